"""Metrics in physical units of every method over sets of trajectories: one step and whole rollouts."""

import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import TrajectoryReader
from ups.diffusion.samplers import Normal, antithetic
from ups.evaluation.kept import Keeper
from ups.evaluation.predictions import (
    HORIZONS,
    Batch,
    Compute,
    Encode,
    Forecast,
    Predicted,
    Slab,
    corrector_mode,
    plain_method,
    predict,
    predict_trivially,
    prediction_of,
    steppers,
    trained_correctors,
)
from ups.evaluation.tables import finite
from ups.evaluation.violations import conserved_channels
from ups.metrics.errors import EPS
from ups.metrics.spectra import radial_spectrum
from ups.metrics.suite import OF_ROLLOUTS, Reductions, ScoreSuite, Timeline, Truth, joined
from ups.models.sizes import Domain
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import OFF, Trained

log = logging.getLogger(__name__)

MAX_POINTS = 256  # points per axis, and times of a 1D dataset, in the arrays for figures

Suites = dict[tuple[str, str], ScoreSuite]
"""(method, horizon) -> its running metrics."""

Predictor = Callable[[Slab], Iterable[Predicted]]


@dataclass(frozen=True)
class TrajectorySet:
    """Trajectories to score, the `indices` of a dataset in `folder`, and what the models need besides the fields.

    `condition` are the features of the PDE's parameters, `domain` the family with its grid of tokens.
    """

    folder: Path
    dataset: Dataset
    indices: tuple[int, ...]
    condition: list[float]
    domain: Domain

    @property
    def num_tokens(self) -> int:
        """Tokens of one trajectory."""
        return math.prod(self.domain.grid) * len(self.dataset.times)


def held_out(cache: LatentCache, raw: Path, split: Literal["valid", "test"] = "test") -> list[TrajectorySet]:
    """The test or validation split of every dataset in the cache."""
    domain_of, sets = domains(cache), []
    for _, entry in sorted(cache.datasets.items()):
        dataset, indices = Dataset.from_json(entry["dataset"]), tuple(entry["split"][split])
        sets.append(TrajectorySet(raw, dataset, indices, entry["condition"], domain_of[dataset.family]))
    return sets


def score_test_split(
    folder: Path, trained: Trained, config: EvaluationConfig, launch: LaunchConfig, raw: Path
) -> dict[str, Any]:
    """Records of the trained models on the test split; arrays for the figures are written into `folder`."""
    sets, compute = held_out(trained.cache(), raw, "test"), Compute.of(launch)
    return {
        "records": score_sets(folder, trained.surrogate(compute.device), sets, config, compute),
        "datasets": {each.dataset.name: each.dataset.family for each in sets},
    }


@torch.no_grad()
def score_sets(
    folder: Path, surrogate: Surrogate, sets: list[TrajectorySet], config: EvaluationConfig, compute: Compute
) -> list[dict[str, Any]]:
    """Score every method on every set; write `folder/<dataset>.npz` for the figures.

    Returns:
        Records {"family", "dataset", "method", "metric", "horizon", "value", "num_trajectories"}. "low" and "high" are
        the 95 % confidence interval of metrics that are statistics over enough trajectories. The nRMSE has
        "trajectories", the error of each in order. A number that is not finite is None. Methods with a corrector have
        its "mode": with "off" they have the scores of the operator or the steady model.
    """
    folder.mkdir(exist_ok=True)
    records = []
    with ProgressBar("evaluate", sum(len(each.indices) for each in sets), "trajectories") as bar:
        for each in sets:
            with Keeper(folder, each.dataset, each.indices, surrogate, config) as keeper:
                suites, example = _score_set(compute.limited(surrogate), each, config, compute, bar, keeper)
            np.savez_compressed(folder / f"{each.dataset.name}.npz", **example.arrays(), **_curves_and_ranks(suites))
            records += _records_of_methods(surrogate, each.dataset, suites)
    return records


def _score_set(
    surrogate: Surrogate,
    scored: TrajectorySet,
    config: EvaluationConfig,
    compute: Compute,
    bar: ProgressBar,
    keeper: Keeper,
) -> tuple[Suites, "Example"]:
    dataset, family = scored.dataset, FAMILIES[scored.dataset.family]
    sizes, conserved = (len(dataset.grid), family.pdebench_batch_size), conserved_channels(dataset)
    suites: Suites = defaultdict(lambda: ScoreSuite(*sizes, conserved, config.seed))
    on_grid = replace(surrogate, codec=surrogate.codec.on_grid(family.name, dataset.grid))

    def normal_of(horizon: str, method: str) -> Normal:
        # The dataset's name is part of the seed: its samples do not depend on which other datasets are scored.
        seed = config.seed + zlib.crc32(f"{dataset.name}/{horizon}/{method}".encode())
        return antithetic(torch.Generator(compute.device).manual_seed(seed))

    active = {h: steppers(on_grid, family.name, config.ensemble_size, partial(normal_of, h)) for h in HORIZONS}
    example = Example(dataset)
    num_members = max((stepper.num_members for stepper in active["rollout"].values()), default=1)
    for batch in batches(on_grid, scored, config.batch_tokens, compute, num_members):
        forecasts = {m: Forecast({h: active[h][m] for h in HORIZONS}, batch.setting) for m in active["rollout"]}
        predictors = [partial(predict_trivially, on_grid, family.name), partial(predict, on_grid, batch, forecasts)]
        shown = example if batch.indices[0] == scored.indices[0] else None
        score_batch(on_grid.encode, batch, predictors, suites, shown, keeper)
        bar.advance(len(batch.indices))
    if clamped := suites["codec", "rollout"].metrics.clamped:
        message = "%s: %d reference snapshots vanish (RMS below %g); nRMSE is RMSE / %g there"
        log.warning(message, dataset.name, clamped, EPS, EPS)
    return suites, example


def batches(
    surrogate: Surrogate, trajectory_set: TrajectorySet, batch_tokens: int, compute: Compute, num_members: int
) -> Iterator[Batch]:
    """Batches of about `batch_tokens` tokens, scored in pieces that fit into memory with `num_members` members."""
    dataset, family = trajectory_set.dataset, FAMILIES[trajectory_set.dataset.family]
    size = min(max(1, batch_tokens // trajectory_set.num_tokens), len(trajectory_set.indices))
    snapshot_bytes = 4 * len(family.fields) * math.prod(dataset.grid)
    fitting = compute.num_snapshots(snapshot_bytes, num_members)
    num_rows, members_at_once = min(max(1, fitting), size), num_members if fitting else 1
    with TrajectoryReader(trajectory_set.folder, dataset) as reader:
        for start in range(0, len(trajectory_set.indices), size):
            indices = trajectory_set.indices[start : start + size]
            condition = torch.tensor(trajectory_set.condition, device=compute.device).expand(len(indices), -1)
            coefficients = torch.zeros(len(indices), math.prod(trajectory_set.domain.grid), 0, device=compute.device)
            if family.coefficients:
                given = torch.from_numpy(np.stack([reader.read_coefficients(index) for index in indices]))
                coefficients = surrogate.encode(given.to(compute.device), family.name, "coefficients")
            setting = Setting(family.name, trajectory_set.domain, coefficients, condition)
            rows = [slice(first, first + num_rows) for first in range(0, len(indices), num_rows)]
            yield Batch(reader, indices, setting, compute.device, max(1, fitting // size), rows, members_at_once)


def score_batch(
    encode: Encode,
    batch: Batch,
    predictors: list[Predictor],
    suites: Suites,
    example: "Example | None" = None,
    keeper: Keeper | None = None,
) -> None:
    """Add the scores of all predictors on a batch to `suites`; its first trajectory is the `example` for figures."""
    timelines: dict[tuple[str, str], Timeline] = defaultdict(lambda: Timeline(batch.num_times))
    for slab in batch.slabs(encode):
        truths = [Truth(slab.target[rows]) for rows in batch.rows]
        if example is not None:
            example.add("truth", slab, slab.target[0])
        for each in chain.from_iterable(predictor(slab) for predictor in predictors):
            each = each if keeper is None else keeper.kept(each, batch, slab)
            found = _reduced(suites[each.method, each.horizons[0]], each, slab, truths, batch.rows, example)
            for horizon in each.horizons:
                left_out = () if horizon == "rollout" else OF_ROLLOUTS
                timelines[each.method, horizon].append({k: v for k, v in found.items() if k not in left_out})
    for (method, horizon), timeline in timelines.items():
        whole = timeline.whole
        suites[method, horizon].add(whole)
        if example is not None and horizon == "rollout":
            example.errors[method] = (whole["rms"] / whole["rms_ref"].clamp_min(EPS))[0].cpu().numpy()


def _reduced(
    suite: ScoreSuite,
    predicted: Predicted,
    slab: Slab,
    truths: list[Truth],
    places: list[slice],
    example: "Example | None",
) -> Reductions:
    """Reductions of a method's predictions for a slab, made a few trajectories at a time."""
    parts, is_rollout = [], "rollout" in predicted.horizons
    for rows, truth in zip(places, truths, strict=True):
        u_0 = slab.u_0[rows] if slab.u_0 is not None and is_rollout else None
        part = truth if predicted.times == slice(None) else Truth(truth.u[:, predicted.times])
        prediction = prediction_of(predicted.members(rows), part.u)
        parts.append(suite.reduce(prediction.u, part, u_0, prediction.ensemble))
        if example is not None and rows.start == 0 and is_rollout:
            example.add(predicted.method, slab, prediction.u[0])
    return joined(parts)


class Example:
    """A trajectory for the figures: truth and rollouts at some times and points, spectra and errors.

    Of a 1D dataset there are up to 256 times, else the first, the middle and the last; of a volume the middle plane
    of z.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.errors: dict[str, np.ndarray] = {}
        count = min(MAX_POINTS if len(dataset.grid) == 1 else 3, len(dataset.times))
        self._shown = np.unique(np.linspace(0, len(dataset.times) - 1, count).astype(int))
        self._snapshots: dict[str, list[np.ndarray]] = defaultdict(list)
        self._spectra: dict[str, np.ndarray] = {}

    def add(self, name: str, slab: Slab, u: Tensor) -> None:
        """Add snapshots u (T, C, *grid) of the truth or of a rollout, those of a slab."""
        start = slab.start
        if slab.u_0 is not None:
            start += 1
            if slab.start == 0:
                self._snapshots[name].append(_thinned(slab.u_0[0]))
        stop = start + len(u)
        self._snapshots[name] += [_thinned(u[index - start]) for index in self._shown if start <= index < stop]
        if stop == len(self.dataset.times):
            self._spectra[name] = radial_spectrum(u[None, -1:])[0, 0].sum(0).cpu().numpy()

    def arrays(self) -> dict[str, np.ndarray]:
        """The `times` of all snapshots, those `shown`, and by `<kind>/<name>` fields, spectra and nRMSE (steps, C)."""
        times = np.array(self.dataset.times)
        arrays = {"times": times, "shown": times[self._shown]}
        arrays |= {f"rollout/{name}": np.stack(u) for name, u in self._snapshots.items()}
        arrays |= {f"spectrum/{name}": energy for name, energy in self._spectra.items()}
        return arrays | {f"nRMSE/{name}": errors for name, errors in self.errors.items()}


def _thinned(u: Tensor) -> np.ndarray:
    """A snapshot (C, *grid) at no more points per axis than are drawn; of a volume the middle plane of z."""
    if u.ndim == 4:
        u = u.narrow(3, u.shape[3] // 2, 1)
    for axis in range(1, u.ndim):
        u = u[(slice(None),) * axis + (slice(None, None, -(-u.shape[axis] // MAX_POINTS)),)]
    return u.cpu().numpy().copy()


def _curves_and_ranks(suites: Suites) -> dict[str, np.ndarray]:
    """The nRMSE (T,) and, for ensembles, the rank histogram (C, M + 1) of each rollout."""
    rollouts = {method: suite for (method, horizon), suite in suites.items() if horizon == "rollout"}
    curves = {f"curve/{method}": suite.metrics.curve() for method, suite in rollouts.items()}
    ranks = {f"ranks/{method}": suite.ranks() for method, suite in rollouts.items()}
    return {name: values.cpu().numpy() for name, values in (curves | ranks).items() if values is not None}


def _records_of_methods(surrogate: Surrogate, dataset: Dataset, suites: Suites) -> list[dict[str, Any]]:
    """Records of the scored methods, and of correctors that are off, which predict what the plain model does."""
    modes = {method: corrector_mode(surrogate, method, dataset.family) for method in trained_correctors(surrogate)}
    records = []
    for (method, horizon), suite in suites.items():
        mode = {"mode": modes[method]} if method in modes else {}
        records += [record | mode for record in records_of(dataset, method, horizon, suite)]
    plain = [record for record in records if record["method"] == plain_method(dataset.family)]
    off = [method for method, mode in modes.items() if mode == OFF]
    return records + [record | {"method": method, "mode": OFF} for method in off for record in plain]


def records_of(dataset: Dataset, method: str, horizon: str, suite: ScoreSuite) -> Iterator[dict[str, Any]]:
    """The records of one method and horizon, as `score_sets` returns them."""
    for metric, score in suite.compute().items():
        record = {"family": dataset.family, "dataset": dataset.name, "method": method, "metric": metric}
        record |= {"horizon": horizon, "value": finite(score.value)}
        record["num_trajectories"] = suite.metrics.num_trajectories
        if metric == "nRMSE":
            record["trajectories"] = [finite(value) for value in suite.of_trajectories(metric).tolist()]
        interval = {} if score.interval is None else dict(zip(("low", "high"), score.interval, strict=True))
        yield record | {end: finite(value) for end, value in interval.items()}
