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

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import TrajectoryReader
from ups.diffusion.samplers import Normal, antithetic
from ups.evaluation.examples import Example, chosen, description, statistics
from ups.evaluation.kept import Keeper
from ups.evaluation.predictions import (
    HORIZONS,
    Batch,
    Compute,
    Encode,
    Forecast,
    Predicted,
    Slab,
    Stepper,
    plain_method,
    predict,
    predict_trivially,
    prediction_of,
    steppers,
    trained_correctors,
)
from ups.evaluation.records import LimitCount, Suites, records_of
from ups.evaluation.violations import conserved_channels, non_negative_channels
from ups.metrics.errors import EPS
from ups.metrics.suite import OF_ROLLOUTS, Reductions, ScoreSuite, Timeline, Truth, joined
from ups.models.sizes import Domain
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import Trained

log = logging.getLogger(__name__)


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
    folder: Path,
    trained: Trained,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    num_trajectories: int | None = None,
) -> dict[str, Any]:
    """Records of the trained models on the test split; arrays for the figures are written into `folder`.

    Of each dataset the first `num_trajectories` are scored; None: all.
    """
    sets, compute = held_out(trained.cache(), raw, "test"), Compute.of(launch)
    sets = [replace(each, indices=each.indices[:num_trajectories]) for each in sets]
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
        its "mode": with "off" they have the scores of the operator or the steady model. Predicted states that limits
        of `StateStatistics` have changed are the share `limited_steps`, their values the share `limited_values`; where
        the operator's rollouts have any, `nRMSE_without_limits` is the error of its rollouts without limits.
    """
    folder.mkdir(exist_ok=True)
    records = []
    total = sum(len(each.indices) for each in sets)
    cost = sum(len(each.indices) * trajectory_cost(surrogate, each, config) for each in sets)
    with ProgressBar("evaluate", total, "trajectories", cost) as bar:
        for each in sets:
            with Keeper(folder, each.dataset, each.indices, surrogate, config) as keeper:
                suites, limited, arrays = _score_set(compute.limited(surrogate), each, config, compute, bar, keeper)
            np.savez_compressed(folder / f"{each.dataset.name}.npz", **arrays)
            records += records_of(surrogate, each.dataset, suites, limited)
    return records


def _score_set(
    surrogate: Surrogate,
    scored: TrajectorySet,
    config: EvaluationConfig,
    compute: Compute,
    bar: ProgressBar,
    keeper: Keeper,
) -> tuple[Suites, dict[tuple[str, str], LimitCount], dict[str, np.ndarray]]:
    """The running metrics of every method, what its limits changed, and the arrays for figures."""
    dataset, family = scored.dataset, FAMILIES[scored.dataset.family]
    suites: Suites = defaultdict(lambda: suite_of(dataset, config.seed))
    on_grid = replace(surrogate, codec=surrogate.codec.on_grid(family.name, dataset.grid))

    def normal_of(horizon: str, method: str) -> Normal:
        # The dataset's name is part of the seed: its samples do not depend on which other datasets are scored.
        seed = config.seed + zlib.crc32(f"{dataset.name}/{horizon}/{method}".encode())
        return antithetic(torch.Generator(compute.device).manual_seed(seed))

    active = {h: steppers(on_grid, family.name, config.ensemble_size, partial(normal_of, h)) for h in HORIZONS}
    limited = {(m, h): LimitCount(on_grid, family.name, compute.device) for h in HORIZONS for m in active[h]}
    counted = {h: {m: limited[m, h].of(stepper) for m, stepper in active[h].items()} for h in HORIZONS}
    trivial, cost = partial(predict_trivially, on_grid, family.name), trajectory_cost(surrogate, scored, config)
    num_members = max((stepper.num_members for stepper in active["rollout"].values()), default=1)
    for batch in batches(on_grid, scored, config.batch_tokens, compute, num_members):
        by_models = partial(predict, on_grid, batch, forecasts(counted, batch))
        score_batch(on_grid.encode, batch, [trivial, by_models], suites, keeper)
        bar.advance(len(batch.indices), len(batch.indices) * cost)
    if clamped := suites["codec", "rollout"].metrics.clamped:
        message = "%s: %d reference snapshots vanish (RMS below %g); nRMSE is RMSE / %g there"
        log.warning(message, dataset.name, clamped, EPS, EPS)
    plain = {h: {m: stepper for m, stepper in active[h].items() if m == plain_method(family.name)} for h in HORIZONS}
    for method, stepper in plain["rollout"].items():
        if not family.steady and limited[method, "rollout"].any:
            _score_without_limits(on_grid, scored, method, stepper, limited[method, "rollout"], config, compute)
    arrays = description(dataset) | statistics(suites)
    return (
        suites,
        limited,
        arrays | (_examples(on_grid, scored, suites, plain, config, compute) if plain["rollout"] else {}),
    )


def _score_without_limits(
    surrogate: Surrogate,
    scored: TrajectorySet,
    method: str,
    stepper: Stepper,
    count: LimitCount,
    config: EvaluationConfig,
    compute: Compute,
) -> None:
    """Score the rollouts of one method once more, as if there were no limits."""
    suites: Suites = defaultdict(partial(suite_of, scored.dataset, config.seed))
    free = count.without_limits(stepper)
    for batch in batches(surrogate, scored, config.batch_tokens, compute, num_members=1):
        forecast = Forecast(dict.fromkeys(HORIZONS, free), batch.setting, stride=batch.num_times)
        predictor = partial(predict, surrogate, batch, {method: forecast})
        score_batch(surrogate.encode, batch, [predictor], suites)
    count.free = suites[method, "rollout"]


def forecasts(active: dict[str, dict[str, Stepper]], batch: Batch) -> dict[str, Forecast]:
    """Forecasts of a batch by method, from the steppers by horizon and method."""
    return {m: Forecast({h: active[h][m] for h in HORIZONS}, batch.setting) for m in active["rollout"]}


def _examples(
    surrogate: Surrogate,
    scored: TrajectorySet,
    suites: Suites,
    plain: dict[str, dict[str, Stepper]],
    config: EvaluationConfig,
    compute: Compute,
) -> dict[str, np.ndarray]:
    """Truth and prediction of the worst, median and best trajectory, predicted once more without corrector."""
    arrays = {}
    errors = suites[plain_method(scored.dataset.family), "rollout"].of_trajectories("nRMSE")
    for role, position in chosen(errors).items():
        example, one = Example(scored.dataset), replace(scored, indices=(scored.indices[position],))
        for batch in batches(surrogate, one, config.batch_tokens, compute, num_members=1):
            example.predict(surrogate, batch, partial(predict, surrogate, batch, forecasts(plain, batch)))
        arrays |= {f"{role}/{name}": values for name, values in example.arrays().items()}
    return arrays


def trajectory_cost(surrogate: Surrogate, scored: TrajectorySet, config: EvaluationConfig) -> int:
    """Tokens of a trajectory times network evaluations per step, of all methods and members: a measure of its time."""
    corrections = [surrogate.corrections.get((m, scored.dataset.family)) for m in trained_correctors(surrogate)]
    evaluations = sum(1 + correction.num_steps for correction in corrections if correction is not None)
    return scored.num_tokens * (1 + config.ensemble_size * evaluations)


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


def suite_of(dataset: Dataset, seed: int) -> ScoreSuite:
    """Empty running metrics for a dataset."""
    batch_size = FAMILIES[dataset.family].pdebench_batch_size
    conserved, non_negative = conserved_channels(dataset), non_negative_channels(dataset)
    return ScoreSuite(len(dataset.grid), batch_size, conserved, seed, non_negative)


def score_batch(
    encode: Encode, batch: Batch, predictors: list[Predictor], suites: Suites, keeper: Keeper | None = None
) -> None:
    """Add the scores of all predictors on a batch to `suites`."""
    timelines: dict[tuple[str, str], Timeline] = defaultdict(lambda: Timeline(batch.num_times))
    for slab in batch.slabs(encode):
        truths = [Truth(slab.target[rows]) for rows in batch.rows]
        for each in chain.from_iterable(predictor(slab) for predictor in predictors):
            each = each if keeper is None else keeper.kept(each, batch, slab)
            found = _reduced(suites[each.method, each.horizons[0]], each, slab, truths, batch.rows)
            for horizon in each.horizons:
                left_out = () if horizon == "rollout" else OF_ROLLOUTS
                timelines[each.method, horizon].append({k: v for k, v in found.items() if k not in left_out})
    for (method, horizon), timeline in timelines.items():
        suites[method, horizon].add(timeline.whole)


def _reduced(
    suite: ScoreSuite,
    predicted: Predicted,
    slab: Slab,
    truths: list[Truth],
    places: list[slice],
) -> Reductions:
    """Reductions of a method's predictions for a slab, made a few trajectories at a time."""
    parts, is_rollout = [], "rollout" in predicted.horizons
    for rows, truth in zip(places, truths, strict=True):
        u_0 = slab.u_0[rows] if slab.u_0 is not None and is_rollout else None
        part = truth if predicted.times == slice(None) else Truth(truth.u[:, predicted.times])
        prediction = prediction_of(predicted.members(rows), part.u)
        parts.append(suite.reduce(prediction.u, part, u_0, prediction.ensemble))
    return joined(parts)
