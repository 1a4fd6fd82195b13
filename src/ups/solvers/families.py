"""The families that can be simulated: their domain, fields and coefficients, as in PDEBench."""

from dataclasses import dataclass

from ups.errors import ConfigFault


@dataclass(frozen=True)
class Problem:
    """What a solver has to know about a family: the domain is `(low, high)` along each of `num_axes` axes."""

    num_axes: int
    num_fields: int
    low: float
    high: float
    coefficients: tuple[str, ...] = ()
    steady: bool = False

    @property
    def length(self) -> float:
        return self.high - self.low


PROBLEMS = {
    "advection_1d": Problem(1, 1, 0.0, 1.0, ("beta",)),
    "burgers_1d": Problem(1, 1, 0.0, 1.0, ("nu",)),
    "diffusion_reaction_1d": Problem(1, 1, 0.0, 1.0, ("nu", "rho")),
    "darcy_2d": Problem(2, 1, 0.0, 1.0, ("nu", "beta"), steady=True),
    "diffusion_reaction_2d": Problem(2, 2, -1.0, 1.0),
    "shallow_water_2d": Problem(2, 1, -2.5, 2.5),
}
SIMULATED_FAMILIES = tuple(PROBLEMS)


def problem_of(family: str) -> Problem:
    """The entry of a family; a ConfigFault names the families there are."""
    if family not in PROBLEMS:
        raise ConfigFault(f"{family!r} cannot be simulated; families that can: {', '.join(SIMULATED_FAMILIES)}")
    return PROBLEMS[family]
