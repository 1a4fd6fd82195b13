"""What every method predicts for a batch of test trajectories: one step from each snapshot, and whole rollouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.pdebench import FAMILIES
from ups.emulator import Emulator, Setting
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.rollout import rollout

HORIZONS = ("one_step", "rollout")


@dataclass(frozen=True)
class Prediction:
    """Predicted snapshots (B, T, C, *grid): of an ensemble the mean, and what its members are worth."""

    u: Tensor
    ensemble: EnsembleErrors | None = None


Predictions = dict[tuple[str, str], Prediction]
"""(method, horizon) -> the T - 1 snapshots after the first, or the one of a steady family."""


def predict(
    emulator: Emulator, u_ref: Tensor, setting: Setting, config: EvaluationConfig, generator: torch.Generator
) -> Predictions:
    """Predictions of every method for test trajectories u_ref (B, T, C, *grid)."""
    z_ref = emulator.encode(u_ref, setting.family)
    if FAMILIES[setting.family].steady:
        return _steady(emulator, z_ref, setting)
    truth, decoded = u_ref[:, 1:], Prediction(emulator.decode(z_ref[:, 1:], setting.family))
    predictions = {
        ("persistence", "one_step"): Prediction(u_ref[:, :-1]),
        ("persistence", "rollout"): Prediction(u_ref[:, :1].expand_as(truth)),
        ("codec", "one_step"): decoded,
        ("codec", "rollout"): decoded,
    }
    for method, (step_of, members) in _steppers(emulator, config, generator).items():
        ensemble = setting.repeated(members)
        predictions[method, "one_step"] = _one_step(emulator, step_of(ensemble), setting.family, z_ref, truth, members)
        z_pred = rollout(step_of(ensemble), z_ref[:, 0].repeat(members, 1, 1), z_ref.shape[1] - 1)[:, 1:]
        predictions[method, "rollout"] = _prediction(emulator.decode(z_pred, setting.family), truth)
    return predictions


def _steady(emulator: Emulator, z_ref: Tensor, setting: Setting) -> Predictions:
    steady = {"codec": emulator.decode(z_ref, setting.family)}
    if emulator.steady is not None:
        steady["steady"] = emulator.decode(emulator.solve_steady(setting)[:, None], setting.family)
    return {(method, horizon): Prediction(u) for method, u in steady.items() for horizon in HORIZONS}


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
    emulator: Emulator, step: Callable[[Tensor], Tensor], family: str, z_ref: Tensor, truth: Tensor, members: int
) -> Prediction:
    """Every snapshot but the last, advanced by one step; a few snapshots at a time bound the memory."""
    parts = []
    for t in range(truth.shape[1]):
        u = emulator.decode(step(z_ref[:, t].repeat(members, 1, 1)), family)
        parts.append(_prediction(u[:, None], truth[:, t : t + 1]))
    errors = [part.ensemble for part in parts if part.ensemble is not None]
    return Prediction(torch.cat([part.u for part in parts], 1), EnsembleErrors.joined(errors) if errors else None)


def _prediction(u: Tensor, truth: Tensor) -> Prediction:
    """From M members (M B, T, C, *grid) and the truth (B, T, C, *grid); several are compared snapshot by snapshot."""
    members = u.unflatten(0, (-1, len(truth)))
    if len(members) == 1:
        return Prediction(members[0])
    times = [slice(t, t + 1) for t in range(truth.shape[1])]
    parts = [ensemble_errors(members[:, :, t], truth[:, t]) for t in times]
    return Prediction(members.mean(0), EnsembleErrors.joined(parts))
