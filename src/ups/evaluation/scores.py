"""Metrics in physical units of every method over sets of trajectories: one step and whole rollouts."""

import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ups.config import EvaluationConfig
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import TrajectoryReader
from ups.diffusion import Normal, antithetic
from ups.evaluation.examples import Arrays, Example, chosen, description, statistics
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
from ups.evaluation.selected import ROLLOUT, SearchChoice
from ups.evaluation.tables import SELECTED
from ups.evaluation.violations import conserved_channels, non_negative_channels
from ups.metrics.errors import EPS
from ups.metrics.suite import OF_ROLLOUTS, Reductions, ScoreSuite, Timeline, Truth, joined
from ups.models.sizes import Domain
from ups.surrogate.surrogate import Setting, Surrogate

log = logging.getLogger(__name__)


Predictor = Callable[[Slab], Iterable[Predicted]]


@dataclass(frozen=True)
class TrajectorySet:
    """Trajectories to score, the `indices` of a dataset in `folder`, and what the models need besides the fields.

    `condition` are the features of the PDE's parameters, `domain` the family with its grid of tokens, `md5` those of
    files by name, for kept predictions, `choice` how `selected` chooses its rollouts; None: it is not scored.
    """

    folder: Path
    dataset: Dataset
    indices: tuple[int, ...]
    condition: list[float]
    domain: Domain
    md5: dict[str, str] = field(default_factory=dict)
    choice: SearchChoice | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of one trajectory."""
        return math.prod(self.domain.grid) * len(self.dataset.times)


def held_out(cache: LatentCache, raw: Path, split: Literal["valid", "test"] = "test") -> list[TrajectorySet]:
    """The test or validation split of every dataset in the cache."""
    domain_of, md5, sets = domains(cache), cache.manifest["key"]["source files"], []
    for _, entry in sorted(cache.datasets.items()):
        dataset, indices = Dataset.from_json(entry["dataset"]), tuple(entry["split"][split])
        sets.append(TrajectorySet(raw, dataset, indices, entry["condition"], domain_of[dataset.family], md5))
    return sets


@dataclass(frozen=True)
class Part:
    """What is scored in one pass over a set: horizons of correctors, and if `plain` all methods without corrector.

    `corrected` has by (method, horizon) the network evaluations per step, those of all members.
    """

    scored: TrajectorySet
    name: str
    plain: bool
    corrected: dict[tuple[str, str], int]

    @classmethod
    def whole(cls, surrogate: Surrogate, scored: TrajectorySet, config: EvaluationConfig) -> "Part":
        """All methods of a set."""
        keys = product(trained_correctors(surrogate), HORIZONS)
        found = {(m, h): surrogate.corrections.get((m, scored.dataset.family)) for m, h in keys}
        evaluations = {key: config.ensemble_size * (1 + how.num_steps) for key, how in found.items() if how is not None}
        if scored.choice is not None:
            evaluations[SELECTED, ROLLOUT] = scored.choice.evaluations(surrogate, scored.dataset)
        return cls(scored, f"{scored.dataset.name}.all", True, evaluations)

    def split(self) -> list["Part"]:
        """All methods without corrector, and each horizon of each corrector by itself."""
        name, keys = self.scored.dataset.name, self.corrected.items()
        alone = [replace(self, name=f"{name}.{m}.{h}", plain=False, corrected={(m, h): n}) for (m, h), n in keys]
        return [replace(self, name=f"{name}.plain", corrected={}), *alone]

    def has(self, method: str, horizon: str) -> bool:
        """Whether it has the steps of this method, a model's, at this horizon."""
        is_plain = method == plain_method(self.scored.dataset.family)
        return self.plain if is_plain else (method, horizon) in self.corrected

    @property
    def cost(self) -> int:
        """Tokens of all trajectories times network evaluations per step: a measure of the time it takes."""
        evaluations = len(HORIZONS) * self.plain + sum(self.corrected.values())
        return self.scored.num_tokens * len(self.scored.indices) * evaluations


@torch.no_grad()
def score_part(
    folder: Path,
    surrogate: Surrogate,
    part: Part,
    *,
    config: EvaluationConfig,
    compute: Compute,
    examples: bool,
    advance: Callable[[int], None],
) -> tuple[list[dict[str, Any]], Arrays]:
    """Score the methods of a part; predictions that are to be kept are written into `folder`.

    `advance` is called with the number of trajectories of each batch. No number depends on which other methods are in
    the part: each method and horizon has noise of its own, and all parts of a set cut it into the same batches.

    Returns:
        Records, see `ups.evaluation.parts.score_sets`, and arrays for figures: curves, and if `examples` trajectories.
    """
    scored, dataset, family = part.scored, part.scored.dataset, part.scored.dataset.family
    on_grid = replace(compute.limited(surrogate), codec=surrogate.codec.on_grid(family, dataset.grid))
    known = {
        h: steppers(on_grid, family, config.ensemble_size, partial(_normal, part, config, compute, h)) for h in HORIZONS
    }
    num_members = max((stepper.num_members for stepper in known["rollout"].values()), default=1)
    choose: Callable[[Batch], Predictor] | None = None
    if scored.choice is not None:
        num_members = max(num_members, scored.choice.num_members)
        if part.has(SELECTED, ROLLOUT):
            noise = _generator(part, config, compute, ROLLOUT, SELECTED)
            choose = partial(scored.choice.predictor, scored.choice.search(on_grid, dataset, compute), noise)
    keys = [(m, h) for m in known["rollout"] for h in HORIZONS if part.has(m, h)]
    limited = {key: LimitCount(on_grid, family, compute.device) for key in keys}
    counted: dict[str, dict[str, Stepper]] = defaultdict(dict)
    for m, h in keys:
        counted[m][h] = limited[m, h].of(known[h][m])
    trivial = [partial(predict_trivially, on_grid, family)] if part.plain else []
    suites: Suites = defaultdict(partial(suite_of, dataset, config.seed))
    with Keeper(folder, dataset, scored.indices, scored.md5, surrogate, config) as keeper:
        for batch in batches(on_grid, scored, config.batch_tokens, compute, num_members):
            predictors = [*trivial, partial(predict, on_grid, batch, forecasts(counted, batch))]
            predictors += [choose(batch)] if choose else []
            score_batch(on_grid.encode, batch, predictors, suites, keeper)
            advance(len(batch.indices))
    if part.plain and (clamped := suites["codec", "rollout"].metrics.clamped):
        message = "%s: %d reference snapshots vanish (RMS below %g of the largest in time); nRMSE divides by this limit"
        log.warning(message, dataset.name, clamped, EPS)
    arrays = statistics(suites) | (description(dataset) if part.plain else {})
    if (plain := plain_method(family)) in counted:
        count = limited[plain, "rollout"]
        if count.any and not FAMILIES[family].steady:
            free = count.without_limits(known["rollout"][plain])
            count.free = _scores_of(on_grid, scored, free, config, compute)
        uncounted = {h: known[h][plain] for h in HORIZONS}
        arrays |= _examples(on_grid, scored, suites, uncounted, config, compute) if examples else {}
    return records_of(surrogate, dataset, suites, limited), arrays


def _generator(part: Part, config: EvaluationConfig, compute: Compute, horizon: str, method: str) -> torch.Generator:
    """The noise of a method at one horizon; its samples depend neither on other datasets or methods nor on the rank."""
    seed = config.seed + zlib.crc32(f"{part.scored.dataset.name}/{horizon}/{method}".encode())
    return torch.Generator(compute.device).manual_seed(seed)


def _normal(part: Part, config: EvaluationConfig, compute: Compute, horizon: str, method: str) -> Normal:
    return antithetic(_generator(part, config, compute, horizon, method))


def _scores_of(
    surrogate: Surrogate,
    scored: TrajectorySet,
    stepper: Stepper,
    config: EvaluationConfig,
    compute: Compute,
) -> ScoreSuite:
    """The scores of the rollouts of a stepper."""
    suites: Suites = defaultdict(partial(suite_of, scored.dataset, config.seed))
    for batch in batches(surrogate, scored, config.batch_tokens, compute, num_members=1):
        forecast = {"": Forecast({"rollout": stepper}, batch.setting)}
        score_batch(surrogate.encode, batch, [partial(predict, surrogate, batch, forecast)], suites)
    return suites["", "rollout"]


def forecasts(active: dict[str, dict[str, Stepper]], batch: Batch) -> dict[str, Forecast]:
    """Forecasts of a batch by method, from the steppers by method and horizon."""
    return {method: Forecast(steppers, batch.setting) for method, steppers in active.items()}


def _examples(
    surrogate: Surrogate,
    scored: TrajectorySet,
    suites: Suites,
    plain: dict[str, Stepper],
    config: EvaluationConfig,
    compute: Compute,
) -> dict[str, np.ndarray]:
    """Truth and prediction of the worst, median and best trajectory, predicted once more without corrector."""
    arrays, method = {}, plain_method(scored.dataset.family)
    for role, position in chosen(suites[method, "rollout"].of_trajectories("nRMSE")).items():
        example, one = Example(scored.dataset), replace(scored, indices=(scored.indices[position],))
        for batch in batches(surrogate, one, config.batch_tokens, compute, num_members=1):
            example.predict(surrogate, batch, partial(predict, surrogate, batch, forecasts({method: plain}, batch)))
        arrays |= {f"{role}/{name}": values for name, values in example.arrays().items()}
    return arrays


def batches(
    surrogate: Surrogate, trajectory_set: TrajectorySet, batch_tokens: int, compute: Compute, num_members: int
) -> Iterator[Batch]:
    """Batches of about `batch_tokens` tokens, scored in pieces that fit into memory with `num_members` members."""
    dataset, family = trajectory_set.dataset, FAMILIES[trajectory_set.dataset.family]
    size = min(max(1, batch_tokens // trajectory_set.num_tokens), len(trajectory_set.indices))
    snapshot_bytes = 4 * len(family.fields) * math.prod(dataset.grid)
    fitting = compute.num_snapshots(snapshot_bytes, num_members)
    num_rows, members_at_once = min(max(1, fitting), size), num_members if fitting else 1
    model = surrogate.model(family.name)
    history = model is not None and model.statistics.history.has(family.name)
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
            yield Batch(
                reader, indices, setting, compute.device, max(1, fitting // size), rows, members_at_once, history
            )


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
            # Made here, so that records are in the order of the predictions.
            suite, *_ = [suites[each.method, horizon] for horizon in each.horizons]
            found = _reduced(suite, each, slab, truths, batch.rows)
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
