"""How far the comparison depends on which trajectories the test split happens to have."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ups.evaluation.compare import HORIZONS, STRONG, WITHOUT_SAMPLING
from ups.evaluation.markdown import number, table
from ups.metrics.bootstrap import bootstrap_interval

SEED = 0
COLUMNS = ("dataset", "trajectories", *(title.lower() for title in HORIZONS.values()))
NOTE = (
    "Ours over the better of FNO and U-Net, nRMSE, with the 95 % interval of the ratio where the test trajectories are "
    "drawn anew, with replacement, the same for both. It tells the chance of the test split alone; seeds vary data, "
    "split and training together. There is none for a few trajectories."
)


def resampled(metrics: list[dict[str, Any]], baseline_metrics: list[dict[str, Any]]) -> str:
    """Markdown: a line per dataset, from the records of both pipelines, whose trajectories are the same."""
    errors = {
        (r["dataset"], r["method"], r["horizon"]): r["trajectories"]
        for r in (*metrics, *baseline_metrics)
        if r["metric"] == "nRMSE"
    }
    lines = table(COLUMNS, _rows(errors))
    return "\n".join(["## Test trajectories drawn anew", "", NOTE, "", *lines, ""])


def _rows(errors: dict[tuple[str, str, str], list[float | None]]) -> Iterator[list[str]]:
    for dataset in sorted({dataset for dataset, _, _ in errors}):
        cells = []
        for horizon in HORIZONS:
            ours, strong = (
                [errors[key] for name in names if (key := (dataset, name, horizon)) in errors]
                for names in (WITHOUT_SAMPLING, STRONG)
            )
            cells.append(_cell(_smallest(ours), _smallest(strong)))
        yield [dataset, str(len(ours[0])), *cells]


def _smallest(candidates: list[list[float | None]]) -> Tensor | None:
    """The errors (N,) with the smallest mean among those that are finite."""
    finite = [torch.tensor(errors, dtype=torch.float64) for errors in candidates if None not in errors]
    return min(finite, key=lambda errors: errors.mean().item(), default=None)


def _cell(ours: Tensor | None, strong: Tensor | None) -> str:
    if ours is None or strong is None:
        return number(None)
    pairs = torch.stack([ours, strong], dim=1)
    ends = bootstrap_interval(pairs, _ratio, SEED)
    interval = "" if ends is None else f" ({number(ends[0])} to {number(ends[1])})"
    return f"{number(_ratio(pairs).item())}{interval}"


def _ratio(pairs: Tensor) -> Tensor:
    """Means (...,) of the first over those of the second of the pairs (..., N, 2)."""
    return pairs[..., 0].mean(-1) / pairs[..., 1].mean(-1)
