"""The trained models as one surrogate: encode fields, advance latents with or without a corrector, decode them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from ups.data.families import SMALLEST_PARAMETER, parameter_feature
from ups.data.pdebench import FAMILIES
from ups.diffusion import (
    Denoise,
    Normal,
    StepNoise,
    consistency_grid,
    consistency_sampler,
    correlated_noise,
    karras_grid,
    multistep_sampler,
)
from ups.models.codec import Codec, group_name
from ups.models.denoiser import Denoiser, predict_step
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Domain

MAX_GRAPHS = 64  # compiled graphs of a model, one per family and batch shape; torch's default of 8 is too few


class NoisyStep(Protocol):
    """Map z -> z_next (B, N, D) with sampled residuals, whose noise may be correlated with that of the last call.

    `origins` (B,) is needed where the caller selected or repeated states between two calls, as an ensemble that
    resamples its members does: the state in row i was in row `origins[i]` of the last call, and the noise of that row
    is continued. None: all states are still in their rows.
    """

    def __call__(self, z: Tensor, origins: Tensor | None = None) -> Tensor:
        """Advance z (B, N, D) by one time step."""
        ...


def rollout_steps(step: Callable[[Tensor], Tensor], u_0: Tensor) -> Iterator[Tensor]:
    """Apply `step` repeatedly from u_0 (B, ...), one prediction (B, ...) after the other without end."""
    u = u_0
    while True:
        u = step(u)
        yield u


def in_float32(states: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The states, each computed with autocast off, which stays as it is where they are used."""
    while True:
        with torch.autocast(device.type, enabled=False):
            u = next(states, None)
        if u is None:
            return
        yield u


def rollout(step: Callable[[Tensor], Tensor], u_0: Tensor, num_steps: int) -> Tensor:
    """The predictions (B, num_steps, ...) of applying `step` repeatedly from u_0 (B, ...)."""
    return torch.stack(list(islice(rollout_steps(step, u_0), num_steps)), 1)


def condition_of(features: Tensor, parameters: dict[str, Tensor], num_samples: int) -> Tensor:
    """Condition (B, K) of B samples: `condition_features` (K,) with other values of the PDE parameters.

    `parameters` are all of them in their order, each (B,) or one number (). Gradients flow to them, as long as they
    keep their sign.
    """
    columns = list(features.expand(num_samples, -1).unbind(1))
    for name, value in parameters.items():
        place, values = parameter_feature(name, parameters), value.expand(num_samples)
        columns[place] = values.abs().clamp(min=SMALLEST_PARAMETER).log10() / 2
        columns[place + 1] = torch.where(values < 0, -1.0, 1.0).type_as(values)  # ONNX has no `copysign`
    return torch.stack(columns, 1)


@dataclass(frozen=True)
class Setting:
    """What stays constant during a rollout: family, token grid, coefficients (B, N, D_c) and condition (B, K)."""

    family: str
    domain: Domain
    coefficients: Tensor
    condition: Tensor

    def repeated(self, times: int) -> "Setting":
        """The setting of an ensemble of `times` members, (times B, ...): all rows of one member after the other."""
        coefficients, condition = self.coefficients.repeat(times, 1, 1), self.condition.repeat(times, 1)
        return replace(self, coefficients=coefficients, condition=condition)

    def of(self, rows: slice) -> "Setting":
        """The setting of some of the rows."""
        return replace(self, coefficients=self.coefficients[rows], condition=self.condition[rows])


@dataclass(frozen=True)
class Correction:
    """How residuals (reference minus operator prediction, in latent space) are sampled for one method and family.

    Sampling starts from noise of level `sigma`, takes `num_steps` network evaluations and, with the denoiser, ends at
    `sigma_min`; the residual is then multiplied by `residual_scale`. Residuals have unit variance: mode `sample` starts
    far above it, from noise alone in effect, mode `refine` near it, which adds only part of the residual's variance.
    `noise_correlation` is the correlation of a member's noise between neighbouring time steps.
    """

    mode: str
    sigma: float
    sigma_min: float
    num_steps: int
    residual_scale: float
    noise_correlation: float


@dataclass(frozen=True)
class Surrogate:
    """The models of one run; None where a model was not trained.

    `denoiser` is the diffusion model, `student` the consistency model distilled from it. `corrections` has the key
    (method, family), with the method `diffusion` or `consistency`. Without an entry the corrector is off: the method
    predicts what the operator or the steady model predicts. Families in `latent_scales` were trained on latents rounded
    to multiples of their scale. The models take at most `max_tokens` tokens at once, but at least one state; None: all.
    """

    codec: Codec
    operator: Operator | None
    denoiser: Denoiser | None
    student: Denoiser | None
    steady: SteadyModel | None
    corrections: dict[tuple[str, str], Correction]
    latent_scales: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def compile(self) -> None:
        """Compile operator and steady model as a whole, in place.

        The compiler runs at the first call with each family and batch shape. Whole models are faster than the single
        blocks that training compiles, but need one graph per family and shape; graphs of blocks are shared.
        """
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        for model in (self.operator, self.steady):
            if model is not None:
                model.compile(dynamic=False)

    def encode(self, u: Tensor, family: str, kind: str = "fields") -> Tensor:
        """Snapshots (..., C, *grid) of `fields` or `coefficients` to latents (..., N, D)."""
        group = self.codec.groups[group_name(family, kind)]
        lead = u.shape[: u.ndim - 1 - len(group.grid)]
        return self.codec.encode(u.flatten(0, len(lead) - 1), group_name(family, kind)).unflatten(0, lead)

    def as_stored(self, z: Tensor, family: str) -> Tensor:
        """Latents as the latent cache keeps them, rounded to multiples of the family's scale."""
        scale = self.latent_scales.get(family)
        return z if scale is None else z.div(scale).round() * scale

    def decode(self, z: Tensor, family: str) -> Tensor:
        """Latents (..., N, D) to snapshots (..., C, *grid); of a state of two snapshots the later one."""
        z = self.snapshot(z, family)
        return self.codec.decode(z.flatten(0, -3), group_name(family, "fields")).unflatten(0, z.shape[:-2])

    def snapshot(self, state: Tensor, family: str) -> Tensor:
        """The latents (..., N, D) of the snapshot of a state, which may have those of the one before, see `History`."""
        return state[..., : self.codec.groups[group_name(family, "fields")].num_channels]

    def model(self, family: str) -> Operator | SteadyModel | None:
        """The model of a family without corrector: the operator, or the steady model (one step from z = 0)."""
        return self.steady if FAMILIES[family].steady else self.operator

    def plain_step(self, setting: Setting) -> Callable[[Tensor], Tensor]:
        """Map z -> z_next (B, N, D) without corrector."""
        model = self.model(setting.family)
        assert model is not None

        def step(z: Tensor) -> Tensor:
            parts = ((z[rows], setting.of(rows)) for rows in self._rows(z))
            return torch.cat([model(z, part.coefficients, part.condition, part.domain) for z, part in parts])

        return step

    def diffusion_step(self, setting: Setting, correction: Correction, normal: Normal) -> NoisyStep:
        """Map z -> z_next with a residual that the diffusion model samples."""
        assert self.denoiser is not None
        sigmas = karras_grid(correction.num_steps, correction.sigma_min, correction.sigma)
        step_noise = correlated_noise(1, correction.noise_correlation, normal)

        def sample(denoise: Denoise, noises: Tensor) -> Tensor:
            return correction.residual_scale * multistep_sampler(denoise, correction.sigma * noises[0], sigmas)

        return self._corrected(self.denoiser, setting, step_noise, sample)

    def consistency_step(self, setting: Setting, correction: Correction, normal: Normal) -> NoisyStep:
        """Map z -> z_next with a residual that the consistency model samples in one or two evaluations."""
        assert self.student is not None
        sigmas = consistency_grid(correction.num_steps, correction.sigma)
        step_noise = correlated_noise(correction.num_steps, correction.noise_correlation, normal)

        def sample(denoise: Denoise, noises: Tensor) -> Tensor:
            return correction.residual_scale * consistency_sampler(denoise, noises, sigmas)

        return self._corrected(self.student, setting, step_noise, sample)

    def _corrected(
        self, denoiser: Denoiser, setting: Setting, step_noise: StepNoise, sample: Callable[[Denoise, Tensor], Tensor]
    ) -> NoisyStep:
        """z_next = constrained(z_pred + residual_unit * y); `sample` maps denoiser and noise to y (B, N, D)."""
        model = self.model(setting.family)
        assert model is not None

        def advance(z: Tensor, noises: Tensor, part: Setting) -> Tensor:
            condition, domain = part.condition, part.domain
            with model.statistics.uncounted():
                context = predict_step(model, z, part.coefficients, condition, domain)
            y = sample(lambda x, sigma: denoiser(x, sigma, context, condition, domain), noises)
            return model.constrained(context.z_pred + denoiser.residual_unit(context, domain) * y, z, domain)

        def corrected_step(z: Tensor, origins: Tensor | None = None) -> Tensor:
            noises = step_noise(self.snapshot(z, setting.family), origins)
            return torch.cat([advance(z[rows], noises[:, rows], setting.of(rows)) for rows in self._rows(z)])

        return corrected_step

    def _rows(self, z: Tensor) -> list[slice]:
        """Rows of states z (B, N, D) that the models take at once."""
        size = len(z) if self.max_tokens is None else max(1, self.max_tokens // z.shape[1])
        return [slice(start, start + size) for start in range(0, len(z), size)]


def decoded(surrogate: Surrogate, z: Tensor, family: str, at_once: int) -> Tensor:
    """Snapshots (M, ..., C, *grid) of latents (M, ..., N, D), `at_once` rows at a time."""
    parts = z.split(at_once)
    first = surrogate.decode(parts[0], family)
    if len(parts) == 1:
        return first
    members = first.new_empty(len(z), *first.shape[1:])
    places = members.split(at_once)
    places[0].copy_(first)
    del first  # as large as a member
    for place, part in zip(places[1:], parts[1:], strict=True):
        place.copy_(surrogate.decode(part, family))
    return members
