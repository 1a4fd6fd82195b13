"""Tables of reports as Markdown, and the numbers in them, of which None is one that is not finite."""

from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import fmean
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], num_names: int = 1) -> list[str]:
    """Lines of a table whose first `num_names` columns are names, to the left; the rest are numbers."""
    rule = ["---"] * num_names + ["--:"] * (len(columns) - num_names)
    return [f"| {' | '.join(map(str, cells))} |" for cells in (columns, rule, *rows)]


def number(value: float | None) -> str:
    """Three digits."""
    return "not finite" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ratio(value: float | None, reference: float | None) -> float | None:
    """Value / reference; None where one of them is, or the reference is zero."""
    return value / reference if value is not None and reference else None


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """None where there is none, or one of them is not finite or zero."""
    return exp(fmean(log(value) for value in values)) if values and all(values) else None
