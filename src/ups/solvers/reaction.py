"""Diffusion with reaction (logistic growth on a periodic line, FitzHugh-Nagumo in a closed square) or sorption (1D)."""

from functools import partial
from math import ceil, sqrt

import numpy as np
import torch
from torch import Tensor

from ups.solvers.numerics import Box, Stepper, largest, second_difference, wavenumbers, zero_flux_laplacian
from ups.solvers.random_fields import Sample, rescaled, sines

D_u, D_v, k = 1e-3, 5e-3, 5e-3  # of FitzHugh-Nagumo; below: of diffusion-sorption
D, POROSITY, RHO_S, K_F, N_F = 5e-4, 0.29, 2880.0, 3.5e-4, 0.874
INFLOW = 1.0  # value of the ghost cell at the left
LONGEST_STEP = 1.0  # seconds


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


def uniform_state(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """One concentration between 0 and 0.2 in all cells."""
    return np.full((1, *box.grid), generator.uniform(0.0, 0.2)), {}


def retardation(u: Tensor) -> Tensor:
    """R(u) = 1 + (1 - phi) / phi rho_s k n (u + 1e-6)^(n - 1): adsorption slows diffusion (Freundlich)."""
    return 1 + (1 - POROSITY) / POROSITY * RHO_S * K_F * N_F * (u.clamp(min=0) + 1e-6) ** (N_F - 1)


def sorption_rate(u: Tensor, dx: float) -> Tensor:
    """D / R(u) u_xx with the ghost values 1 at the left and D (u_{N-2} - u_{N-1}) / dx, for u = D u_x, at the right."""
    left = torch.full_like(u[..., :1], INFLOW)
    right = D * (u[..., -2:-1] - u[..., -1:]) / dx
    return D / retardation(u) * torch.cat((left, u, right), dim=-1).diff(n=2) / dx**2


def diffusion_sorption(c: dict[str, Tensor], box: Box) -> Stepper:
    """u_t = D / R(u) u_xx by the Runge-Kutta-Legendre method RKL2, whose stable step grows with its stages squared.

    Meyer, Balsara and Aslam 2014, A stabilized Runge-Kutta-Legendre method, J. Comput. Phys. 257, equations 16 to 18.
    The largest eigenvalue is 4 D / (R dx^2) with the smallest R, that of u = 1.
    """
    dx = box.spacing[0]
    euler_step = dx**2 * float(retardation(torch.tensor(INFLOW))) / (2 * D)
    num_stages = max(3, ceil(0.5 * (sqrt(9 + 16 * LONGEST_STEP / euler_step) - 1)))
    dt_max = euler_step * (num_stages**2 + num_stages - 2) / 4
    b = [1 / 3] * 2 + [(j * j + j - 2) / (2 * j * (j + 1)) for j in range(2, num_stages + 1)]
    w = 4 / (num_stages**2 + num_stages - 2)

    def step(u: Tensor, dt: Tensor) -> Tensor:
        rate_0 = dt * sorption_rate(u, dx)
        before, now = u, u + b[1] * w * rate_0
        for j in range(2, num_stages + 1):
            mu, nu = (2 * j - 1) / j * b[j] / b[j - 1], (1 - j) / j * b[j] / b[j - 2]
            rate = w * mu * (dt * sorption_rate(now, dx) - (1 - b[j - 1]) * rate_0)
            before, now = now, mu * now + nu * before + (1 - mu - nu) * u + rate
        return now

    def limit(u: Tensor) -> Tensor:
        return u.new_full((len(u), 1, 1), dt_max)

    return step, limit


def diffusion_sorption_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """u_t = D / R(u) u_xx with PDEBench's ghost values."""
    return sorption_rate(u, spacing[0])


def diffusion_sorption_settings(duration: float, num_snapshots: int) -> dict[str, float]:
    """Settings that PDEBench's generator writes beside every trajectory."""
    soil = {"D": D, "por": POROSITY, "rho_s": RHO_S, "k_f": K_F, "n_f": N_F, "sol": INFLOW}
    return soil | {"t": duration, "tdim": num_snapshots, "n": 1}
