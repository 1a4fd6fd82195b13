"""Scores of chosen trajectories in physical units: one step and whole rollouts, per dataset and method."""

import logging
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.dataset import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import TrajectoryReader
from ups.emulator import Emulator, Setting
from ups.evaluation import OFF
from ups.evaluation.predict import Predictions, mode, predict, targets
from ups.metrics.errors import EPS
from ups.metrics.spectra import radial_spectrum
from ups.metrics.suite import ScoreSuite, Truth
from ups.models.domain import Domain

log = logging.getLogger(__name__)

COMPAT_BATCH_SIZES = {  # of PDEBench's configurations, 50 where none is given; two of its metrics depend on them
    "compressible_ns_1d": 100,
    "compressible_ns_2d": 20,
    "compressible_ns_3d": 5,
    "diffusion_reaction_2d": 5,
    "shallow_water_2d": 5,
}


@dataclass(frozen=True)
class Subject:
    """Trajectories to score, by their positions in a dataset in `folder`, and what models are told about them."""

    folder: Path
    dataset: Dataset
    trajectories: tuple[int, ...]
    condition: list[float]
    domain: Domain

    @property
    def num_tokens(self) -> int:
        """Of one trajectory."""
        return math.prod(self.domain.grid) * len(self.dataset.times)


def held_out(cache: LatentCache, raw: Path, split: Literal["valid", "test"] = "test") -> list[Subject]:
    """The test or validation split of every dataset in the cache."""
    known, subjects = domains(cache), []
    for _, entry in sorted(cache.datasets.items()):
        dataset = Dataset.from_json(entry["dataset"])
        chosen = tuple(entry["split"][split])
        subjects.append(Subject(raw, dataset, chosen, entry["condition"], known[dataset.family]))
    return subjects


@torch.no_grad()
def evaluate(
    emulator: Emulator,
    subjects: list[Subject],
    config: EvaluationConfig,
    device: torch.device,
    folder: Path,
    advance: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Score every subject; write `folder/<dataset>.npz` for the figures.

    Returns:
        Records {"family", "dataset", "method", "metric", "horizon", "value", "num_trajectories"}, and "low", "high" for
        metrics with a confidence interval over trajectories (95 %), where these are enough, and for the nRMSE
        "trajectories", that of each in their order; a number that is not finite is None. Those of the correctors say in
        which "mode" they were; one that is "off" has the scores without it.
    """
    records = []
    for subject in subjects:
        dataset = subject.dataset
        suites: dict[tuple[str, str], ScoreSuite] = {}
        example: dict[str, np.ndarray] = {}
        generator = torch.Generator(device).manual_seed(config.seed + zlib.crc32(dataset.name.encode()))
        on_grid = replace(emulator, codec=emulator.codec.on_grid(dataset.family, dataset.grid))
        for u_ref, setting in batches(on_grid, subject, config.batch_tokens, device):
            predictions = predict(on_grid, u_ref, setting, config, generator)
            steady = FAMILIES[dataset.family].steady
            truth = Truth(targets(u_ref, dataset.family))
            for (method, horizon), prediction in predictions.items():
                suite = suites.setdefault((method, horizon), _suite(dataset, config.seed))
                u_0 = u_ref[:, 0] if horizon == "rollout" and not steady else None
                suite.update(prediction.u, truth, u_0, prediction.ensemble)
            example = example or _example(u_ref, _drawn(predictions, emulator, dataset.family))
            advance(len(u_ref))
        if vanishing := suites["codec", "rollout"].corrected.clamped:
            log.warning(
                "%s: fields of %d true snapshots vanish; their nRMSE is RMSE / %g", dataset.name, vanishing, EPS
            )
        arrays = example | _arrays(_drawn(suites, emulator, dataset.family))
        np.savez_compressed(folder / f"{dataset.name}.npz", times=np.array(dataset.times), **arrays)
        for (method, horizon), suite in suites.items():
            how = mode(emulator, method, dataset.family)
            marked = {} if how is None else {"mode": how}
            records += [record | marked for record in _records(dataset, method, horizon, suite)]
    return records


def _suite(dataset: Dataset, seed: int) -> ScoreSuite:
    """Fields are conserved by the family's own boundaries, not by open ones."""
    family = FAMILIES[dataset.family]
    is_closed = all(boundary == family.boundary for boundary in dataset.boundary)
    conserved = tuple(family.fields.index(field) for field in family.conserved) if is_closed else ()
    return ScoreSuite(len(dataset.grid), COMPAT_BATCH_SIZES.get(family.name, 50), conserved, seed)


def batches(
    emulator: Emulator, subject: Subject, batch_tokens: int, device: torch.device
) -> Iterator[tuple[Tensor, Setting]]:
    """The trajectories (B, T, C, *grid) of a subject, about `batch_tokens` tokens at a time."""
    dataset, family = subject.dataset, FAMILIES[subject.dataset.family]
    size = max(1, batch_tokens // subject.num_tokens)
    with TrajectoryReader(subject.folder, dataset) as reader:
        for start in range(0, len(subject.trajectories), size):
            chosen = subject.trajectories[start : start + size]
            u_ref = torch.from_numpy(np.stack([reader.read(index) for index in chosen])).to(device)
            condition = torch.tensor(subject.condition, device=device).expand(len(chosen), -1)
            coefficients = torch.zeros(len(chosen), math.prod(subject.domain.grid), 0, device=device)
            if family.coefficients:
                given = torch.from_numpy(np.stack([reader.read_coefficients(index) for index in chosen]))
                coefficients = emulator.encode(given.to(device), family.name, "coefficients")
            yield u_ref, Setting(family.name, subject.domain, coefficients, condition)


def _drawn(found: dict[tuple[str, str], Any], emulator: Emulator, family: str) -> dict[tuple[str, str], Any]:
    """What figures show: a corrector that is off would hide what it equals."""
    return {key: value for key, value in found.items() if mode(emulator, key[0], family) != OFF}


def _example(u_ref: Tensor, predictions: Predictions) -> dict[str, np.ndarray]:
    """The first test trajectory: truth, rollouts with their initial state, spectra of the last snapshot."""
    first = {"truth": u_ref[:1]}
    for (method, horizon), prediction in predictions.items():
        if horizon == "rollout":
            initial = u_ref[:1, : u_ref.shape[1] - prediction.u.shape[1]]
            first[method] = torch.cat([initial, prediction.u[:1]], 1)
    example = {f"rollout/{name}": u[0].cpu().numpy() for name, u in first.items()}
    return example | {
        f"spectrum/{name}": radial_spectrum(u[:, -1:])[0, 0].sum(0).cpu().numpy() for name, u in first.items()
    }


def _arrays(suites: dict[tuple[str, str], ScoreSuite]) -> dict[str, np.ndarray]:
    """The nRMSE (T,) and, for ensembles, the rank histogram (C, M + 1) of each rollout."""
    rollouts = {method: suite for (method, horizon), suite in suites.items() if horizon == "rollout"}
    curves = {f"curve/{method}": suite.corrected.curve() for method, suite in rollouts.items()}
    ranks = {f"ranks/{method}": suite.ranks() for method, suite in rollouts.items()}
    return {name: array.cpu().numpy() for name, array in (curves | ranks).items() if array is not None}


def _records(dataset: Dataset, method: str, horizon: str, suite: ScoreSuite) -> Iterator[dict[str, Any]]:
    for metric, score in suite.compute().items():
        record = {
            "family": dataset.family,
            "dataset": dataset.name,
            "method": method,
            "metric": metric,
            "horizon": horizon,
            "value": _finite(score.value),
            "num_trajectories": suite.corrected.num_trajectories,
        }
        if metric == "nRMSE":
            record["trajectories"] = [_finite(value) for value in suite.of_trajectories(metric).tolist()]
        interval = {} if score.interval is None else dict(zip(("low", "high"), score.interval, strict=True))
        yield record | {end: _finite(value) for end, value in interval.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
