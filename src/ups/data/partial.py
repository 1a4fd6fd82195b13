"""Some trajectories of a remote file, fetched by ranges of bytes into a small file of the same layout."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from ups.data.hdf5 import CORRUPTION, bad_file, list_names, open_array, open_file, read_text
from ups.data.layouts import POSITIONS, inspect_file
from ups.data.pdebench import FAMILIES, Family
from ups.data.registry import RemoteFile
from ups.data.remote import RemoteReader
from ups.data.selection import PARTIAL_LAYOUTS
from ups.data.sparse import SparseBuffer
from ups.data.storage import lock
from ups.data.transfer import new_session
from ups.errors import ConfigFault, DataFault
from ups.files import storage_faults

MARKER = "ups_partial"
MAX_RUNS_NAMED = 20
MAX_ATTRIBUTE_BYTES = 2**12


@dataclass(frozen=True)
class StoredArray:
    """A contiguous dataset of a remote file: `leading` axes of length one, then `shape` with the trajectories first."""

    name: str
    dtype: np.dtype
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def stride(self) -> int:
        """Bytes of one trajectory."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Structure:
    """Everything of a remote file but its trajectories."""

    count: int
    attributes: dict[str, np.ndarray]
    coordinates: dict[str, np.ndarray]
    arrays: list[StoredArray]


def partial_name(name: str, count: int) -> str:
    """Name of the file with the first `count` trajectories of the file `name`."""
    path = Path(name)
    return f"{path.stem}_first{count}{path.suffix}"


def fetch_trajectories(
    file: RemoteFile,
    target: Path,
    positions: Sequence[int],
    *,
    base_url: str | None,
    advance: Callable[[int], object],
) -> None:
    """Fetch the trajectories at increasing `positions` of a file of layout `tensor` or `fields`.

    The attribute `ups_partial` of the small file names its origin. Positions other than the first ones are stored
    beside the trajectories: splits go by the position in the whole file.
    """
    url = file.address(base_url)
    if FAMILIES[file.family].layout not in PARTIAL_LAYOUTS:
        raise DataFault(f"{url}: the layout of {file.family} is not contiguous; fetch the whole file")
    if not positions or positions[0] < 0 or any(a >= b for a, b in pairwise(positions)):
        raise ConfigFault(f"trajectories of {url}: give increasing positions from 0 on, not {str(positions)[:80]}")
    with lock(target, lambda: advance(0)):
        if target.exists():
            _expect_marker(target, positions, file)
            return
        remedy = "free space or name a folder that can be written to, the same command goes on here"
        with storage_faults(target, remedy), new_session() as session:
            _fetch(RemoteReader(session, url, advance), file, target, positions, advance)


def _fetch(
    remote: RemoteReader,
    file: RemoteFile,
    target: Path,
    positions: Sequence[int],
    advance: Callable[[int], object],
) -> None:
    """Fill `NAME.part` from its start to its end, its frame last, so that its size tells what has arrived."""
    if file.bytes not in (None, remote.size):
        raise bad_file(repr(remote), f"has {remote.size} bytes, expected {file.bytes}", "check the source")
    structure = _read_structure(remote, FAMILIES[file.family])
    if positions[-1] >= structure.count:
        what = f"has {structure.count} trajectories, not {positions[-1] + 1}"
        raise bad_file(repr(remote), what, "ask for fewer")
    marker = _marker(positions, structure.count, file)
    frame, places = _build_frame(structure, positions, marker)
    with _open_part(target, remote.validator, marker) as part:
        _copy(remote, structure.arrays, positions, part, places, advance)
        frame.write_to(part)
        os.fsync(part.fileno())
        Path(part.name).replace(target)


@contextmanager
def _open_part(target: Path, validator: str | None, marker: str) -> Iterator[BinaryIO]:
    """The part that an earlier process fetched of the same version of the same file, or an empty one."""
    path, version = (target.with_name(f"{target.name}{suffix}") for suffix in (".part", ".part.version"))
    identity = f"{validator} {h5py.__version__} {marker}"
    if validator is None or not version.is_file() or version.read_text() != identity:
        path.unlink(missing_ok=True)
        version.write_text(identity)
    try:
        with path.open("rb+" if path.exists() else "wb+") as part:
            yield part
    finally:
        if not path.exists() or path.stat().st_size == 0:
            path.unlink(missing_ok=True)
            version.unlink(missing_ok=True)


def read_marker(path: Path) -> str | None:
    """What a partial file says about its origin; None for a whole file."""
    with open_file(path) as file:
        return read_text(file, MARKER)


def _marker(positions: Sequence[int], total: int | str, file: RemoteFile) -> str:
    runs = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in _runs(positions)]
    named = ",".join(runs) if len(runs) <= MAX_RUNS_NAMED else f"{len(positions)} chosen ones"
    return f"trajectories {named} of {total} of {file.name}, MD5 {file.md5}"


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive positions as (start, stop)."""
    starts = [p for i, p in enumerate(positions) if i == 0 or positions[i - 1] != p - 1]
    stops = [p + 1 for i, p in enumerate(positions) if i == len(positions) - 1 or positions[i + 1] != p + 1]
    return list(zip(starts, stops, strict=True))


def _expect_marker(path: Path, positions: Sequence[int], file: RemoteFile) -> None:
    marker = read_marker(path) or "no partial file"
    start, end = _marker(positions, "*", file).split("*", 1)
    if not (marker.startswith(start) and marker.endswith(end)):
        raise bad_file(path, f"is {marker}", "delete it to fetch it anew")


@contextmanager
def _open_remote(remote: RemoteReader) -> Iterator[h5py.File]:
    """The remote file as HDF5; a failed transfer is reported as such, not as damage that h5py sees in its place."""
    try:
        with h5py.File(remote, "r") as file:
            yield file
    except DataFault as error:
        raise (remote.fault or error) from error.__cause__
    except CORRUPTION as error:
        raise bad_file(repr(remote), f"is no HDF5 file that can be read ({error})", "check the URL") from error


def _read_structure(remote: RemoteReader, family: Family) -> Structure:
    """Check a remote file like one on disk, and read everything but its trajectories."""
    names = ("tensor",) if family.layout == "tensor" else family.fields
    ranks = dict.fromkeys(names, 2 + len(family.axes)) | dict.fromkeys(family.coefficients, 1 + len(family.axes))
    with _open_remote(remote) as file:
        contents = inspect_file(file, family)
        coordinates = sorted({f"{axis}-coordinate" for axis in (*family.axes, "t")} & set(list_names(file)))
        return Structure(
            count=contents.count,
            attributes={name: file.attrs[name] for name in file.attrs if _is_number(file.attrs.get_id(name))},
            coordinates={name: open_array(file, name, 1)[()] for name in coordinates},
            arrays=[_find_array(file, name, rank) for name, rank in ranks.items()],
        )


def _is_number(attribute: h5py.h5a.AttrID) -> bool:
    """Whether an attribute is a number or a few; text and objects of strangers say nothing that is used."""
    dtype = attribute.dtype
    return dtype.kind in "fiu" and dtype.itemsize * math.prod(attribute.shape) < MAX_ATTRIBUTE_BYTES


def _find_array(file: h5py.File, name: str, rank: int) -> StoredArray:
    dataset = open_array(file, name, rank)
    offset = dataset.id.get_offset()
    if dataset.chunks is not None or offset is None:
        raise bad_file(file.filename, f"{name!r} is stored in chunks", "fetch the whole file")
    return StoredArray(name, dataset.dtype, dataset.shape[:-rank], dataset.shape[-rank:], offset)


def _build_frame(structure: Structure, positions: Sequence[int], marker: str) -> tuple[SparseBuffer, list[int]]:
    """The small file without its trajectories, and where in it those of each array go."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    frame, places = SparseBuffer(), []
    with h5py.File(frame, "w") as file:
        file.attrs.update(structure.attributes | {MARKER: marker})
        if list(positions) != list(range(len(positions))):
            file[POSITIONS] = np.asarray(positions, np.int64)
        for name, values in structure.coordinates.items():
            file[name] = values
        for array in structure.arrays:
            space = h5py.h5s.create_simple((*array.leading, len(positions), *array.shape[1:]))
            kind = h5py.h5t.py_create(array.dtype)
            places.append(h5py.h5d.create(file.id, array.name.encode(), kind, space, properties).get_offset())
    return frame, places


def _copy(
    remote: RemoteReader,
    arrays: list[StoredArray],
    positions: Sequence[int],
    part: BinaryIO,
    places: list[int],
    advance: Callable[[int], object],
) -> None:
    """Fetch what is missing of the trajectories, neighbours together, in the order of their places."""
    arrived = part.seek(0, os.SEEK_END)
    for place, array in sorted(zip(places, arrays, strict=True), key=lambda pair: pair[0]):
        for start, stop in _runs(positions):
            num_bytes = (stop - start) * array.stride
            skip = min(max(0, arrived - place), num_bytes)
            advance(skip)
            part.seek(place + skip)
            remote.stream(array.offset + start * array.stride + skip, array.offset + stop * array.stride, part.write)
            place += num_bytes
