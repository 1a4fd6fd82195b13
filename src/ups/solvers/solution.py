"""The entry to all solvers: a family, its initial states and coefficients in, trajectories out."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.darcy import darcy
from ups.solvers.families import Problem, problem_of
from ups.solvers.shallow_water import shallow_water
from ups.solvers.transient import (
    Limit,
    Step,
    burgers,
    diffusion_reaction_1d,
    diffusion_reaction_2d,
    integrate,
    shift,
)

Coefficients = dict[str, float | Tensor]
Advance = Callable[[int], object]


def solve(
    family: str,
    u_0: Tensor | None,  # (B, C, *grid); None for a steady family
    coefficients: Coefficients,
    times: Sequence[float],
    advance: Advance | None = None,
) -> Tensor:
    """Trajectories (B, T, C, *grid) at `times`, starting from `u_0` at `times[0]`, computed in float64.

    A coefficient is a number or one value per trajectory (B,); names the family does not have are ignored. Darcy's
    `nu` is a field (B, X, Y) and its result (B, 1, 1, X, Y). `advance(n)` is called when `n` more snapshots are done,
    B * T in total.
    """
    problem = problem_of(family)
    missing = [name for name in problem.coefficients if name not in coefficients]
    if missing:
        raise ConfigFault(f"{family} needs the coefficients {', '.join(problem.coefficients)}; missing: {missing[0]}")
    advance = advance or (lambda n: None)
    if problem.steady:
        return _solve_darcy(coefficients, problem, advance)
    if u_0 is None or u_0.ndim != problem.num_axes + 2 or u_0.shape[1] != problem.num_fields:
        shape = "nothing" if u_0 is None else tuple(u_0.shape)
        raise ConfigFault(f"{family} needs u_0 of shape (B, {problem.num_fields}, *grid), got {shape}")
    times = [float(time) for time in times]
    if not times or any(stop <= start for start, stop in pairwise(times)):
        raise ConfigFault("times must increase")
    return _solve_transient(family, u_0, coefficients, times, advance).to(u_0.dtype)


def _solve_transient(
    family: str, u_0: Tensor, coefficients: Coefficients, times: list[float], advance: Advance
) -> Tensor:
    problem = problem_of(family)
    c = {name: _per_trajectory(name, coefficients[name], u_0) for name in problem.coefficients}
    u = u_0.double()
    if family == "shallow_water_2d":
        u = torch.cat((u, torch.zeros_like(u), torch.zeros_like(u)), dim=1)
    snapshots = [u]
    advance(len(u))
    for start, stop in pairwise(times):
        if family == "advection_1d":
            u = shift(snapshots[0], c["beta"] * (stop - times[0]), problem.length)
        else:
            u = integrate(*_stepper(family, c, problem, u_0.shape[2:]), u, stop - start)
        snapshots.append(u)
        advance(len(u))
    return torch.stack(snapshots, dim=1)[:, :, : problem.num_fields]


def _stepper(family: str, c: dict[str, Tensor], problem: Problem, grid: tuple[int, ...]) -> tuple[Step, Limit]:
    match family:
        case "burgers_1d":
            return burgers(c["nu"], problem.length, grid[0])
        case "diffusion_reaction_1d":
            return diffusion_reaction_1d(c["nu"], c["rho"], problem.length)
        case "diffusion_reaction_2d":
            return diffusion_reaction_2d(problem.length, grid)
        case "shallow_water_2d":
            return shallow_water(problem.length, grid)
    raise AssertionError(f"{family} has a problem, but no stepper")


def _solve_darcy(coefficients: Coefficients, problem: Problem, advance: Advance) -> Tensor:
    nu = torch.as_tensor(coefficients["nu"])
    if nu.ndim != 3:
        raise ConfigFault(f"darcy_2d needs a permeability nu of shape (B, X, Y), got {tuple(nu.shape)}")
    beta = _per_trajectory("beta", coefficients["beta"], nu).expand(len(nu), 1, 1)
    u = []
    for nu_i, beta_i in zip(nu.double().cpu().numpy(), beta.cpu().numpy(), strict=True):
        u.append(torch.from_numpy(darcy(nu_i, beta_i, problem.length)))
        advance(1)
    return torch.stack(u)[:, None, None].to(nu)


def _per_trajectory(name: str, value: float | Tensor, u: Tensor) -> Tensor:
    """A coefficient in float64 with the axes of the state `u`."""
    value = torch.as_tensor(value, dtype=torch.float64, device=u.device)
    if value.ndim > 1 or value.numel() not in (1, len(u)):
        raise ConfigFault(f"coefficient {name} must be a number or {len(u)} values, got shape {tuple(value.shape)}")
    return value.reshape(-1, *[1] * (u.ndim - 1))
