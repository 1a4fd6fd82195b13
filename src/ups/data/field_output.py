"""The arrays of a file of predicted fields: PDEBench's layouts in HDF5, or an array per field in other files.

`ups.data.field_stores` has the files themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups.data.families import Family
from ups.errors import ConfigFault

PDEBENCH = (".h5", ".hdf5")
SUFFIXES = (*PDEBENCH, ".nc", ".zarr", ".npz")

Arrays = dict[str, Any]
"""The arrays of an open file by name: values are assigned to ranges of their first axes."""
Place = tuple[int, int, int]
"""The first trajectory, member and time of what is written."""


@dataclass(frozen=True)
class Content:
    """Predictions: `count` trajectories of a family at `times`, which are () for a steady one.

    `coefficients` are the names of the coefficient fields that are written too. `members` is the size of an ensemble,
    None without; `lengths` are those of the axes of `grid`; `parameters` are (N,) each; `attributes` are further texts
    and numbers. `chunk` trajectories and times are written at once.
    """

    family: Family
    coefficients: tuple[str, ...]
    count: int
    members: int | None
    times: tuple[float, ...]
    grid: tuple[int, ...]
    lengths: tuple[float, ...]
    parameters: dict[str, np.ndarray]
    attributes: dict[str, Any]
    chunk: tuple[int, int]

    @property
    def centres(self) -> dict[str, np.ndarray]:
        """Cell centres of each axis of a domain that starts at 0."""
        sizes = zip(self.family.axes, self.grid, self.lengths, strict=True)
        return {axis: (np.arange(n) + 0.5) * length / n for axis, n, length in sizes}

    @property
    def times_after(self) -> np.ndarray:
        """The times and one more, as PDEBench has them in most files."""
        return np.append(self.times, 2 * self.times[-1] - self.times[-2])

    @property
    def num_bytes(self) -> int:
        """Of the values of all fields and coefficients."""
        num_fields = len(self.family.fields) * (self.members or 1) * max(1, len(self.times))
        return 4 * self.count * math.prod(self.grid) * (num_fields + len(self.coefficients))


@dataclass(frozen=True)
class Structure:
    """The arrays of a file: the shapes of those that are `written` piece by piece, and the `known` ones.

    `dims` names the axes of a written array by known arrays, where files have such names; `chunks` are the parts that
    are written at once. `put(arrays, place, u)` writes fields (C, B, M, T, *grid), `put_coefficients(arrays, first,
    coefficients)` those of the trajectories from `first` on, (B, *grid) by name.
    """

    written: dict[str, tuple[int, ...]]
    known: dict[str, np.ndarray]
    attributes: dict[str, Any]
    put: Callable[[Arrays, Place, np.ndarray], None]
    put_coefficients: Callable[[Arrays, int, dict[str, np.ndarray]], None]
    dims: dict[str, tuple[str, ...]]
    chunks: dict[str, tuple[int, ...]]


def structure_of(content: Content, path: Path) -> Structure:
    """The structure of a file, whose kind is its suffix.

    Raises:
        ConfigFault: an unknown suffix, or PDEBench's layouts cannot hold the predictions.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigFault(f"{path}: name a file for the predictions that ends in {', '.join(SUFFIXES)}")
    if path.suffix not in PDEBENCH:
        return _named(content)
    if content.members is not None:
        raise ConfigFault(f"{path}: PDEBench's layouts have no ensembles; choose .zarr, .nc or .npz")
    if varying := [name for name, values in content.parameters.items() if len(set(values.tolist())) > 1]:
        what = f"{', '.join(varying)} differs between trajectories, PDEBench's files have one value"
        raise ConfigFault(f"{path}: {what}; choose .zarr, .nc or .npz")
    return {"groups": _groups, "batch": _batch}.get(content.family.layout, _arrays)(content)


def _named(content: Content) -> Structure:
    """An array per field, with named axes."""
    family, parameters = content.family, content.parameters
    members = {} if content.members is None else {"member": np.arange(content.members)}
    times = {"time": np.array(content.times)} if content.times else {}
    coordinates = {"trajectory": np.arange(content.count), **members, **times, **content.centres}
    dims = dict.fromkeys(family.fields, tuple(coordinates))
    dims |= dict.fromkeys(content.coefficients, ("trajectory", *family.axes))
    written = {name: tuple(len(coordinates[dim]) for dim in axes) for name, axes in dims.items()}
    at_once = {"trajectory": content.chunk[0], "time": content.chunk[1]}
    sizes = {dim: min(at_once.get(dim, len(values)), len(values)) for dim, values in coordinates.items()}
    chunks = {name: tuple(sizes[dim] for dim in axes) for name, axes in dims.items()}

    def put(arrays: Arrays, place: Place, u: np.ndarray) -> None:
        rows, chosen, steps = (slice(n, n + size) for n, size in zip(place, u.shape[1:4], strict=True))
        index = (rows, *[chosen] * len(members), *[steps] * len(times))
        for name, values in zip(family.fields, u, strict=True):
            values = values if times else values[:, :, 0]
            arrays[name][index] = values if members else values[:, 0]

    known = coordinates | {name: values for name, values in parameters.items() if name not in content.coefficients}
    return Structure(written, known, content.attributes, put, _put_coefficients, dims, chunks)


def _arrays(content: Content) -> Structure:
    """Layouts `tensor` and `fields`: arrays (N, T, *grid), coefficients (N, *grid), coordinates of the axes."""
    family, num_times = content.family, max(1, len(content.times))
    written = dict.fromkeys(family.arrays, (content.count, num_times, *content.grid))
    written |= dict.fromkeys(content.coefficients, (content.count, *content.grid))
    known = {f"{axis}-coordinate": _float32(centres) for axis, centres in content.centres.items()}
    if content.times:
        known["t-coordinate"] = _float32(content.times_after)
    parameters = {family.attributes.get(name, name): float(values[0]) for name, values in content.parameters.items()}

    def put(arrays: Arrays, place: Place, u: np.ndarray) -> None:
        first, _, start = place
        for name, values in zip(family.arrays, u, strict=True):
            arrays[name][first : first + len(values), start : start + values.shape[2]] = values[:, 0]

    return Structure(written, known, content.attributes | parameters, put, _put_coefficients, {}, {})


def _groups(content: Content) -> Structure:
    """Layout `groups`: one group per trajectory with `data` (T, *grid, C), in which x and y may be swapped."""
    family = content.family
    grid = content.grid[::-1] if family.stored_yx else content.grid
    digits = max(4, len(str(content.count - 1)))  # readers sort by name
    names = [f"{row:0{digits}d}" for row in range(content.count)]
    written = dict.fromkeys([f"{name}/data" for name in names], (len(content.times), *grid, len(family.fields)))
    coordinates = content.centres | {"t": np.array(content.times)}
    known = {f"{name}/grid/{axis}": _float32(values) for name in names for axis, values in coordinates.items()}

    def put(arrays: Arrays, place: Place, u: np.ndarray) -> None:
        channels_last = np.moveaxis(u[:, :, 0], 0, -1)  # (B, T, *grid, C)
        for name, values in zip(names[place[0] :], channels_last, strict=False):
            steps = (slice(place[2], place[2] + len(values)),)
            arrays[f"{name}/data"][steps] = values.swapaxes(1, 2) if family.stored_yx else values

    return Structure(written, known, content.attributes, put, _put_coefficients, {}, {})


def _batch(content: Content) -> Structure:
    """Layout `batch`: arrays (N, T, *grid, components), no coordinates of space, times (N, T)."""
    count, grid = content.count, content.grid
    shape = (count, len(content.times), *grid)
    written = {"velocity": (*shape, len(grid)), "particles": (*shape, 1), "force": (count, *grid, len(grid))}
    known = {"t": np.tile(_float32(np.array(content.times)), (count, 1))}

    def put(arrays: Arrays, place: Place, u: np.ndarray) -> None:
        first, _, start = place
        index = (slice(first, first + u.shape[1]), slice(start, start + u.shape[3]))
        arrays["velocity"][index] = np.moveaxis(u[:-1, :, 0], 0, -1)
        arrays["particles"][index] = u[-1, :, 0, ..., None]

    def put_coefficients(arrays: Arrays, first: int, coefficients: dict[str, np.ndarray]) -> None:
        _put_coefficients(arrays, first, {"force": np.stack(list(coefficients.values()), -1)})

    attributes = content.attributes | {"latestIndex": len(content.times) - 1}
    return Structure(written, known, attributes, put, put_coefficients, {}, {})


def _put_coefficients(arrays: Arrays, first: int, coefficients: dict[str, np.ndarray]) -> None:
    for name, values in coefficients.items():
        arrays[name][(slice(first, first + len(values)),)] = values


def _float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)
