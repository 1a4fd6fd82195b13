"""Tables for Markdown reports and the console, and the numbers in them: None stands for one that is not finite."""

from collections.abc import Iterable, Sequence
from math import exp, isfinite, log
from statistics import fmean
from typing import Any

from rich.table import Table
from tabulate import tabulate

from ups.evaluation.predictions import HORIZONS
from ups.surrogate.trained import OFF


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], num_names: int = 1) -> str:
    """A Markdown table whose first `num_names` columns are names, aligned left; the rest are numbers, aligned right."""
    alignment = ["left"] * num_names + ["right"] * (len(columns) - num_names)
    return tabulate(rows, columns, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def finite(content: Any) -> Any:
    """A number, or nested dictionaries of numbers; None where one is not finite, which JSON has no number for."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    return None if isinstance(content, float) and not isfinite(content) else content


def number(value: float | None) -> str:
    """Three significant digits."""
    return "not finite" if value is None else f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def ratio(value: float | None, reference: float | None) -> float | None:
    """Value / reference; None where one of them is None or the reference is zero."""
    return value / reference if value is not None and reference else None


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """None for no values at all, and where one of them is None or zero."""
    return exp(fmean(log(value) for value in values)) if values and all(values) else None


METHODS = ("persistence", "operator", "finetuned", "diffusion", "consistency", "steady")


def score_table(records: list[dict[str, Any]], metric: str, scored: str) -> Table:
    """A console table: one row per dataset, one column per method, the error of one step above that of the rollout.

    `scored` names the trajectories in the title. "off" stands where a method's corrector is off: its errors are
    those of the operator.
    """
    chosen = [record for record in records if record["metric"] == metric]
    values = {(r["dataset"], r["method"], r["horizon"]): r["value"] for r in chosen}
    off = {(r["dataset"], r["method"]) for r in chosen if r.get("mode") == OFF}
    methods = [method for method in METHODS if any(method == m for _, m, _ in values)]
    shown = Table(title=f"{metric} on {scored}: one step, rollout", title_justify="left")
    shown.add_column("dataset", overflow="fold")
    for method in methods:
        shown.add_column(method, justify="right")
    for dataset in sorted({dataset for dataset, _, _ in values}):
        keys = {method: [(dataset, method, horizon) for horizon in HORIZONS] for method in methods}
        cells = {method: "\n".join(_cell(values[key]) for key in keys[method] if key in values) for method in methods}
        shown.add_row(dataset, *(OFF if (dataset, method) in off else cells[method] for method in methods))
    return shown


def rollout_table(records: list[dict[str, Any]]) -> Table:
    """A console table of all scores of one method on one dataset, with their 95 % intervals."""
    first = records[0]
    title = f"{first['method']} on {first['num_trajectories']} trajectories of {first['dataset']}: rollouts"
    shown = Table("metric", title=title, title_justify="left")
    for column in ("value", "low", "high"):
        shown.add_column(column, justify="right")
    for record in records:
        interval = [number(record[end]) if end in record else "" for end in ("low", "high")]
        shown.add_row(record["metric"], number(record["value"]), *interval)
    return shown


def _cell(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"
