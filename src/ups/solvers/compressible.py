"""Compressible Navier-Stokes in one, two or three dimensions by PDEBench's finite-volume scheme.

A state is primitive: density rho, pressure p and the d velocities v. Inside a step the fields come first,
W (2 + d, B, *grid), and fluxes are computed on lines (2 + d, N, M) along their axis, whose slices are contiguous.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ups.solvers.transient import Limit, Step, integrate, largest, limited_slope

GAMMA = 5 / 3
CFL = 0.3
LINE_VALUES = 2**16  # numbers in the lines whose fluxes are computed together
PRESSURE_FLOOR, PRESSURE_REPAIR = 1e-8, 1e-4  # PDEBench sets what falls below the first to the second


def conserved(W: Tensor) -> Tensor:
    """Return rho, energy E = p / (Gamma - 1) + rho |v|^2 / 2 and momenta rho v of primitive fields (2 + d, ...)."""
    momentum = W[:1] * W[2:]
    energy = W[1] / (GAMMA - 1) + 0.5 * (momentum * W[2:]).sum(0)
    return torch.cat((W[:1], energy[None], momentum))


def primitive(U: Tensor) -> Tensor:
    """Inverse of `conserved`; a pressure that is lost to cancellation is repaired as PDEBench does it."""
    v = U[2:] / U[:1]
    p = (GAMMA - 1) * (U[1] - 0.5 * (U[2:] * v).sum(0))
    return torch.cat((U[:1], torch.where(p > PRESSURE_FLOOR, p, PRESSURE_REPAIR)[None], v))


def by_lines(change: Callable[[Tensor, slice], Tensor], W: Tensor, axis: int) -> Tensor:
    """`change` of the lines (C, N, M) of W (C, B, *grid) along `axis`, some at a time so that they stay in the cache.

    `change` is also told which of the M lines it gets.
    """
    W = W.movedim(axis, 1)
    lines = W.flatten(2)
    size = max(1, LINE_VALUES // (lines.shape[0] * lines.shape[1]))
    parts = [slice(start, start + size) for start in range(0, lines.shape[2], size)]
    return torch.cat([change(lines[:, :, part], part) for part in parts], dim=2).view(W.shape).movedim(1, axis)


def with_ghosts(W: Tensor, width: int, periodic: bool) -> Tensor:
    """Lines with ghost cells at both ends: the cells of the other end, or the mirror image of this one (outflow)."""
    low, high = W[:, :width], W[:, -width:]
    return torch.cat((high, W, low) if periodic else (low.flip(1), W, high.flip(1)), dim=1)


def hllc(W_L: Tensor, W_R: Tensor, normal: int) -> Tensor:
    """HLLC flux of (rho, E, rho v) through faces whose normal velocity is the field `normal`.

    Toro, Riemann Solvers and Numerical Methods for Fluid Dynamics, 10.4, with the wave speeds
    S_L = min(v_L, v_R) - max(c_L, c_R) and S_R = max(v_L, v_R) + max(c_L, c_R).
    The flux is F_K + S_K (U*_K - U_K) on the side K of the contact, F_K alone in supersonic flow.
    """
    rho_L, p_L, v_L = W_L[0], W_L[1], W_L[normal]
    rho_R, p_R, v_R = W_R[0], W_R[1], W_R[normal]
    c = (GAMMA * torch.maximum(p_L / rho_L, p_R / rho_R)).sqrt()
    S_L, S_R = torch.minimum(v_L, v_R) - c, torch.maximum(v_L, v_R) + c
    inflow_L, inflow_R = rho_L * (S_L - v_L), rho_R * (S_R - v_R)
    S_star = (p_R - p_L + v_L * inflow_L - v_R * inflow_R) / (inflow_L - inflow_R)
    is_left = S_star >= 0
    limited = torch.where(is_left, S_L.clamp(max=0), S_R.clamp(min=0))
    return _one_sided_flux(torch.where(is_left, W_L, W_R), normal, torch.where(is_left, S_L, S_R), S_star, limited)


def _one_sided_flux(W: Tensor, normal: int, S: Tensor, S_star: Tensor, limited: Tensor) -> Tensor:
    """F + limited (U* - U) of one side of the contact, where `limited` is S or 0."""
    rho, p, v = W[0], W[1], W[normal]
    compression = (S - v) / (S - S_star)  # rho* / rho
    scale = v + limited * (compression - 1)
    gain = limited * compression * (S_star - v)
    F = scale * conserved(W)
    F[1] += p * v + gain * (rho * S_star + p / (S - v))
    F[normal] += p + gain * rho
    return F


def inviscid_change(W: Tensor, normal: int, dx: float, periodic: bool) -> Tensor:
    """(F_{i+1/2} - F_{i-1/2}) / dx of lines (C, N, M) with fluxes between limited linear primitive states."""
    W = with_ghosts(W, 2, periodic)
    difference = W[:, 1:] - W[:, :-1]
    half_slope = 0.5 * limited_slope(difference[:, :-1], difference[:, 1:])
    centre = W[:, 1:-1]
    flux = hllc((centre + half_slope)[:, :-1], (centre - half_slope)[:, 1:], normal)
    return (flux[:, 1:] - flux[:, :-1]) / dx


def viscous_change(W: Tensor, dx: float, periodic: bool, viscosity: Tensor) -> Tensor:
    """Change of (rho, E, rho v) of lines (C, N, M) by the stresses tau = rho viscosity dv/dx on their faces.

    `viscosity` (d, 1, M or 1) is zeta + 4 eta / 3 for the velocity along the lines, eta for the others; E gains
    v . tau.
    """
    W = with_ghosts(W, 1, periodic)
    mean = 0.5 * (W[:, 1:] + W[:, :-1])
    stress = mean[:1] * viscosity * (W[2:, 1:] - W[2:, :-1]) / dx
    work = (mean[2:] * stress).sum(0)
    flux = torch.cat((torch.zeros_like(work)[None], work[None], stress))
    return (flux[:, 1:] - flux[:, :-1]) / dx


def compressible(eta: Tensor, zeta: Tensor, spacing: tuple[float, ...], *, periodic: bool) -> tuple[Step, Limit]:
    """Midpoint rule with MUSCL and HLLC, CFL number 0.3, then viscosity in sub-steps, one direction after the other."""
    axes = dict(zip(range(2, 2 + len(spacing)), spacing, strict=True))  # also the field of the velocity along that axis
    along_axis = zeta + 4 / 3 * eta
    sub_step_limit = CFL * 0.5 * min(spacing) ** 2 / along_axis.clamp(min=1e-300)

    def inviscid(W: Tensor) -> Tensor:
        return sum(
            by_lines(lambda lines, _, axis=axis, dx=dx: inviscid_change(lines, axis, dx, periodic), W, axis)
            for axis, dx in axes.items()
        )

    def viscous(W: Tensor, axis: int, dx: float) -> Tensor:
        values = torch.stack([along_axis if velocity == axis else eta for velocity in axes]).flatten(2)
        num_lines = W[0, 0].numel() // W.shape[axis]
        viscosity = values.expand(-1, W.shape[1], num_lines).flatten(1)[:, None]
        return by_lines(lambda lines, part: viscous_change(lines, dx, periodic, viscosity[..., part]), W, axis)

    def viscous_step(u: Tensor, dt: Tensor) -> Tensor:
        W, dt = u.transpose(0, 1), dt.transpose(0, 1)
        for axis, dx in axes.items():
            W = primitive(conserved(W) + dt * viscous(W, axis, dx))
        return W.transpose(0, 1)

    def step(u: Tensor, dt: Tensor) -> Tensor:
        W, interval = u.transpose(0, 1), dt.transpose(0, 1)
        U = conserved(W)
        W_star = primitive(U - 0.5 * interval * inviscid(W))
        W = primitive(U - interval * inviscid(W_star))
        return integrate(viscous_step, lambda _: sub_step_limit, W.transpose(0, 1), dt)

    def limit(u: Tensor) -> Tensor:
        c = (GAMMA * u[:, 1:2] / u[:, :1]).sqrt()
        dx = u.new_tensor(spacing).reshape(-1, *[1] * len(spacing))
        return CFL / largest((u[:, 2:].abs() + c) / dx)

    return step, limit
