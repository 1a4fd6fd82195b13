"""The families that can be simulated: their domain, fields and coefficients, as in PDEBench."""

from dataclasses import dataclass

from ups.errors import ConfigFault


@dataclass(frozen=True)
class Problem:
    """What a solver has to know about a family: the domain is `(low, high)` along each of `num_axes` axes.

    `coefficients` are numbers the solver needs, `given_fields` are coefficients that vary in space. The first of
    `boundaries` is the one a family has unless told otherwise.
    """

    num_axes: int
    num_fields: int
    low: float
    high: float
    coefficients: tuple[str, ...] = ()
    given_fields: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    steady: bool = False

    @property
    def length(self) -> float:
        return self.high - self.low

    def spacing(self, grid: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(self.length / points for points in grid)


PROBLEMS = {
    "advection_1d": Problem(1, 1, 0.0, 1.0, ("beta",)),
    "burgers_1d": Problem(1, 1, 0.0, 1.0, ("nu",)),
    "diffusion_reaction_1d": Problem(1, 1, 0.0, 1.0, ("nu", "rho")),
    "diffusion_sorption_1d": Problem(1, 1, 0.0, 1.0),
    "compressible_ns_1d": Problem(1, 3, -1.0, 1.0, ("eta", "zeta"), boundaries=("periodic", "outflow")),
    "darcy_2d": Problem(2, 1, 0.0, 1.0, ("beta",), ("nu",), steady=True),
    "compressible_ns_2d": Problem(2, 4, 0.0, 1.0, ("eta", "zeta"), boundaries=("periodic", "outflow")),
    "diffusion_reaction_2d": Problem(2, 2, -1.0, 1.0),
    "shallow_water_2d": Problem(2, 1, -2.5, 2.5),
    "incompressible_ns_2d": Problem(2, 3, 0.0, 1.0, given_fields=("force_x", "force_y")),
    "compressible_ns_3d": Problem(3, 5, 0.0, 1.0, ("eta", "zeta"), boundaries=("periodic", "outflow")),
}
SIMULATED_FAMILIES = tuple(PROBLEMS)


def problem_of(family: str) -> Problem:
    """The entry of a family; a ConfigFault names the families there are."""
    if family not in PROBLEMS:
        raise ConfigFault(f"{family!r} cannot be simulated; families that can: {', '.join(SIMULATED_FAMILIES)}")
    return PROBLEMS[family]
