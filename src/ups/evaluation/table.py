"""Scores as a table for the terminal."""

from typing import Any

from rich.table import Table

METHODS = ("persistence", "operator", "diffusion", "consistency", "steady")
HORIZONS = ("one_step", "rollout")


def score_table(records: list[dict[str, Any]], metric: str) -> Table:
    """One row per dataset, one column per method: the error of one step above that of the whole rollout."""
    scores = {(r["dataset"], r["method"], r["horizon"]): r["value"] for r in records if r["metric"] == metric}
    methods = [method for method in METHODS if any(method == m for _, m, _ in scores)]
    table = Table(title=f"{metric} on the test split: one step, rollout", title_justify="left")
    table.add_column("dataset", overflow="fold")
    for method in methods:
        table.add_column(method, justify="right")
    for dataset in sorted({dataset for dataset, _, _ in scores}):
        cells = ["\n".join(_cell(scores, dataset, method, horizon) for horizon in HORIZONS) for method in methods]
        table.add_row(dataset, *cells)
    return table


def _cell(scores: dict[tuple[str, str, str], float | None], dataset: str, method: str, horizon: str) -> str:
    if (dataset, method, horizon) not in scores:
        return ""
    value = scores[dataset, method, horizon]
    return "not finite" if value is None else f"{value:.2g}"
