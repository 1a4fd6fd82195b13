"""The trained models as one emulator: encode, advance with or without a corrector, decode."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.data.pdebench import FAMILIES
from ups.diffusion.losses import Denoise
from ups.diffusion.samplers import (
    Draw,
    Normal,
    consistency_grid,
    consistency_sampler,
    karras_grid,
    multistep_sampler,
    remembered_noise,
)
from ups.models.codec import Codec, group_name
from ups.models.denoiser import Denoiser, predict
from ups.models.domain import Domain
from ups.models.operator import Operator
from ups.models.steady import SteadyModel
from ups.rollout import NoisyStep

MAX_GRAPHS = 64


@dataclass(frozen=True)
class Setting:
    """What stays the same during a rollout: family, domain, coefficients (B, N, D_c) and condition (B, K)."""

    family: str
    domain: Domain
    coefficients: Tensor
    condition: Tensor

    def repeated(self, times: int) -> "Setting":
        """The same for an ensemble, members one after the other."""
        coefficients, condition = self.coefficients.repeat(times, 1, 1), self.condition.repeat(times, 1)
        return Setting(self.family, self.domain, coefficients, condition)


@dataclass(frozen=True)
class Correction:
    """How residuals are drawn: from noise of level `sigma` in `num_steps` evaluations, then times `spread`.

    Mode `sample` starts from noise that hides the residual; `refine` from less, and gives what fits below `sigma` of
    it. The denoiser's last level is `sigma_min`; `memory` is the correlation of a member's noise between neighbouring
    steps.
    """

    mode: str
    sigma: float
    sigma_min: float
    num_steps: int
    spread: float
    memory: float


@dataclass(frozen=True)
class Emulator:
    """Models of one run; those that were not trained are None.

    `corrections` says per method, `diffusion` or `consistency`, and family how residuals are drawn; where it has none
    the corrector is off, and the method is the operator or the steady model.
    """

    codec: Codec
    operator: Operator | None
    denoiser: Denoiser | None
    student: Denoiser | None
    steady: SteadyModel | None
    corrections: dict[tuple[str, str], Correction]

    def compile(self) -> None:
        """Compile what predicts without corrector, whole and in place: when a family or a batch's shape first comes.

        The fastest there is, but a graph for each of them; of the blocks that training compiles few serve all families.
        """
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        for model in (self.operator, self.steady):
            if model is not None:
                model.compile(dynamic=False)

    def encode(self, u: Tensor, family: str, kind: str = "fields") -> Tensor:
        """Snapshots (..., C, *grid) to latents (..., N, D)."""
        group = self.codec.groups[group_name(family, kind)]
        lead = u.shape[: u.ndim - 1 - len(group.grid)]
        return self.codec.encode(u.flatten(0, len(lead) - 1), group_name(family, kind)).unflatten(0, lead)

    def decode(self, z: Tensor, family: str) -> Tensor:
        """Latents (..., N, D) to snapshots (..., C, *grid)."""
        return self.codec.decode(z.flatten(0, -3), group_name(family, "fields")).unflatten(0, z.shape[:-2])

    def model(self, family: str) -> Operator | SteadyModel | None:
        """What predicts a family without corrector: the operator, or the steady model, a step of which starts at 0."""
        return self.steady if FAMILIES[family].steady else self.operator

    def plain_step(self, setting: Setting) -> Callable[[Tensor], Tensor]:
        """Map z -> z_next without corrector."""
        model = self.model(setting.family)
        assert model is not None
        return lambda z: model(z, setting.coefficients, setting.condition, setting.domain)

    def diffusion_step(self, setting: Setting, correction: Correction, normal: Normal) -> NoisyStep:
        """Map z -> z_next with a residual sampled by the denoiser."""
        assert self.denoiser is not None
        sigmas = karras_grid(correction.num_steps, correction.sigma_min, correction.sigma)
        draw = remembered_noise(1, correction.memory, normal)

        def sample(denoise: Denoise, noise: Tensor) -> Tensor:
            return correction.spread * multistep_sampler(denoise, correction.sigma * noise[0], sigmas)

        return self._corrected(self.denoiser, setting, draw, sample)

    def consistency_step(self, setting: Setting, correction: Correction, normal: Normal) -> NoisyStep:
        """Map z -> z_next with a residual sampled by the student in one or two evaluations."""
        assert self.student is not None
        sigmas = consistency_grid(correction.num_steps, correction.sigma)
        draw = remembered_noise(correction.num_steps, correction.memory, normal)

        def sample(denoise: Denoise, noises: Tensor) -> Tensor:
            return correction.spread * consistency_sampler(denoise, noises, sigmas)

        return self._corrected(self.student, setting, draw, sample)

    def _corrected(
        self, denoiser: Denoiser, setting: Setting, draw: Draw, sample: Callable[[Denoise, Tensor], Tensor]
    ) -> NoisyStep:
        model, condition, domain = self.model(setting.family), setting.condition, setting.domain
        assert model is not None

        def corrected_step(z: Tensor, origins: Tensor | None = None) -> Tensor:
            context = predict(model, z, setting.coefficients, condition, domain)
            y = sample(lambda x, sigma: denoiser(x, sigma, context, condition, domain), draw(z, origins))
            return model.amplitude.clip(context.z_pred + denoiser.units(context, domain) * y, z, domain)

        return corrected_step
