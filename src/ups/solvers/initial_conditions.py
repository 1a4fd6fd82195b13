"""PDEBench's random initial states, one independent stream per trajectory."""

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.families import problem_of
from ups.solvers.gas import random_gas, shock_tube, turbulent_gas
from ups.solvers.incompressible import to_centres
from ups.solvers.random_fields import gaussian_field
from ups.solvers.sines import rescaled, sines

# Mean over the unit square, over x_m ~ U(0,1)^2 and s_m ~ U(0,0.5), of the sum of five bumps exp(-|x - x_m|^2 / s_m).
# PDEBench takes the mean over the trajectories of one generation batch; its expectation keeps trajectories independent.
DARCY_THRESHOLD = 1.852145330065209

STARTS = {1: ("Rand", "Shock"), 2: ("Rand", "Turb"), 3: ("Rand", "Turb")}  # of compressible flow, by number of axes


def draw(
    family: str,
    indices: Sequence[int],
    grid: tuple[int, ...],
    seed: int,
    *,
    mach: float | None = None,
    start: str = "Rand",
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Initial states of shape (B, C, *grid) of the trajectories `indices`, and the coefficients drawn with them.

    Trajectory `i` depends on `(seed, i)` alone. Darcy is steady: no initial state, but a permeability `nu` (B, X, Y).
    Shallow water also tells its `dam_radius` (B,), incompressible Navier-Stokes its forces `force_x`, `force_y`
    (B, X, Y). Compressible flow starts as PDEBench's `Rand`, `Shock` or `Turb`, in two and three dimensions at the
    Mach number `mach`.
    """
    problem = problem_of(family)
    if len(grid) != problem.num_axes:
        raise ConfigFault(f"{family} has {problem.num_axes} axes, but the grid is {grid}")
    axes = [
        problem.low + (np.arange(points) + 0.5) * dx for points, dx in zip(grid, problem.spacing(grid), strict=True)
    ]
    streams = [np.random.default_rng([seed, index]) for index in indices]
    match family:
        case "advection_1d" | "burgers_1d":
            return _stack([sines(axes[0], stream)[None] for stream in streams]), {}
        case "diffusion_reaction_1d":
            return _stack([rescaled(sines(axes[0], stream))[None] for stream in streams]), {}
        case "diffusion_sorption_1d":
            return _stack([np.full((1, *grid), stream.uniform(0.0, 0.2)) for stream in streams]), {}
        case "darcy_2d":
            return None, {"nu": _stack([permeability(axes[0], axes[1], stream) for stream in streams])}
        case "diffusion_reaction_2d":
            return _stack([stream.standard_normal((problem.num_fields, *grid)) for stream in streams]), {}
        case "shallow_water_2d":
            radius = np.array([stream.uniform(0.3, 0.7) for stream in streams])
            return _stack([dam(axes[0], axes[1], r)[None] for r in radius]), {"dam_radius": torch.from_numpy(radius)}
        case "incompressible_ns_2d":
            drawn = _stack([np.stack(box_flow(grid, stream)) for stream in streams])
            return to_centres(drawn[:, :3]), dict(zip(("force_x", "force_y"), drawn[:, 3:].unbind(1), strict=True))
        case "compressible_ns_1d" | "compressible_ns_2d" | "compressible_ns_3d":
            _check_gas(family, mach, start)
            gas = {"Rand": random_gas, "Turb": turbulent_gas}.get(start)
            states = [gas(axes, stream, mach) if gas else shock_tube(axes[0], stream) for stream in streams]
            return _stack(states), {}
    raise AssertionError(f"{family} has a problem, but no initial states")


def _check_gas(family: str, mach: float | None, start: str) -> None:
    num_axes = problem_of(family).num_axes
    if start not in STARTS[num_axes]:
        raise ConfigFault(f"{family} starts as one of {', '.join(STARTS[num_axes])}, got {start!r}")
    if num_axes > 1 and not (mach and isfinite(mach) and mach > 0):
        raise ConfigFault(f"{family} needs a Mach number above 0, got {mach}")


def _stack(states: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(states)).float()


def permeability(x: np.ndarray, y: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """1 where five random bumps exp(-|x - x_m|^2 / s_m) sum to more than their mean, 0.1 elsewhere."""
    x_m, y_m = stream.uniform(0.0, 1.0, (2, 5))
    s_m = stream.uniform(0.0, 0.5, 5)
    distance = (x[:, None, None] - x_m) ** 2 + (y[None, :, None] - y_m) ** 2
    return np.where(np.exp(-distance / s_m).sum(axis=2) > DARCY_THRESHOLD, 1.0, 0.1)


def dam(x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Means over cells of water of height 2 inside the circle of a radial dam, 1 outside.

    The circle cuts a cell as a straight line along the grid would. Heights at cell centres would make one state of
    many radii: seven states in all on 32 x 32 cells.
    """
    distance = np.hypot(x[:, None], y[None, :])
    return 1.0 + np.clip((radius - distance) / (x[1] - x[0]) + 0.5, 0.0, 1.0)


def box_flow(grid: tuple[int, int], stream: np.random.Generator) -> list[np.ndarray]:
    """Velocities on the faces of a closed box, particles and forces: Gaussian fields of mean 0 and deviation 1."""
    X, Y = grid
    v_x = np.pad(gaussian_field((X - 1, Y), stream, scale=0.4, smoothness=1.0), ((0, 1), (0, 0)))
    v_y = np.pad(gaussian_field((X, Y - 1), stream, scale=0.4, smoothness=1.0), ((0, 0), (0, 1)))
    c = gaussian_field(grid, stream, scale=0.4, smoothness=1.0)
    return [v_x, v_y, c, *(gaussian_field(grid, stream, scale=0.15, smoothness=3.0) for _ in range(2))]
