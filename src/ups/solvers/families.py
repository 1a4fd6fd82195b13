"""The table of simulated families: initial states, scheme and equation of each, on PDEBench's domain.

A further family is one module of this folder, one entry here, and its entry in `ups.data.pdebench`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers import advection, compressible, darcy, incompressible, reaction, shallow_water
from ups.solvers.numerics import Box, Evolution, Fields, Stepper, identity
from ups.solvers.random_fields import Sample


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
        num_axes=1, coefficients=("beta",), initial_states={"Rand": advection.sines_state},
        stepper=advection.advection, rate=advection.advection_rate,
    ),
    "burgers_1d": Problem(
        num_axes=1, coefficients=("nu",), initial_states={"Rand": advection.sines_state},
        stepper=advection.burgers, rate=advection.burgers_rate,
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
        num_axes=2, low=-2.5, high=2.5, initial_states={"Rand": shallow_water.dam},
        stepper=shallow_water.shallow_water, to_state=shallow_water.at_rest, to_fields=shallow_water.height_of,
        settings=shallow_water.shallow_water_settings,
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
