"""Scores on the test split in physical units: one step and whole rollouts, per dataset and method."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.dataset import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.loader import domains
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.emulator import Emulator, Setting
from ups.metrics import MetricSuite, radial_spectrum
from ups.rollout import rollout

Predictions = dict[tuple[str, str], Tensor]
"""(method, horizon) -> predicted snapshots (B, T - 1, C, *grid), or (B, 1, C, *grid) for a steady family."""

HORIZONS = ("one_step", "rollout")


@torch.no_grad()
def evaluate(
    emulator: Emulator,
    cache: LatentCache,
    raw: Path,
    config: EvaluationConfig,
    device: torch.device,
    folder: Path,
    advance: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Score every dataset of the cache on its test split; write `folder/<dataset>.npz` for the figures.

    Returns:
        Records {"family", "dataset", "method", "metric", "horizon", "value", "num_trajectories"}; a value that is not
        finite is None.
    """
    records = []
    for position, name in enumerate(sorted(cache.datasets)):
        dataset = Dataset.from_json(cache.datasets[name]["dataset"])
        suites: dict[tuple[str, str], MetricSuite] = {}
        example: dict[str, np.ndarray] = {}
        generator = torch.Generator(device).manual_seed(config.seed + position)
        for u_ref, setting in _batches(emulator, cache, raw, name, config.batch_tokens, device):
            predictions = predict(emulator, u_ref, setting, config, generator)
            truth = u_ref if FAMILIES[dataset.family].steady else u_ref[:, 1:]
            for key, u_pred in predictions.items():
                suites.setdefault(key, MetricSuite(len(dataset.grid))).update(u_pred, truth)
            example = example or _example(u_ref, predictions)
            advance(len(u_ref))
        curves = {f"curve/{method}": suites[method, "rollout"].curve().cpu().numpy() for method, _ in suites}
        np.savez_compressed(folder / f"{name}.npz", times=np.array(dataset.times), **example, **curves)
        records += [record for key, suite in suites.items() for record in _records(dataset, *key, suite)]
    return records


def predict(
    emulator: Emulator, u_ref: Tensor, setting: Setting, config: EvaluationConfig, generator: torch.Generator
) -> Predictions:
    """Predictions of every method for test trajectories u_ref (B, T, C, *grid)."""
    z_ref = emulator.encode(u_ref, setting.family)
    if FAMILIES[setting.family].steady:
        steady = {"codec": emulator.decode(z_ref, setting.family)}
        if emulator.steady is not None:
            steady["steady"] = emulator.decode(emulator.solve_steady(setting)[:, None], setting.family)
        return {(method, horizon): u for method, u in steady.items() for horizon in HORIZONS}
    decoded = emulator.decode(z_ref[:, 1:], setting.family)
    predictions = {
        ("persistence", "one_step"): u_ref[:, :-1],
        ("persistence", "rollout"): u_ref[:, :1].expand_as(decoded),
        ("codec", "one_step"): decoded,
        ("codec", "rollout"): decoded,
    }
    for method, (step_of, members) in _steppers(emulator, config, generator).items():
        ensemble = setting.repeated(members)
        predictions[method, "one_step"] = _one_step(emulator, step_of, ensemble, z_ref, members)
        z_pred = rollout(step_of(ensemble), z_ref[:, 0].repeat(members, 1, 1), z_ref.shape[1] - 1)[:, 1:]
        predictions[method, "rollout"] = _mean_of_members(emulator.decode(z_pred, setting.family), members)
    return predictions


def _steppers(
    emulator: Emulator, config: EvaluationConfig, generator: torch.Generator
) -> dict[str, tuple[Callable[[Setting], Callable[[Tensor], Tensor]], int]]:
    """Method -> how to make its step for a setting, and the size of its ensemble."""
    steppers: dict[str, tuple[Callable[[Setting], Callable[[Tensor], Tensor]], int]] = {}
    if emulator.operator is not None:
        steppers["operator"] = (emulator.operator_step, 1)
    if emulator.denoiser is not None:
        steps = config.diffusion_steps
        steppers["diffusion"] = (lambda s: emulator.diffusion_step(s, steps, generator), config.ensemble_size)
    if emulator.student is not None:
        few = config.consistency_steps
        steppers["consistency"] = (lambda s: emulator.consistency_step(s, few, generator), config.ensemble_size)
    return steppers


def _one_step(
    emulator: Emulator,
    step_of: Callable[[Setting], Callable[[Tensor], Tensor]],
    ensemble: Setting,
    z_ref: Tensor,
    members: int,
) -> Tensor:
    """Every snapshot but the last, advanced by one step; a few snapshots at a time bound the memory."""
    step = step_of(ensemble)
    steps = [
        _mean_of_members(emulator.decode(step(z_ref[:, t].repeat(members, 1, 1)), ensemble.family), members)
        for t in range(z_ref.shape[1] - 1)
    ]
    return torch.stack(steps, 1)


def _mean_of_members(u: Tensor, members: int) -> Tensor:
    return u.unflatten(0, (members, -1)).mean(0)


def _batches(
    emulator: Emulator, cache: LatentCache, raw: Path, name: str, batch_tokens: int, device: torch.device
) -> Iterator[tuple[Tensor, Setting]]:
    entry = cache.datasets[name]
    dataset = Dataset.from_json(entry["dataset"])
    family = FAMILIES[dataset.family]
    size = max(1, batch_tokens // (math.prod(entry["token_grid"]) * len(dataset.times)))
    test, domain = entry["split"]["test"], domains(cache)[dataset.family]
    with TrajectoryReader(raw, dataset) as reader:
        for start in range(0, len(test), size):
            chosen = test[start : start + size]
            u_ref = torch.from_numpy(np.stack([reader.read(index) for index in chosen])).to(device)
            condition = torch.tensor(entry["condition"], device=device).expand(len(chosen), -1)
            coefficients = torch.zeros(len(chosen), math.prod(entry["token_grid"]), 0, device=device)
            if family.coefficients:
                given = torch.from_numpy(np.stack([reader.read_coefficients(index) for index in chosen]))
                coefficients = emulator.encode(given.to(device), family.name, "coefficients")
            yield u_ref, Setting(family.name, domain, coefficients, condition)


def _example(u_ref: Tensor, predictions: Predictions) -> dict[str, np.ndarray]:
    """The first test trajectory: truth, rollouts with their initial state, spectra of the last snapshot."""
    first = {"truth": u_ref[:1]}
    for (method, horizon), u_pred in predictions.items():
        if horizon == "rollout":
            initial = u_ref[:1, : u_ref.shape[1] - u_pred.shape[1]]
            first[method] = torch.cat([initial, u_pred[:1]], 1)
    example = {f"rollout/{name}": u[0].cpu().numpy() for name, u in first.items()}
    return example | {
        f"spectrum/{name}": radial_spectrum(u[:, -1:])[0, 0].sum(0).cpu().numpy() for name, u in first.items()
    }


def _records(dataset: Dataset, method: str, horizon: str, suite: MetricSuite) -> Iterator[dict[str, Any]]:
    for metric, value in suite.compute().items():
        yield {
            "family": dataset.family,
            "dataset": dataset.name,
            "method": method,
            "metric": metric,
            "horizon": horizon,
            "value": value if math.isfinite(value) else None,
            "num_trajectories": suite.num_trajectories,
        }
