"""The table of simulated families on PDEBench's domains, and the entry to their solvers.

`PROBLEMS` has the initial states, scheme and equation of each family; `sample_initial_states`, `solve` and `evolve`
make random initial states and the trajectories that start from them. A further family is one module of this folder, one
entry here, and its entry in `ups.data.pdebench`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite, prod

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers import compressible, darcy, hyperbolic, incompressible, reaction
from ups.solvers.numerics import Box, Evolution, Fields, Stepper, aligned, identity, integrate
from ups.solvers.random_fields import Sample

Coefficients = dict[str, float | Tensor]

CHUNK_VALUES = 2**15  # numbers in the states advanced together: enough for full speed, few enough for the cache


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One simulated family on [low, high]^num_axes, with `num_fields` stored fields.

    `initial_states` has a function per kind of random initial state; it depends on the cells, a random generator and
    the parameters of the equation. `coefficients` are the numbers and `given_fields` the fields constant in time that
    the solver needs; parameters and random coefficients of the initial state provide them. `boundaries` are the
    conditions one can choose from, the first by default; empty where there is only one.

    A transient family has a `stepper`: time step and its limit for given coefficients and cells. Its solver may advance
    another state than the fields that are stored: `to_state` and `to_fields` convert. Its equation in the stored fields
    u is quantity(u)_t = rate(u, coefficients, spacing, boundary); no `rate` where they do not determine it.
    A steady family has `steady_solutions` instead, from coefficients and the length of the domain.

    `settings` are what PDEBench's generator writes beside a trajectory of this duration and number of snapshots.
    """

    num_axes: int
    num_fields: int = 1
    low: float = 0.0
    high: float = 1.0
    initial_states: dict[str, Callable[[Box, np.random.Generator, dict[str, float]], Sample]]
    coefficients: tuple[str, ...] = ()
    given_fields: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    stepper: Callable[[dict[str, Tensor], Box], Stepper] | None = None
    to_state: Fields = identity
    to_fields: Fields = identity
    rate: Callable[[Tensor, dict[str, float], tuple[float, ...], str], Tensor] | None = None
    quantity: Fields = identity
    steady_solutions: Callable[[dict[str, float | Tensor], float], Tensor] | None = None
    settings: Callable[[float, int], dict[str, float]] | None = None

    @property
    def steady(self) -> bool:
        return self.stepper is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all coefficients that the solver needs."""
        return self.coefficients + self.given_fields

    def box(self, grid: tuple[int, ...], boundary: str | None = None) -> Box:
        """The domain in cells."""
        return Box(self.low, self.high, grid, boundary)


def _compressible(num_axes: int, low: float, **initial_states: Callable) -> Problem:
    return Problem(
        num_axes=num_axes, num_fields=2 + num_axes, low=low, coefficients=("eta", "zeta"),
        initial_states=initial_states, boundaries=("periodic", "outflow"),
        stepper=compressible.compressible, rate=compressible.euler_rate, quantity=compressible.conserved_fields,
    )  # fmt: skip


PROBLEMS = {
    "advection_1d": Problem(
        num_axes=1, coefficients=("beta",), initial_states={"Rand": hyperbolic.sines_state},
        stepper=hyperbolic.advection, rate=hyperbolic.advection_rate,
    ),
    "burgers_1d": Problem(
        num_axes=1, coefficients=("nu",), initial_states={"Rand": hyperbolic.sines_state},
        stepper=hyperbolic.burgers, rate=hyperbolic.burgers_rate,
    ),
    "diffusion_reaction_1d": Problem(
        num_axes=1, coefficients=("nu", "rho"), initial_states={"Rand": reaction.sines_in_unit_interval},
        stepper=reaction.logistic_diffusion, rate=reaction.logistic_diffusion_rate,
    ),
    "diffusion_sorption_1d": Problem(
        num_axes=1, initial_states={"Rand": reaction.uniform_state}, settings=reaction.diffusion_sorption_settings,
        stepper=reaction.diffusion_sorption, rate=reaction.diffusion_sorption_rate,
    ),
    "compressible_ns_1d": _compressible(1, -1.0, Rand=compressible.sines_gas, Shock=compressible.shock_tube),
    "darcy_2d": Problem(
        num_axes=2, coefficients=("beta",), given_fields=("nu",), initial_states={"Rand": darcy.permeability},
        steady_solutions=darcy.darcy_solutions,
    ),
    "compressible_ns_2d": _compressible(2, 0.0, Rand=compressible.fourier_gas, Turb=compressible.turbulent_gas),
    "diffusion_reaction_2d": Problem(
        num_axes=2, num_fields=2, low=-1.0, initial_states={"Rand": reaction.normal_state},
        stepper=reaction.fitzhugh_nagumo, rate=reaction.fitzhugh_nagumo_rate,
        settings=reaction.fitzhugh_nagumo_settings,
    ),
    "shallow_water_2d": Problem(
        num_axes=2, low=-2.5, high=2.5, initial_states={"Rand": hyperbolic.dam},
        stepper=hyperbolic.shallow_water, to_state=hyperbolic.at_rest, to_fields=hyperbolic.height_of,
        settings=hyperbolic.shallow_water_settings,
    ),
    "incompressible_ns_2d": Problem(
        num_axes=2, num_fields=3, given_fields=("force_x", "force_y"),
        initial_states={"Rand": incompressible.gaussian_state},
        stepper=incompressible.incompressible, to_state=incompressible.to_faces, to_fields=incompressible.to_centres,
        rate=incompressible.tracer_rate, quantity=incompressible.particles,
    ),
    "compressible_ns_3d": _compressible(3, 0.0, Rand=compressible.fourier_gas, Turb=compressible.turbulent_gas),
}  # fmt: skip
SIMULATED_FAMILIES = tuple(PROBLEMS)


def problem_of(family: str) -> Problem:
    """The entry of a family; a ConfigFault names the families that can be simulated."""
    if family not in PROBLEMS:
        raise ConfigFault(f"{family!r} cannot be simulated; families that can: {', '.join(SIMULATED_FAMILIES)}")
    return PROBLEMS[family]


def equation_of(family: str, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Evolution | None:
    """The equation of a family's stored fields; None where they do not determine it, or where there is no solver.

    Shallow water has none: the momenta are not stored.
    """
    problem = PROBLEMS.get(family)
    if problem is None or problem.rate is None:
        return None
    return Evolution(partial(problem.rate, c=c, spacing=spacing, boundary=boundary), problem.quantity)


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
