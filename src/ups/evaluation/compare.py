"""The table that compares: families x methods, one step and rollout, cost, and everything relative to the FNO."""

from collections.abc import Iterator, Sequence
from math import isfinite, isnan
from typing import Any

from matplotlib.figure import Figure

from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.evaluation import OFF
from ups.evaluation.costs import FRAME
from ups.evaluation.markdown import geometric_mean, number, ratio, table
from ups.evaluation.plots import colour_of, new_figure

BASELINES = ("persistence", "linear", "unet", "fno")
OURS = ("operator", "diffusion", "consistency", "steady")
HORIZONS = {"one_step": "One step", "rollout": "Rollout"}
STRONG = ("unet", "fno")
WITHOUT_SAMPLING = ("operator", "steady")
COSTS = {
    "training_seconds": "training seconds",
    "parameters": "parameters",
    "datasets": "datasets",
    FRAME: "milliseconds per frame",
    "over_fno": "over fno",
    "speed_up_over_solver": "speed up over solver",
}
COST_NOTE = (
    "Milliseconds per frame and trajectory, decoded, a few trajectories at once; diffusion and consistency: of one "
    "member, where errors are those of an ensemble's mean. The last three columns are geometric means over the "
    "datasets that a method is for and on: rows with different numbers of them are not to be compared. The solver is "
    "ours, at the same grid and on the CPU, with initial states of its own. What a method trains on is counted with "
    "it: the corrector's models, their codec."
)

COMPILED_NOTE = (
    "Operator and steady model were compiled, in training too; the baselines never were: torch's compiler has no code "
    "for the FNO's complex numbers."
)

Records = list[dict[str, Any]]
Errors = dict[tuple[str, str, str], float | None]
"""(dataset, method, horizon) -> nRMSE, NaN where the method is off."""


def errors_of(metrics: Records, baseline_metrics: Records) -> Errors:
    """The nRMSE of every method.

    Raises:
        DataFault: a baseline is missing; a table without it would say nothing.
    """
    errors = {
        (r["dataset"], r["method"], r["horizon"]): _OFF if r.get("mode") == OFF else r["value"]
        for r in (*metrics, *baseline_metrics)
        if r["metric"] == "nRMSE"
    }
    for dataset, family in {r["dataset"]: r["family"] for r in metrics}.items():
        expected = BASELINES[FAMILIES[family].steady :]
        missing = [m for m in expected if any((dataset, m, h) not in errors for h in HORIZONS)]
        if missing:
            raise DataFault(f"no scores of {', '.join(missing)} on {dataset}: run `kedro run --pipeline baselines`")
    return errors


def comparison(errors: Errors, costs: dict[str, Any], note: str) -> str:
    """Markdown: a table per horizon, then two of costs; `ours` is the operator, or the steady model."""
    methods = _methods(errors)
    sides = ["ours / fno", "ours / better of fno, unet"]
    lines = ["# Comparison", "", note, ""]
    for horizon, title in HORIZONS.items():
        rows = _error_rows(errors, methods, horizon)
        lines += [f"## {title}: nRMSE on the test split", "", *table(["dataset", *methods, *sides], rows), ""]
    told = f"{COST_NOTE} {COMPILED_NOTE if costs['compiled'] else 'No model was compiled.'}"
    lines += ["## Cost", "", told, "", *table(["method", *COSTS.values()], _cost_rows(costs["methods"])), ""]
    frames = ["dataset", "ours", "fno", "unet", "solver", "ours / fno", "solver / ours"]
    return "\n".join([*lines, "## Milliseconds per frame", "", *table(frames, _frame_rows(costs[FRAME])), ""])


def logged(seconds: dict[str, float]) -> str:
    """The seconds that training took, ours beside those of the strong baselines."""
    return ", ".join(f"{method} {seconds[method]:,.0f} s" for method in ("ours", *STRONG))


def _methods(errors: Errors) -> list[str]:
    """Those that were scored, in their usual order."""
    return [m for m in (*BASELINES, *OURS) if any(m == method for _, method, _ in errors)]


def _error_rows(errors: Errors, methods: Sequence[str], horizon: str) -> Iterator[list[str]]:
    ratios = []
    for dataset in sorted({dataset for dataset, _, _ in errors}):
        values = {method: errors.get((dataset, method, horizon), _ABSENT) for method in methods}
        fno, strong = (best(values, names) for names in (("fno",), STRONG))
        ours = best(values, WITHOUT_SAMPLING)
        ratios.append((ratio(ours, fno), ratio(ours, strong)))
        yield [dataset, *map(_shown, values.values()), *map(_shown, ratios[-1])]
    means = [geometric_mean([pair[side] for pair in ratios]) for side in (0, 1)]
    yield ["geometric mean", *[""] * len(methods), *map(_shown, means)]


def _cost_rows(costs: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for method, cost in costs.items():
        yield [method, *(_shown(cost[column]) for column in COSTS)]


def _frame_rows(frames: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for dataset, times in sorted(frames.items()):
        ours = best(times, WITHOUT_SAMPLING)
        fno, unet, solver = times["fno"], times["unet"], times.get("solver", _ABSENT)
        yield [dataset, *map(_shown, (ours, fno, unet, solver, ratio(ours, fno), ratio(solver, ours)))]


def draw_comparison(errors: Errors) -> Figure:
    """One panel per horizon: nRMSE over the datasets, the methods beside each other."""
    datasets = sorted({dataset for dataset, _, _ in errors})
    errors = {key: value for key, value in errors.items() if value is not None and isfinite(value)}
    methods = _methods(errors)
    figure = new_figure(12, 8)
    panels = figure.subplots(len(HORIZONS), 1, sharex=True)
    for panel, (horizon, title) in zip(panels, HORIZONS.items(), strict=True):
        for position, method in enumerate(methods):
            values = [errors.get((dataset, method, horizon)) for dataset in datasets]
            offset = (position - (len(methods) - 1) / 2) / (len(methods) + 2)
            places = [place + offset for place, value in enumerate(values) if value is not None]
            style = {"marker": "o" if method in OURS else "s", "markersize": 5, "linestyle": "none"}
            known = [value for value in values if value is not None]
            panel.plot(places, known, color=colour_of(method), label=method, **style)
        for edge in range(1, len(datasets)):
            panel.axvline(edge - 0.5, color="#e4e4e4", linewidth=0.6)
        panel.set(yscale="log", ylabel="nRMSE", title=title)
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    panels[-1].set_xticks(range(len(datasets)), datasets, rotation=30, ha="right", fontsize=8)
    panels[0].legend(ncols=8, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.3), frameon=False)
    return figure


_ABSENT, _OFF = float("inf"), float("nan")


def best(values: dict[str, float | None], names: Sequence[str]) -> float | None:
    """The smallest known error among some methods; None where none is finite."""
    known = [value for name in names if (value := values.get(name)) is not None and value < _ABSENT]
    return min(known, default=None)


def _shown(value: float | None) -> str:
    if value is not None and isnan(value):
        return OFF
    return "" if value == _ABSENT else number(value)
