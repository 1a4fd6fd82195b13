"""Sampling with a denoiser: the Karras grid, the second-order multistep solver, few-step consistency sampling."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ups.diffusion.losses import Denoise

RHO = 7.0
SECOND_SIGMA = 1.64  # of consistency sampling, for data of unit variance

Normal = Callable[..., Tensor]  # unit noise of a shape (draws, B, ...): `independent` or `mirrored`

Draw = Callable[[Tensor, Tensor | None], Tensor]  # see `remembered_noise`


def karras_grid(num_steps: int, sigma_min: float, sigma_max: float) -> Tensor:
    """Noise levels sigma_0 = sigma_max > ... > sigma_(N-1) = sigma_min, then 0; arXiv:2206.00364, eq. 5."""
    if num_steps == 1:
        return torch.tensor([sigma_max, 0.0])
    ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    sigma = (sigma_max ** (1 / RHO) + ramp * (sigma_min ** (1 / RHO) - sigma_max ** (1 / RHO))) ** RHO
    return torch.cat([sigma, torch.zeros(1, dtype=torch.float64)]).float()


def multistep_sampler(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M), one evaluation per noise level; x (B, ...) starts as sigma_max times unit noise.

    With q = sigma_(i+1) / sigma_i, h_i = -log q, r = h_(i-1) / h_i: D = (1 + 1/2r) D_i - 1/2r D_(i-1),
    x <- q x + (1 - q) D. Lu et al. 2022 (arXiv:2211.01095), algorithm 2 in the noise levels of EDM.
    """
    previous, h_previous = None, None
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        denoised = denoise(x, sigma.expand(x.shape[0]).to(x))
        q = (sigma_next / sigma).item()
        if sigma_next == 0:
            return denoised
        h = -torch.tensor(q).log().item()
        direction = denoised
        if previous is not None:
            r = h_previous / h
            direction = (1 + 0.5 / r) * denoised - 0.5 / r * previous
        x = q * x + (1 - q) * direction
        previous, h_previous = denoised, h
    return x


def heun_sampler(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """EDM's second-order solver without churn, 2N - 1 evaluations; arXiv:2206.00364, algorithm 1."""
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        d = (x - denoise(x, sigma.expand(x.shape[0]).to(x))) / sigma
        x_next = x + (sigma_next - sigma) * d
        if sigma_next > 0:
            d_next = (x_next - denoise(x_next, sigma_next.expand(x.shape[0]).to(x))) / sigma_next
            x_next = x + (sigma_next - sigma) * (d + d_next) / 2
        x = x_next
    return x


def consistency_grid(num_steps: int, sigma_max: float) -> Tensor:
    """The noise levels of one or two steps: the second is 1.64, or half the first where that is less."""
    return torch.tensor([sigma_max, min(SECOND_SIGMA, sigma_max / 2)])[:num_steps]


def consistency_sampler(denoise: Denoise, noises: Tensor, sigmas: Tensor) -> Tensor:
    """Denoise from sigma_0, then add fresh noise of level sigma_1 and denoise again, and so on.

    `noises` (steps, B, ...) are unit normal; Song et al. 2023 (arXiv:2303.01469), algorithm 1.
    """
    y = torch.zeros_like(noises[0])
    for noise, sigma in zip(noises, sigmas, strict=True):
        y = denoise(y + sigma * noise, sigma.expand(noise.shape[0]).to(noise))
    return y


def independent(generator: torch.Generator) -> Normal:
    """Every row is drawn by itself."""
    return lambda *shape: torch.randn(*shape, generator=generator, device=generator.device)


def mirrored(generator: torch.Generator) -> Normal:
    """The second half of the B rows, an even number, is the first one negated.

    What is linear in the noise cancels in the mean of such antithetic pairs (Hammersley and Morton 1956).
    """

    def draw(num_draws: int, num_rows: int, *shape: int) -> Tensor:
        half = torch.randn(num_draws, num_rows // 2, *shape, generator=generator, device=generator.device)
        return torch.cat([half, -half], dim=1)

    return draw


def remembered_noise(num_draws: int, memory: float, normal: Normal) -> Draw:
    """Unit noise (num_draws, *z.shape) for states z, call after call n <- memory n + sqrt(1 - memory^2) fresh noise.

    A residual that changes slowly along a trajectory is not drawn anew at every step; `memory` is the correlation of
    neighbouring draws, between 0 and 1. State i remembers the noise of row i of the last call, or of `origins[i]`.
    """
    noise: Tensor | None = None

    def draw(z: Tensor, origins: Tensor | None = None) -> Tensor:
        nonlocal noise
        fresh = normal(num_draws, *z.shape)
        if noise is not None:
            remembered = noise if origins is None else noise[:, origins]
            fresh = memory * remembered + math.sqrt(1 - memory**2) * fresh
        noise = fresh
        return noise

    return draw
