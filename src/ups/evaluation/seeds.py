"""Comparisons that differ in their seed alone, beside each other."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

from ups.errors import DataFault
from ups.evaluation.compare import HORIZONS, STRONG, WITHOUT_SAMPLING, Errors, best, errors_of
from ups.evaluation.markdown import geometric_mean, number, ratio, table
from ups.files import read_json

NOTE = (
    "nRMSE on the test split, mean ± standard deviation over seeds; then ours over the better of FNO and U-Net for "
    "each data root, and the geometric mean. `ours` is the operator, or the steady model."
)


def errors_in(root: Path) -> Errors:
    """The errors that `full` and `baselines` left below a data root.

    Raises:
        DataFault: one of them was not run there.
    """
    files = [root / "08_reporting" / name for name in ("metrics.json", "baseline_metrics.json")]
    for file in files:
        if not file.is_file():
            raise DataFault(
                f"{file} does not exist: run `kedro run --pipeline full`, then `kedro run --pipeline baselines`, "
                f"both with --params data_root={root},seed=N and the --env of the others"
            )
    return errors_of(*map(read_json, files))


def seeds_text(runs: dict[str, Errors]) -> str:
    """Markdown: a table per horizon; `runs` maps data roots to their errors.

    Raises:
        DataFault: the runs have different datasets, or two of them the same errors.
    """
    datasets = [sorted({dataset for dataset, _, _ in errors}) for errors in runs.values()]
    for name, found in zip(runs, datasets, strict=True):
        if found != datasets[0]:
            raise DataFault(f"{name} has the datasets {', '.join(found)}, not {', '.join(datasets[0])}: same --env?")
    for one, other in combinations(runs, 2):
        if _ours(runs[one]) == _ours(runs[other]):
            raise DataFault(f"{one} and {other} have the same errors: run one of them anew with --params seed=N")
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


def _ours(errors: Errors) -> Errors:
    """Those of the operator and the steady model."""
    return {key: value for key, value in errors.items() if key[1] in WITHOUT_SAMPLING}


def _nrmse(errors: Errors, dataset: str, horizon: str) -> dict[str, float | None]:
    values = {method: errors.get((dataset, method, horizon)) for method in (*STRONG, *WITHOUT_SAMPLING)}
    return values | {"ours": best(values, WITHOUT_SAMPLING)}


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return number(None)
    one_digit = float(f"{stdev(known):.1g}")
    return f"{number(mean(known))} ± {number(one_digit)}"
