"""Predictions of every method for a batch of trajectories: one step from each snapshot, and whole rollouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.pdebench import FAMILIES
from ups.diffusion.samplers import Normal, antithetic
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.surrogate.surrogate import Correction, NoisyStep, Setting, Surrogate, rollout
from ups.surrogate.trained import OFF

HORIZONS = ("one_step", "rollout")


@dataclass(frozen=True)
class Prediction:
    """Predicted snapshots u (B, T, C, *grid): for an ensemble their mean and reductions of the members.

    Half of the members have the noise of the others negated, so that the mean is that of antithetic pairs. Within each
    half they are independent: the scores of an ensemble are means over the two halves.
    """

    u: Tensor
    ensemble: EnsembleErrors | None = None


Predictions = dict[tuple[str, str], Prediction]
"""(method, horizon) -> the T - 1 snapshots after the first, or the one snapshot of a steady family."""


@dataclass(frozen=True)
class Stepper:
    """Makes a method's step z -> z_next for a setting; `num_members` is the size of its ensemble."""

    step_of: Callable[[Setting], Callable[[Tensor], Tensor]]
    num_members: int

    def start(self, setting: Setting) -> NoisyStep:
        """The step of all M members of B trajectories, (M B, N, D); its noise is independent of earlier steps."""
        return self.step_of(setting.repeated(self.num_members))


def predict(
    surrogate: Surrogate, u_ref: Tensor, setting: Setting, config: EvaluationConfig, generator: torch.Generator
) -> Predictions:
    """Predictions of every method for trajectories u_ref (B, T, C, *grid); a corrector that is off adds nothing.

    Besides the trained models: `codec` decodes the encoded reference, `persistence` repeats the snapshot before.
    """
    family = setting.family
    z_ref, target = latent_states(surrogate, u_ref, family), targets(u_ref, family)
    decoded = Prediction(surrogate.decode(z_ref[:, 1:], family))
    methods = {"codec": dict.fromkeys(HORIZONS, decoded)}
    if not FAMILIES[family].steady:
        first = Prediction(u_ref[:, :1].expand_as(target))
        methods["persistence"] = {"one_step": Prediction(u_ref[:, :-1]), "rollout": first}
    if surrogate.model(family) is not None:
        active = steppers(surrogate, family, config.ensemble_size, antithetic(generator))
        predicted = {name: predict_horizons(surrogate, each, setting, target, z_ref) for name, each in active.items()}
        plain = plain_method(family)
        methods |= {m: predicted.get(m, predicted[plain]) for m in (plain, *trained_correctors(surrogate))}
    return {(method, horizon): both[horizon] for method, both in methods.items() for horizon in HORIZONS}


def targets(u_ref: Tensor, family: str) -> Tensor:
    """The snapshots to predict of trajectories u_ref (B, T, C, *grid): all after the first, or a steady solution."""
    return u_ref if FAMILIES[family].steady else u_ref[:, 1:]


def latent_states(surrogate: Surrogate, u_ref: Tensor, family: str) -> Tensor:
    """Latents (B, T, N, D) of trajectories u_ref (B, T, C, *grid); a steady solution is one step from z = 0."""
    z_ref = surrogate.encode(u_ref, family)
    return torch.cat([torch.zeros_like(z_ref), z_ref], 1) if FAMILIES[family].steady else z_ref


def plain_method(family: str) -> str:
    """The method that predicts a family without corrector."""
    return "steady" if FAMILIES[family].steady else "operator"


def trained_correctors(surrogate: Surrogate) -> list[str]:
    """The methods that sample residuals and whose model was trained."""
    models = {"diffusion": surrogate.denoiser, "consistency": surrogate.student}
    return [method for method, model in models.items() if model is not None]


def corrector_mode(surrogate: Surrogate, method: str, family: str) -> str | None:
    """`sample`, `refine` or `off` for a method that samples residuals; None for every other method."""
    if method not in trained_correctors(surrogate):
        return None
    correction = surrogate.corrections.get((method, family))
    return OFF if correction is None else correction.mode


def steppers(surrogate: Surrogate, family: str, num_members: int, normal: Normal) -> dict[str, Stepper]:
    """The steps of a family's methods: without corrector, and with each corrector that is trained and not off."""
    found = {plain_method(family): Stepper(surrogate.plain_step, 1)}
    for method in trained_correctors(surrogate):
        if correction := surrogate.corrections.get((method, family)):
            found[method] = corrected_stepper(surrogate, method, correction, num_members, normal)
    return found


def corrected_stepper(
    surrogate: Surrogate, method: str, correction: Correction, num_members: int, normal: Normal
) -> Stepper:
    """The plain step plus residuals sampled by the denoiser (`diffusion`) or by the student (`consistency`)."""
    make = surrogate.diffusion_step if method == "diffusion" else surrogate.consistency_step
    return Stepper(lambda setting: make(setting, correction, normal), num_members)


def ensemble_rollouts(step: Callable[[Tensor], Tensor], z_0: Tensor, num_steps: int, num_members: int) -> Tensor:
    """Rollouts (M, B, num_steps + 1, ...) of M members from the same z_0 (B, ...), which they begin with."""
    z = rollout(step, torch.cat([z_0] * num_members), num_steps)
    return z.unflatten(0, (num_members, -1))


def predict_horizons(
    surrogate: Surrogate, stepper: Stepper, setting: Setting, target: Tensor, z_ref: Tensor, stride: int = 1
) -> dict[str, Prediction]:
    """From latents z_ref (B, T + 1, N, D) a rollout over target (B, T, C, *grid), and every `stride`-th single step."""

    def predicted(step: NoisyStep, z_0: Tensor, u_ref: Tensor) -> Prediction:
        z_pred = ensemble_rollouts(step, z_0, u_ref.shape[1], stepper.num_members)[:, :, 1:]
        return _prediction(surrogate.decode(z_pred, setting.family), u_ref)

    step, times = stepper.start(setting), range(0, target.shape[1], stride)
    # One snapshot at a time, of all members, bounds the memory.
    parts = [predicted(step, z_ref[:, t], target[:, t : t + 1]) for t in times]
    errors = [part.ensemble for part in parts if part.ensemble is not None]
    joined = EnsembleErrors.joined(errors) if errors else None
    one_step = Prediction(torch.cat([part.u for part in parts], 1), joined)
    return {"one_step": one_step, "rollout": predicted(stepper.start(setting), z_ref[:, 0], target)}


def _prediction(members: Tensor, target: Tensor) -> Prediction:
    """From members (M, B, T, C, *grid), which are compared with the target (B, T, C, *grid) one snapshot at a time."""
    if len(members) == 1:
        return Prediction(members[0])
    halves, times = members.chunk(2), [slice(t, t + 1) for t in range(target.shape[1])]
    parts = [EnsembleErrors.mean([ensemble_errors(half[:, :, t], target[:, t]) for half in halves]) for t in times]
    return Prediction(members.mean(0), EnsembleErrors.joined(parts))
