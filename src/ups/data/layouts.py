"""The four HDF5 layouts of PDEBench: checks of a file, and the arrays of one trajectory.

`tensor` and `fields` store arrays (N, T, *grid), `groups` one group per trajectory, `batch` arrays with the components
on the last axis.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import h5py
import numpy as np

from ups.data.axes import TOLERANCE, axes_of, expect_order, is_uniform
from ups.data.families import Family
from ups.data.hdf5 import (
    MAX_SMALL_ELEMENTS,
    file_fault,
    has,
    is_dimension,
    list_names,
    open_array,
    open_dataset,
    read_array,
    read_number,
)

MAX_SNAPSHOT_ELEMENTS = 2**26  # of all fields at one time: four fields on 256^3 points
MAX_TRAJECTORY_ELEMENTS = 2**30  # PDEBench's largest, of the incompressible family, has 2**29.6
MAX_SNAPSHOTS = 2**16  # of a trajectory
MAX_TRAJECTORIES = 2**20  # of a file
BLOCK_ELEMENTS = 2**20  # read at once before they are thinned, if a snapshot has fewer
POSITIONS_DATASET = "ups_trajectories"  # positions of the trajectories of a partial file in the published one
Opener = Callable[[str], h5py.Dataset]  # a file's dataset by its name, as `open_dataset` finds it


@dataclass(frozen=True)
class Contents:
    """Contents of one file: number of trajectories, times of the snapshots, points and domain length of each axis."""

    count: int
    times: tuple[float, ...]
    grid: tuple[int, ...]
    lengths: tuple[float, ...]


def inspect_file(file: h5py.File, family: Family) -> Contents:
    """Check names, shapes, types, coordinates and times of a file; its values are checked by `normalization`."""
    inspect = {"groups": _inspect_groups, "batch": _inspect_batch}.get(family.layout, _inspect_arrays)
    contents = inspect(file, family)
    if contents.count > MAX_TRAJECTORIES:
        raise file_fault(file.filename, f"has an absurd number of {contents.count} trajectories")
    num_elements = math.prod(contents.grid) * len(family.fields)
    if num_elements > MAX_SNAPSHOT_ELEMENTS:
        raise file_fault(file.filename, f"has snapshots on an absurd grid of {contents.grid}")
    if (num_elements := num_elements * len(contents.times)) > MAX_TRAJECTORY_ELEMENTS:
        raise file_fault(file.filename, f"has trajectories of {num_elements} values, over {MAX_TRAJECTORY_ELEMENTS}")
    return contents


def list_trajectories(file: h5py.File, family: Family) -> list[str] | range:
    """Identifiers of the trajectories for `read_snapshots`: names of groups, or positions on the leading axis."""
    if family.layout == "groups":
        return list_names(file)
    name, rank = ("particles", 3) if family.layout == "batch" else (arrays_of(file, family)[0], 2)
    return range(open_dataset(file, name).shape[-rank - len(family.axes)])


def arrays_of(file: h5py.File, family: Family) -> tuple[str, ...]:
    """Names of the arrays with the fields in the layouts `tensor` and `fields`; a single one has either name."""
    if len(family.fields) > 1:
        return family.fields
    names = (*family.arrays, *family.fields, "tensor")
    return (next((name for name in names if has(file, name)), family.arrays[0]),)


def read_positions(file: h5py.File, count: int) -> np.ndarray | range:
    """Positions of the `count` trajectories in the published file, of which this file may be a part."""
    if POSITIONS_DATASET not in list_names(file):
        return range(count)
    dataset = open_array(file, POSITIONS_DATASET, 1, kind="i")
    if dataset.shape != (count,):
        raise file_fault(file.filename, f"{POSITIONS_DATASET!r} has shape {dataset.shape}, expected {count} integers")
    return read_array(dataset, 1).astype(np.int64)


def read_snapshots(
    names: tuple[str, ...], opener: Opener, family: Family, trajectory: int | str, snapshots: range, every_point: int
) -> np.ndarray:
    """Every k-th point of the snapshots at these positions of one trajectory, float32 (T, C, *grid)."""
    num_axes = len(family.axes)

    def read(name: str, rank: int, *place: int | str) -> np.ndarray:
        # HDF5's own strides in time take 8 to 15 times as long as single snapshots if data are chunked, those in space
        # 2 to 5 times as long as strides in memory in any case.
        dataset = opener(name)
        if (snapshots.step, every_point) == (1, 1):
            return read_array(dataset, rank, (*place, slice(snapshots.start, snapshots.stop)))
        num_points = math.prod(dataset.shape[len(place) + 1 - rank :])
        at_once = 1 if dataset.chunks else max(1, BLOCK_ELEMENTS // num_points)
        blocks = (read_array(dataset, rank, (*place, block)) for block in _blocks(snapshots, at_once))
        return np.concatenate([thinned(u, 1, num_axes, every_point) for u in blocks])

    if family.layout == "groups":
        u = read(f"{trajectory}/data", 2 + num_axes)
    elif family.layout == "batch":
        u = np.concatenate([read(name, 3 + num_axes, trajectory) for name in ("velocity", "particles")], axis=-1)
    else:
        u = np.stack([read(name, 2 + num_axes, trajectory) for name in names], axis=-1)
    u = np.moveaxis(u, -1, 1)
    return np.ascontiguousarray(u.swapaxes(2, 3) if family.stored_yx else u)


def _blocks(snapshots: range, at_once: int) -> Iterator[slice]:
    for first in range(0, len(snapshots), at_once):
        block = snapshots[first : first + at_once]
        yield slice(block[0], block[-1] + 1, block.step)


def read_coefficients(opener: Opener, family: Family, trajectory: int | str, every_point: int) -> np.ndarray:
    """Every k-th point of the coefficient fields of one trajectory, float32 (C, *grid), of a family that has some."""
    num_axes = len(family.axes)
    if family.layout == "batch":
        force = read_array(opener("force"), 2 + num_axes, (trajectory,))
        return thinned(np.moveaxis(force, -1, 0), 1, num_axes, every_point)
    stored = [opener(name) for name in family.coefficients]
    return np.stack(
        [thinned(read_array(dataset, 1 + num_axes, (trajectory,)), 0, num_axes, every_point) for dataset in stored]
    )


def thinned(values: np.ndarray, first_axis: int, num_axes: int, every_point: int) -> np.ndarray:
    """Every k-th point along `num_axes` axes, in memory of its own."""
    every = (slice(None, None, every_point),) * num_axes
    return np.ascontiguousarray(values[(slice(None),) * first_axis + every])


def _inspect_arrays(file: h5py.File, family: Family) -> Contents:
    """Layouts `tensor` and `fields`: (N, T, *grid) per field, coefficients (N, *grid)."""
    count, num_snapshots, *grid = find_shape(file, family)
    times = (0.0,) if family.steady else find_times(file, num_snapshots)
    lengths = [find_length(file, axis, n) for axis, n in zip(family.axes, grid, strict=True)]
    if family.name == "burgers_1d" and (name := _coordinate(file, "x")) and _read_coordinate(file, name)[0] < 0:
        what = "lies on (-1, 1), as the outdated Burgers files with twice the flux do"
        raise file_fault(file.filename, what, "fetch the current version")
    return Contents(count, times, tuple(grid), tuple(lengths))


def _inspect_groups(file: h5py.File, family: Family) -> Contents:
    """Layout `groups`: one group per trajectory with `data` (T, *grid, C) and the coordinates in `grid`."""
    keys = list_names(file)
    if not keys:
        raise file_fault(file.filename, "holds no trajectory")
    first = _inspect_group(file, keys[0], family)
    for key in keys[1:]:
        contents = _inspect_group(file, key, family)
        if contents.grid != first.grid or not _agree(contents.times, first.times):
            raise file_fault(file.filename, f"group {key!r} has another grid or other times than {keys[0]!r}")
    return replace(first, count=len(keys))


def _inspect_group(file: h5py.File, key: str, family: Family) -> Contents:
    num_snapshots, *grid, num_channels = _shape(file, family, f"{key}/data", 2 + len(family.axes))
    if num_channels != len(family.fields):
        raise file_fault(file.filename, f"'{key}/data' has {num_channels} fields, expected {', '.join(family.fields)}")
    if family.stored_yx:
        grid.reverse()
    times = _read_times(file, f"{key}/grid/t", num_snapshots)
    lengths = [_read_length(file, f"{key}/grid/{axis}", n) for axis, n in zip(family.axes, grid, strict=True)]
    return Contents(1, times, tuple(grid), tuple(lengths))


def _inspect_batch(file: h5py.File, family: Family) -> Contents:
    """Layout `batch`: (N, T, *grid, components), no coordinates of space, times (N, T)."""
    count, num_snapshots, *grid, num_components = _shape(file, family, "velocity", 3 + len(family.axes))
    if num_components != len(grid):
        raise file_fault(file.filename, f"'velocity' has {num_components} components, expected {len(grid)}")
    _expect_shape(file, family, "particles", (count, num_snapshots, *grid, 1))
    _expect_shape(file, family, "force", (count, *grid, len(grid)))
    _expect_shape(file, family, "t", (count, num_snapshots))
    if num_snapshots > MAX_SNAPSHOTS or count * num_snapshots > MAX_SMALL_ELEMENTS:
        raise file_fault(file.filename, f"has an absurd number of {count} x {num_snapshots} snapshots")
    times = read_array(open_dataset(file, "t"), 2)
    decimals = [_expect_times(file, "t", row) for row in times]
    if not _agree(times, times[:1]):
        raise file_fault(file.filename, "the trajectories differ in 't'")
    latest = read_number(file, "latestIndex")
    if latest is None or latest < num_snapshots - 1:
        raise file_fault(file.filename, f"is of an aborted run: latestIndex is {latest}, not {num_snapshots - 1}")
    return Contents(count, decimals[0], tuple(grid), (1.0,) * len(grid))


def _shape(file: h5py.File, family: Family, name: str, rank: int) -> tuple[int, ...]:
    expect_order(file.filename, name, axes_of(dataset := open_array(file, name, rank)), family)
    return dataset.shape[-rank:]


def _expect_shape(file: h5py.File, family: Family, name: str, expected: tuple[int, ...]) -> None:
    shape = _shape(file, family, name, len(expected))
    if shape != tuple(expected):
        raise file_fault(file.filename, f"{name!r} has shape {shape}, the other fields have {tuple(expected)}")


def find_shape(file: h5py.File, family: Family) -> tuple[int, ...]:
    """The shape (N, T, *grid) of all fields in the layouts `tensor` and `fields`."""
    names = arrays_of(file, family)
    found = open_dataset(file, names[0]).shape or ()
    if len(found) < 2 + len(family.axes):
        what = f"{names[0]!r} has shape {found}, expected the axes (trajectory, snapshot, {', '.join(family.axes)})"
        raise file_fault(file.filename, what, "write them all, be it with length 1")
    shape = _shape(file, family, names[0], 2 + len(family.axes))
    for name in names[1:]:
        _expect_shape(file, family, name, shape)
    count, num_snapshots, *grid = shape
    for name in family.coefficients:
        _expect_shape(file, family, name, (count, *grid))
    if family.steady and num_snapshots != 1:
        raise file_fault(file.filename, f"{names[0]!r} has {num_snapshots} snapshots, a steady family has 1")
    return shape


def find_times(file: h5py.File, num_snapshots: int) -> tuple[float, ...]:
    """Times of the snapshots, from an array or the number `dt`."""
    name = _coordinate(file, "t", "time")
    if name is not None:
        return _read_times(file, name, num_snapshots)
    dt = _step(file, "t", "times of the snapshots", num_snapshots)
    return _expect_times(file, "dt", dt * np.arange(num_snapshots))


def find_length(file: h5py.File, axis: str, num_points: int) -> float:
    """Length of the domain along an axis, from an array or the number `dx`."""
    name = _coordinate(file, axis)
    if name is not None:
        return _read_length(file, name, num_points)
    return float(f"{num_points * _step(file, axis, 'cell centres', num_points):.6g}")


def _coordinate(file: h5py.File, axis: str, *aliases: str) -> str | None:
    """The name of the array with the coordinates of an axis; None if there is none."""
    names = (
        name for name in (f"{axis}-coordinate", axis, *aliases) if has(file, name) and not is_dimension(file, name)
    )
    return next(names, None)


def _step(file: h5py.File, axis: str, what: str, count: int) -> float:
    step = read_number(file, f"d{axis}")
    if step is None:
        missing = f"has no '{axis}-coordinate', nor '{axis}' or the number 'd{axis}', found {list_names(file)[:8]}"
        raise file_fault(file.filename, missing, f"add '{axis}', the {count} {what}, or d{axis}")
    if step <= 0:
        raise file_fault(file.filename, f"'d{axis}' is {step:g}", "expected a positive step")
    return step


def _read_times(file: h5py.File, name: str, num_snapshots: int) -> tuple[float, ...]:
    if num_snapshots > MAX_SNAPSHOTS:
        raise file_fault(file.filename, f"has an absurd number of {num_snapshots} snapshots")
    times = _read_coordinate(file, name)
    # PDEBench's generators write one entry more than there are snapshots.
    if len(times) not in (num_snapshots, num_snapshots + 1):
        raise file_fault(file.filename, f"{name!r} has {len(times)} entries for {num_snapshots} snapshots")
    return _expect_times(file, name, times[:num_snapshots])


def _expect_times(file: h5py.File, name: str, times: np.ndarray) -> tuple[float, ...]:
    """Shortest decimals that round to these values in float32, 0.05 instead of 0.05000000074505806; or uniform ones."""
    if len(times) < 2:
        raise file_fault(file.filename, "holds one snapshot per trajectory, a transient family needs at least 2")
    if not is_uniform(times):
        raise file_fault(file.filename, f"{name!r} is not a uniform, increasing time step")
    decimals = tuple(float(str(t)) for t in times.astype(np.float32))
    uniform = np.linspace(times[0], times[-1], len(times))
    return decimals if _agree(decimals, uniform) else tuple(uniform.tolist())


def _read_length(file: h5py.File, name: str, num_points: int) -> float:
    """Length of the domain, N dx, from the N centres of its cells."""
    x = _read_coordinate(file, name)
    if len(x) != num_points:
        raise file_fault(file.filename, f"{name!r} has {len(x)} entries for {num_points} points")
    if num_points < 2 or not is_uniform(x):
        raise file_fault(file.filename, f"{name!r} is not a uniform, increasing grid of at least 2 points")
    return float(f"{num_points * (x[-1] - x[0]) / (num_points - 1):.6g}")


def _read_coordinate(file: h5py.File, name: str) -> np.ndarray:
    return read_array(open_array(file, name, 1, kind="fiu"), 1, dtype=np.float64)


def _agree(times: np.ndarray | tuple[float, ...], reference: np.ndarray | tuple[float, ...]) -> bool:
    times, reference = np.atleast_2d(times), np.atleast_2d(reference)
    dt = reference[0, 1] - reference[0, 0]
    return times.shape[1] == reference.shape[1] and bool((abs(times - reference) <= TOLERANCE * dt).all())
