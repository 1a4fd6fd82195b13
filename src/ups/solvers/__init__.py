"""PDEBench's equations: random initial states and their solutions, without files or configuration."""

from ups.solvers.families import SIMULATED_FAMILIES
from ups.solvers.initial_conditions import draw
from ups.solvers.solution import evolve, solve

__all__ = ["SIMULATED_FAMILIES", "draw", "evolve", "solve"]
