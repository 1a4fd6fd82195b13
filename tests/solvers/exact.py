"""Exact solutions that several tests compare with."""

from math import pi

import torch
from torch import Tensor


def shift(u: Tensor, distance: Tensor, length: float) -> Tensor:
    """u(x - distance) of the trigonometric interpolant on a periodic axis, which solves advection exactly."""
    points = u.shape[-1]
    k = 2 * pi * torch.fft.rfftfreq(points, length / points, dtype=u.dtype, device=u.device)
    return torch.fft.irfft(torch.exp(-1j * k * distance) * torch.fft.rfft(u), n=points)
