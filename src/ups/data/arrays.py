"""Files of arrays in other formats than HDF5 (npz, zarr, NetCDF 3), which are copied to HDF5 once.

An npz archive has no partial reads, zarr and NetCDF 3 have none that are checked as those of HDF5 are. The copy lies
beside the file as `.NAME.hdf5`, and is made anew when size or time of the file change. NetCDF 4 is HDF5 already.
"""

import hashlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.data import hdf5, zarr_stores
from ups.data.hdf5 import COPY_SUFFIX, file_fault, open_file
from ups.data.hdf5_output import create_file
from ups.errors import DataFault, Fault, StorageFault
from ups.files import only_writer, publish, remove_leftovers

HDF5_SUFFIXES = (".hdf5", ".h5")
SUFFIXES = (*HDF5_SUFFIXES, ".nc", ".npz", ".zarr")
STAMP = "ups_plain_copy_of"  # attribute of a copy: size and time of modification of its origin
BLOCK_BYTES = 2**26
POLL_SECONDS = 0.5  # while another process copies; one that polls seldom stays below its limit of computing time
MAX_AXES, MAX_ITEM_BYTES = 6, 16
NETCDF_3 = b"CDF"
REMEDY = "write it anew with ups.write_dataset, or as HDF5"
# Raised by the readers on damaged files, for which they have no classes of their own.
DAMAGE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, RuntimeError, AssertionError)
DAMAGE += (struct.error, zlib.error, zipfile.BadZipFile, OverflowError)


Stamps = dict[str, tuple[int, int]]
"""What `stamp` says of files, by name relative to their folder."""


@dataclass(frozen=True)
class StoredArray:
    """Shape and type of an array, and its values block by block in the order of `blocks_of(shape, dtype)`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterator[np.ndarray]]
    axes: tuple[str, ...] = ()  # their names, where the file has them


def open_data(path: Path) -> h5py.File:
    """Open a file of data in any of the formats, as HDF5.

    Raises:
        DataFault: it is missing or damaged.
        StorageFault: a copy is needed, and the folder is full or not writable.
    """
    is_other = path.suffix in (".npz", ".zarr") or (path.suffix == ".nc" and _starts_with(path, NETCDF_3))
    return open_file(_copied(path) if is_other and path.exists() else path)


def stamp(path: Path) -> tuple[int, int]:
    """Size in bytes and time of modification in nanoseconds of a file.

    Of a folder the size of all files, and a number that depends on the name, size and time of each of them.
    """
    if not path.is_dir():
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    statuses = {str(each.relative_to(path)): each.stat() for each in zarr_stores.files_of(path)}
    listed = [(name, status.st_size, status.st_mtime_ns) for name, status in statuses.items()]
    digest = hashlib.sha256(repr(listed).encode()).digest()
    return sum(size for _, size, _ in listed), int.from_bytes(digest[:7])


def expect_stamps(folder: Path, stamps: Stamps) -> None:
    """Refuse files of a folder that were replaced or changed; raises `DataFault`."""
    for name, expected in stamps.items():
        path = folder / name
        if not path.exists():
            raise gone(path)
        if stamp(path) != expected:
            raise changed(path)


def gone(path: Path) -> DataFault:
    """The fault of a file that was described and is not there."""
    return file_fault(path, "is not there any more", "put it back, or name its new folder: --params raw_root=DIR")


def changed(path: Path, what: str = "has changed since the datasets were described") -> DataFault:
    """The fault of a file that is no longer the one that was described."""
    return file_fault(path, what, "run the same command again, with the data pipeline; if it does not help, delete it")


def blocks_of(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[Any, ...]]:
    """Indices of blocks of at most about 64 MiB: snapshots of one trajectory, in arrays (N, T, *grid)."""
    if math.prod(shape) * dtype.itemsize <= BLOCK_BYTES or len(shape) < 3:
        yield (slice(None),) * min(1, len(shape))
        return
    count = max(1, BLOCK_BYTES // (math.prod(shape[2:]) * dtype.itemsize))
    for trajectory in range(shape[0]):
        for first in range(0, shape[1], count):
            yield trajectory, slice(first, min(first + count, shape[1]))


def _starts_with(path: Path, signature: bytes) -> bool:
    return path.is_file() and hdf5.head_of(path).startswith(signature)


def _copied(path: Path) -> Path:
    """The copy of a file as HDF5, made if there is none or the file has changed since."""
    copy = path.with_name(f".{path.name}{COPY_SUFFIX}")
    if _is_copy(copy, path):
        return copy
    if not os.access(path.parent, os.W_OK):
        what = f"{path}: its folder is not writable, where it is copied to HDF5 once"
        raise StorageFault(f"{what}; copy the folder, or {REMEDY}")
    with only_writer(copy, POLL_SECONDS):
        if not _is_copy(copy, path):  # another process may have made it meanwhile
            remove_leftovers(copy.parent, copy.name)
            _write_copy(path, copy)
    return copy


def _is_copy(copy: Path, path: Path) -> bool:
    if not copy.is_file():
        return False
    with open_file(copy) as file:
        return hdf5.read_label(file, STAMP) == str(stamp(path))


def _write_copy(path: Path, copy: Path) -> None:
    origin = str(stamp(path))
    arrays, numbers = _read_contents(path)
    try:
        with publish(copy) as temporary, create_file(temporary) as file:
            file.attrs.update(numbers | {STAMP: origin})
            for name, array in arrays.items():
                dataset = file.create_dataset(name, array.shape, array.dtype)
                for dim, axis in zip(dataset.dims, array.axes, strict=False):  # fewer or more in a strange file
                    dim.label = axis
                _copy(path, dataset, array)
    except Fault:  # a DataFault is a ValueError as well
        raise
    except DAMAGE as error:  # names and texts that HDF5 does not have
        raise file_fault(path, f"cannot be copied to HDF5 ({error})", REMEDY) from error


def _copy(path: Path, dataset: h5py.Dataset, array: StoredArray) -> None:
    blocks = array.read()
    for index in blocks_of(array.shape, array.dtype):
        hdf5.before_access(str(path))
        try:
            values = next(blocks)
        except DAMAGE as error:
            raise file_fault(path, f"{dataset.name!r} cannot be read ({error})") from error
        dataset[index] = values


def _read_contents(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """Arrays by name, and numbers and texts by name."""
    hdf5.before_access(str(path))
    read = {".npz": _read_npz, ".zarr": _read_zarr, ".nc": _read_netcdf}[path.suffix]
    try:
        arrays, numbers = read(path)
        without_axes = [name for name, array in arrays.items() if array.shape == () and array.dtype.kind in "fiuSU"]
        numbers |= {name: next(arrays[name].read())[()] for name in without_axes}
    except DAMAGE as error:
        raise file_fault(path, f"cannot be read as {path.suffix[1:]} ({error})", REMEDY) from error
    arrays = {name: array for name, array in arrays.items() if array.shape != () and array.dtype.kind in "fiubc"}
    for name, array in arrays.items():
        is_plain = len(array.shape) <= MAX_AXES and min(array.shape) >= 0 and array.dtype.itemsize <= MAX_ITEM_BYTES
        if not is_plain or math.prod(array.shape) > hdf5.MAX_ELEMENTS:
            raise file_fault(path, f"{name!r} has the absurd shape {array.shape} or type {array.dtype}", REMEDY)
    return arrays, {name: str(value) if isinstance(value, str) else value for name, value in numbers.items()}


def _read_npz(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): _npz_array(path, archive, name) for name in names}, {}


def _npz_array(path: Path, archive: zipfile.ZipFile, name: str) -> StoredArray:
    def open_values(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return header(file)

    with archive.open(name) as file:
        shape, is_fortran, dtype = open_values(file)
    if dtype.hasobject or (is_fortran and len(shape) > 1):
        what = "Python objects" if dtype.hasobject else "an array in Fortran's order"
        raise ValueError(f"{name} holds {what}; save numpy.ascontiguousarray of numbers")

    def read() -> Iterator[np.ndarray]:
        with zipfile.ZipFile(path) as opened, opened.open(name) as file:
            open_values(file)
            for index in blocks_of(shape, dtype):
                inner = shape if not index or index == (slice(None),) else (index[1].stop - index[1].start, *shape[2:])
                values = file.read(math.prod(inner) * dtype.itemsize)
                yield np.frombuffer(values, dtype, math.prod(inner)).reshape(inner)

    return StoredArray(shape, dtype, read)


def _read_zarr(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    stored = {}
    arrays, attributes = zarr_stores.open_zarr(path, "tensor")
    for name, array in arrays.items():
        read = partial(zarr_stores.read_blocks, path, array, list(blocks_of(array.shape, array.dtype)))
        stored[name] = StoredArray(array.shape, array.dtype, read, zarr_stores.axes_of(array) or ())
    return stored, {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}


def _read_netcdf(path: Path) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    from scipy.io import netcdf_file

    with netcdf_file(path, mmap=True) as file:
        shapes = {name: (tuple(v.shape), np.dtype(v.data.dtype)) for name, v in file.variables.items()}
        axes = {name: tuple(map(str, v.dimensions)) for name, v in file.variables.items()}
        attributes = {name: _plain(value) for name, value in file._attributes.items()}
        encodings = {name: dict(v._attributes) for name, v in file.variables.items()}
    for name, encoding in encodings.items():  # a fault within would keep the file mapped, of which SciPy warns
        hdf5.expect_values(name, encoding)

    def reader(name: str, indices: list[tuple[Any, ...]]) -> Callable[[], Iterator[np.ndarray]]:
        def read() -> Iterator[np.ndarray]:
            with netcdf_file(path, mmap=True) as opened:
                yield from (np.array(opened.variables[name].data[index]) for index in indices)

        return read

    readers = {name: reader(name, list(blocks_of(*what))) for name, what in shapes.items()}
    return {name: StoredArray(*what, readers[name], axes[name]) for name, what in shapes.items()}, attributes


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
