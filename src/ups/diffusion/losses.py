"""Denoising and consistency losses for a denoiser D(x, sigma) of data with unit variance."""

from collections.abc import Callable

import torch
from torch import Tensor

Denoise = Callable[[Tensor, Tensor], Tensor]  # D(x, sigma) of noisy data x (B, ...) at noise levels sigma (B,)


def denoising_loss(denoise: Denoise, y: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """lambda(sigma) |D(y + sigma n; sigma) - y|^2 per sample (B,), with lambda = (sigma^2 + 1) / sigma^2.

    Karras et al. 2022 (arXiv:2206.00364), eq. 8 and Table 1 with sigma_data = 1.
    """
    error = denoise(y + _like(sigma, y) * noise, sigma) - y
    return (sigma**2 + 1) / sigma**2 * error.square().flatten(1).mean(1)


def next_sigma(sigma: Tensor, q: float, k: float, b: float, stage: int) -> Tensor:
    """The adjacent smaller noise level s of the level t = sigma (B,).

    s = max(0, t (1 - q^-(stage+1) n(t))) with n(t) = 1 + k / (1 + e^(b t)); Geng et al. 2024 (arXiv:2406.14548).
    """
    return (sigma * (1 - (1 + k * torch.sigmoid(-b * sigma)) / q ** (stage + 1))).clamp(min=0.0)


def consistency_loss(denoise: Denoise, y: Tensor, noise: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """|D(y + t n; t) - stopgrad D(y + s n; s)|^2 / (t - s) per sample (B,) for t = sigma > s = sigma_next.

    The target is y itself where s = 0; elsewhere the student's own output at the lower level, with the same noise and
    without gradient. Easy consistency tuning, Geng et al. 2024 (arXiv:2406.14548).
    """
    student = denoise(y + _like(sigma, y) * noise, sigma)
    with torch.no_grad():
        floor = sigma_next.clamp(min=torch.finfo(y.dtype).eps)
        target = torch.where(_like(sigma_next, y) > 0, denoise(y + _like(floor, y) * noise, floor), y)
    return (student - target).square().flatten(1).mean(1) / (sigma - sigma_next)


def _like(sigma: Tensor, y: Tensor) -> Tensor:
    return sigma.view(-1, *[1] * (y.ndim - 1))
