"""Comparisons that differ in their seed alone, beside each other."""

from collections.abc import Iterator
from statistics import mean, stdev

from ups.errors import DataFault
from ups.evaluation.compare import HORIZONS, STRONG, WITHOUT_SAMPLING, Errors, best
from ups.evaluation.markdown import geometric_mean, number, ratio, table

NOTE = (
    "nRMSE on the test split, mean ± standard deviation over seeds; then ours over the better of FNO and U-Net for "
    "each data root, and the geometric mean. `ours` is the operator, or the steady model."
)


def seeds_text(runs: dict[str, Errors]) -> str:
    """Markdown: a table per horizon; `runs` maps data roots to their errors.

    Raises:
        DataFault: the runs have different datasets.
    """
    datasets = [sorted({dataset for dataset, _, _ in errors}) for errors in runs.values()]
    for name, found in zip(runs, datasets, strict=True):
        if found != datasets[0]:
            raise DataFault(f"{name} has the datasets {', '.join(found)}, not {', '.join(datasets[0])}: same --env?")
    lines = [f"# Comparison over {len(runs)} seeds", "", NOTE, ""]
    for horizon, title in HORIZONS.items():
        columns = ["dataset", *STRONG, "ours", *runs, "geometric mean"]
        lines += [f"## {title}", "", *table(columns, _rows(list(runs.values()), datasets[0], horizon)), ""]
    return "\n".join(lines)


def _rows(runs: list[Errors], datasets: list[str], horizon: str) -> Iterator[list[str]]:
    ratios_of = []
    for dataset in datasets:
        values = [_nrmse(errors, dataset, horizon) for errors in runs]
        ratios = [ratio(each["ours"], best(each, STRONG)) for each in values]
        ratios_of.append([*ratios, geometric_mean(ratios)])
        spreads = [_spread([each[method] for each in values]) for method in (*STRONG, "ours")]
        yield [dataset, *spreads, *map(number, ratios_of[-1])]
    means = [geometric_mean(column) for column in zip(*ratios_of, strict=True)]
    yield ["geometric mean", "", "", "", *map(number, means)]


def _nrmse(errors: Errors, dataset: str, horizon: str) -> dict[str, float | None]:
    values = {method: errors.get((dataset, method, horizon)) for method in (*STRONG, *WITHOUT_SAMPLING)}
    return values | {"ours": best(values, WITHOUT_SAMPLING)}


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{number(mean(known))} ± {stdev(known):.1g}" if len(known) == len(values) else number(None)
