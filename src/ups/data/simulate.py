"""Simulated trajectories in PDEBench's four HDF5 layouts and under its file names: read like downloaded files."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import yaml
from torch import Tensor

from ups.data.families import Family
from ups.data.hdf5_output import create_file
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.files import publish, remove_leftovers
from ups.solvers import evolve, incompressible, sample_initial_states
from ups.solvers.families import Problem, one_thread, problem_of

BATCH_VALUES = 2**15  # numbers in the states of the trajectories that are advanced together
FILE_TRAJECTORIES = 4  # in each file of incompressible Navier-Stokes, as in PDEBench


@dataclass(frozen=True)
class SimulatedFile:
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

    def group(self, index: int) -> str:
        """Name of the group of a trajectory; readers sort by name."""
        return f"{index:0{max(4, len(str(self.indices[-1])))}d}"

    def rows(self, indices: range) -> slice:
        """Positions of a batch of trajectories in the file."""
        return slice(indices.start - self.indices.start, indices.stop - self.indices.start)


def file_name(
    family: str,
    parameters: dict[str, float],
    resolution: int = 0,
    *,
    number: int = 0,
    start: str = "Rand",
    boundary: str | None = None,
) -> str:
    """PDEBench's name for a file of a family, from its template `Family.file_name`."""
    _check_parameters(family, parameters)
    values = {name: str(float(value)) for name, value in parameters.items()}
    if family == "compressible_ns_1d":  # 1.e-8 in one dimension, 1e-08 in two and three
        values = {name: re.sub(r"^(\d+)e-0?", r"\1.e-", value) for name, value in values.items()}
    words = {"resolution": resolution, "number": number, "start": start}
    words["boundary"] = FAMILIES[family].boundary_names.get(boundary or "periodic")
    return FAMILIES[family].file_name.format(**values, **words)


def files_of(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of `simulate` for each file of a recipe, by file name; only layout `batch` has several files."""
    family, count = recipe["family"], recipe["num_trajectories"]
    choices = {name: recipe[name] for name in ("start", "boundary") if name in recipe}
    problem_of(family)
    size = FILE_TRAJECTORIES if FAMILIES[family].layout == "batch" else max(1, count)
    files = {}
    for number, first in enumerate(range(0, max(1, count), size)):
        name = file_name(family, recipe["parameters"], recipe["resolution"], number=number, **choices)
        files[name] = recipe | {"num_trajectories": min(size, count - first), "first": first}
    return files


@one_thread()
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
    first: int = 0,
    start: str = "Rand",
    boundary: str | None = None,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Write one file of trajectories first..first+num_trajectories-1; the same arguments give the same values.

    `resolution` counts points per axis and `duration` ends at the last snapshot; a steady family has one snapshot and
    no duration. Compressible flow also has a `start` (Rand, Shock or Turb) and a `boundary` (periodic or outflow).
    `advance(n)` is called when `n` more snapshots are solved, num_trajectories * num_snapshots in total. The file
    appears under its name when it is complete. The bytes are the same too, except in layout `batch`, because the output
    of the LZF compressor depends on what its memory held before.
    """
    _check_parameters(family, parameters)
    _check_times(family, num_snapshots, duration)
    sizes = {"num_trajectories": num_trajectories, "resolution": resolution, "seed": seed, "first": first}
    for name, smallest in {"num_trajectories": 1, "resolution": 4, "seed": 0, "first": 0}.items():
        if sizes[name] < smallest:
            raise ConfigFault(f"{family} needs {name} >= {smallest}, got {sizes[name]}")
    problem = problem_of(family)
    indices, grid = range(first, first + num_trajectories), (resolution,) * problem.num_axes
    content = SimulatedFile(FAMILIES[family], problem, parameters, indices, grid, num_snapshots, duration)
    remove_leftovers(path.parent, path.name)
    with publish(path) as temporary, create_file(temporary) as file:
        _write(file, content, seed, start, boundary, advance)


def _write(
    file: h5py.File,
    content: SimulatedFile,
    seed: int,
    start: str,
    boundary: str | None,
    advance: Callable[[int], object] | None,
) -> None:
    name = content.family.name
    if content.family.layout == "batch":
        _create_batch(file, content, seed)
    elif content.family.layout != "groups":
        _create_arrays(file, content)
    size = max(1, BATCH_VALUES // (content.problem.num_fields * prod(content.grid)))
    for offset in range(0, len(content.indices), size):
        indices = content.indices[offset : offset + size]
        u_0, sampled = sample_initial_states(name, indices, content.grid, seed, content.parameters, start=start)
        _write_given(file, content, indices, sampled)
        for time, u in enumerate(
            evolve(name, u_0, {**content.parameters, **sampled}, content.times, boundary=boundary)
        ):
            if not torch.isfinite(u).all():
                where = f"snapshot {time} of the trajectories {indices[0]}..{indices[-1]}"
                raise DataFault(f"{name}: {where} is not finite; check the parameters {content.parameters}")
            _write_snapshot(file, content, indices, time, u)
            if advance:
                advance(len(u))


def _check_parameters(family: str, parameters: dict[str, float]) -> None:
    problem_of(family)
    expected = FAMILIES[family].parameters
    if set(parameters) != set(expected):
        raise ConfigFault(f"{family} has the parameters {list(expected)}, got {list(parameters)}")
    for name, value in parameters.items():
        if not isfinite(value) or (name != "beta" and value < 0) or (name == "mach" and value == 0):
            raise ConfigFault(f"{family}: {name} must be finite, not negative (except beta), not 0 (mach); got {value}")


def _check_times(family: str, num_snapshots: int, duration: float) -> None:
    if FAMILIES[family].steady:
        if num_snapshots != 1:
            raise ConfigFault(f"{family} is steady: num_snapshots must be 1, got {num_snapshots}")
    elif num_snapshots < 2 or not 0 < duration < inf:
        raise ConfigFault(f"{family} needs num_snapshots >= 2 and duration > 0, got {num_snapshots} and {duration}")


def _write_given(file: h5py.File, content: SimulatedFile, indices: range, sampled: dict[str, Tensor]) -> None:
    """Write the coefficients of the trajectories `indices`, constant in time, sampled with their initial states."""
    match content.family.layout:
        case "groups":
            _create_groups(file, content, indices, sampled)
        case "batch":
            force = [sampled[name].numpy() for name in content.family.coefficients]
            file["force"][content.rows(indices)] = np.stack(force, axis=-1)
        case _:
            for name in content.family.coefficients:
                file[name][content.rows(indices)] = sampled[name].numpy()


def _write_snapshot(file: h5py.File, content: SimulatedFile, indices: range, time: int, u: Tensor) -> None:
    """Write one snapshot (B, C, *grid) of the trajectories `indices`."""
    rows, channels_last = content.rows(indices), u.movedim(1, -1).numpy()
    match content.family.layout:
        case "groups":
            if content.family.stored_yx:
                channels_last = channels_last.swapaxes(1, 2)
            for index, values in zip(indices, channels_last, strict=True):
                file[f"{content.group(index)}/data"][time] = values
        case "batch":
            file["velocity"][rows, time] = channels_last[..., :2]
            file["particles"][rows, time] = channels_last[..., 2:]
        case _:
            for channel, name in enumerate(content.family.arrays):
                file[name][rows, time] = u[:, channel].numpy()


def _create_arrays(file: h5py.File, content: SimulatedFile) -> None:
    """Layouts `tensor` and `fields`: contiguous arrays (N, T, *grid), coefficients (N, *grid)."""
    file.attrs.update(
        {content.family.attributes.get(name, name): np.float64(value) for name, value in content.parameters.items()}
    )
    for axis, centres in content.centres.items():
        _store(file, f"{axis}-coordinate", centres)
    if not content.problem.steady:  # PDEBench writes one time more than there are snapshots
        _store(file, "t-coordinate", np.append(content.times, content.duration + content.times[1]))
    count = len(content.indices)
    for name in content.family.coefficients:
        file.create_dataset(name, (count, *content.grid), "f4", track_times=False)
    for name in content.family.arrays:
        file.create_dataset(name, (count, content.num_snapshots, *content.grid), "f4", track_times=False)


def _create_batch(file: h5py.File, content: SimulatedFile, seed: int) -> None:
    """Layout `batch`: vectors in the last axis, one compressed chunk per snapshot, no coordinates of space."""
    count = len(content.indices)
    scalar = (count, content.num_snapshots, *content.grid)
    shapes = {"velocity": (*scalar, 2), "particles": (*scalar, 1), "force": (count, *content.grid, 2)}
    for name, shape in shapes.items():
        chunks = tuple(1 if axis < 2 else points for axis, points in enumerate(shape))
        file.create_dataset(name, shape, "f4", chunks=chunks, compression="lzf", shuffle=True, track_times=False)
    _store(file, "t", np.tile(content.times, (count, 1)))
    domain = {
        "sim_name": f"ns_incom_inhom_2d_{content.grid[0]}",
        "domain_size": [1, 1],
        "grid_size": list(content.grid),
    }
    settings = domain | {"NU": incompressible.NU, "seed": seed, "n_batch": count}
    file.attrs["config"] = yaml.safe_dump(settings, sort_keys=False)
    file.attrs["latestIndex"] = np.int64(content.num_snapshots - 1)


def _create_groups(file: h5py.File, content: SimulatedFile, indices: range, sampled: dict[str, Tensor]) -> None:
    """Layout `groups`: one group per trajectory with `data` (T, *grid, C) and exact coordinates."""
    grid = content.grid[::-1] if content.family.stored_yx else content.grid
    shape = (content.num_snapshots, *grid, len(content.family.fields))
    for row, index in enumerate(indices):
        group = file.create_group(content.group(index))
        group.attrs["config"] = _config(content, index, {name: float(values[row]) for name, values in sampled.items()})
        group.create_dataset("data", shape, "f4", track_times=False)
        for axis, centres in content.centres.items():
            _store(group, f"grid/{axis}", centres)
        _store(group, "grid/t", content.times)


def _store(group: h5py.Group, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=np.ascontiguousarray(values, dtype="f4"), track_times=False)


def _config(content: SimulatedFile, index: int, sampled: dict[str, float]) -> str:
    """The YAML text that PDEBench keeps with every group."""
    low, high = content.problem.low, content.problem.high
    box: dict[str, float] = {"x_left": low, "x_right": high, "xdim": content.grid[0]}
    if len(content.grid) == 2:
        box |= {"y_bottom": low, "y_top": high, "ydim": content.grid[1]}
    own = content.problem.settings(content.duration, content.num_snapshots) if content.problem.settings else {}
    name = content.family.file_name.partition("_NA_NA")[0].lower()  # 2d_diff-react, as in 2D_diff-react_NA_NA.h5
    return yaml.safe_dump({"name": name, "sim": {**own, **box, "seed": index, **sampled}}, sort_keys=False)
