"""Hyperbolic equations by PDEBench's finite volumes with limited linear states (MUSCL).

Advection and Burgers' equation on a periodic line; shallow water over a flat floor between open walls.
"""

from math import pi

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ups.solvers.numerics import Box, Stepper, central_difference, face_states, largest, second_difference, wavenumbers
from ups.solvers.random_fields import Sample, sines

GRAVITY = 1.0
INNER_HEIGHT = 2.0  # of the water inside the dam


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


def dam(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """Water of height 2 inside a circle of radius 0.3 to 0.7, 1 outside, as means over the cells.

    The circle cuts a cell as a straight line along the grid would. Heights at the cell centres would be the same for
    many radii: seven states in all on 32 x 32 cells.
    """
    radius = generator.uniform(0.3, 0.7)
    x, y = box.centres
    distance = np.hypot(x[:, None], y[None, :])
    height = 1.0 + np.clip((radius - distance) / (x[1] - x[0]) + 0.5, 0.0, 1.0)
    return height[None], {"dam_radius": np.float64(radius)}


def at_rest(height: Tensor) -> Tensor:
    """State h, hu, hv of water (B, 1, X, Y) that does not move."""
    return torch.cat((height, torch.zeros_like(height), torch.zeros_like(height)), dim=1)


def height_of(state: Tensor) -> Tensor:
    """The height alone, which is what PDEBench stores."""
    return state[:, :1]


def split(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Height and velocities (B, ...) of a state h, hu, hv (B, 3, ...)."""
    h = state[:, 0]
    return h, state[:, 1] / h, state[:, 2] / h


def flux(h: Tensor, normal: Tensor, tangential: Tensor) -> Tensor:
    """Flux of (h, h normal, h tangential) through a face across the normal velocity."""
    return torch.stack((h * normal, h * normal**2 + 0.5 * GRAVITY * h**2, h * normal * tangential), dim=1)


def hll(left: Tensor, right: Tensor) -> Tensor:
    """HLL flux between the primitive states h, normal, tangential (B, 3, ...) of the two sides."""
    c_left, c_right = (GRAVITY * left[:, 0]).sqrt(), (GRAVITY * right[:, 0]).sqrt()
    slowest = torch.minimum(left[:, 1] - c_left, right[:, 1] - c_right).clamp(max=0)[:, None]
    fastest = torch.maximum(left[:, 1] + c_left, right[:, 1] + c_right).clamp(min=0)[:, None]
    jump = conserved(right) - conserved(left)
    flux_left, flux_right = flux(*left.unbind(1)), flux(*right.unbind(1))
    return (fastest * flux_left - slowest * flux_right + fastest * slowest * jump) / (fastest - slowest)


def conserved(primitive: Tensor) -> Tensor:
    """h, hu, hv of h, u, v (B, 3, ...)."""
    return torch.cat((primitive[:, :1], primitive[:, :1] * primitive[:, 1:]), dim=1)


def divergence(state: Tensor, dx: float) -> Tensor:
    """(F_{i+1/2} - F_{i-1/2}) / dx along the last axis of h, h normal, h tangential, with zero-gradient walls."""
    primitive = torch.stack(split(functional.pad(state, (2, 2, 0, 0), mode="replicate")), dim=1)
    return hll(*face_states(primitive, -1)).diff(dim=-1) / dx


def shallow_water(c: dict[str, Tensor], box: Box) -> Stepper:
    """h_t + div(h v) = 0, (h v)_t + div(h v v) + grad(g h^2/2) = 0 with SSP-RK2, CFL number 0.4."""
    dx, dy = box.spacing
    swap = [0, 2, 1]

    def rate(state: Tensor) -> Tensor:
        along_x = divergence(state.transpose(-1, -2), dx).transpose(-1, -2)
        along_y = divergence(state[:, swap], dy)[:, swap]
        return -along_x - along_y

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u_star = u + dt * rate(u)
        return 0.5 * (u + u_star + dt * rate(u_star))

    def limit(state: Tensor) -> Tensor:
        h, v_x, v_y = split(state)
        c = (GRAVITY * h).sqrt()
        return 0.4 / largest((v_x.abs() + c) / dx + (v_y.abs() + c) / dy)[:, None]

    return step, limit


def shallow_water_settings(duration: float, num_snapshots: int) -> dict[str, float]:
    """Settings that PDEBench's generator writes beside every trajectory."""
    return {"T_end": duration, "n_time_steps": num_snapshots - 1, "gravity": GRAVITY, "inner_height": INNER_HEIGHT}
