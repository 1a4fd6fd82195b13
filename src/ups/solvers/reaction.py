"""Diffusion with reaction: logistic growth on a periodic line, FitzHugh-Nagumo in a closed square."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ups.solvers.numerics import Box, Stepper, largest, second_difference, wavenumbers, zero_flux_laplacian
from ups.solvers.random_fields import Sample, rescaled, sines

D_u, D_v, k = 1e-3, 5e-3, 5e-3


def sines_in_unit_interval(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """The sum of sines of advection and Burgers, rescaled to [0, 1]."""
    return rescaled(sines(box.centres[0], generator))[None], {}


def logistic_diffusion(c: dict[str, Tensor], box: Box) -> Stepper:
    """u_t = nu u_xx + rho u (1 - u): Strang splitting of two exact solutions."""
    nu, rho = c["nu"], c["rho"]

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u = logistic(u, 0.5 * rho * dt)
        u = heat(u, nu * dt, box.length)
        return logistic(u, 0.5 * rho * dt)

    def limit(u: Tensor) -> Tensor:
        return (0.004 / torch.maximum(rho, nu).clamp(min=1e-12)).expand(len(u), 1, 1)

    return step, limit


def logistic_diffusion_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """u_t = nu u_xx + rho u (1 - u)."""
    return c["nu"] * second_difference(u, spacing[0]) + c["rho"] * u * (1 - u)


def heat(u: Tensor, diffused: Tensor, length: float) -> Tensor:
    """Solve u_t = nu u_xx on a periodic axis exactly, with `diffused` = nu t."""
    decay = torch.exp(-diffused * wavenumbers(u, length) ** 2)
    return torch.fft.irfft(decay * torch.fft.rfft(u), n=u.shape[-1])


def logistic(u: Tensor, grown: Tensor) -> Tensor:
    """Solve u_t = rho u (1 - u) exactly, with `grown` = rho t."""
    return u / (u + (1 - u) * torch.exp(-grown))


def normal_state(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """Activator and inhibitor as independent standard normal numbers in every cell."""
    return generator.standard_normal((2, *box.grid)), {}


def fitzhugh_nagumo(c: dict[str, Tensor], box: Box) -> Stepper:
    """u_t = D_u lap u + u - u^3 - k - v, v_t = D_v lap v + u - v: RK4 within its stability limit."""
    dx, dy = box.spacing
    stiffness = 4 * D_v * (1 / dx**2 + 1 / dy**2)
    rate = partial(fitzhugh_nagumo_rate, c={}, spacing=box.spacing, boundary="zero_flux")

    def step(u: Tensor, dt: Tensor) -> Tensor:
        k_1 = rate(u)
        k_2 = rate(u + 0.5 * dt * k_1)
        k_3 = rate(u + 0.5 * dt * k_2)
        k_4 = rate(u + dt * k_3)
        return u + dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)

    def limit(u: Tensor) -> Tensor:
        return 1 / (stiffness + 3 * largest(u[:, :1] ** 2) + 1)

    return step, limit


def fitzhugh_nagumo_rate(state: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """u_t and v_t of `fitzhugh_nagumo`, of a state (B, 2, X, Y)."""
    laplacian = zero_flux_laplacian(state, *spacing)
    u, v = state[:, 0], state[:, 1]
    return torch.stack((D_u * laplacian[:, 0] + u - u**3 - k - v, D_v * laplacian[:, 1] + u - v), dim=1)


def fitzhugh_nagumo_settings(duration: float, num_snapshots: int) -> dict[str, float]:
    """Settings that PDEBench's generator writes beside every trajectory."""
    return {"Du": D_u, "Dv": D_v, "k": k, "t": duration, "tdim": num_snapshots, "n": 1}
