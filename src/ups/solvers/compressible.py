"""Compressible Navier-Stokes in one, two or three dimensions by PDEBench's finite-volume scheme.

A state is primitive: density rho, pressure p and the d velocities v. Inside a step the fields come first,
W (2 + d, B, *grid), and fluxes are computed on lines (2 + d, N, ...) along their axis, whose slices are contiguous.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.numerics import Box, Stepper, central_difference, face_states, integrate, largest
from ups.solvers.random_fields import Sample, fourier_field, rescaled, sines, solenoidal, window

GAMMA = 5 / 3
CFL = 0.3
LINE_VALUES = 2**16  # numbers in the lines whose fluxes are computed together
PRESSURE_FLOOR, PRESSURE_REPAIR = 1e-8, 1e-4  # PDEBench sets what falls below the first to the second
MIN_FRACTION = 0.01  # smallest density or pressure, relative to its mean: keeps both positive


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

    Large grids are processed in groups of lines, to limit memory and use the cache.
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
    return hllc(*face_states(with_ghosts(W, 2, periodic), 1), normal).diff(dim=1) / dx


def viscous_change(W: Tensor, dx: float, periodic: bool, viscosity: Tensor) -> Tensor:
    """Change of (rho, E, rho v) of lines (C, N, ...) by the stresses tau = rho viscosity dv/dx on their faces.

    `viscosity` (d, 1, ...) is zeta + 4 eta / 3 for the velocity along the lines, eta for the others; E gains v . tau.
    """
    W = with_ghosts(W, 1, periodic)
    mean = 0.5 * (W[:, 1:] + W[:, :-1])
    stress = mean[:1] * viscosity * W[2:].diff(dim=1) / dx
    work = (mean[2:] * stress).sum(0, keepdim=True)
    return torch.cat((torch.zeros_like(work), work, stress)).diff(dim=1) / dx


def compressible(c: dict[str, Tensor], box: Box) -> Stepper:
    """Midpoint rule with MUSCL and HLLC, CFL number 0.3, then viscosity in sub-steps, one direction after the other."""
    eta, zeta, spacing, periodic = c["eta"], c["zeta"], box.spacing, box.boundary != "outflow"
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

    def step(u: Tensor, dt: Tensor) -> Tensor:
        W, dt_W = u.transpose(0, 1), dt.transpose(0, 1)
        U = conserved(W)
        W = inviscid_update(U, inviscid_update(U, W, 0.5 * dt_W), dt_W)
        return integrate(viscous_step, lambda _: sub_step_limit, W.transpose(0, 1), dt)

    def limit(u: Tensor) -> Tensor:
        sound = (GAMMA * u[:, 1:2] / u[:, :1]).sqrt()
        dx = u.new_tensor(spacing).reshape(-1, *[1] * len(spacing))
        return CFL / largest((u[:, 2:].abs() + sound) / dx)

    return step, limit


def conserved_fields(u: Tensor) -> Tensor:
    """Return rho, E and rho v of stored fields (B, 2 + d, *grid)."""
    return conserved(u.movedim(1, 0)).movedim(0, 1)


def euler_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """Euler's equations of rho, E and rho v; the stress is left out, small with PDEBench's viscosities."""
    U, change = conserved_fields(u), torch.zeros_like(u)
    for axis, dx in enumerate(spacing, start=2):  # also the channel of the velocity along that axis
        v, p = u[:, axis : axis + 1], u[:, 1:2]
        pressure = torch.zeros_like(u)
        pressure[:, 1:2], pressure[:, axis : axis + 1] = p * v, p
        change -= central_difference(U * v + pressure, axis, dx, boundary)
    return change


def sines_gas(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """PDEBench's `Rand` in one dimension, three sums of sines: v, rho and p, the latter rescaled to b + m [0, 1].

    b and m are log-uniform in 1..10 for rho and in 10..100 for p.
    """
    rho, p, v = (sines(box.centres[0], generator, num_modes=3, P=0.5) for _ in range(3))
    m_rho, b_rho = 10 ** generator.uniform(0.0, 1.0, 2)
    m_p, b_p = 10 ** generator.uniform(1.0, 2.0, 2)
    return np.stack((b_rho + m_rho * rescaled(rho), b_p + m_p * rescaled(p), v)), {}


def shock_tube(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """PDEBench's `Shock`: two constant states, log-uniform rho in 1..10, p in 10..100 and v in exp(-1/2)..exp(1/2).

    Each field has its own jump, at the fraction 1/4 + r/2 of the cells with the r of its right state.
    """
    r = generator.uniform(0.0, 1.0, (3, 2))
    states = np.stack((10 ** r[0], 10 ** (1 + r[1]), np.exp(r[2] - 0.5)))
    num_cells = box.grid[0]
    jump = np.floor(num_cells * (0.25 + 0.5 * r[:, 1]))
    return np.where(np.arange(num_cells) < jump[:, None], states[:, :1], states[:, 1:]), {}


def fourier_gas(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """PDEBench's `Rand` in two and three dimensions: smooth perturbations of a gas at rest, half of them in a window.

    With mean density rho_0 and mean temperature T_0:
    rho = rho_0 (1 + delta F), p = rho_0 T_0 (1 + delta' F'), mean |v| = mach sqrt(Gamma T_0).
    """
    axes, mach = box.centres, mach_number(parameters)
    rho_0, T_0 = generator.uniform(0.1, 10.0, 2)
    delta_rho, delta_p = generator.uniform(0.01, 0.2, 2)
    p_0 = rho_0 * T_0
    rho = rho_0 * np.maximum(1 + delta_rho * fourier_field(axes, generator), MIN_FRACTION)
    p = p_0 * np.maximum(1 + delta_p * fourier_field(axes, generator), MIN_FRACTION)
    v = np.stack([fourier_field(axes, generator) for _ in axes])
    v *= mach * np.sqrt(GAMMA * T_0) / np.sqrt((v**2).sum(axis=0)).mean()
    if generator.uniform() < 0.5:
        edges = [window(x, generator.uniform(0.1, 0.45), generator.uniform(0.55, 0.9)) for x in axes]
        W = reduce(np.multiply.outer, edges)
        rho, p, v = W * rho + (1 - W) * rho_0, W * p + (1 - W) * p_0, W * v
    return np.stack((rho, p, *v)), {}


def turbulent_gas(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """PDEBench's `Turb`: rho = 1, p = 1 / (Gamma mach^2), and a velocity without divergence of mean |v| = 1."""
    axes, mach = box.centres, mach_number(parameters)
    v = solenoidal(np.stack([fourier_field(axes, generator) for _ in axes]))
    v /= np.sqrt((v**2).sum(axis=0)).mean()
    rest = np.ones(v.shape[1:])
    return np.stack((rest, rest / (GAMMA * mach**2), *v)), {}


def mach_number(parameters: dict[str, float]) -> float:
    """The parameter `mach`; a ConfigFault if it is missing or not above 0."""
    mach = parameters.get("mach")
    if not (mach and isfinite(mach) and mach > 0):
        raise ConfigFault(f"compressible flow needs a Mach number above 0, got {mach}")
    return mach
