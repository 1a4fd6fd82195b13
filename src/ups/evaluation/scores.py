"""Metrics in physical units of every method over sets of trajectories: one step and whole rollouts."""

import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import TrajectoryReader
from ups.evaluation.predictions import Predictions, corrector_mode, predict, targets, trained_correctors
from ups.evaluation.tables import finite
from ups.metrics.errors import EPS
from ups.metrics.spectra import radial_spectrum
from ups.metrics.suite import ScoreSuite, Truth
from ups.models.sizes import Domain
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import OFF, Trained

log = logging.getLogger(__name__)

Suites = dict[tuple[str, str], ScoreSuite]
"""(method, horizon) -> its running metrics."""


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
    folder: Path, trained: Trained, config: EvaluationConfig, device: str, raw: Path
) -> dict[str, Any]:
    """Records of the trained models on the test split; arrays for the figures are written into `folder`."""
    sets = held_out(trained.cache(), raw, "test")
    return {
        "records": score_sets(folder, trained.surrogate(device), sets, config, device),
        "datasets": {each.dataset.name: each.dataset.family for each in sets},
    }


@torch.no_grad()
def score_sets(
    folder: Path, surrogate: Surrogate, sets: list[TrajectorySet], config: EvaluationConfig, device: str
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
            records += _score_set(folder, surrogate, each, config, device, bar)
    return records


def _score_set(
    folder: Path, surrogate: Surrogate, scored: TrajectorySet, config: EvaluationConfig, device: str, bar: ProgressBar
) -> list[dict[str, Any]]:
    dataset, family = scored.dataset, FAMILIES[scored.dataset.family]
    num_dims, conserved = len(dataset.grid), conserved_channels(dataset)
    suites: Suites = defaultdict(lambda: ScoreSuite(num_dims, family.pdebench_batch_size, conserved, config.seed))
    example: dict[str, np.ndarray] = {}
    modes = {m: corrector_mode(surrogate, m, family.name) for m in trained_correctors(surrogate)}
    off = [m for m, mode in modes.items() if mode == OFF]  # not in the figures: their curves equal the operator's
    # The dataset's name is part of the seed: its samples do not depend on which other datasets are scored.
    generator = torch.Generator(device).manual_seed(config.seed + zlib.crc32(dataset.name.encode()))
    on_grid = replace(surrogate, codec=surrogate.codec.on_grid(dataset.family, dataset.grid))
    for u_ref, setting in batches(on_grid, scored, config.batch_tokens, torch.device(device)):
        predictions = predict(on_grid, u_ref, setting, config, generator)
        truth = Truth(targets(u_ref, dataset.family))
        for (method, horizon), prediction in predictions.items():
            u_0 = u_ref[:, 0] if horizon == "rollout" and not family.steady else None
            suites[method, horizon].update(prediction.u, truth, u_0, prediction.ensemble)
        example = example or _example(u_ref, {key: predictions[key] for key in predictions if key[0] not in off})
        bar.advance(len(u_ref))
    if clamped := suites["codec", "rollout"].metrics.clamped:
        message = "%s: %d reference snapshots vanish (RMS below %g); nRMSE is RMSE / %g there"
        log.warning(message, dataset.name, clamped, EPS, EPS)
    arrays = example | _curves_and_ranks({key: suite for key, suite in suites.items() if key[0] not in off})
    np.savez_compressed(folder / f"{dataset.name}.npz", times=np.array(dataset.times), **arrays)
    return [
        record | ({"mode": modes[method]} if method in modes else {})
        for (method, horizon), suite in suites.items()
        for record in _records(dataset, method, horizon, suite)
    ]


def conserved_channels(dataset: Dataset) -> list[int]:
    """Channels whose integral over space is constant; none where a boundary condition is not the family's own."""
    family = FAMILIES[dataset.family]
    is_closed = all(boundary == family.boundary for boundary in dataset.boundary)
    return [family.fields.index(name) for name in family.conserved] if is_closed else []


def batches(
    surrogate: Surrogate, trajectory_set: TrajectorySet, batch_tokens: int, device: torch.device
) -> Iterator[tuple[Tensor, Setting]]:
    """Batches of trajectories (B, T, C, *grid) with their setting, of about `batch_tokens` tokens each."""
    dataset, family = trajectory_set.dataset, FAMILIES[trajectory_set.dataset.family]
    size = max(1, batch_tokens // trajectory_set.num_tokens)
    with TrajectoryReader(trajectory_set.folder, dataset) as reader:
        for start in range(0, len(trajectory_set.indices), size):
            indices = trajectory_set.indices[start : start + size]
            u_ref = torch.from_numpy(np.stack([reader.read(index) for index in indices])).to(device)
            condition = torch.tensor(trajectory_set.condition, device=device).expand(len(indices), -1)
            coefficients = torch.zeros(len(indices), math.prod(trajectory_set.domain.grid), 0, device=device)
            if family.coefficients:
                given = torch.from_numpy(np.stack([reader.read_coefficients(index) for index in indices]))
                coefficients = surrogate.encode(given.to(device), family.name, "coefficients")
            yield u_ref, Setting(family.name, trajectory_set.domain, coefficients, condition)


def _example(u_ref: Tensor, predictions: Predictions) -> dict[str, np.ndarray]:
    """The first trajectory: reference, rollouts with their initial state, spectra of the last snapshot."""
    first = {"truth": u_ref[:1]}
    for (method, horizon), prediction in predictions.items():
        if horizon == "rollout":
            initial = u_ref[:1, : u_ref.shape[1] - prediction.u.shape[1]]
            first[method] = torch.cat([initial, prediction.u[:1]], 1)
    arrays = {f"rollout/{name}": u[0] for name, u in first.items()}
    arrays |= {f"spectrum/{name}": radial_spectrum(u[:, -1:])[0, 0].sum(0) for name, u in first.items()}
    return {name: values.cpu().numpy() for name, values in arrays.items()}


def _curves_and_ranks(suites: Suites) -> dict[str, np.ndarray]:
    """The nRMSE (T,) and, for ensembles, the rank histogram (C, M + 1) of each rollout."""
    rollouts = {method: suite for (method, horizon), suite in suites.items() if horizon == "rollout"}
    curves = {f"curve/{method}": suite.metrics.curve() for method, suite in rollouts.items()}
    ranks = {f"ranks/{method}": suite.ranks() for method, suite in rollouts.items()}
    return {name: values.cpu().numpy() for name, values in (curves | ranks).items() if values is not None}


def _records(dataset: Dataset, method: str, horizon: str, suite: ScoreSuite) -> Iterator[dict[str, Any]]:
    for metric, score in suite.compute().items():
        record = {"family": dataset.family, "dataset": dataset.name, "method": method, "metric": metric}
        record |= {"horizon": horizon, "value": finite(score.value)}
        record["num_trajectories"] = suite.metrics.num_trajectories
        if metric == "nRMSE":
            record["trajectories"] = [finite(value) for value in suite.of_trajectories(metric).tolist()]
        interval = {} if score.interval is None else dict(zip(("low", "high"), score.interval, strict=True))
        yield record | {end: finite(value) for end, value in interval.items()}
