"""Tables for Markdown reports and the console, and the numbers in them: None stands for one that is not finite."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import exp, isfinite, log
from operator import itemgetter
from statistics import fmean
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from ups.data.pdebench import FAMILIES
from ups.surrogate.trained import OFF


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], num_names: int = 1) -> str:
    """A Markdown table whose first `num_names` columns are names, aligned left; the rest are numbers, aligned right."""
    alignment = ["left"] * num_names + ["right"] * (len(columns) - num_names)
    return tabulate(rows, columns, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def console_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], num_names: int = 1) -> Table:
    """The same for the console, with a title."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for position, column in enumerate(columns):
        shown.add_column(column, justify="left" if position < num_names else "right")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


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
    """Of numbers that are not negative; None for no values at all, and where one of them is None."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return exp(fmean(map(log, known))) if all(known) else 0.0


SELECTED = "selected"  # rollouts of ensemble members that physics chooses, where validation says that it helps
METHODS = ("persistence", "operator", "diffusion", "consistency", SELECTED, "steady")
WITHOUT_SAMPLING = ("operator", "steady")  # ours, without corrector
STRONG = ("unet", "fno")  # the baselines that ours are compared with
LABELS = {"one_step": "one step", "rollout": "rollout"}
STEADY_LABEL = "solution"
GRADES = {"good": "green", "weak": "yellow", "unusable": "red"}  # best first, with their colours
LEGEND, OFF_LEGEND = "*: best, 1: as good as predicting zero", ", off: the corrector is off"
SELECTED_LEGEND = ", selected: members that fit the PDE"
LABEL_WIDTH, COLUMN_WIDTH = 8, 12  # of at most six methods in 80 columns


def score_table(
    records: list[dict[str, Any]], metric: str, scored: str, grades: dict[str, dict[str, Any]] | None = None
) -> Text:
    """For the console: of each dataset a line with name and grade, then one per horizon with the error of each method.

    `scored` names the trajectories in the title, `grades` are those of a verdict. "off" stands where a method's
    corrector is off: its errors are those of the operator.
    """
    methods, rows = _score_rows(records, metric)
    is_off = any(OFF in cells for *_, cells in rows)
    shown = Text().append(f"{metric} on {scored}\n", style="bold")
    legend = f"{LEGEND}{OFF_LEGEND if is_off else ''}{SELECTED_LEGEND if SELECTED in methods else ''}"
    shown.append("\n".join(wrap(legend, 80)) + "\n", style="dim")
    shown.append(" " * LABEL_WIDTH + "".join(f"{method:>{COLUMN_WIDTH - 1}} " for method in methods).rstrip() + "\n")
    for dataset, of_dataset in groupby(rows, key=itemgetter(0)):
        shown.append(dataset)
        if grades is not None:
            grade = grades[dataset]["grade"]
            shown.append(": ").append(grade, style=GRADES[grade])
        for _, label, cells in of_dataset:
            numbers = (f"{cell if cell.endswith('*') else cell + ' ':>{COLUMN_WIDTH}}" for cell in cells)
            row = " " * LABEL_WIDTH + "".join(numbers)  # of which the label may cover a little more than its width
            shown.append(f"\n {label}{row[len(label) + 1 :].rstrip()}", style="")
        shown.append("\n")
    shown.no_wrap, shown.overflow = True, "ignore"
    return shown


def rollout_table(records: list[dict[str, Any]]) -> Table:
    """A console table of all scores of one method on one dataset, with their 95 % intervals."""
    first = records[0]
    title = f"{first['method']} on {first['num_trajectories']} trajectories of {first['dataset']}: rollouts"
    ends = ([number(record[end]) if end in record else "" for end in ("low", "high")] for record in records)
    rows = ([r["metric"], number(r["value"]), *interval] for r, interval in zip(records, ends, strict=True))
    return console_table(title, ["metric", "value", "low", "high"], rows)


def verdict_text(records: list[dict[str, Any]], metric: str, scored: str, verdict: dict[str, Any]) -> str:
    """Markdown: the same table with grades, and below it the gates that do not hold."""
    methods, rows = _score_rows(records, metric)
    grades = verdict["grades"]
    lines = [[dataset, grades[dataset]["grade"], label, *cells] for dataset, label, cells in rows]
    reasons = [f"- {dataset}: {reason}" for dataset, entry in grades.items() for reason in entry["reasons"]]
    parts = [f"# {metric} on {scored}", "", f"{LEGEND}.", "", table(["dataset", "grade", "", *methods], lines, 3)]
    return "\n".join([*parts, "", "## Gates that do not hold", "", *(reasons or ["None."]), ""])


def _score_rows(records: list[dict[str, Any]], metric: str) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    """The methods, and of every dataset and horizon its name, what is scored, and a cell per method."""
    chosen = [record for record in records if record["metric"] == metric]
    values = {(r["dataset"], r["method"], r["horizon"]): OFF if r.get("mode") == OFF else r["value"] for r in chosen}
    methods = [method for method in METHODS if any(method == m for _, m, _ in values)]
    rows = []
    for dataset, family in sorted({(record["dataset"], record["family"]) for record in chosen}):
        labels = {"one_step": STEADY_LABEL} if FAMILIES[family].steady else LABELS
        for horizon, label in labels.items():
            found = {method: values.get((dataset, method, horizon), "") for method in methods}
            best = min((value for value in found.values() if isinstance(value, float)), default=None)
            rows.append((dataset, label, [_cell(value, best) for value in found.values()]))
    return methods, rows


def _cell(value: float | str | None, best: float | None) -> str:
    if isinstance(value, str):
        return value
    return number(value) + "*" * (value is not None and value == best)
