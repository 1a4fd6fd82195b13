"""Simulated trajectories in PDEBench's file layouts and under its file names, so that nothing downstream can tell."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml
from torch import Tensor

from ups.data.pdebench import FAMILIES, Family
from ups.errors import ConfigFault, DataFault
from ups.solvers import draw, solve
from ups.solvers.families import SIMULATED_FAMILIES, Problem, problem_of
from ups.solvers.shallow_water import GRAVITY
from ups.solvers.transient import D_u, D_v, k

BATCH_VALUES = 2**15  # numbers in the states of one batch: enough for full speed, few enough for the cache

_FILE_NAMES = {
    "advection_1d": "1D_Advection_Sols_beta{beta}.hdf5",
    "burgers_1d": "1D_Burgers_Sols_Nu{nu}.hdf5",
    "diffusion_reaction_1d": "ReacDiff_Nu{nu}_Rho{rho}.hdf5",
    "darcy_2d": "2D_DarcyFlow_beta{beta}_Train.hdf5",
    "diffusion_reaction_2d": "2D_diff-react_NA_NA.h5",
    "shallow_water_2d": "2D_rdb_NA_NA.h5",
}
assert set(_FILE_NAMES) == set(SIMULATED_FAMILIES)


@dataclass(frozen=True)
class _Plan:
    """What one file holds: `num_trajectories` on `grid`, at `num_snapshots` times from 0 to `duration`."""

    family: Family
    problem: Problem
    parameters: dict[str, float]
    num_trajectories: int
    grid: tuple[int, ...]
    num_snapshots: int
    duration: float
    seed: int

    @property
    def times(self) -> np.ndarray:
        return np.linspace(0.0, self.duration, self.num_snapshots)

    def centres(self, axis: int) -> np.ndarray:
        dx = self.problem.length / self.grid[axis]
        return self.problem.low + (np.arange(self.grid[axis]) + 0.5) * dx


def file_name(family: str, parameters: dict[str, float]) -> str:
    """The name PDEBench gives to the file of a family with these parameters."""
    _check_parameters(family, parameters)
    return _FILE_NAMES[family].format(**{name: float(value) for name, value in parameters.items()})


def simulate(
    path: Path,
    *,
    family: str,
    parameters: dict[str, float],
    num_trajectories: int,
    resolution: int,
    num_snapshots: int,
    duration: float,
    seed: int,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Write one file of trajectories 0..num_trajectories-1; the same arguments give the same bytes.

    `resolution` counts points per axis and `duration` ends at the last snapshot; a steady family has one snapshot and
    no duration. `advance(n)` is called when `n` more snapshots are solved, num_trajectories * num_snapshots in total.
    The file appears under its name when it is complete.
    """
    _check_parameters(family, parameters)
    _check_sizes(family, num_trajectories, resolution, num_snapshots, duration, seed)
    problem = problem_of(family)
    grid = (resolution,) * problem.num_axes
    plan = _Plan(FAMILIES[family], problem, parameters, num_trajectories, grid, num_snapshots, duration, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with h5py.File(partial, "w") as file:
            _write(file, plan, advance)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write(file: h5py.File, plan: _Plan, advance: Callable[[int], object] | None) -> None:
    write_batch = _write_groups
    if plan.family.layout == "tensor":
        _create_tensor(file, plan)
        write_batch = _write_tensor
    for indices in _batches(plan):
        u_0, drawn = draw(plan.family.name, indices, plan.grid, plan.seed)
        u = solve(plan.family.name, u_0, {**plan.parameters, **drawn}, plan.times, advance)
        if not torch.isfinite(u).all():
            raise DataFault(
                f"{plan.family.name}: the solution of trajectories {indices[0]}..{indices[-1]} is not finite; "
                f"check the parameters {plan.parameters}"
            )
        write_batch(file, plan, indices, u, drawn)


def _batches(plan: _Plan) -> Iterator[range]:
    size = max(1, BATCH_VALUES // (plan.problem.num_fields * int(np.prod(plan.grid))))
    for start in range(0, plan.num_trajectories, size):
        yield range(start, min(start + size, plan.num_trajectories))


def _create_tensor(file: h5py.File, plan: _Plan) -> None:
    file.attrs.update({plan.family.attributes[name]: np.float64(value) for name, value in plan.parameters.items()})
    for axis, name in enumerate(plan.family.axes):
        _create(file, f"{name}-coordinate", plan.centres(axis))
    if not plan.problem.steady:  # PDEBench writes one time more than there are snapshots
        _create(file, "t-coordinate", np.append(plan.times, plan.duration + plan.times[1]))
    for name in plan.family.coefficients:
        file.create_dataset(name, (plan.num_trajectories, *plan.grid), "f4", track_times=False)
    file.create_dataset("tensor", (plan.num_trajectories, plan.num_snapshots, *plan.grid), "f4", track_times=False)


def _write_tensor(file: h5py.File, plan: _Plan, indices: range, u: Tensor, drawn: dict[str, Tensor]) -> None:
    rows = slice(indices.start, indices.stop)
    file["tensor"][rows] = u[:, :, 0].numpy()
    for name in plan.family.coefficients:
        file[name][rows] = drawn[name].numpy()


def _write_groups(file: h5py.File, plan: _Plan, indices: range, u: Tensor, drawn: dict[str, Tensor]) -> None:
    # Two-dimensional diffusion-reaction is the one family stored with y before x.
    order = (0, 3, 2, 1) if plan.family.name == "diffusion_reaction_2d" else (0, 2, 3, 1)
    for row, index in enumerate(indices):
        group = file.create_group(f"{index:04d}")
        group.attrs["config"] = _config(plan, index, {name: float(values[row]) for name, values in drawn.items()})
        _create(group, "data", u[row].permute(order).numpy())
        for axis, name in enumerate(plan.family.axes):
            _create(group, f"grid/{name}", plan.centres(axis))
        _create(group, "grid/t", plan.times)


def _create(group: h5py.Group, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=np.ascontiguousarray(values, dtype="f4"), track_times=False)


def _config(plan: _Plan, index: int, drawn: dict[str, float]) -> str:
    """The YAML text that PDEBench keeps with every group."""
    low, high, (xdim, ydim) = plan.problem.low, plan.problem.high, plan.grid
    box = {"x_left": low, "x_right": high, "y_bottom": low, "y_top": high, "xdim": xdim, "ydim": ydim, "seed": index}
    if plan.family.name == "diffusion_reaction_2d":
        sim = {"Du": D_u, "Dv": D_v, "k": k, "t": plan.duration, "tdim": plan.num_snapshots, "n": 1}
        name = "2d_diff-react"
    else:
        sim = {"T_end": plan.duration, "n_time_steps": plan.num_snapshots - 1, "gravity": GRAVITY, "inner_height": 2.0}
        name = "2d_rdb"
    return yaml.safe_dump({"name": name, "sim": {**sim, **box, **drawn}}, sort_keys=False)


def _check_parameters(family: str, parameters: dict[str, float]) -> None:
    problem_of(family)
    expected = FAMILIES[family].parameters
    if set(parameters) != set(expected):
        raise ConfigFault(f"{family} has the parameters {list(expected)}, got {list(parameters)}")
    for name, value in parameters.items():
        if not isfinite(value) or (name in ("nu", "rho") and value < 0):
            raise ConfigFault(f"{family}: {name} must be finite and, for nu and rho, not negative; got {value}")


def _check_sizes(
    family: str, num_trajectories: int, resolution: int, num_snapshots: int, duration: float, seed: int
) -> None:
    if num_trajectories < 1 or resolution < 4 or seed < 0:
        raise ConfigFault(
            f"{family} needs num_trajectories >= 1, resolution >= 4 and seed >= 0, "
            f"got {num_trajectories}, {resolution} and {seed}"
        )
    if FAMILIES[family].steady:
        if num_snapshots != 1:
            raise ConfigFault(f"{family} is steady: num_snapshots must be 1, got {num_snapshots}")
    elif num_snapshots < 2 or not 0 < duration < inf:
        raise ConfigFault(f"{family} needs num_snapshots >= 2 and duration > 0, got {num_snapshots} and {duration}")
