"""Advection and Burgers' equation on a periodic line, by PDEBench's finite volumes with limited linear states."""

from math import pi

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ups.solvers.numerics import Box, Stepper, central_difference, face_states, largest, second_difference, wavenumbers
from ups.solvers.random_fields import Sample, sines


def sines_state(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """A random sum of sines, the same for both families."""
    return sines(box.centres[0], generator)[None], {}


def advection(c: dict[str, Tensor], box: Box) -> Stepper:
    """u_t + beta u_x = 0 by upwind fluxes of limited linear states and the midpoint rule, CFL number 0.4."""
    beta, dx = c["beta"], box.spacing[0]

    def rate(u: Tensor) -> Tensor:
        u_left, u_right = _periodic_face_states(u)
        flux = beta * torch.where(beta > 0, u_left, u_right)
        return (flux[..., :-1] - flux[..., 1:]) / dx

    def step(u: Tensor, dt: Tensor) -> Tensor:
        return u + dt * rate(u + 0.5 * dt * rate(u))

    def limit(u: Tensor) -> Tensor:
        return (0.4 * dx / beta.abs().clamp(min=1e-12)).expand(len(u), 1, 1)

    return step, limit


def advection_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """u_t = -beta u_x."""
    return -c["beta"] * central_difference(u, 2, spacing[0], "periodic")


def burgers(c: dict[str, Tensor], box: Box) -> Stepper:
    """u_t + (u^2/2)_x = (nu/pi) u_xx: Strang splitting of diffusion and MUSCL with SSP-RK2, CFL number 0.5."""
    nu, dx = c["nu"], box.spacing[0]

    def step(u: Tensor, dt: Tensor) -> Tensor:
        diffused = 0.5 * dt * nu / pi
        u = finite_volume_heat(u, diffused, box.length)
        u_star = u + dt * _inviscid_rate(u, dx)
        u = 0.5 * (u + u_star + dt * _inviscid_rate(u_star, dx))
        return finite_volume_heat(u, diffused, box.length)

    def limit(u: Tensor) -> Tensor:
        return 0.5 * dx / largest(u.abs()).clamp(min=1e-12)

    return step, limit


def burgers_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """u_t = (nu/pi) u_xx - (u^2/2)_x."""
    diffusion = c["nu"] / pi * second_difference(u, spacing[0])
    return diffusion - central_difference(0.5 * u**2, 2, spacing[0], "periodic")


def _inviscid_rate(u: Tensor, dx: float) -> Tensor:
    """-(F_{i+1/2} - F_{i-1/2}) / dx with Godunov's flux F of f = u^2/2 between limited linear states."""
    u_left, u_right = _periodic_face_states(u)
    flux = 0.5 * torch.maximum(u_left.clamp(min=0), -u_right.clamp(max=0)) ** 2
    return (flux[..., :-1] - flux[..., 1:]) / dx


def _periodic_face_states(u: Tensor) -> tuple[Tensor, Tensor]:
    return face_states(functional.pad(u, (2, 2), mode="circular"), -1)


def finite_volume_heat(u: Tensor, diffused: Tensor, length: float) -> Tensor:
    """Solve du_i/dt = nu (u_{i+1} - 2 u_i + u_{i-1}) / dx^2 on a periodic axis exactly, with `diffused` = nu t.

    The exact solution needs no step limit; unlike the spectral one it makes no new extrema, even next to shocks.
    """
    dx = length / u.shape[-1]
    eigenvalue = (2 - 2 * torch.cos(wavenumbers(u, length) * dx)) / dx**2
    return torch.fft.irfft(torch.exp(-diffused * eigenvalue) * torch.fft.rfft(u), n=u.shape[-1])
