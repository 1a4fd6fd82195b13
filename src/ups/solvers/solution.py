"""The entry to all solvers: random initial states of a family, and the trajectories that start from them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import isfinite, prod

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.families import Problem, problem_of
from ups.solvers.numerics import aligned, integrate

Coefficients = dict[str, float | Tensor]

CHUNK_VALUES = 2**15  # numbers in the states advanced together: enough for full speed, few enough for the cache


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: for arrays of this size synchronizing threads costs more time than they save."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def sample_initial_states(
    family: str,
    indices: Sequence[int],
    grid: tuple[int, ...],
    seed: int,
    parameters: dict[str, float] | None = None,
    *,
    start: str = "Rand",
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Random initial states (B, C, *grid) of the trajectories `indices`, and the coefficients that are random too.

    Trajectory `i` depends on `(seed, i)` alone. Coefficients are fields (B, *grid) in float32 or numbers (B,) in
    float64: Darcy's permeability `nu` (a steady family has no initial state), the `dam_radius` of shallow water, the
    forces `force_x`, `force_y` of incompressible Navier-Stokes. Compressible flow starts as PDEBench's `Rand`, `Shock`
    (1D) or `Turb` (2D, 3D), in two and three dimensions at the Mach number `parameters["mach"]`.
    """
    problem = problem_of(family)
    if len(grid) != problem.num_axes:
        raise ConfigFault(f"{family} has {problem.num_axes} axes, but the grid is {grid}")
    if start not in problem.initial_states:
        raise ConfigFault(f"{family}: start must be one of {', '.join(problem.initial_states)}, got {start!r}")
    box, sample = problem.box(grid), problem.initial_states[start]
    generators = [np.random.default_rng([seed, index]) for index in indices]
    states, coefficients = zip(*(sample(box, generator, parameters or {}) for generator in generators), strict=True)
    u_0 = None if problem.steady else _stack(states)
    return u_0, {name: _stack([c[name] for c in coefficients]) for name in coefficients[0]}


def _stack(values: Sequence[np.ndarray]) -> Tensor:
    stacked = torch.from_numpy(np.stack(values))
    return stacked.float() if stacked.ndim > 1 else stacked


@one_thread()
def solve(
    family: str, u_0: Tensor | None, coefficients: Coefficients, times: Sequence[float], *, boundary: str | None = None
) -> Tensor:
    """Trajectories (B, T, C, *grid) at `times`, starting from `u_0` (B, C, *grid) at `times[0]`, computed in float64.

    A coefficient is a number or one value per trajectory (B,); Darcy's `nu` and the forces of incompressible
    Navier-Stokes are fields, one for all (*grid) or one each (B, *grid). Names the family does not have are ignored.
    A steady family has no `u_0` (None) and one snapshot. `boundary` is "periodic" or "outflow" for the compressible
    families, where PDEBench has both.
    """
    problem, c, times = _checked(family, u_0, coefficients, times, boundary)
    if problem.steady:
        return torch.stack(list(_evolve(problem, c, times, None, boundary)), dim=1)
    size = max(1, CHUNK_VALUES // prod(u_0.shape[1:]))
    chunks = []
    for start in range(0, len(u_0), size):
        rows = slice(start, start + size)
        own = {name: value if len(value) == 1 else value[rows] for name, value in c.items()}
        chunks.append(torch.stack(list(_evolve(problem, own, times, u_0[rows], boundary)), dim=1))
    return torch.cat(chunks)


def evolve(
    family: str, u_0: Tensor | None, coefficients: Coefficients, times: Sequence[float], *, boundary: str | None = None
) -> Iterator[Tensor]:
    """The snapshots (B, C, *grid) of `solve` one after the other, for trajectories that do not fit into memory."""
    return _evolve(*_checked(family, u_0, coefficients, times, boundary), u_0, boundary)


def _evolve(
    problem: Problem, c: Coefficients, times: list[float], u_0: Tensor | None, boundary: str | None
) -> Iterator[Tensor]:
    """The stored fields at `times` in the precision of `u_0`."""
    if problem.steady:
        yield problem.steady_solutions(c, problem.high - problem.low)
        return
    step, limit = problem.stepper(c, problem.box(tuple(u_0.shape[2:]), boundary))
    state = problem.to_state(u_0.double())
    yield u_0
    for start, stop in pairwise(times):
        state = integrate(step, limit, state, stop - start)
        yield problem.to_fields(state).to(u_0.dtype)


def _checked(
    family: str, u_0: Tensor | None, coefficients: Coefficients, times: Sequence[float], boundary: str | None
) -> tuple[Problem, Coefficients, list[float]]:
    """The family's entry, its coefficients (aligned with `u_0` unless steady) and the times; else a ConfigFault."""
    problem, times = problem_of(family), [float(time) for time in times]
    missing = [name for name in problem.inputs if name not in coefficients]
    if missing:
        raise ConfigFault(f"{family} needs the coefficients {', '.join(problem.inputs)}; missing: {missing[0]}")
    if boundary is not None and boundary not in problem.boundaries:
        choice = f"can be {' or '.join(problem.boundaries)}" if problem.boundaries else "cannot be chosen"
        raise ConfigFault(f"the boundary of {family} {choice}, got {boundary!r}")
    if not times or not all(map(isfinite, times)) or any(stop <= start for start, stop in pairwise(times)):
        raise ConfigFault(f"{family}: the times must increase and be finite")
    if problem.steady:
        return problem, coefficients, times
    if u_0 is None or u_0.ndim != problem.num_axes + 2 or u_0.shape[1] != problem.num_fields or not len(u_0):
        shape = "nothing" if u_0 is None else tuple(u_0.shape)
        raise ConfigFault(f"{family} needs u_0 of shape (B, {problem.num_fields}, *grid), got {shape}")
    if not u_0.is_floating_point() or not u_0.isfinite().all():
        raise ConfigFault(f"{family} needs a u_0 of finite floating-point numbers; check where it comes from")
    c = {name: aligned(name, coefficients[name], u_0, is_field=name in problem.given_fields) for name in problem.inputs}
    return problem, c, times
