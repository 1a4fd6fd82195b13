"""How far stored snapshots are from solving their equation, by one central scheme for every family that allows it.

The residual of stored snapshots is not small even for the truth: `dt` is many steps of the solver. What it says of a
prediction is its ratio to that of the truth at the same `dt` and `dx`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from ups.solvers.compressible import conserved
from ups.solvers.sorption import sorption_rate
from ups.solvers.transient import D_u, D_v, k, zero_flux_laplacian

Fields = Callable[[Tensor], Tensor]  # states (B, C, *grid) to (B, C', *grid)


@dataclass(frozen=True)
class Law:
    """An equation quantity(u)_t = rate(u), with derivatives in space of second order."""

    quantity: Fields
    rate: Fields

    def residual(self, u: Tensor, dt: float) -> Tensor:
        """(q_(n+1) - q_n) / dt - (r_n + r_(n+1)) / 2: (B, T + 1, C, *grid) -> (B, T, C', *grid).

        The trapezoidal rule, of second order in dt.
        """
        q, r = (of(u.flatten(0, 1)).unflatten(0, u.shape[:2]) for of in (self.quantity, self.rate))
        return q.diff(dim=1) / dt - 0.5 * (r[:, 1:] + r[:, :-1])


def law_of(family: str, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Law | None:
    """The law of a family's stored fields; None where they do not determine it (shallow water lacks the momenta)."""
    dx = spacing[0]
    match family:
        case "advection_1d":
            return Law(_all, lambda u: -c["beta"] * central(u, 2, dx, "periodic"))
        case "burgers_1d":
            diffusion = c["nu"] / pi
            return Law(_all, lambda u: diffusion * _second(u, dx) - central(0.5 * u**2, 2, dx, "periodic"))
        case "diffusion_reaction_1d":
            return Law(_all, lambda u: c["nu"] * _second(u, dx) + c["rho"] * u * (1 - u))
        case "diffusion_sorption_1d":
            return Law(_all, lambda u: sorption_rate(u, dx))
        case "diffusion_reaction_2d":
            return Law(_all, lambda state: _reaction_rate(state, spacing))
        case "incompressible_ns_2d":
            return Law(lambda u: u[:, 2:], lambda u: _carried(u, spacing))
        case "compressible_ns_1d" | "compressible_ns_2d" | "compressible_ns_3d":
            return Law(_conserved, lambda u: _inviscid_rate(u, spacing, boundary))
    return None


def central(u: Tensor, axis: int, dx: float, boundary: str) -> Tensor:
    """(u_(i+1) - u_(i-1)) / (2 dx); beyond the ends the other end, the same value (open), or its negative (wall)."""
    if boundary == "periodic":
        return (u.roll(-1, axis) - u.roll(1, axis)) / (2 * dx)
    sign = -1 if boundary == "wall" else 1
    low, high = sign * u.narrow(axis, 0, 1), sign * u.narrow(axis, u.shape[axis] - 1, 1)
    padded = torch.cat((low, u, high), dim=axis)
    return (padded.narrow(axis, 2, u.shape[axis]) - padded.narrow(axis, 0, u.shape[axis])) / (2 * dx)


def wall_divergence(v: Tensor, spacing: tuple[float, ...]) -> Tensor:
    """Divergence of velocities (B, d, *grid) at cell centres that vanish on the walls: (B, *grid)."""
    return sum(central(v[:, a], a + 1, dx, "wall") for a, dx in enumerate(spacing))


def _all(u: Tensor) -> Tensor:
    return u


def _second(u: Tensor, dx: float) -> Tensor:
    return (u.roll(-1, -1) - 2 * u + u.roll(1, -1)) / dx**2


def _reaction_rate(state: Tensor, spacing: tuple[float, ...]) -> Tensor:
    laplacian = zero_flux_laplacian(state, *spacing)
    u, v = state.unbind(1)
    return torch.stack((D_u * laplacian[:, 0] + u - u**3 - k - v, D_v * laplacian[:, 1] + u - v), dim=1)


def _carried(u: Tensor, spacing: tuple[float, ...]) -> Tensor:
    """-v . grad c of incompressible flow, whose pressure, and so the change of v, is not stored."""
    v, c = u[:, :2], u[:, 2:]
    return -sum(v[:, a : a + 1] * central(c, a + 2, dx, "zero_flux") for a, dx in enumerate(spacing))


def _conserved(u: Tensor) -> Tensor:
    return conserved(u.movedim(1, 0)).movedim(0, 1)


def _inviscid_rate(u: Tensor, spacing: tuple[float, ...], boundary: str) -> Tensor:
    """Change of rho, E and rho v by Euler's fluxes; the stress is left out, small with PDEBench's viscosities."""
    U, p = _conserved(u), u[:, 1:2]
    rate = torch.zeros_like(u)
    for a, dx in enumerate(spacing):
        pressure = torch.zeros_like(u)
        pressure[:, 1:2], pressure[:, 2 + a : 3 + a] = p * u[:, 2 + a : 3 + a], p
        rate -= central(U * u[:, 2 + a : 3 + a] + pressure, a + 2, dx, boundary)
    return rate
