"""Steps `u, dt -> u_next` of the transient families in float64, and the loop that advances each trajectory by its own.

A state `u` is (B, C, *grid). A time step `dt` has one value per trajectory and the axes of the state, so the solution
of a trajectory does not depend on the others of its batch.
"""

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor
from torch.nn import functional

Step = Callable[[Tensor, Tensor], Tensor]
Limit = Callable[[Tensor], Tensor]

D_u, D_v, k = 1e-3, 5e-3, 5e-3


def integrate(step: Step, limit: Limit, u: Tensor, interval: float | Tensor) -> Tensor:
    """Advance `u` by `interval`, one for all or one each, in steps of at most `limit(u)`, the last one shortened."""
    remaining = torch.as_tensor(interval, dtype=u.dtype, device=u.device).expand(len(u), *[1] * (u.ndim - 1))
    while bool((remaining > 0).any()):
        dt = torch.minimum(limit(u), remaining)
        u = step(u, dt)
        remaining = remaining - dt
    return u


def largest(u: Tensor) -> Tensor:
    """The largest entry of each trajectory, with the axes of the state."""
    return u.amax(dim=tuple(range(1, u.ndim)), keepdim=True)


def shift(u: Tensor, distance: Tensor, length: float) -> Tensor:
    """u(x - distance) of the trigonometric interpolant on a periodic axis."""
    return apply_spectrum(u, torch.exp(-1j * wavenumbers(u, length) * distance))


def wavenumbers(u: Tensor, length: float) -> Tensor:
    """Wavenumbers 2 pi m / length of the real Fourier transform along the last axis."""
    points = u.shape[-1]
    return 2 * pi * torch.fft.rfftfreq(points, length / points, dtype=u.dtype, device=u.device)


def apply_spectrum(u: Tensor, factor: Tensor) -> Tensor:
    """Multiply the Fourier transform of `u` along the last axis by `factor`."""
    return torch.fft.irfft(factor * torch.fft.rfft(u), n=u.shape[-1])


def heat(u: Tensor, diffused: Tensor, length: float) -> Tensor:
    """Solve u_t = nu u_xx on a periodic axis exactly, with `diffused` = nu t."""
    return apply_spectrum(u, torch.exp(-diffused * wavenumbers(u, length) ** 2))


def finite_volume_heat(u: Tensor, diffused: Tensor, length: float) -> Tensor:
    """Solve du_i/dt = nu (u_{i+1} - 2 u_i + u_{i-1}) / dx^2 exactly: no step limit, mean kept, no new extrema."""
    dx = length / u.shape[-1]
    eigenvalue = (2 - 2 * torch.cos(wavenumbers(u, length) * dx)) / dx**2
    return apply_spectrum(u, torch.exp(-diffused * eigenvalue))


def limited_slope(a: Tensor, b: Tensor) -> Tensor:
    """Monotonised central slope: sign(c) min(2|a|, 2|b|, |c|) with c = (a + b) / 2 if a b > 0, otherwise 0."""
    return nearer_zero(2 * nearer_zero(a, b), 0.5 * (a + b))


def nearer_zero(a: Tensor, b: Tensor) -> Tensor:
    """The one of `a` and `b` with the smaller modulus if their signs agree, otherwise 0."""
    return torch.clamp(b, min=a.clamp(max=0), max=a.clamp(min=0))


def advection(beta: Tensor, length: float, num_points: int) -> tuple[Step, Limit]:
    """u_t + beta u_x = 0 by PDEBench's scheme: upwind limited linear states, midpoint rule, CFL number 0.4."""
    dx = length / num_points

    def rate(u: Tensor) -> Tensor:
        difference = u.roll(-1, -1) - u
        half_slope = 0.5 * limited_slope(difference.roll(1, -1), difference)
        flux = beta * torch.where(beta > 0, u + half_slope, (u - half_slope).roll(-1, -1))
        return (flux.roll(1, -1) - flux) / dx

    def step(u: Tensor, dt: Tensor) -> Tensor:
        return u + dt * rate(u + 0.5 * dt * rate(u))

    def limit(u: Tensor) -> Tensor:
        return (0.4 * dx / beta.abs().clamp(min=1e-12)).expand(len(u), 1, 1)

    return step, limit


def burgers_rhs(u: Tensor, dx: float) -> Tensor:
    """-(F_{i+1/2} - F_{i-1/2}) / dx with Godunov's flux F of f = u^2/2 between limited linear states."""
    difference = u.roll(-1, -1) - u
    half_slope = 0.5 * limited_slope(difference.roll(1, -1), difference)
    u_left, u_right = u + half_slope, (u - half_slope).roll(-1, -1)
    flux = 0.5 * torch.maximum(u_left.clamp(min=0), -u_right.clamp(max=0)) ** 2
    return (flux.roll(1, -1) - flux) / dx


def burgers(nu: Tensor, length: float, num_points: int) -> tuple[Step, Limit]:
    """u_t + (u^2/2)_x = (nu/pi) u_xx: Strang splitting of diffusion and MUSCL with SSP-RK2, CFL number 0.5."""
    dx = length / num_points

    def step(u: Tensor, dt: Tensor) -> Tensor:
        diffused = 0.5 * dt * nu / pi
        u = finite_volume_heat(u, diffused, length)
        u_star = u + dt * burgers_rhs(u, dx)
        u = 0.5 * (u + u_star + dt * burgers_rhs(u_star, dx))
        return finite_volume_heat(u, diffused, length)

    def limit(u: Tensor) -> Tensor:
        return 0.5 * dx / largest(u.abs()).clamp(min=1e-12)

    return step, limit


def logistic(u: Tensor, grown: Tensor) -> Tensor:
    """Solve u_t = rho u (1 - u) exactly, with `grown` = rho t."""
    decay = torch.exp(-grown)
    return u / (u + (1 - u) * decay)


def diffusion_reaction_1d(nu: Tensor, rho: Tensor, length: float) -> tuple[Step, Limit]:
    """u_t = nu u_xx + rho u (1 - u): Strang splitting of two exact solutions."""

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u = logistic(u, 0.5 * rho * dt)
        u = heat(u, nu * dt, length)
        return logistic(u, 0.5 * rho * dt)

    def limit(u: Tensor) -> Tensor:
        return (0.004 / torch.maximum(rho, nu).clamp(min=1e-12)).expand(len(u), 1, 1)

    return step, limit


def zero_flux_laplacian(u: Tensor, dx: float, dy: float) -> Tensor:
    """5-point Laplacian of (B, C, X, Y) with no flux through the walls."""
    padded = functional.pad(u, (1, 1, 1, 1), mode="replicate")
    along_x = padded[..., 2:, 1:-1] - 2 * u + padded[..., :-2, 1:-1]
    along_y = padded[..., 1:-1, 2:] - 2 * u + padded[..., 1:-1, :-2]
    return along_x / dx**2 + along_y / dy**2


def diffusion_reaction_2d(length: float, grid: tuple[int, int]) -> tuple[Step, Limit]:
    """u_t = D_u lap u + u - u^3 - k - v, v_t = D_v lap v + u - v: RK4 within its stability limit."""
    dx, dy = (length / points for points in grid)
    stiffness = 4 * D_v * (1 / dx**2 + 1 / dy**2)

    def rate(state: Tensor) -> Tensor:
        laplacian = zero_flux_laplacian(state, dx, dy)
        u, v = state[:, 0], state[:, 1]
        return torch.stack((D_u * laplacian[:, 0] + u - u**3 - k - v, D_v * laplacian[:, 1] + u - v), dim=1)

    def step(u: Tensor, dt: Tensor) -> Tensor:
        k_1 = rate(u)
        k_2 = rate(u + 0.5 * dt * k_1)
        k_3 = rate(u + 0.5 * dt * k_2)
        k_4 = rate(u + dt * k_3)
        return u + dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)

    def limit(u: Tensor) -> Tensor:
        return 1 / (stiffness + 3 * largest(u[:, :1] ** 2) + 1)

    return step, limit
