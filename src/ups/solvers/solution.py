"""The entry to all solvers: a family, its initial states and coefficients in, trajectories out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import isfinite, prod

import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.compressible import compressible
from ups.solvers.darcy import darcy
from ups.solvers.families import Problem, problem_of
from ups.solvers.incompressible import incompressible, to_centres, to_faces
from ups.solvers.shallow_water import shallow_water
from ups.solvers.sorption import diffusion_sorption
from ups.solvers.transient import (
    Limit,
    Step,
    advection,
    burgers,
    diffusion_reaction_1d,
    diffusion_reaction_2d,
    integrate,
    shift,
)

Coefficients = dict[str, float | Tensor]
Advance = Callable[[int], object]

SCHEMES = ("generator", "accurate")
CHUNK_VALUES = 2**15  # numbers in the states advanced together: enough for full speed, few enough for the cache


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: arrays of this size lose more to threads that wait for each other than they gain."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@one_thread()
def solve(
    family: str,
    u_0: Tensor | None,  # (B, C, *grid); None for a steady family
    coefficients: Coefficients,
    times: Sequence[float],
    advance: Advance | None = None,
    *,
    scheme: str = "generator",
    boundary: str | None = None,
) -> Tensor:
    """Trajectories (B, T, C, *grid) at `times`, starting from `u_0` at `times[0]`, computed in float64.

    A coefficient is a number or one value per trajectory (B,); Darcy's `nu` and the forces of incompressible
    Navier-Stokes are fields, one for all (*grid) or one each (B, *grid). Names the family does not have are ignored.
    Darcy has no `u_0` and one snapshot. `advance(n)` is called when `n` more snapshots are done, B * T in total.

    `scheme` matters for advection, where PDEBench's own scheme blurs what an exact shift (`accurate`) keeps sharp.
    `boundary` is "periodic" or "outflow" for the compressible families, where PDEBench has both.
    """
    chunks = []
    for u_0_chunk, c in _chunks(family, u_0, coefficients):
        snapshots = []
        for u in evolve(family, u_0_chunk, c, times, scheme=scheme, boundary=boundary):
            snapshots.append(u)
            if advance:
                advance(len(u))
        chunks.append(torch.stack(snapshots, dim=1))
    return torch.cat(chunks)


def evolve(
    family: str,
    u_0: Tensor | None,
    coefficients: Coefficients,
    times: Sequence[float],
    *,
    scheme: str = "generator",
    boundary: str | None = None,
) -> Iterator[Tensor]:
    """The snapshots (B, C, *grid) of `solve` one after the other, for trajectories too long to be held at once."""
    problem = problem_of(family)
    _check(family, problem, coefficients, scheme, boundary)
    times = [float(time) for time in times]
    if not times or not all(map(isfinite, times)) or any(stop <= start for start, stop in pairwise(times)):
        raise ConfigFault("times must increase")
    if problem.steady:
        return iter((_solve_darcy(coefficients, problem),))
    _check_state(family, problem, u_0)
    c = {name: _coefficient(name, coefficients[name], u_0, name in problem.given_fields) for name in _names(problem)}
    if family == "advection_1d" and scheme == "accurate":
        u = u_0.double()
        return (shift(u, c["beta"] * (time - times[0]), problem.length).to(u_0.dtype) for time in times)
    return _integrated(family, *_stepper(family, c, problem, u_0.shape[2:], boundary), u_0, times)


def _chunks(
    family: str, u_0: Tensor | None, coefficients: Coefficients
) -> Iterator[tuple[Tensor | None, Coefficients]]:
    """Some trajectories at a time, and their own coefficients."""
    problem = problem_of(family)
    if problem.steady:
        yield u_0, coefficients
        return
    _check_state(family, problem, u_0)
    size = max(1, CHUNK_VALUES // prod(u_0.shape[1:]))
    values = {name: torch.as_tensor(coefficients[name]) for name in _names(problem) if name in coefficients}
    axes = {name: 1 + problem.num_axes if name in problem.given_fields else 1 for name in values}
    own = {name: value for name, value in values.items() if value.ndim == axes[name] and len(value) == len(u_0)}
    for start in range(0, len(u_0), size):
        rows = slice(start, start + size)
        yield u_0[rows], {**coefficients, **{name: value[rows] for name, value in own.items()}}


def _check_state(family: str, problem: Problem, u_0: Tensor | None) -> None:
    if u_0 is None or u_0.ndim != problem.num_axes + 2 or u_0.shape[1] != problem.num_fields or not len(u_0):
        shape = "nothing" if u_0 is None else tuple(u_0.shape)
        raise ConfigFault(f"{family} needs u_0 of shape (B, {problem.num_fields}, *grid), got {shape}")
    if not u_0.is_floating_point() or not u_0.isfinite().all():
        raise ConfigFault(f"{family} needs a u_0 of finite floating-point numbers; check where it comes from")


def _names(problem: Problem) -> tuple[str, ...]:
    return problem.coefficients + problem.given_fields


def _check(family: str, problem: Problem, coefficients: Coefficients, scheme: str, boundary: str | None) -> None:
    missing = [name for name in _names(problem) if name not in coefficients]
    if missing:
        raise ConfigFault(f"{family} needs the coefficients {', '.join(_names(problem))}; missing: {missing[0]}")
    if scheme not in SCHEMES:
        raise ConfigFault(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if boundary is not None and boundary not in problem.boundaries:
        choice = f"can be {' or '.join(problem.boundaries)}" if problem.boundaries else "cannot be chosen"
        raise ConfigFault(f"the boundary of {family} {choice}, got {boundary!r}")


def _integrated(family: str, step: Step, limit: Limit, u_0: Tensor, times: list[float]) -> Iterator[Tensor]:
    """The stored fields; two families advance another state than they store."""
    state = u_0.double()
    if family == "shallow_water_2d":  # h, hu, hv, of which h is stored
        state = torch.cat((state, torch.zeros_like(state), torch.zeros_like(state)), dim=1)
    elif family == "incompressible_ns_2d":
        state = to_faces(state)
    yield u_0
    for start, stop in pairwise(times):
        state = integrate(step, limit, state, stop - start)
        stored = to_centres(state) if family == "incompressible_ns_2d" else state[:, : u_0.shape[1]]
        yield stored.to(u_0.dtype)


def _stepper(
    family: str, c: dict[str, Tensor], problem: Problem, grid: tuple[int, ...], boundary: str | None
) -> tuple[Step, Limit]:
    match family:
        case "advection_1d":
            return advection(c["beta"], problem.length, grid[0])
        case "burgers_1d":
            return burgers(c["nu"], problem.length, grid[0])
        case "diffusion_reaction_1d":
            return diffusion_reaction_1d(c["nu"], c["rho"], problem.length)
        case "diffusion_sorption_1d":
            return diffusion_sorption(problem.length, grid[0])
        case "diffusion_reaction_2d":
            return diffusion_reaction_2d(problem.length, grid)
        case "shallow_water_2d":
            return shallow_water(problem.length, grid)
        case "incompressible_ns_2d":
            return incompressible(c["force_x"][:, 0], c["force_y"][:, 0], problem.length, grid)
        case "compressible_ns_1d" | "compressible_ns_2d" | "compressible_ns_3d":
            return compressible(c["eta"], c["zeta"], problem.spacing(grid), periodic=boundary != "outflow")
    raise AssertionError(f"{family} has a problem, but no stepper")


def _solve_darcy(coefficients: Coefficients, problem: Problem) -> Tensor:
    nu = torch.as_tensor(coefficients["nu"])
    if nu.ndim not in (2, 3):
        raise ConfigFault(f"darcy_2d needs a permeability nu of shape (X, Y) or (B, X, Y), got {tuple(nu.shape)}")
    fields = nu.reshape(-1, 1, *nu.shape[-2:])
    beta = torch.as_tensor(coefficients["beta"])
    if len(fields) == 1 and beta.ndim == 1:
        fields = fields.expand(len(beta), -1, -1, -1)
    beta = _coefficient("beta", beta, fields, beta.ndim > 1).expand(len(fields), -1, -1, -1)
    pairs = zip(fields[:, 0].double().cpu().numpy(), beta[:, 0].cpu().numpy(), strict=True)
    u = [torch.from_numpy(darcy(nu_i, beta_i, problem.length)) for nu_i, beta_i in pairs]
    return torch.stack(u)[:, None].to(nu)


def _coefficient(name: str, value: float | Tensor, u: Tensor, is_field: bool) -> Tensor:
    """A coefficient in float64 with the axes of the state `u` (B, C, *grid), and 1 or B trajectories."""
    value = torch.as_tensor(value, dtype=torch.float64, device=u.device)
    grid = tuple(u.shape[2:])
    if is_field and value.shape in (grid, (1, *grid), (len(u), *grid)):
        return value.reshape(-1, 1, *grid)
    if not is_field and value.ndim <= 1 and value.numel() in (1, len(u)):
        return value.reshape(-1, *[1] * (u.ndim - 1))
    expected = f"a field {grid} or {len(u)} of them" if is_field else f"a number or {len(u)} values"
    raise ConfigFault(f"coefficient {name} must be {expected}, got shape {tuple(value.shape)}")
