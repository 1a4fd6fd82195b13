"""Files of predicted fields on disk, HDF5, NetCDF, zarr and npz, which a killed run goes on writing.

A file grows under the name `.NAME.part`; the record `.NAME.json` beside it counts the trajectories that are complete.
HDF5 and NetCDF files get their whole structure first: later only values are written, to places in the file that do not
move, so that a kill damages nothing and no library holds what is written in memory.
"""

import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from ups.data.field_output import Arrays, Content, Place, Structure, structure_of
from ups.errors import ConfigFault, StorageFault
from ups.files import only_writer, publish, read_json, remove_leftovers, storage_faults, write_json

REQUEST = "request"  # attribute with the digest of all that the values depend on


class FlatArray:
    """A float32 array in row-major order at one place of an open file, of which blocks may be written."""

    def __init__(self, file: BinaryIO, offset: int, shape: tuple[int, ...]) -> None:
        self._file, self._offset, self._shape = file, offset, shape

    def __setitem__(self, place: tuple[slice, ...], values: np.ndarray) -> None:
        """Write values to the ranges `place` of the first axes; the further axes are whole."""
        lead = self._shape[: len(place)]
        starts = [part.indices(n)[0] for part, n in zip(place, lead, strict=True)]
        row_bytes = 4 * math.prod(self._shape[len(place) :])
        for index in np.ndindex(values.shape[: len(place) - 1]):
            first = [start + shift for start, shift in zip(starts, (*index, 0), strict=True)]
            self._file.seek(self._offset + row_bytes * int(np.ravel_multi_index(first, lead)))
            self._file.write(np.ascontiguousarray(values[index], dtype="<f4").data)


@dataclass
class Output:
    """An open file of predictions, of which the trajectories before `done` are complete."""

    structure: Structure
    record: Path
    request: str
    done: int
    arrays: Arrays = field(default_factory=dict)
    files: list[BinaryIO] = field(default_factory=list)

    def write(self, place: Place, u: np.ndarray) -> None:
        """Write fields (C, B, M, T, *grid)."""
        self.structure.put(self.arrays, place, u)

    def write_coefficients(self, first: int, coefficients: dict[str, np.ndarray]) -> None:
        """Write coefficient fields (B, *grid) of the trajectories from `first` on."""
        if coefficients:
            self.structure.put_coefficients(self.arrays, first, coefficients)

    def complete(self, done: int) -> None:
        """All trajectories before `done` are written: a killed run goes on from here."""
        for file in self.files:
            file.flush()
            os.fdatasync(file.fileno())
        self.done = done
        write_json(self.record, {REQUEST: self.request, "done": done})


@contextmanager
def resumable(path: Path, content: Content, request: str) -> Iterator[Output]:
    """A file that appears under its name at the end; what a killed run with the same `request` has written is kept.

    Raises:
        ConfigFault: the file exists, or cannot hold the content.
        StorageFault: the disk is full or read-only, or has too little space.
        Locked: another process writes the file.
    """
    structure = structure_of(content, path)
    structure.attributes[REQUEST] = request
    if path.exists():
        raise ConfigFault(f"{path} exists: delete it, or choose another name")
    part, record = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.json")
    with storage_faults(path), only_writer(path):
        for each in (path, record):
            remove_leftovers(each.parent, each.name)
        output = Output(structure, record, request, _done(part, record, request))
        if output.done == 0:
            _expect_space(path.parent, content.num_bytes * (2 if path.suffix == ".npz" else 1))  # see `_finish`
            record.unlink(missing_ok=True)  # before the file changes that it is about
            _create(part, path.suffix, structure)
            output.complete(0)
        with _opened(output, part, path.suffix):
            yield output
        _finish(part, path)
        record.unlink()


def _done(part: Path, record: Path, request: str) -> int:
    """Trajectories of the same request that are complete."""
    if not (part.exists() and record.is_file()):
        return 0
    known = read_json(record, dict[str, Any])
    return known["done"] if known.get(REQUEST) == request else 0


def _expect_space(folder: Path, num_bytes: int) -> None:
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        what = f"the predictions take {num_bytes / 1e9:.3g} GB, of which {free / 1e9:.3g} GB are free"
        raise StorageFault(f"{folder}: {what}; choose another disk or fewer steps")


def _create(part: Path, suffix: str, structure: Structure) -> None:
    """An empty file with all of its structure."""
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    if suffix == ".zarr":
        _create_zarr(part, structure)
    elif suffix == ".npz":
        _create_npy(part, structure)
    else:
        _create_hdf5(part, structure)


def _create_hdf5(part: Path, structure: Structure) -> None:
    in_order = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    in_order.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # so that the place of the values is known
    in_order.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(part, "w") as file:
        file.attrs.update(structure.attributes)
        for name, values in structure.known.items():
            file.create_dataset(name, data=values, track_times=False)
        for name, shape in structure.written.items():
            file.create_dataset(name, shape, "<f4", dcpl=in_order.copy(), track_times=False)
        for dim in _dims(structure):
            file[dim].make_scale(dim)
        for name, dims in structure.dims.items():
            for axis, dim in enumerate(dims):
                file[name].dims[axis].attach_scale(file[dim])


def _create_npy(part: Path, structure: Structure) -> None:
    """A folder with the members of an npz file; attributes are arrays as well, unless a parameter has their name."""
    part.mkdir()
    for name, values in (structure.attributes | structure.known).items():
        np.save(part / f"{name}.npy", np.asarray(values), allow_pickle=False)
    for name, shape in structure.written.items():
        np.lib.format.open_memmap(part / f"{name}.npy", "w+", "<f4", shape)


def _create_zarr(part: Path, structure: Structure) -> None:
    import zarr

    group = zarr.create_group(part, attributes=structure.attributes)
    for name, values in structure.known.items():
        dims = [name] if name in _dims(structure) else ["trajectory"]
        group.create_array(name, data=values, dimension_names=dims)
    for name, shape in structure.written.items():
        chunks, dims = structure.chunks[name], structure.dims[name]
        group.create_array(name, shape=shape, dtype="<f4", chunks=chunks, dimension_names=dims, compressors=None)


def _dims(structure: Structure) -> set[str]:
    return {dim for dims in structure.dims.values() for dim in dims}


@contextmanager
def _opened(output: Output, part: Path, suffix: str) -> Iterator[None]:
    """Open the arrays that are written."""
    written = output.structure.written
    if suffix == ".zarr":
        import zarr

        group = zarr.open_group(part, mode="r+")
        whole = {"write_empty_chunks": True}  # zarr leaves out chunks of zeros, which are as if they were lost
        output.arrays = {name: group[name].with_config(whole) for name in written}
        yield
        return
    with ExitStack() as stack:
        if suffix == ".npz":
            paths = {name: part / f"{name}.npy" for name in written}
            offsets = {name: np.load(path, mmap_mode="r").offset for name, path in paths.items()}
        else:
            paths = dict.fromkeys(written, part)
            with h5py.File(part, "r") as file:
                offsets = {name: file[name].id.get_offset() for name in written}
        files = {path: stack.enter_context(path.open("r+b")) for path in set(paths.values())}
        output.files = list(files.values())
        output.arrays = {name: FlatArray(files[paths[name]], offsets[name], written[name]) for name in written}
        yield


def _finish(part: Path, path: Path) -> None:
    """Give the complete file its name; an npz file is a copy of its members."""
    if path.suffix != ".npz":
        part.rename(path)
        return
    with publish(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
        for member in sorted(part.iterdir()):
            file.write(member, member.name)
    shutil.rmtree(part)
