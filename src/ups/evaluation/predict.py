"""What every method predicts for a batch of test trajectories: one step from each snapshot, and whole rollouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.pdebench import FAMILIES
from ups.diffusion.samplers import Normal, mirrored
from ups.emulator import Correction, Emulator, Setting
from ups.evaluation import OFF
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.rollout import rollout

HORIZONS = ("one_step", "rollout")


@dataclass(frozen=True)
class Prediction:
    """Predicted snapshots (B, T, C, *grid): of an ensemble the mean, and what its members are worth.

    Half of the members have the noise of the others negated, so that the mean is that of antithetic pairs. Within
    each half they are independent: scores of ensembles are means over the two halves.
    """

    u: Tensor
    ensemble: EnsembleErrors | None = None


Predictions = dict[tuple[str, str], Prediction]
"""(method, horizon) -> the T - 1 snapshots after the first, or the one of a steady family."""


@dataclass(frozen=True)
class Stepper:
    """How to make a method's step z -> z_next for a setting, and the size of its ensemble."""

    step_of: Callable[[Setting], Callable[[Tensor], Tensor]]
    num_members: int


def predict(
    emulator: Emulator, u_ref: Tensor, setting: Setting, config: EvaluationConfig, generator: torch.Generator
) -> Predictions:
    """Predictions of every method for test trajectories u_ref (B, T, C, *grid)."""
    z_ref, truth = states(emulator, u_ref, setting.family), targets(u_ref, setting.family)
    decoded = Prediction(emulator.decode(z_ref[:, 1:], setting.family))
    methods = {"codec": dict.fromkeys(HORIZONS, decoded)}
    if not FAMILIES[setting.family].steady:
        whole = Prediction(u_ref[:, :1].expand_as(truth))
        methods["persistence"] = {"one_step": Prediction(u_ref[:, :-1]), "rollout": whole}
    if emulator.model(setting.family) is not None:
        methods |= _by_models(emulator, setting, truth, z_ref, config.ensemble_size, generator)
    return {(method, horizon): both[horizon] for method, both in methods.items() for horizon in HORIZONS}


def targets(u_ref: Tensor, family: str) -> Tensor:
    """What is to be predicted of trajectories u_ref (B, T, C, *grid): all after the first, or a steady solution."""
    return u_ref if FAMILIES[family].steady else u_ref[:, 1:]


def states(emulator: Emulator, u_ref: Tensor, family: str) -> Tensor:
    """Latents (B, T, N, D) of trajectories u_ref (B, T, C, *grid); a steady solution is a step from zero."""
    z_ref = emulator.encode(u_ref, family)
    return torch.cat([torch.zeros_like(z_ref), z_ref], 1) if FAMILIES[family].steady else z_ref


def initial_state(emulator: Emulator, u_ref: Tensor, family: str) -> Tensor:
    """The first of the latents (B, N, D); no others are encoded."""
    return states(emulator, u_ref[:, :1], family)[:, 0]


def _by_models(
    emulator: Emulator, setting: Setting, truth: Tensor, z_ref: Tensor, num_members: int, generator: torch.Generator
) -> dict[str, dict[str, Prediction]]:
    plain = advance(emulator, plain_stepper(emulator), setting, truth, z_ref)
    methods = {plain_method(setting.family): plain}
    for method in correctors(emulator):
        methods[method] = plain
        correction = emulator.corrections.get((method, setting.family))
        if correction is not None:
            stepper = corrected_stepper(emulator, method, correction, num_members, mirrored(generator))
            methods[method] = advance(emulator, stepper, setting, truth, z_ref)
    return methods


def plain_method(family: str) -> str:
    """The name of what predicts a family without corrector."""
    return "steady" if FAMILIES[family].steady else "operator"


def correctors(emulator: Emulator) -> list[str]:
    """The methods that sample residuals, as far as they were trained."""
    models = {"diffusion": emulator.denoiser, "consistency": emulator.student}
    return [method for method, model in models.items() if model is not None]


def mode(emulator: Emulator, method: str, family: str) -> str | None:
    """How a method samples residuals, or that it is off; None for a method that never does."""
    if method not in correctors(emulator):
        return None
    correction = emulator.corrections.get((method, family))
    return OFF if correction is None else correction.mode


def plain_stepper(emulator: Emulator) -> Stepper:
    """The operator or the steady model without corrector."""
    return Stepper(emulator.plain_step, 1)


def corrected_stepper(
    emulator: Emulator, method: str, correction: Correction, num_members: int, normal: Normal
) -> Stepper:
    """The same with residuals drawn by the denoiser or by the student."""
    make = emulator.diffusion_step if method == "diffusion" else emulator.consistency_step
    return Stepper(lambda setting: make(setting, correction, normal), num_members)


def advance(
    emulator: Emulator, stepper: Stepper, setting: Setting, truth: Tensor, z_ref: Tensor
) -> dict[str, Prediction]:
    """One step from each snapshot z_ref[:, :-1], and a rollout from the first; truth (B, T - 1, C, *grid)."""
    return {
        "one_step": one_step(emulator, stepper, setting, truth, z_ref[:, :-1]),
        "rollout": whole_rollout(emulator, stepper, setting, truth, z_ref[:, 0]),
    }


def one_step(emulator: Emulator, stepper: Stepper, setting: Setting, truth: Tensor, z_ref: Tensor) -> Prediction:
    """Snapshots z_ref (B, T, N, D) advanced by one step each, beside truth (B, T, C, *grid).

    One snapshot of every trajectory and member at a time bounds the memory.
    """
    step, parts = stepper.step_of(setting.repeated(stepper.num_members)), []
    for t in range(truth.shape[1]):
        u = emulator.decode(step(z_ref[:, t].repeat(stepper.num_members, 1, 1)), setting.family)
        parts.append(_prediction(u[:, None], truth[:, t : t + 1]))
    errors = [part.ensemble for part in parts if part.ensemble is not None]
    return Prediction(torch.cat([part.u for part in parts], 1), EnsembleErrors.joined(errors) if errors else None)


def whole_rollout(emulator: Emulator, stepper: Stepper, setting: Setting, truth: Tensor, z_0: Tensor) -> Prediction:
    """Rollouts from z_0 (B, N, D), beside truth (B, T, C, *grid)."""
    step = stepper.step_of(setting.repeated(stepper.num_members))
    z_pred = rollout(step, z_0.repeat(stepper.num_members, 1, 1), truth.shape[1])[:, 1:]
    return _prediction(emulator.decode(z_pred, setting.family), truth)


def _prediction(u: Tensor, truth: Tensor) -> Prediction:
    """From M members (M B, T, C, *grid) and the truth (B, T, C, *grid); several are compared snapshot by snapshot."""
    members = u.unflatten(0, (-1, len(truth)))
    if len(members) == 1:
        return Prediction(members[0])
    halves, times = members.chunk(2), [slice(t, t + 1) for t in range(truth.shape[1])]
    parts = [EnsembleErrors.mean([ensemble_errors(half[:, :, t], truth[:, t]) for half in halves]) for t in times]
    return Prediction(members.mean(0), EnsembleErrors.joined(parts))
