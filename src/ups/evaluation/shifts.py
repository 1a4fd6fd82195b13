"""Whether the warning of `ups.surrogate.coverage` foretells errors: shifted trajectories, simulated and predicted.

Each shift changes one thing about the datasets of training: a parameter of the equation, the amplitude, wavenumbers or
noise of the initial states (of a steady family: of the coefficients), the time step or the grid.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from ups.config import LaunchConfig, ShiftsConfig
from ups.data.families import Dataset, base_of, condition_features
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.errors import ConfigFault
from ups.evaluation.predictions import Compute
from ups.evaluation.tables import finite, table
from ups.metrics.errors import EPS, nRMSE
from ups.models.codec import group_name
from ups.models.sizes import Domain
from ups.runs.progress import ProgressBar
from ups.solvers import sample_initial_states, solve
from ups.solvers.families import PROBLEMS
from ups.surrogate.coverage import Coverage
from ups.surrogate.surrogate import Setting, Surrogate, rollout
from ups.surrogate.trained import Trained

FIRST = 10**6  # trajectories from here on are in no training data, whatever its seed
MANY_ERRORS = 3.0  # an error above so many times the median of trajectories without shift is to be foretold
KINDS = ("parameter", "amplitude", "wavenumber", "noise", "time step", "grid")
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Shift:
    """One thing changed by a factor; `parameter` is the name of the parameter of kind `parameter`."""

    kind: str
    factor: float
    parameter: str | None = None

    def of(self, dataset: Dataset) -> Dataset:
        """The dataset with another parameter, time step or grid."""
        match self.kind:
            case "parameter":
                changed = {self.parameter: self.factor * dataset.parameters[self.parameter]}
                return replace(dataset, parameters=dataset.parameters | changed)
            case "time step":
                return replace(dataset, times=tuple(self.factor * time for time in dataset.times))
            case "grid":
                return replace(dataset, grid=tuple(round(self.factor * points) for points in dataset.grid))
        return dataset

    def change(self, u: Tensor, log: list[bool], generator: torch.Generator) -> Tensor:
        """Fields (B, C, *grid) with another amplitude, other wavenumbers or noise; where `log`, those of log(u)."""
        axes = tuple(range(2, u.ndim))
        is_log = torch.tensor(log).reshape(-1, *[1] * len(axes))
        x = torch.where(is_log, u.clamp_min(EPS).log(), u)
        centre = torch.where(is_log, x.mean(axes, keepdim=True), 0.0)
        match self.kind:
            case "amplitude":
                x = centre + self.factor * (x - centre)
            case "wavenumber":
                x = compressed(x, round(self.factor))
            case "noise":
                rms = (x - x.mean(axes, keepdim=True)).square().mean(axes, keepdim=True).sqrt()
                x = x + self.factor * rms * torch.randn(x.shape, generator=generator)
            case _:
                return u
        return torch.where(is_log, x.exp(), x)


@dataclass(frozen=True)
class Case:
    """Trajectories u (B, T, C, *grid) of a shifted dataset with their coefficients (B, C', *grid), if there are any."""

    dataset: Dataset
    u: Tensor
    coefficients: Tensor | None


def compressed(u: Tensor, times: int) -> Tensor:
    """Every wavenumber `times` as large: copies of every k-th point, alternately mirrored, so that none jumps."""
    for axis in range(2, u.ndim):
        part = u.index_select(axis, torch.arange(0, u.shape[axis], times))
        copies = [part.flip(axis) if number % 2 else part for number in range(times)]
        u = torch.cat(copies, axis).narrow(axis, 0, u.shape[axis])
    return u


def shifts_of(dataset: Dataset, config: ShiftsConfig) -> Iterator[Shift]:
    """The shifts of a dataset; steady families have no time step."""
    for parameter in dataset.parameters:
        yield from (Shift("parameter", factor, parameter) for factor in config.parameters)
    factors = {"amplitude": config.amplitudes, "wavenumber": config.wavenumbers, "noise": config.noises}
    factors |= {"grid": config.grids, "time step": [] if len(dataset.times) == 1 else config.time_steps}
    for kind, values in factors.items():
        yield from (Shift(kind, factor) for factor in values)


def simulate_case(dataset: Dataset, shift: Shift, count: int, seed: int) -> Case:
    """`count` trajectories of a dataset with one shift."""
    base, family, problem = base_of(dataset.family), FAMILIES[dataset.family], PROBLEMS[base_of(dataset.family)]
    first = FIRST + count * (zlib.crc32(repr(shift).encode()) % FIRST)
    start = next((name for name in problem.initial_states if f"_{name}_" in dataset.name), "Rand")
    shifted, indices = shift.of(dataset), range(first, first + count)
    u_0, sampled = sample_initial_states(base, indices, shifted.grid, seed, shifted.parameters, start=start)
    generator = torch.Generator().manual_seed(first)
    fields = [sampled[name].float() for name in family.coefficients]
    coefficients = torch.stack(fields, 1) if fields else None
    if u_0 is None:
        assert coefficients is not None
        log = [name in family.positive_coefficients for name in family.coefficients]
        coefficients = shift.change(coefficients, log, generator)
        sampled |= dict(zip(family.coefficients, coefficients.unbind(1), strict=True))
    else:
        u_0 = shift.change(u_0, [name in family.positive for name in family.fields], generator)
        for channel in map(family.fields.index, family.non_negative):
            u_0[:, channel].clamp_(min=0.0)
    boundary = dataset.boundary[0] if problem.boundaries else None
    u = solve(base, u_0, shifted.parameters | sampled, shifted.times, boundary=boundary)
    return Case(shifted, u.float(), coefficients)


@torch.no_grad()
def errors_of_case(surrogate: Surrogate, case: Case, periodic: tuple[bool, ...], device: torch.device) -> Tensor:
    """The nRMSE (B,) of each rollout or steady solution without corrector, a mean over its times and fields."""
    family, u = case.dataset.family, case.u.to(device)
    surrogate = replace(surrogate, codec=surrogate.codec.on_grid(family, case.dataset.grid))
    group = surrogate.codec.groups[group_name(family, "fields")]
    domain, z = Domain(family, group.token_grid, periodic), surrogate.encode(u[:, 0], family)
    coefficients = z[..., :0]
    if case.coefficients is not None:
        coefficients = surrogate.encode(case.coefficients.to(device), family, "coefficients")
    condition = torch.tensor(condition_features(case.dataset), device=device).expand(len(u), -1)
    step = surrogate.plain_step(Setting(family, domain, coefficients, condition))
    if FAMILIES[family].steady:
        return nRMSE(surrogate.decode(step(torch.zeros_like(z)), family)[:, None], u).mean((1, 2))
    predicted = rollout(step, z, u.shape[1] - 1)
    return nRMSE(surrogate.decode(predicted, family), u[:, 1:]).mean((1, 2))


def score_shifts(
    trained: Trained, coverage: dict[str, Any], config: ShiftsConfig, launch: LaunchConfig
) -> dict[str, Any]:
    """{"records"}: per dataset and shift the errors, scores and warnings of its trajectories, and reasons to warn.

    A dataset's first record is of trajectories without shift; families without a solver are left out.

    Raises:
        ConfigFault: no family has a solver.
    """
    compute, cache, records = Compute.of(launch), trained.cache(), []
    surrogate, domain_of = compute.limited(trained.surrogate(compute.device)), domains(trained.cache())
    datasets = [Dataset.from_json(entry["dataset"]) for _, entry in sorted(cache.datasets.items())]
    plan = [
        (dataset, shift)
        for dataset in datasets
        if base_of(dataset.family) in PROBLEMS
        for shift in (Shift("none", 1.0), *shifts_of(dataset, config))
    ]
    if not plan:
        raise ConfigFault(f"--pipeline coverage simulates trajectories: train on a family of {', '.join(PROBLEMS)}")
    with ProgressBar("score_shifts", len(plan), "shifts") as bar:
        for dataset, shift in plan:
            count = config.num_trajectories[len(dataset.grid) - 1]
            count *= config.unshifted if shift.kind == "none" else 1
            case = simulate_case(dataset, shift, count, config.seed)
            errors = errors_of_case(surrogate, case, domain_of[dataset.family].periodic, compute.device)
            records.append(_record(dataset, shift, case, errors, Coverage.from_json(coverage[dataset.family])))
            bar.advance(1)
    return {"records": records}


def _record(dataset: Dataset, shift: Shift, case: Case, errors: Tensor, covered: Coverage) -> dict[str, Any]:
    shifted, steady = case.dataset, FAMILIES[dataset.family].steady
    dt = None if steady else shifted.times[1] - shifted.times[0]
    u_0 = None if steady else case.u[:, 0]
    outside = covered.check(u_0, case.coefficients, shifted.parameters, grid=shifted.grid, dt=dt)
    record = {"family": dataset.family, "dataset": dataset.name, "kind": shift.kind, "parameter": shift.parameter}
    record |= {"factor": shift.factor, "errors": [finite(error) for error in errors.tolist()]}
    reasons = list(outside.reasons)
    return record | {"scores": outside.score.tolist(), "warned": outside.warned.tolist(), "reasons": reasons}


def AUROC(scores: Iterable[float], positive: Iterable[bool]) -> float:  # noqa: N802
    """Probability that a positive has a larger score than a negative, ties half; NaN without one of either."""
    ranks, chosen = rankdata(list(scores)), np.array(list(positive), bool)
    num_positive, num_negative = int(chosen.sum()), int((~chosen).sum())
    if not num_positive or not num_negative:
        return math.nan
    return float((ranks[chosen].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def summarize(records: Records) -> Records:
    """Per family, and over all: AUROC, shares of large errors, of those warned of, and of others warned of."""
    rows = [row for record in records for row in _rows(record, records)]
    groups = {name: [row for row in rows if row["family"] == name] for name in dict.fromkeys(r["family"] for r in rows)}
    states = ("none", "parameter", "amplitude")
    groups["all"] = rows
    groups["all, parameters and amplitudes alone"] = [row for row in rows if row["kind"] in states]
    return [{"group": name} | _summary(of) for name, of in groups.items()]


def _rows(record: dict[str, Any], records: Records) -> Iterator[dict[str, Any]]:
    """One row per trajectory: whether its error is large, its score and warning."""
    usual = next(r["errors"] for r in records if r["dataset"] == record["dataset"] and r["kind"] == "none")
    limit = MANY_ERRORS * median(math.inf if error is None else error for error in usual)
    for error, score, warned in zip(record["errors"], record["scores"], record["warned"], strict=True):
        is_large = error is None or error > limit
        yield {key: record[key] for key in ("family", "kind")} | {"large": is_large, "score": score, "warned": warned}


def _summary(rows: Records) -> dict[str, Any]:
    def share(chosen: list[dict[str, Any]]) -> float | None:
        return sum(row["warned"] for row in chosen) / len(chosen) if chosen else None

    large = [row["large"] for row in rows]
    return {
        "num_trajectories": len(rows),
        "AUROC": finite(AUROC([row["score"] for row in rows], large)),
        "large_errors": sum(large) / len(rows),
        "hits": share([row for row in rows if row["large"]]),
        "false_alarms_unshifted": share([row for row in rows if not row["large"] and row["kind"] == "none"]),
        "false_alarms_shifted": share([row for row in rows if not row["large"] and row["kind"] != "none"]),
    }


NOTE = (
    f"Trajectories simulated with one thing changed, and predicted. Large: an error above {MANY_ERRORS:g} times the "
    "median of trajectories without shift. AUROC: probability that a trajectory with a large error has a higher score "
    "than another one. Hits: share of the large errors that a warning preceded; false alarms: share of the others that "
    "one preceded, among trajectories without shift and with one."
)


def shifts_text(summary: Records) -> str:
    """Markdown: the table of `summarize`."""
    columns = ["family", "trajectories", "AUROC", "large errors", "hits", "false alarms, no shift", "with shift"]
    keys = list(summary[0])[1:]
    cells = ([row["group"], *(_cell(row[key]) for key in keys)] for row in summary)
    return "\n\n".join(["# Warning outside what training covered", NOTE, table(columns, cells)]) + "\n"


def _cell(value: float | None) -> str:
    return "none" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
