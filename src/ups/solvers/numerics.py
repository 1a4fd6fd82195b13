"""Shared by the schemes: cells of a box, time steps, limited states, differences, wavenumbers, residuals.

A state `u` is (B, C, *grid) in float64. A time step `dt` has one value per trajectory and the axes of the state, so the
solution of a trajectory does not depend on the others of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ups.errors import ConfigFault

Step = Callable[[Tensor, Tensor], Tensor]
"""(u, dt) -> u at t + dt."""
StepLimit = Callable[[Tensor], Tensor]
"""u -> largest stable time step of each trajectory, with the axes of u."""
Stepper = tuple[Step, StepLimit]
Fields = Callable[[Tensor], Tensor]
"""(B, C, *grid) -> (B, C', *grid)."""


@dataclass(frozen=True)
class Box:
    """The box [low, high]^d in equal cells, `grid` of them along the axes; `boundary` as in `ups.data` or None."""

    low: float
    high: float
    grid: tuple[int, ...]
    boundary: str | None = None

    @property
    def length(self) -> float:
        return self.high - self.low

    @property
    def spacing(self) -> tuple[float, ...]:
        """Edges dx, dy, ... of a cell."""
        return tuple(self.length / points for points in self.grid)

    @property
    def centres(self) -> list[np.ndarray]:
        """Coordinates of the cell centres along each axis."""
        return [self.low + (np.arange(n) + 0.5) * dx for n, dx in zip(self.grid, self.spacing, strict=True)]


def integrate(step: Step, limit: StepLimit, u: Tensor, interval: float | Tensor) -> Tensor:
    """Advance `u` by `interval` (a number, or one per trajectory) in steps of `limit(u)`, the last one shortened."""
    remaining = torch.as_tensor(interval, dtype=u.dtype, device=u.device).expand(len(u), *[1] * (u.ndim - 1))
    while bool((remaining > 0).any()):
        dt = torch.minimum(limit(u), remaining)
        u = step(u, dt)
        remaining = remaining - dt
    return u


def aligned(name: str, value: float | Tensor, u: Tensor, *, is_field: bool) -> Tensor:
    """A coefficient in float64 with the axes of the state `u` (B, C, *grid), for all trajectories or one for each."""
    value = torch.as_tensor(value, dtype=torch.float64, device=u.device)
    grid = tuple(u.shape[2:])
    if is_field and value.shape in (grid, (1, *grid), (len(u), *grid)):
        return value.reshape(-1, 1, *grid)
    if not is_field and value.ndim <= 1 and value.numel() in (1, len(u)):
        return value.reshape(-1, *[1] * (u.ndim - 1))
    expected = f"a field {grid} or {len(u)} of them" if is_field else f"a number or {len(u)} values"
    raise ConfigFault(f"coefficient {name} must be {expected}, got shape {tuple(value.shape)}")


def largest(u: Tensor) -> Tensor:
    """The largest entry of each trajectory, with the axes of the state."""
    return u.amax(dim=tuple(range(1, u.ndim)), keepdim=True)


def face_states(u: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """States at the lower and the upper side of each face along `axis`, from linear states in all cells but the ends.

    Their slope is the monotonised central one (van Leer 1977): with the differences a, b to the two neighbours and
    c = (a + b) / 2 it is sign(c) min(2|a|, 2|b|, |c|) if a b > 0, otherwise 0.
    """
    num_cells = u.shape[axis] - 2
    centre, difference = u.narrow(axis, 1, num_cells), u.diff(dim=axis)
    a, b = difference.narrow(axis, 0, num_cells), difference.narrow(axis, 1, num_cells)
    half_slope = 0.5 * _minmod(2 * _minmod(a, b), 0.5 * (a + b))
    return (centre + half_slope).narrow(axis, 0, num_cells - 1), (centre - half_slope).narrow(axis, 1, num_cells - 1)


def _minmod(a: Tensor, b: Tensor) -> Tensor:
    """The one of `a` and `b` with the smaller modulus if their signs agree, otherwise 0."""
    return torch.clamp(b, min=a.clamp(max=0), max=a.clamp(min=0))


def wavenumbers(u: Tensor, length: float) -> Tensor:
    """Wavenumbers 2 pi m / length of the real Fourier transform along the last axis."""
    points = u.shape[-1]
    return 2 * pi * torch.fft.rfftfreq(points, length / points, dtype=u.dtype, device=u.device)


def central_difference(u: Tensor, axis: int, dx: float, boundary: str) -> Tensor:
    """(u_(i+1) - u_(i-1)) / (2 dx), where `boundary` gives the cell beyond an end.

    periodic: the cell of the other end; wall: minus the last cell; otherwise the last cell, a gradient of 0.
    """
    if boundary == "periodic":
        return (u.roll(-1, axis) - u.roll(1, axis)) / (2 * dx)
    sign = -1 if boundary == "wall" else 1
    low, high = sign * u.narrow(axis, 0, 1), sign * u.narrow(axis, u.shape[axis] - 1, 1)
    padded = torch.cat((low, u, high), dim=axis)
    return (padded.narrow(axis, 2, u.shape[axis]) - padded.narrow(axis, 0, u.shape[axis])) / (2 * dx)


def second_difference(u: Tensor, dx: float) -> Tensor:
    """(u_(i+1) - 2 u_i + u_(i-1)) / dx^2 along the last axis, periodic."""
    return (u.roll(-1, -1) - 2 * u + u.roll(1, -1)) / dx**2


def zero_flux_laplacian(u: Tensor, dx: float, dy: float) -> Tensor:
    """5-point Laplacian of (B, C, X, Y) with no flux through the walls."""
    padded = functional.pad(u, (1, 1, 1, 1), mode="replicate")
    along_x = padded[..., 2:, 1:-1] - 2 * u + padded[..., :-2, 1:-1]
    along_y = padded[..., 1:-1, 2:] - 2 * u + padded[..., 1:-1, :-2]
    return along_x / dx**2 + along_y / dy**2


def wall_divergence(v: Tensor, spacing: tuple[float, ...]) -> Tensor:
    """Divergence of velocities (B, d, *grid) at cell centres that vanish on the walls: (B, *grid)."""
    return sum(central_difference(v[:, a], a + 1, dx, "wall") for a, dx in enumerate(spacing))


def identity(u: Tensor) -> Tensor:
    """`u` itself: the default where a family stores the state of its solver, or conserves the stored fields."""
    return u


@dataclass(frozen=True)
class Evolution:
    """An equation quantity(u)_t = rate(u) of the stored fields u, discretised by second-order central differences.

    Its residual measures how far stored snapshots are from solving the equation. It is not small even for snapshots of
    the solver, whose own time steps are much shorter than `dt`: compare predictions with the solver's snapshots at the
    same `dt` and `dx`.
    """

    rate: Fields
    quantity: Fields = identity

    def residual(self, u: Tensor, dt: float) -> Tensor:
        """(q_(n+1) - q_n) / dt - (r_n + r_(n+1)) / 2: (B, T + 1, C, *grid) -> (B, T, C', *grid).

        The trapezoidal rule, of second order in dt.
        """
        q, r = (of(u.flatten(0, 1)).unflatten(0, u.shape[:2]) for of in (self.quantity, self.rate))
        return q.diff(dim=1) / dt - 0.5 * (r[:, 1:] + r[:, :-1])
