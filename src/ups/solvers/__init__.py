"""Solvers of PDEBench's equations: random initial states and their solutions, without files or configuration.

- `families`: the table of simulated families, with the functions of the modules below
- `solution`: random initial states and trajectories of any family
- `advection`: advection and Burgers' equation on a periodic line
- `reaction`: diffusion-reaction in one and two dimensions, diffusion-sorption in one
- `compressible`: compressible Navier-Stokes in one to three dimensions
- `incompressible`: incompressible Navier-Stokes in a closed box
- `shallow_water`: shallow water over a flat floor
- `darcy`: steady Darcy flow
- `random_fields`: sums of sines, Fourier fields and Gaussian fields for initial states
- `numerics`: cells, time steps, differences and residuals that the schemes share
"""

from ups.solvers.families import SIMULATED_FAMILIES
from ups.solvers.solution import evolve, sample_initial_states, solve

__all__ = ["SIMULATED_FAMILIES", "evolve", "sample_initial_states", "solve"]
