"""PDEBench's random initial states, one independent stream per trajectory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.families import problem_of

# Mean over the unit square, over x_m ~ U(0,1)^2 and s_m ~ U(0,0.5), of the sum of five bumps exp(-|x - x_m|^2 / s_m).
# PDEBench takes the mean over the trajectories of one generation batch; its expectation keeps trajectories independent.
DARCY_THRESHOLD = 1.852145330065209


def draw(
    family: str, indices: Sequence[int], grid: tuple[int, ...], seed: int
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Initial states of shape (B, C, *grid) of the trajectories `indices`, and the coefficients drawn with them.

    Trajectory `i` depends on `(seed, i)` alone. Darcy is steady: no initial state, but a permeability `nu` (B, X, Y).
    Shallow water also tells its `dam_radius` (B,).
    """
    problem = problem_of(family)
    if len(grid) != problem.num_axes:
        raise ConfigFault(f"{family} has {problem.num_axes} axes, but the grid is {grid}")
    dx = [problem.length / points for points in grid]
    axes = [problem.low + (np.arange(points) + 0.5) * step for points, step in zip(grid, dx, strict=True)]
    streams = [np.random.default_rng([seed, index]) for index in indices]
    match family:
        case "advection_1d" | "burgers_1d":
            return _stack([sines(axes[0], stream)[None] for stream in streams]), {}
        case "diffusion_reaction_1d":
            return _stack([rescaled(sines(axes[0], stream))[None] for stream in streams]), {}
        case "darcy_2d":
            return None, {"nu": _stack([permeability(axes[0], axes[1], stream) for stream in streams])}
        case "diffusion_reaction_2d":
            return _stack([stream.standard_normal((problem.num_fields, *grid)) for stream in streams]), {}
        case "shallow_water_2d":
            radius = np.array([stream.uniform(0.3, 0.7) for stream in streams])
            return _stack([dam(axes[0], axes[1], r)[None] for r in radius]), {"dam_radius": torch.from_numpy(radius)}
    raise AssertionError(f"{family} has a problem, but no initial states")


def _stack(states: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(states)).float()


def sines(x: np.ndarray, stream: np.random.Generator, num_modes: int = 4, P: float = 0.1) -> np.ndarray:
    """Sum_j A_j sin(2 pi j c_j x / L' + phi_j), sometimes its absolute value, a random sign, windowed at rate `P`.

    c_j counts how often j = 1..num_modes comes up in two draws, and L' = x_{N-1} - x_0. Every mode has an amplitude and
    a phase, so a mode that does not come up adds a constant.
    """
    j = np.arange(1, num_modes + 1)
    c = np.bincount(stream.integers(1, num_modes + 1, size=2), minlength=num_modes + 1)[1:]
    A = stream.uniform(0.0, 1.0, num_modes)
    phi = stream.uniform(0.0, 2 * np.pi, num_modes)
    u = (A * np.sin(2 * np.pi * j * c * x[:, None] / (x[-1] - x[0]) + phi)).sum(axis=1)
    if stream.uniform() < 0.1:
        u = np.abs(u)
    u = u * stream.choice([-1.0, 1.0])
    if stream.uniform() < P:
        u = u * window(x, stream.uniform(0.1, 0.45), stream.uniform(0.55, 0.9))
    return u


def window(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """w(x) = (tanh((x - a) / 0.01) - tanh((x - b) / 0.01)) / 2, one between a and b and zero outside."""
    return 0.5 * (np.tanh((x - a) / 0.01) - np.tanh((x - b) / 0.01))


def rescaled(u: np.ndarray) -> np.ndarray:
    """`u` moved and stretched to [0, 1]."""
    return (u - u.min()) / (u.max() - u.min())


def permeability(x: np.ndarray, y: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """1 where five random bumps exp(-|x - x_m|^2 / s_m) sum to more than their mean, 0.1 elsewhere."""
    x_m, y_m = stream.uniform(0.0, 1.0, (2, 5))
    s_m = stream.uniform(0.0, 0.5, 5)
    distance = (x[:, None, None] - x_m) ** 2 + (y[None, :, None] - y_m) ** 2
    return np.where(np.exp(-distance / s_m).sum(axis=2) > DARCY_THRESHOLD, 1.0, 0.1)


def dam(x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Water of height 2 inside the circle of a radial dam, 1 outside."""
    return np.where(x[:, None] ** 2 + y[None, :] ** 2 <= radius**2, 2.0, 1.0)
