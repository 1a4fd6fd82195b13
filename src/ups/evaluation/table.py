"""Scores as a table for the terminal."""

from typing import Any

from rich.table import Table

from ups.evaluation import OFF

METHODS = ("persistence", "operator", "finetuned", "diffusion", "consistency", "steady")
HORIZONS = ("one_step", "rollout")


def score_table(records: list[dict[str, Any]], metric: str, scored: str) -> Table:
    """One row per dataset, one column per method: the error of one step above that of the whole rollout.

    `scored` says what was scored, for the title. Where the corrector is off the cell says so: its scores are those of
    the operator.
    """
    chosen = [record for record in records if record["metric"] == metric]
    scores = {(r["dataset"], r["method"], r["horizon"]): r["value"] for r in chosen}
    off = {(r["dataset"], r["method"]) for r in chosen if r.get("mode") == OFF}
    methods = [method for method in METHODS if any(method == m for _, m, _ in scores)]
    table = Table(title=f"{metric} on {scored}: one step, rollout", title_justify="left")
    table.add_column("dataset", overflow="fold")
    for method in methods:
        table.add_column(method, justify="right")
    for dataset in sorted({dataset for dataset, _, _ in scores}):
        cells = [
            OFF
            if (dataset, method) in off
            else "\n".join(_cell(scores, dataset, method, horizon) for horizon in HORIZONS)
            for method in methods
        ]
        table.add_row(dataset, *cells)
    return table


def _cell(scores: dict[tuple[str, str, str], float | None], dataset: str, method: str, horizon: str) -> str:
    if (dataset, method, horizon) not in scores:
        return ""
    value = scores[dataset, method, horizon]
    return "not finite" if value is None else f"{value:.2g}"
