"""Writes simulated trajectories in PDEBench's four HDF5 layouts, batch by batch."""

from dataclasses import dataclass

import h5py
import numpy as np
import yaml
from torch import Tensor

from ups.data.families import Family
from ups.solvers import incompressible
from ups.solvers.families import Problem


@dataclass(frozen=True)
class Plan:
    """Contents of one file: the trajectories `indices` on `grid`, at `num_snapshots` times from 0 to `duration`."""

    family: Family
    problem: Problem
    parameters: dict[str, float]
    indices: range
    grid: tuple[int, ...]
    num_snapshots: int
    duration: float

    @property
    def times(self) -> np.ndarray:
        return np.linspace(0.0, self.duration, self.num_snapshots)

    @property
    def centres(self) -> dict[str, np.ndarray]:
        """Coordinates of the cell centres by axis."""
        return dict(zip(self.family.axes, self.problem.box(self.grid).centres, strict=True))

    def rows(self, indices: range) -> slice:
        """Positions of a batch of trajectories in the file."""
        return slice(indices.start - self.indices.start, indices.stop - self.indices.start)


def create(file: h5py.File, plan: Plan, seed: int) -> None:
    """Write the attributes and coordinates, and create the arrays that `write_snapshot` fills."""
    match plan.family.layout:
        case "batch":
            _create_batch(file, plan, seed)
        case "tensor" | "fields":
            _create_arrays(file, plan)


def write_given(file: h5py.File, plan: Plan, indices: range, sampled: dict[str, Tensor]) -> None:
    """Write the coefficients of the trajectories `indices`, constant in time, sampled with their initial states."""
    match plan.family.layout:
        case "groups":
            _create_groups(file, plan, indices, sampled)
        case "batch":
            force = [sampled[name].numpy() for name in plan.family.coefficients]
            file["force"][plan.rows(indices)] = np.stack(force, axis=-1)
        case _:
            for name in plan.family.coefficients:
                file[name][plan.rows(indices)] = sampled[name].numpy()


def write_snapshot(file: h5py.File, plan: Plan, indices: range, time: int, u: Tensor) -> None:
    """Write one snapshot (B, C, *grid) of the trajectories `indices`."""
    rows, channels_last = plan.rows(indices), u.movedim(1, -1).numpy()
    match plan.family.layout:
        case "groups":
            if plan.family.stored_yx:
                channels_last = channels_last.swapaxes(1, 2)
            for index, values in zip(indices, channels_last, strict=True):
                file[f"{index:04d}/data"][time] = values
        case "batch":
            file["velocity"][rows, time] = channels_last[..., :2]
            file["particles"][rows, time] = channels_last[..., 2:]
        case _:
            for channel, name in enumerate(plan.family.arrays):
                file[name][rows, time] = u[:, channel].numpy()


def _create_arrays(file: h5py.File, plan: Plan) -> None:
    """Layouts `tensor` and `fields`: contiguous arrays (N, T, *grid), coefficients (N, *grid)."""
    file.attrs.update({plan.family.attributes[name]: np.float64(value) for name, value in plan.parameters.items()})
    for axis, centres in plan.centres.items():
        _store(file, f"{axis}-coordinate", centres)
    if not plan.problem.steady:  # PDEBench writes one time more than there are snapshots
        _store(file, "t-coordinate", np.append(plan.times, plan.duration + plan.times[1]))
    count = len(plan.indices)
    for name in plan.family.coefficients:
        file.create_dataset(name, (count, *plan.grid), "f4", track_times=False)
    for name in plan.family.arrays:
        file.create_dataset(name, (count, plan.num_snapshots, *plan.grid), "f4", track_times=False)


def _create_batch(file: h5py.File, plan: Plan, seed: int) -> None:
    """Layout `batch`: vectors in the last axis, one compressed chunk per snapshot, no coordinates of space."""
    count = len(plan.indices)
    scalar = (count, plan.num_snapshots, *plan.grid)
    shapes = {"velocity": (*scalar, 2), "particles": (*scalar, 1), "force": (count, *plan.grid, 2)}
    for name, shape in shapes.items():
        chunks = tuple(1 if axis < 2 else points for axis, points in enumerate(shape))
        file.create_dataset(name, shape, "f4", chunks=chunks, compression="lzf", shuffle=True, track_times=False)
    _store(file, "t", np.tile(plan.times, (count, 1)))
    domain = {"sim_name": f"ns_incom_inhom_2d_{plan.grid[0]}", "domain_size": [1, 1], "grid_size": list(plan.grid)}
    settings = domain | {"NU": incompressible.NU, "seed": seed, "n_batch": count}
    file.attrs["config"] = yaml.safe_dump(settings, sort_keys=False)
    file.attrs["latestIndex"] = np.int64(plan.num_snapshots - 1)


def _create_groups(file: h5py.File, plan: Plan, indices: range, sampled: dict[str, Tensor]) -> None:
    """Layout `groups`: one group per trajectory with `data` (T, *grid, C) and exact coordinates."""
    grid = plan.grid[::-1] if plan.family.stored_yx else plan.grid
    shape = (plan.num_snapshots, *grid, len(plan.family.fields))
    for row, index in enumerate(indices):
        group = file.create_group(f"{index:04d}")
        group.attrs["config"] = _config(plan, index, {name: float(values[row]) for name, values in sampled.items()})
        group.create_dataset("data", shape, "f4", track_times=False)
        for axis, centres in plan.centres.items():
            _store(group, f"grid/{axis}", centres)
        _store(group, "grid/t", plan.times)


def _store(group: h5py.Group, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=np.ascontiguousarray(values, dtype="f4"), track_times=False)


def _config(plan: Plan, index: int, sampled: dict[str, float]) -> str:
    """The YAML text that PDEBench keeps with every group."""
    low, high = plan.problem.low, plan.problem.high
    box: dict[str, float] = {"x_left": low, "x_right": high, "xdim": plan.grid[0]}
    if len(plan.grid) == 2:
        box |= {"y_bottom": low, "y_top": high, "ydim": plan.grid[1]}
    own = plan.problem.settings(plan.duration, plan.num_snapshots) if plan.problem.settings else {}
    name = plan.family.file_name.partition("_NA_NA")[0].lower()  # 2d_diff-react, as in 2D_diff-react_NA_NA.h5
    return yaml.safe_dump({"name": name, "sim": {**own, **box, "seed": index, **sampled}}, sort_keys=False)
