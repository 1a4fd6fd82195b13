"""Hyperbolic equations by PDEBench's finite volumes.

Advection and Burgers' equation on a periodic line with limited linear states (MUSCL); shallow water over a flat floor
between open walls with limited waves.
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
CFL = 0.9  # of a step of shallow water


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


def roe_waves(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Waves W (B, 3, 3, ...) and speeds s (B, 3, 1, ...) between states (h, h normal, h tangential), (B, 3, ...).

    Roe's linearization (LeVeque 2002, Finite Volume Methods for Hyperbolic Problems, section 15.3): the waves add up to
    the jump of the state, and s W to that of the flux.
    """
    root_l, root_r = left[:, 0].sqrt(), right[:, 0].sqrt()
    u, v = ((left[:, i] / root_l + right[:, i] / root_r) / (root_l + root_r) for i in (1, 2))
    c = (0.5 * GRAVITY * (left[:, 0] + right[:, 0])).sqrt()
    jump, normal, tangential = (right - left).unbind(1)
    one, zero = torch.ones_like(u), torch.zeros_like(u)
    slow = ((u + c) * jump - normal) / (2 * c)
    fast = (normal - (u - c) * jump) / (2 * c)
    strengths = torch.stack((slow, tangential - v * jump, fast), dim=1).unsqueeze(2)
    directions = [torch.stack(each, dim=1) for each in ((one, u - c, v), (zero, zero, one), (one, u + c, v))]
    return strengths * torch.stack(directions, dim=1), torch.stack((u - c, u, u + c), dim=1).unsqueeze(2)


def swept(state: Tensor, ratio: Tensor) -> Tensor:
    """The state (B, 3, ..., n) of h, h normal, h tangential after a step dt = `ratio` dx along its last axis.

    Roe's method with second-order corrections, of waves that the monotonised central limiter compares with those at the
    next face upwind (LeVeque 2002, equation 6.61); zero gradient at both ends. Without an entropy fix, which water
    needs that is faster than its waves: behind dams of heights 2 and 1 none is.
    """
    padded = functional.pad(state, (2, 2, 0, 0), mode="replicate")
    left, right = padded[..., :-1], padded[..., 1:]
    waves, speeds = roe_waves(left, right)
    to_the_left, to_the_right = (speeds.clamp(max=0) * waves).sum(1), (speeds.clamp(min=0) * waves).sum(1)
    wave, speed = waves[..., 1:-1], speeds[..., 1:-1]
    size = (wave * wave).sum(2, keepdim=True)
    upwind = torch.where(speed > 0, waves[..., :-2], waves[..., 2:])
    smoothness = (upwind * wave).sum(2, keepdim=True) / size.where(size > 0, 1.0)
    limiter = torch.minimum(0.5 * (1 + smoothness), 2 * smoothness).clamp(0, 2)
    correction = (0.5 * speed.abs() * (1 - ratio.unsqueeze(1) * speed.abs()) * limiter * wave).sum(1)
    return state - ratio * (to_the_right[..., 1:-2] + to_the_left[..., 2:-1] + correction.diff(dim=-1))


def shallow_water(c: dict[str, Tensor], box: Box) -> Stepper:
    """h_t + div(h v) = 0, (h v)_t + div(h v v) + grad(g h^2/2) = 0, first along x, then along y, CFL number 0.9.

    The scheme of PDEBench's generator, Clawpack's ClawSolver2D, whose solutions it repeats from the same initial state.
    """
    dx, dy = box.spacing
    swap = [0, 2, 1]

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u = swept(u.transpose(-1, -2), dt / dx).transpose(-1, -2)
        return swept(u[:, swap], dt / dy)[:, swap]

    def limit(state: Tensor) -> Tensor:
        h, along_x, along_y = state.unbind(1)
        c = (GRAVITY * h).sqrt()
        fastest = torch.maximum(((along_x / h).abs() + c) / dx, ((along_y / h).abs() + c) / dy)
        return CFL / largest(fastest)[:, None]

    return step, limit


def shallow_water_settings(duration: float, num_snapshots: int) -> dict[str, float]:
    """Settings that PDEBench's generator writes beside every trajectory."""
    return {"T_end": duration, "n_time_steps": num_snapshots - 1, "gravity": GRAVITY, "inner_height": INNER_HEIGHT}
