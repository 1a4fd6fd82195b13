"""Solvers of PDEBench's equations: random initial states and their solutions, without files or configuration.

- `families`: the table of simulated families; random initial states and trajectories of any of them
- `hyperbolic`: advection and Burgers' equation on a periodic line, shallow water over a flat floor
- `reaction`: diffusion-reaction in one and two dimensions, diffusion-sorption in one
- `compressible`: compressible Navier-Stokes in one to three dimensions
- `incompressible`: incompressible Navier-Stokes in a closed box
- `darcy`: steady Darcy flow
- `random_fields`: sums of sines, Fourier fields and Gaussian fields for initial states
- `numerics`: cells, time steps, differences and residuals that the schemes share
"""

from ups.solvers.families import SIMULATED_FAMILIES, evolve, sample_initial_states, solve

__all__ = ["SIMULATED_FAMILIES", "evolve", "sample_initial_states", "solve"]
