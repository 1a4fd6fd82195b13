"""Compressible Navier-Stokes in one, two or three dimensions by PDEBench's finite-volume scheme.

A state is primitive: density rho, pressure p and the d velocities v. Inside a step the fields come first,
W (2 + d, B, *grid), and fluxes are computed on lines (2 + d, N, ...) along their axis, whose slices are contiguous.
"""

from collections.abc import Callable
from functools import partial

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
    W = torch.empty_like(U)
    W[0] = U[0]
    torch.div(U[2:], U[:1], out=W[2:])
    p = (GAMMA - 1) * (U[1] - 0.5 * (U[2:] * W[2:]).sum(0))
    W[1] = torch.where(p > PRESSURE_FLOOR, p, PRESSURE_REPAIR)
    return W


def add_change(total: Tensor, W: Tensor, axis: int, change: Callable[[Tensor], Tensor]) -> None:
    """Add to `total` the `change` of the lines of W (C, B, *grid) along `axis`, given as (C, N, B, ...).

    Large grids are done in parts across the lines, so that memory and cache hold what one part needs.
    """
    lines, sums = W.movedim(axis, 1), total.movedim(axis, 1)
    if lines.ndim == 3:
        sums += change(lines)
        return
    size = max(1, LINE_VALUES * lines.shape[3] // lines.numel())
    for part, part_of_sums in zip(lines.split(size, 3), sums.split(size, 3), strict=True):
        part_of_sums += change(part)


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
    """(F_{i+1/2} - F_{i-1/2}) / dx of lines (C, N, ...) with fluxes between limited linear primitive states."""
    W = with_ghosts(W, 2, periodic)
    difference = W[:, 1:] - W[:, :-1]
    half_slope = 0.5 * limited_slope(difference[:, :-1], difference[:, 1:])
    centre = W[:, 1:-1]
    flux = hllc((centre + half_slope)[:, :-1], (centre - half_slope)[:, 1:], normal)
    return (flux[:, 1:] - flux[:, :-1]) / dx


def viscous_change(W: Tensor, dx: float, periodic: bool, viscosity: Tensor) -> Tensor:
    """Change of (rho, E, rho v) of lines (C, N, ...) by the stresses tau = rho viscosity dv/dx on their faces.

    `viscosity` (d, 1, ...) is zeta + 4 eta / 3 for the velocity along the lines, eta for the others; E gains
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

    def inviscid_update(U: Tensor, W: Tensor, dt: Tensor) -> Tensor:
        total = torch.zeros_like(U)
        for axis, dx in axes.items():
            add_change(total, W, axis, partial(inviscid_change, normal=axis, dx=dx, periodic=periodic))
        return primitive(U - total.mul_(dt))

    def viscous_step(u: Tensor, dt: Tensor) -> Tensor:
        W, dt = u.transpose(0, 1), dt.transpose(0, 1)
        for axis, dx in axes.items():
            viscosity = torch.stack([along_axis if velocity == axis else eta for velocity in axes])
            stress = partial(viscous_change, dx=dx, periodic=periodic, viscosity=viscosity[:, None, :, 0, ..., 0])
            total = torch.zeros_like(W)
            add_change(total, W, axis, stress)
            W = primitive(conserved(W) + total.mul_(dt))
        return W.transpose(0, 1)

    def midpoint(W: Tensor, dt: Tensor) -> Tensor:
        U = conserved(W)
        return inviscid_update(U, inviscid_update(U, W, 0.5 * dt), dt)

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u = midpoint(u.transpose(0, 1), dt.transpose(0, 1)).transpose(0, 1)
        return integrate(viscous_step, lambda _: sub_step_limit, u, dt)

    def limit(u: Tensor) -> Tensor:
        c = (GAMMA * u[:, 1:2] / u[:, :1]).sqrt()
        dx = u.new_tensor(spacing).reshape(-1, *[1] * len(spacing))
        return CFL / largest((u[:, 2:].abs() + c) / dx)

    return step, limit
