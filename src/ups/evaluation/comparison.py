"""Errors and costs of our methods beside those of the baselines: tables, intervals, uncertainty, a figure."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ups.config.baselines import BaselinesConfig
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.evaluation.corrector import HIGH_BAND
from ups.evaluation.costs import OURS, PER_SNAPSHOT
from ups.evaluation.entries import comparable
from ups.evaluation.predictions import HORIZONS, plain_method
from ups.evaluation.records import WITHOUT_LIMITS
from ups.evaluation.styles import NORMAL, SMALL, colour_of, common_legend, log_axes, new_figure, tidy, wrapped
from ups.evaluation.tables import SELECTED, STRONG, WITHOUT_SAMPLING, geometric_mean, number, ratio, table
from ups.files import read_json
from ups.metrics.bootstrap import bootstrap_interval, ratio_of_means
from ups.surrogate.trained import OFF

BASELINES = ("persistence", "linear", "unet", "fno")
FURTHER = ("transformer", "normalized_unet", "normalized_fno")  # trained only where `baselines.time_shares` has them
HORIZON_TITLES = {"one_step": "One step", "rollout": "Rollout"}
COSTS = ("training_seconds", "parameters", "datasets", PER_SNAPSHOT, "over_fno", "speed_up_over_solver")
COST_NOTE = (
    "Milliseconds per predicted snapshot and trajectory, decoding included, for a few trajectories in one "
    "batch; for diffusion and consistency of one member, while their errors are those of an ensemble's mean. The last "
    "three columns are geometric means over the datasets that a method predicts and is not off for; rows with "
    "different numbers of datasets are not comparable. The solver is ours, on the same grid and on the CPU, with other "
    "initial states. Training and parameters include the stages that a method builds on: the codec, for the "
    "correctors also the operator and the steady model; parameters also the statistics that are kept with them."
)
COMPILED_NOTE = (
    "Operator and steady model were compiled, in training too; the baselines were not, because torch's compiler does "
    "not support the complex numbers of the FNO."
)
WIDTH_OF_DATASET, LABEL_CHARACTERS = 1.25, 18  # of its column in the figure: inches, characters of its title in a line

Records = list[dict[str, Any]]
Errors = dict[tuple[str, str, str], float | None]
"""(dataset, method, horizon) -> nRMSE, NaN where the method is off."""


def errors_in(root: Path) -> Errors:
    """The errors that the pipelines `full` and `baselines` have written below a data root.

    Raises:
        DataFault: one of them was not run there, or `baselines` for other trajectories.
    """
    files = [root / "08_reporting" / name for name in ("metrics.json", "baseline_metrics.json")]
    if missing := [file for file in files if not file.is_file()]:
        raise DataFault(
            f"{missing[0]} does not exist: run `kedro run --pipeline full`, then `kedro run --pipeline baselines`, "
            f"both with --params data_root={root},seed=N and the --env of the others"
        )
    FAMILIES.read(root)
    try:
        return errors_of(*map(read_json, files))
    except DataFault as fault:
        raise DataFault(f"{root}: {fault}") from None


def errors_of(metrics: Records, baseline_metrics: Records) -> Errors:
    """The nRMSE of every method.

    Raises:
        DataFault: the scores of a baseline are missing, or are those of other trajectories.
    """
    errors = {
        (r["dataset"], r["method"], r["horizon"]): _OFF if r.get("mode") == OFF else r["value"]
        for r in (*metrics, *comparable(baseline_metrics, metrics))
        if r["metric"] == "nRMSE"
    }
    for dataset, family in {r["dataset"]: r["family"] for r in metrics}.items():
        expected = BASELINES[FAMILIES[family].steady :]
        missing = [m for m in expected if any((dataset, m, h) not in errors for h in HORIZONS)]
        if missing:
            raise DataFault(f"no scores of {', '.join(missing)} on {dataset}: run `kedro run --pipeline baselines`")
    return errors


def comparison_text(errors: Errors, costs: dict[str, Any], note: str) -> str:
    """Markdown: a table of errors per horizon, then two of costs; `ours` is the operator or the steady model."""
    methods, further = _methods(errors), further_baselines(errors)
    sides: dict[str, Sequence[str]] = {"ours / fno": ("fno",), "ours / better of fno, unet": STRONG}
    sides |= {"ours / best network": (*STRONG, *further)} if further else {}
    lines = ["# Comparison", "", note, ""]
    for horizon, title in HORIZON_TITLES.items():
        rows = _error_rows(errors, methods, list(sides.values()), horizon)
        lines += [f"## {title}: nRMSE on the test split", "", table(["dataset", *methods, *sides], rows), ""]
    cost_note = f"{COST_NOTE} {COMPILED_NOTE if costs['compiled'] else 'No model was compiled.'}"
    cost_rows = [[method, *(_shown(cost[column]) for column in COSTS)] for method, cost in costs["methods"].items()]
    cost_names = [name.replace("_", " ") for name in COSTS]
    lines += ["## Cost", "", cost_note, "", table(["method", *cost_names], cost_rows), ""]
    names = ["dataset", "ours", "fno", "unet", "solver", "ours / fno", "solver / ours"]
    return "\n".join([*lines, "## Milliseconds per snapshot", "", table(names, _time_rows(costs[PER_SNAPSHOT])), ""])


def training_time_text(training: dict[str, dict[str, float]]) -> str:
    """Seconds of training of our models and of the strong baselines, on the clock and of the CPU, as one phrase."""
    times = ((method, training[method]) for method in ("ours", *STRONG))
    return ", ".join(f"{method} {time['wall']:,.0f} s (CPU {time['cpu']:,.0f} s)" for method, time in times)


def _methods(errors: Errors) -> list[str]:
    """The methods that have scores, baselines first."""
    return [m for m in (*BASELINES, *FURTHER, *OURS, SELECTED) if any(m == method for _, method, _ in errors)]


def further_baselines(errors: Errors) -> list[str]:
    """The further baselines that have scores."""
    return [method for method in _methods(errors) if method in FURTHER]


def _error_rows(
    errors: Errors, methods: Sequence[str], sides: Sequence[Sequence[str]], horizon: str
) -> Iterator[list[str]]:
    ratios = []
    for dataset in sorted({dataset for dataset, _, _ in errors}):
        values = {method: errors.get((dataset, method, horizon), _ABSENT) for method in methods}
        ours = best(values, WITHOUT_SAMPLING)
        ratios.append([ratio(ours, best(values, names)) for names in sides])
        yield [dataset, *map(_shown, values.values()), *map(_shown, ratios[-1])]
    means = map(geometric_mean, map(list, zip(*ratios, strict=True)))
    yield ["geometric mean", *[""] * len(methods), *map(_shown, means)]


def _time_rows(times_by_dataset: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for dataset, times in sorted(times_by_dataset.items()):
        ours = best(times, WITHOUT_SAMPLING)
        fno, unet, solver = times["fno"], times["unet"], times.get("solver", _ABSENT)
        yield [dataset, *map(_shown, (ours, fno, unet, solver, ratio(ours, fno), ratio(solver, ours)))]


def draw_comparison(errors: Errors, titles: dict[str, str]) -> Figure:
    """One panel per horizon: nRMSE of every method, side by side for each dataset; `titles` are those of datasets."""
    datasets = sorted({dataset for dataset, _, _ in errors})
    errors = {key: value for key, value in errors.items() if value is not None and isfinite(value)}
    methods = _methods(errors)
    figure = new_figure(max(6.0, WIDTH_OF_DATASET * len(datasets)), 7.5)
    panels = figure.subplots(len(HORIZONS), 1, sharex=True)
    for panel, (horizon, title) in zip(panels, HORIZON_TITLES.items(), strict=True):
        for position, method in enumerate(methods):
            values = [errors.get((dataset, method, horizon), np.nan) for dataset in datasets]
            places = np.arange(len(datasets)) + (position - (len(methods) - 1) / 2) / (len(methods) + 2)
            style = {"marker": "o" if method in OURS else "s", "markersize": 5, "linestyle": "none"}
            panel.plot(places, values, color=colour_of(method), label=method, **style)
        edges = np.arange(1, len(datasets)) - 0.5
        panel.vlines(edges, 0, 1, transform=panel.get_xaxis_transform(), color="#e4e4e4", linewidth=0.6)
        panel.set_title(title, fontsize=NORMAL)
        panel.set_ylabel("nRMSE", fontsize=NORMAL)
        panel.grid(axis="y", which="both", color="#e4e4e4", linewidth=0.6)
        tidy(panel)
    log_axes(panels, np.array([value for (_, method, _), value in errors.items() if method in methods]), 0.0)
    labels = [wrapped(titles[name], LABEL_CHARACTERS) for name in datasets]
    panels[-1].set_xticks(range(len(datasets)), labels, fontsize=SMALL)
    common_legend(figure, "test split; squares: baselines, circles: ours")
    return figure


_ABSENT, _OFF = float("inf"), float("nan")  # no score of a method; its corrector is off, so that it has none of its own


def best(values: dict[str, float | None], names: Sequence[str]) -> float | None:
    """The smallest error among some methods; None where none is finite."""
    known = [value for name in names if (value := values.get(name)) is not None and value < _ABSENT]
    return min(known, default=None)


def _shown(value: float | None) -> str:
    if value is not None and isnan(value):
        return OFF
    return "" if value == _ABSENT else number(value)


TRIAL_NOTE = (
    "Chosen on the validation split by short trainings: up to {max_trials} trials per model, each of {trial_share:.0%}"
    " of its training time, change {changed} by their factors from the best so far. Values have worse ones on both "
    "sides; where the number of trials has a *, one may be at the edge of what was tried. Models with 0 trials have "
    "the values of `baselines.chosen`, which earlier trials found. Our models have no trials here; their values are "
    "those of the configuration, for all families together. Models named normalized have the normalization, the units "
    "and the conserved integrals of our operator."
)


def trials_text(models: dict[str, dict[str, dict[str, Any]]], config: BaselinesConfig) -> str:
    """Markdown: the learning rate and sizes that the trials of each model have chosen; `models` by kind and family."""
    note = TRIAL_NOTE.format(
        max_trials=config.max_trials, trial_share=config.trial_share, changed=", ".join(config.factors)
    )
    rows = [
        [family, kind, *(str(receipt["values"].get(name, "")) for name in config.factors), _trials(receipt)]
        for kind, by_family in models.items()
        for family, receipt in by_family.items()
    ]
    columns = ["family", "model", *(name.replace("_", " ") for name in config.factors), "trials"]
    return "\n".join(["## Trials of the baselines", "", note, "", table(columns, sorted(rows), num_names=2), ""])


def _trials(receipt: dict[str, Any]) -> str:
    return f"{receipt['trials']}{'' if receipt['settled'] else ' *'}"


INTERVAL_NOTE = (
    "nRMSE of ours over that of the better of FNO and U-Net, with the 95 % bootstrap interval of the ratio: test "
    "trajectories are resampled with replacement, the same for both. It covers the choice of test trajectories alone; "
    "the table over seeds varies data, split and training together. Too few trajectories have no interval."
)


def intervals_text(metrics: Records, baseline_metrics: Records) -> str:
    """Markdown: ratios with intervals, one row per dataset; both lists of records are of the same test trajectories."""
    errors = {
        (r["dataset"], r["method"], r["horizon"]): r["trajectories"]
        for r in (*metrics, *baseline_metrics)
        if r["metric"] == "nRMSE"
    }
    columns = ["dataset", "trajectories", *(title.lower() for title in HORIZON_TITLES.values())]
    rows = table(columns, _interval_rows(errors))
    return "\n".join(["## Intervals over test trajectories", "", INTERVAL_NOTE, "", rows, ""])


def _interval_rows(errors: dict[tuple[str, str, str], list[float | None]]) -> Iterator[list[str]]:
    for dataset in sorted({dataset for dataset, _, _ in errors}):
        cells = []
        for horizon in HORIZONS:
            found = {method: errors.get((dataset, method, horizon)) for method in (*WITHOUT_SAMPLING, *STRONG)}
            ours, strong = ([found[m] for m in names if found[m] is not None] for names in (WITHOUT_SAMPLING, STRONG))
            cells.append(_cell(_smallest(ours), _smallest(strong)))
        yield [dataset, str(len(ours[0])), *cells]


def _smallest(candidates: list[list[float | None]]) -> Tensor | None:
    """The errors (N,) with the smallest mean, of the methods whose errors are all finite."""
    finite = [torch.tensor(errors, dtype=torch.float64) for errors in candidates if None not in errors]
    return min(finite, key=lambda errors: errors.mean().item(), default=None)


def _cell(ours: Tensor | None, strong: Tensor | None) -> str:
    if ours is None or strong is None:
        return number(None)
    ends = bootstrap_interval(ours, strong, statistic=ratio_of_means, seed=0)
    interval = "" if ends is None else f" ({number(ends[0])} to {number(ends[1])})"
    return f"{number(float(ratio_of_means(ours.numpy(), strong.numpy())))}{interval}"


LIMITS_NOTE = (
    "Rollouts of operators and transient baselines in which the limits on predicted states, the same for all models, "
    "changed a state: shares of the predicted states and of their values that were changed, and the nRMSE as it is and "
    "without any limit. Those without a row do not touch their limits."
)


def limits_text(records: Records) -> str:
    """Markdown: one row per dataset and model whose rollouts touch the limits of `StateStatistics`."""
    rollouts = [r for r in records if r["horizon"] == "rollout" and r.get("mode") != OFF]
    values = {(r["dataset"], r["method"], r["metric"]): r["value"] for r in rollouts}
    columns = ("limited_steps", "limited_values", "nRMSE", WITHOUT_LIMITS)
    touched = sorted((dataset, method) for dataset, method, metric in values if metric == WITHOUT_LIMITS)
    rows = [[*key, *(number(values[*key, column]) for column in columns)] for key in touched]
    names = ["dataset", "model", *(name.replace("_", " ") for name in columns)]
    shown = table(names, rows, num_names=2) if rows else "No rollout did."
    return "\n".join(["## Limits on predicted states", "", LIMITS_NOTE, "", shown, ""])


UNCERTAINTY_COLUMNS = ("dataset", "method", "horizon", "CRPS", "nRMSE", "high band", "spread-skill", "coverage")
UNCERTAINTY_NOTE = (
    "CRPS over the MAE of the operator, which is the CRPS of a single prediction; nRMSE and error in the highest band "
    "of wavenumbers of the ensemble's mean over the operator's: below 1 is better. For a steady family read steady "
    "model for operator. Half of the members have the noise of the others negated; within a half they are independent, "
    "and CRPS, spread-skill and coverage are means over the two halves. Calibrated halves of M members have "
    "spread-skill 1 and coverage (M - 1) / (M + 1): 0.6 for 4. A method that is off equals the operator and has no row "
    "here; `corrector.json` has the scores behind that decision."
)


def uncertainty_text(records: Records) -> str:
    """Markdown: one row per dataset, ensemble and horizon, from records of the test split."""
    values = {(r["dataset"], r["method"], r["horizon"], r["metric"]): r["value"] for r in records}
    families = {r["dataset"]: r["family"] for r in records}
    rows = table(UNCERTAINTY_COLUMNS, _uncertainty_rows(values, families), num_names=3)
    return "\n".join(["## Uncertainty on the test split", "", UNCERTAINTY_NOTE, "", rows, ""])


def _uncertainty_rows(
    values: dict[tuple[str, str, str, str], float | None], families: dict[str, str]
) -> Iterator[list[str]]:
    pairs = (("CRPS", "MAE"), ("nRMSE", "nRMSE"), (HIGH_BAND, HIGH_BAND))
    for dataset, method, horizon in product(sorted(families), ("diffusion", "consistency"), HORIZONS):
        own, alone = (dataset, method, horizon), (dataset, plain_method(families[dataset]), horizon)
        if (*own, "CRPS") in values:
            ratios = [ratio(values.get((*own, ours)), values.get((*alone, theirs))) for ours, theirs in pairs]
            yield [*own, *map(number, (*ratios, values[*own, "spread_skill"], values[*own, "coverage"]))]
