"""The first trajectories of a remote file, fetched by ranges of bytes into a small file of the same layout."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from ups.data.hdf5 import CORRUPTION, bad_file, list_names, open_array, open_dataset, open_file, read_text
from ups.data.layouts import inspect_file
from ups.data.pdebench import Family
from ups.data.remote import RemoteReader
from ups.data.selection import PARTIAL_LAYOUTS
from ups.data.storage import lock, storage_faults
from ups.data.transfer import new_session
from ups.errors import DataFault
from ups.files import publish

MARKER = "ups_partial"
MAX_ATTRIBUTE_BYTES = 2**12
MAX_COORDINATE_BYTES = 2**24


@dataclass(frozen=True)
class Piece:
    """Bytes that lie at `start` in the remote file and at `place` in the small one."""

    start: int
    place: int
    num_bytes: int


def partial_name(name: str, count: int) -> str:
    """Name of the file with the first `count` trajectories of the file `name`."""
    path = Path(name)
    return f"{path.stem}_first{count}{path.suffix}"


def fetch_first(
    url: str, family: Family, target: Path, count: int, *, origin: str, advance: Callable[[int], object]
) -> None:
    """Fetch the first `count` trajectories of a file of layout `tensor` or `fields`.

    `origin` names the remote file and its MD5 in the attribute `ups_partial` of the small one. Trajectories keep their
    positions, so that splits by position agree with those of whole files.
    """
    if family.layout not in PARTIAL_LAYOUTS:
        raise DataFault(f"{url}: layout {family.layout!r} is not contiguous; fetch the whole file")
    with lock(target):
        if target.exists():
            _expect_marker(target, count, origin)
            return
        remedy = "free space or make the folder writable"
        with storage_faults(target, remedy), publish(target) as temporary, new_session() as session:
            remote = RemoteReader(session, url, advance)
            pieces = _write_skeleton(remote, family, temporary, count, origin)
            with temporary.open("rb+", buffering=0) as file:
                for piece in pieces:
                    file.seek(piece.place)
                    remote.stream(piece.start, piece.start + piece.num_bytes, _writer(file))


def read_marker(path: Path) -> str | None:
    """What a partial file says about its origin; None for a whole file."""
    with open_file(path) as file:
        return read_text(file, MARKER)


def _marker(count: int, total: int | str, origin: str) -> str:
    return f"trajectories 0-{count - 1} of {total} of {origin}"


def _expect_marker(path: Path, count: int, origin: str) -> None:
    marker = read_marker(path) or "no partial file"
    if not (marker.startswith(f"trajectories 0-{count - 1} of ") and marker.endswith(f" of {origin}")):
        raise bad_file(path, f"is {marker}", "delete it to fetch it anew")


def _writer(file: io.FileIO) -> Callable[[bytes], None]:
    def write(block: bytes) -> None:
        view = memoryview(block)
        while view:
            view = view[file.write(view) :]

    return write


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


def _write_skeleton(remote: RemoteReader, family: Family, path: Path, count: int, origin: str) -> list[Piece]:
    """Write everything but the trajectories, and tell where those come from and go to."""
    with _open_remote(remote) as source:
        contents = inspect_file(source, family)
        if count > contents.count:
            raise bad_file(repr(remote), f"has {contents.count} trajectories, not {count}", "ask for fewer")
        names = ("tensor",) if family.layout == "tensor" else family.fields
        ranks = dict.fromkeys(names, 2 + len(family.axes)) | dict.fromkeys(family.coefficients, 1 + len(family.axes))
        with h5py.File(path, "w") as small:
            _copy_attributes(source, small)
            small.attrs[MARKER] = _marker(count, contents.count, origin)
            for name in sorted({f"{axis}-coordinate" for axis in (*family.axes, "t")} & set(list_names(source))):
                coordinate = open_dataset(source, name)
                if coordinate.nbytes <= MAX_COORDINATE_BYTES:
                    small[name] = coordinate[()]
            return [_reserve(source, small, name, rank, count) for name, rank in ranks.items()]


def _copy_attributes(source: h5py.File, small: h5py.File) -> None:
    """Copy the numbers; text and objects of strangers say nothing that is used."""
    for name in source.attrs:
        attribute = source.attrs.get_id(name)
        if (
            attribute.dtype.kind in "fiu"
            and attribute.dtype.itemsize * math.prod(attribute.shape) < MAX_ATTRIBUTE_BYTES
        ):
            small.attrs[name] = source.attrs[name]


def _reserve(source: h5py.File, small: h5py.File, name: str, rank: int, count: int) -> Piece:
    """Make room for the first trajectories of a dataset, contiguous as there."""
    remote = open_array(source, name, rank)
    offset = remote.id.get_offset()
    if remote.chunks is not None or offset is None:
        raise bad_file(source.filename, f"{name!r} is stored in chunks", "fetch the whole file")
    leading, shape = remote.shape[:-rank], remote.shape[-rank:]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((*leading, count, *shape[1:]))
    stored = h5py.h5d.create(small.id, name.encode(), remote.id.get_type(), space, properties)
    num_bytes = count * math.prod(shape[1:]) * np.dtype(remote.dtype).itemsize
    return Piece(offset, stored.get_offset(), num_bytes)
