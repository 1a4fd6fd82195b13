"""An surrogate whose residuals are Gaussian and known, so that everything about its corrector is."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ups.models.denoiser import PredictedStep, predict_step
from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import StateStatistics
from ups.surrogate.surrogate import Surrogate

FAMILY, NUM_POINTS = "burgers_1d", 32
DOMAIN = Domain(FAMILY, (NUM_POINTS,), (True,))
Denoise = Callable[[Tensor, Tensor], Tensor]


class Codec:
    """Latents are the fields: a token per point."""

    groups = dict.fromkeys((f"{FAMILY}/fields", "darcy_2d/fields"), SimpleNamespace(grid=(NUM_POINTS,), num_channels=1))

    def encode(self, u: Tensor, group: str) -> Tensor:
        return u.transpose(-1, -2)

    decode = encode


class Halving(nn.Module):
    """An operator that halves the state and adds the coefficients; from zero they are the solution of a steady PDE."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = StateStatistics(Sizes((FAMILY, "darcy_2d"), (1, 2), (1, 1), (1, 1), (0, 1), 1))
        self.statistics.max_mean.fill_(1e6)
        self.statistics.max_fluctuation.fill_(1e6)

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        return self.constrained(z[..., :1] / 2 + coefficients.sum(-1, keepdim=True), z, domain)

    def constrained(self, z_next: Tensor, z: Tensor, domain: Domain) -> Tensor:
        return self.statistics.limit_step(z_next, z[..., :1], domain)


@dataclass(frozen=True)
class Denoiser:
    """Residuals of unit scale, whatever the context; counts its evaluations."""

    denoise: Denoise
    levels: list[Tensor]

    def __call__(self, x: Tensor, sigma: Tensor, context: PredictedStep, condition: Tensor, domain: Domain) -> Tensor:
        self.levels.append(sigma)
        return self.denoise(x, sigma[:, None, None])

    def residual_unit(self, context: PredictedStep, domain: Domain) -> Tensor:
        return context.change_rms


def posterior_mean(mean: float, std: float) -> Denoise:
    """The exact denoiser of residuals ~ N(mean, std^2)."""
    return lambda x, sigma: (std**2 * x + sigma**2 * mean) / (std**2 + sigma**2)


def flow_end(mean: float, std: float) -> Denoise:
    """The exact student of that denoiser: where the probability flow through x ends."""
    return lambda x, sigma: mean + (x - mean) * std / (std**2 + sigma**2).sqrt()


def make_surrogate(denoise: Denoise, student: Denoise | None = None) -> Surrogate:
    """Put the operator together with a denoiser, and a student if there is one."""
    return Surrogate(
        codec=Codec(),
        operator=Halving(),
        denoiser=Denoiser(denoise, []),
        student=None if student is None else Denoiser(student, []),
        steady=Halving(),
        corrections={},
    )


def trajectories(residual: Callable[[int], Tensor], num_trajectories: int, num_steps: int) -> Tensor:
    """Fields (B, T, 1, X) on which the operator misses `residual(t)` (B, X, 1), in the units of a denoiser."""
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(num_trajectories, NUM_POINTS, 1, generator=generator)]
    nothing = torch.zeros(num_trajectories, NUM_POINTS, 0), torch.zeros(num_trajectories, 1)
    for t in range(num_steps):
        context = predict_step(Halving(), states[-1], *nothing, DOMAIN)
        states.append(context.z_pred + context.change_rms * residual(t))
    return torch.stack(states, 1).transpose(-1, -2)
