"""Sampling with any denoiser D(x, sigma) in the notation of EDM (Karras et al. 2022, arXiv:2206.00364).

Karras noise levels, a second-order multistep solver, consistency sampling in few steps, noise that is correlated along
a rollout. The losses are in `ups.models.denoiser`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

RHO = 7.0  # exponent of the Karras grid
SECOND_SIGMA = 1.64  # second noise level of consistency sampling, for data of unit variance

Denoise = Callable[[Tensor, Tensor], Tensor]  # D(x, sigma) of noisy data x (B, ...) at noise levels sigma (B,)
Normal = Callable[..., Tensor]  # normal(num_noises, B, ...): unit noise of that shape, `independent` or `antithetic`
StepNoise = Callable[[Tensor, Tensor | None], Tensor]  # step_noise(z, origins) of one step, see `correlated_noise`


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


def consistency_grid(num_steps: int, sigma_max: float) -> Tensor:
    """Noise levels of one or two steps: sigma_max, then SECOND_SIGMA or half of sigma_max, the smaller of both."""
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
    """Independent unit noise of shape (num_noises, B, ...)."""
    return lambda *shape: torch.randn(*shape, generator=generator, device=generator.device)


def antithetic(generator: torch.Generator) -> Normal:
    """Unit noise of shape (num_noises, B, ...) whose second half of the B rows, an even number, negates the first.

    Whatever is linear in the noise cancels in the mean of such antithetic pairs (Hammersley and Morton 1956).
    """

    def normal(num_noises: int, num_rows: int, *shape: int) -> Tensor:
        half = torch.randn(num_noises, num_rows // 2, *shape, generator=generator, device=generator.device)
        return torch.cat([half, -half], dim=1)

    return normal


def correlated_noise(num_noises: int, correlation: float, normal: Normal) -> StepNoise:
    """Unit noise (num_noises, *z.shape) for the states z (B, ...) of successive time steps.

    n_t = c n_(t-1) + sqrt(1 - c^2) fresh noise, a first-order autoregressive process: noises of neighbouring steps have
    the `correlation` c in [0, 1], because a residual may change slowly along a trajectory. Row i continues the noise of
    row i of the previous step, or of row `origins[i]` where a search has kept and repeated rows since.
    """
    noise: Tensor | None = None

    def step_noise(z: Tensor, origins: Tensor | None = None) -> Tensor:
        nonlocal noise
        fresh = normal(num_noises, *z.shape)
        if noise is not None:
            previous = noise if origins is None else noise[:, origins]
            fresh = correlation * previous + math.sqrt(1 - correlation**2) * fresh
        noise = fresh
        return noise

    return step_noise
