"""Fields of trajectories in files of any kind: initial states, or whole trajectories, truth or predicted.

HDF5 and NetCDF, zarr, npz and npy. Arrays are named after the fields, or a single one holds them all:

- a field: (*grid), (N, *grid), (N, T, *grid) or, of an ensemble, (N, M, T, *grid), of steady ones (N, M, *grid);
- a single array: (C, *grid), (N, C, *grid) or (N, T, C, *grid), of one field also without C, but no ensemble;
- HDF5 also has PDEBench's layouts.

Coefficients (N, *grid) and parameters of the PDE, as an attribute or an array () or (N,), have their names.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import h5py
import numpy as np

from ups.data import zarr_stores
from ups.data.arrays import DAMAGE, open_data
from ups.data.axes import TIMES, axes_of, expect_grid_last, expect_order, expect_uniform
from ups.data.families import Family
from ups.data.hdf5 import corruption_faults, file_fault, kind_of, list_names, open_dataset, read_array
from ups.data.trajectories import parameter_in_name
from ups.errors import ConfigFault

NUM_OPEN = 8  # arrays of an HDF5 file: each keeps a megabyte and more, and there may be thousands
KINDS = (".npz", ".npy", ".zarr", ".h5", ".hdf5", ".nc")
COORDINATES = (*TIMES, "trajectory", "member")
REMEDY = "give an array for each field, or a single one; see `ups predict --help`"


@dataclass(frozen=True)
class Stored:
    """An array in a file, of which `read(index)` reads a part, as float32 or another `dtype`."""

    shape: tuple[int, ...]
    read: Callable[..., np.ndarray]
    axes: tuple[str, ...] | None = None  # their names, where the file has them


@dataclass(frozen=True)
class Field:
    """One field (N, M, T, *grid), M or T None without such an axis; `read(row, member, times)` gives (T, *grid)."""

    count: int
    members: int | None
    times: int | None
    grid: tuple[int, ...]
    read: Callable[[int, int, slice], np.ndarray]

    @property
    def sizes(self) -> tuple[Any, ...]:
        return (self.count, self.members, self.times, self.grid)


@dataclass(frozen=True)
class FieldFile:
    """An open file: `fields` and `coefficients` of its trajectories by name, `parameters` (N,) and `times` it states.

    A file of initial states of a steady family has coefficients alone. `times` (T,) are those of the first trajectory.
    """

    path: Path
    fields: dict[str, Field]
    coefficients: dict[str, Field]
    parameters: dict[str, np.ndarray]
    times: np.ndarray | None
    attributes: Mapping[str, Any]

    @property
    def first(self) -> Field:
        """The first field, or coefficient, whose sizes the others share."""
        return next(iter((self.fields or self.coefficients).values()))

    def read(self, row: int, member: int, times: slice) -> np.ndarray:
        """Snapshots of one trajectory, float32 (T, C, *grid)."""
        return np.stack([field.read(row, member, times) for field in self.fields.values()], 1)

    def states(self, rows: range, time: int) -> np.ndarray | None:
        """The snapshots (B, C, *grid) at an index of time >= 0; None where there are coefficients alone."""
        return np.concatenate([self.read(row, 0, slice(time, time + 1)) for row in rows]) if self.fields else None

    def read_coefficients(self, rows: range) -> dict[str, np.ndarray]:
        """Coefficient fields (B, *grid) by name."""
        read = {name: field.read for name, field in self.coefficients.items()}
        return {name: np.concatenate([each(row, 0, slice(0, 1)) for row in rows]) for name, each in read.items()}


@contextmanager
def open_fields(path: Path, family: Family) -> Iterator[FieldFile]:
    """Open a file of fields of a family, for initial states or predictions.

    Raises:
        ConfigFault: the name has another suffix than those in `KINDS`.
        DataFault: the file is damaged, lacks fields, or they have other shapes.
    """
    with _open_arrays(path) as (arrays, attributes):
        fields = _fields(path, arrays, family)
        coefficients = _coefficients(path, arrays, family)
        if not fields and not (family.steady and coefficients):
            found = ", ".join(f"{name} {stored.shape}" for name, stored in list(arrays.items())[:8]) or "no arrays"
            needed = ", ".join(family.coefficients if family.steady else family.fields)
            raise file_fault(path, f"has no fields of {family.name} ({needed}), found {found}", REMEDY)
        counts = {each.count for each in (*fields.values(), *coefficients.values())}
        if len({each.sizes for each in fields.values()}) > 1 or len(counts) > 1 or 0 in counts:
            found = ", ".join(f"{name} {each.sizes}" for name, each in (fields | coefficients).items())
            raise file_fault(path, f"fields have different shapes, or none: {found}", REMEDY)
        expect_uniform(path, family, {name: partial(stored.read, (), np.float64) for name, stored in arrays.items()})
        parameters = dict(_parameters(path, arrays, attributes, family, counts.pop()))
        yield FieldFile(path, fields, coefficients, parameters, _times(arrays), attributes)


@contextmanager
def _open_arrays(path: Path) -> Iterator[tuple[dict[str, Stored], Mapping[str, Any]]]:
    """All arrays by name, of groups as `group/name`, and the attributes at the root."""
    if path.suffix not in KINDS:
        raise ConfigFault(f"{path} is of an unknown kind: name a file that ends in {', '.join(KINDS)}")
    if not path.exists():
        raise file_fault(path, "no such file", "check its name")
    if path.suffix in (".h5", ".hdf5", ".nc"):
        with open_data(path) as file:
            with corruption_faults(file, "its contents are damaged"):
                found = _of_hdf5(file), dict(file.attrs)
            yield found
        return
    try:
        arrays, attributes = _of_zarr(path) if path.suffix == ".zarr" else _of_numpy(path)
    except DAMAGE as error:
        raise file_fault(path, f"cannot be read ({error})", "write it again") from error
    yield {name: stored for name, (stored, kind) in arrays.items() if kind in "fiu"}, attributes


def _of_hdf5(file: h5py.File) -> dict[str, Stored]:
    opened, arrays = lru_cache(NUM_OPEN)(partial(open_dataset, file)), {}

    def read(path: str, index: Any, dtype: type[np.floating] = np.float32) -> np.ndarray:
        return read_array(opened(path), opened(path).ndim, index, dtype)

    for name in list_names(file):
        is_group = kind_of(file, name) is h5py.Group
        path = f"{name}/data" if is_group else name  # of a link, which opening refuses
        if not (is_group and path not in file) and (dataset := open_dataset(file, path)).dtype.kind in "fiu":
            arrays[path] = Stored(dataset.shape, partial(read, path), axes_of(dataset))
        if is_group and "t" not in arrays and f"{name}/grid/t" in file:
            arrays["t"] = Stored(open_dataset(file, f"{name}/grid/t").shape, partial(read, f"{name}/grid/t"))
    return arrays


def _plain(array: Any, axes: tuple[str, ...] | None = None) -> tuple[Stored, str]:
    return Stored(array.shape, lambda index, dtype=np.float32: np.asarray(array[index], dtype), axes), array.dtype.kind


def _of_numpy(path: Path) -> tuple[dict[str, tuple[Stored, str]], Mapping[str, Any]]:
    if path.suffix == ".npy":
        return {"array": _plain(np.load(path, mmap_mode="r", allow_pickle=False))}, {}
    if not is_zipfile(path):
        raise ValueError("it is no zip archive")
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    texts = {name: array.item() for name, array in arrays.items() if array.dtype.kind == "U" and array.ndim == 0}
    return {name: _plain(array) for name, array in arrays.items()}, texts


def _of_zarr(path: Path) -> tuple[dict[str, tuple[Stored, str]], Mapping[str, Any]]:
    arrays, attributes = zarr_stores.open_zarr(path, "array")
    return {name: _plain(array, zarr_stores.axes_of(array)) for name, array in arrays.items()}, attributes


def _fields(path: Path, arrays: dict[str, Stored], family: Family) -> dict[str, Field]:
    """The fields of a family by name; none where the file has other arrays alone."""
    groups = [stored for name, stored in sorted(arrays.items()) if name.endswith("/data")]
    if family.layout == "groups" and groups:
        return _grouped(path, groups, family)
    named = dict(arrays)
    if family.layout == "tensor" and "tensor" in arrays:
        named[family.fields[0]] = arrays["tensor"]
    if family.layout == "batch" and {"velocity", "particles"} <= arrays.keys():
        named |= _channels(arrays["velocity"], family.fields[:-1]) | _channels(arrays["particles"], family.fields[-1:])
    if all(name in named for name in family.fields):
        return {name: _field(path, name, named[name], family) for name in family.fields}
    single = None if family.steady else _single(arrays, family)
    return {} if single is None else _stacked(path, single, family)


def _single(arrays: dict[str, Stored], family: Family) -> Stored | None:
    """The only array that is no coordinate and has no name of the family; None if there are several or none."""
    known = {*family.parameters, *family.attributes.values(), *family.coefficients, *family.axes, *COORDINATES}
    others = [stored for name, stored in arrays.items() if name not in known and not name.endswith("-coordinate")]
    return others[0] if len(others) == 1 else None


def _coefficients(path: Path, arrays: dict[str, Stored], family: Family) -> dict[str, Field]:
    """The coefficients of a family by name; of a steady family a single array may be the only one."""
    named = dict(arrays)
    if family.layout == "batch" and "force" in arrays:
        named |= _channels(arrays["force"], family.coefficients)
    unnamed = {name: stored for name, stored in arrays.items() if name not in (*family.fields, "tensor")}  # solutions
    if family.steady and len(family.coefficients) == 1 and (single := _single(unnamed, family)) is not None:
        named.setdefault(family.coefficients[0], single)
    return {name: _field(path, name, named[name], family) for name in family.coefficients if name in named}


def _channels(stored: Stored, names: tuple[str, ...], axis: int = -1) -> dict[str, Stored]:
    """The parts of an array along one axis, by name."""
    axis %= len(stored.shape)
    shape = stored.shape[:axis] + stored.shape[axis + 1 :]
    axes = stored.axes and stored.axes[:axis] + stored.axes[axis + 1 :]

    def part(channel: int) -> Stored:
        def read(index: tuple[Any, ...]) -> np.ndarray:
            index = (*index, *(slice(None),) * (axis - len(index)))
            return stored.read((*index[:axis], channel, *index[axis:]))

        return Stored(shape, read, axes)

    return {name: part(channel) for channel, name in enumerate(names)}


def _grouped(path: Path, groups: list[Stored], family: Family) -> dict[str, Field]:
    """PDEBench's layout `groups`: for each trajectory an array (T, *grid, C), in which x and y may be swapped."""
    expected = (*("T", *"XYZ"[: len(family.axes)]), len(family.fields))
    shape = groups[0].shape
    if {stored.shape for stored in groups} != {shape} or len(shape) != len(expected) or shape[-1] != expected[-1]:
        found = ", ".join(sorted({str(stored.shape) for stored in groups}))
        raise file_fault(path, f"its groups have data of shape {found}, expected {expected} in all", REMEDY)
    for stored in groups:
        expect_order(path, "data", stored.axes, family)
    grid = shape[-2:0:-1] if family.stored_yx else shape[1:-1]
    channels = [_channels(stored, family.fields) for stored in groups]

    def field(name: str) -> Field:
        def read(row: int, member: int, times: slice) -> np.ndarray:
            u = channels[row][name].read((times,))
            return u.swapaxes(1, 2) if family.stored_yx else u

        return Field(len(groups), None, shape[0], grid, read)

    return {name: field(name) for name in family.fields}


def _field(path: Path, name: str, stored: Stored, family: Family) -> Field:
    """An array of one field, with the axes of trajectories, members and times before those of the grid."""
    rank = len(stored.shape) - len(family.axes)
    expect_grid_last(path, name, stored.axes, family)
    if not 0 <= rank <= 3:
        what = f"{name!r} has shape {stored.shape}, expected {len(family.axes)} axes of the grid, up to 3 before them"
        raise file_fault(path, what, REMEDY)
    lead, grid = stored.shape[:rank], stored.shape[rank:]
    is_steady_ensemble = family.steady and rank == 2 and lead[1] > 1
    members = lead[1] if rank == 3 or is_steady_ensemble else None
    num_times = None if is_steady_ensemble or rank < 2 else lead[-1]

    def read(row: int, member: int, times: slice) -> np.ndarray:
        index = (*[row] * bool(lead), *[member] * (members is not None), *[times] * (num_times is not None))
        u = stored.read(index)
        return u[None] if num_times is None else u

    return Field(lead[0] if lead else 1, members, num_times, grid, read)


def _stacked(path: Path, stored: Stored, family: Family) -> dict[str, Field]:
    """The fields in a single array, with an axis of fields before the grid; without it if there is one field."""
    num_fields, rank = len(family.fields), len(stored.shape) - len(family.axes)
    if num_fields == 1 and 0 <= rank < 3:
        named = {family.fields[0]: stored}
    elif 1 <= rank <= 3 and stored.shape[rank - 1] == num_fields:
        named = _channels(stored, family.fields, rank - 1)
    else:
        grid = ", ".join("XYZ"[: len(family.axes)])
        expected = f"(N, {num_fields}, {grid}) or (N, T, {num_fields}, {grid})"
        raise file_fault(path, f"its array has shape {stored.shape}, expected {expected}", REMEDY)
    return {name: _field(path, name, each, family) for name, each in named.items()}


def _times(arrays: dict[str, Stored]) -> np.ndarray | None:
    stated = next((arrays[name].read((), np.float64) for name in arrays if name in (*TIMES, "t-coordinate")), None)
    return None if stated is None or stated.size < 2 else stated.reshape(-1, stated.shape[-1])[0]


def _parameters(
    path: Path, arrays: dict[str, Stored], attributes: Mapping[str, Any], family: Family, count: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters (N,) of the PDE that the file states: as an attribute, an array, or in its name."""
    for name in family.parameters:
        attribute = family.attributes.get(name, name)
        stated = attributes.get(name, attributes.get(attribute))
        if (stored := arrays.get(name, arrays.get(attribute))) is not None:
            stated = [float(str(value)) for value in stored.read(()).ravel()]  # decimals of float32
        if stated is None and (stated := parameter_in_name(path, attribute)) is None:
            continue
        values = np.asarray(stated)
        if values.dtype.kind not in "fiu" or values.size not in (1, count):
            raise file_fault(path, f"{name!r} is no number, nor one for each of {count} trajectories", "correct it")
        yield name, np.broadcast_to(values.reshape(-1).astype(np.float64), count)
