"""Some trajectories of a remote file, fetched by ranges of bytes into a small file of the same layout."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from ups.data.hdf5 import CORRUPTION, bad_file, list_names, open_array, open_file, read_text
from ups.data.layouts import POSITIONS, inspect_file
from ups.data.pdebench import Family
from ups.data.remote import RemoteReader
from ups.data.selection import PARTIAL_LAYOUTS
from ups.data.storage import lock, storage_faults
from ups.data.transfer import new_session
from ups.errors import ConfigFault, DataFault
from ups.files import publish

MARKER = "ups_partial"
MAX_RUNS_NAMED = 20
MAX_ATTRIBUTE_BYTES = 2**12


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


def fetch_trajectories(
    url: str, family: Family, target: Path, positions: Sequence[int], *, origin: str, advance: Callable[[int], object]
) -> None:
    """Fetch the trajectories at increasing `positions` of a file of layout `tensor` or `fields`.

    `origin` names the remote file and its MD5 in the attribute `ups_partial` of the small one. Positions other than the
    first ones are stored beside the trajectories: splits go by the position in the whole file.
    """
    if family.layout not in PARTIAL_LAYOUTS:
        raise DataFault(f"{url}: layout {family.layout!r} is not contiguous; fetch the whole file")
    if not positions or positions[0] < 0 or any(a >= b for a, b in pairwise(positions)):
        raise ConfigFault(f"trajectories of {url}: give increasing positions from 0 on, not {str(positions)[:80]}")
    with lock(target, lambda: advance(0)):
        if target.exists():
            _expect_marker(target, positions, origin)
            return
        remedy = "free space or make the folder writable"
        with storage_faults(target, remedy), publish(target) as temporary, new_session() as session:
            remote = RemoteReader(session, url, advance)
            pieces = _write_skeleton(remote, family, temporary, positions, origin)
            with temporary.open("rb+", buffering=0) as file:
                for piece in pieces:
                    file.seek(piece.place)
                    remote.stream(piece.start, piece.start + piece.num_bytes, _writer(file))


def read_marker(path: Path) -> str | None:
    """What a partial file says about its origin; None for a whole file."""
    with open_file(path) as file:
        return read_text(file, MARKER)


def _marker(positions: Sequence[int], total: int | str, origin: str) -> str:
    runs = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in _runs(positions)]
    named = ",".join(runs) if len(runs) <= MAX_RUNS_NAMED else f"{len(positions)} chosen ones"
    return f"trajectories {named} of {total} of {origin}"


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive positions as (start, stop)."""
    starts = [p for i, p in enumerate(positions) if i == 0 or positions[i - 1] != p - 1]
    stops = [p + 1 for i, p in enumerate(positions) if i == len(positions) - 1 or positions[i + 1] != p + 1]
    return list(zip(starts, stops, strict=True))


def _expect_marker(path: Path, positions: Sequence[int], origin: str) -> None:
    marker = read_marker(path) or "no partial file"
    start, end = _marker(positions, "*", origin).split("*", 1)
    if not (marker.startswith(start) and marker.endswith(end)):
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


def _write_skeleton(
    remote: RemoteReader, family: Family, path: Path, positions: Sequence[int], origin: str
) -> list[Piece]:
    """Write everything but the trajectories, and tell where those come from and go to."""
    with _open_remote(remote) as source:
        contents = inspect_file(source, family)
        if positions[-1] >= contents.count:
            what = f"has {contents.count} trajectories, not {positions[-1] + 1}"
            raise bad_file(repr(remote), what, "ask for fewer")
        names = ("tensor",) if family.layout == "tensor" else family.fields
        ranks = dict.fromkeys(names, 2 + len(family.axes)) | dict.fromkeys(family.coefficients, 1 + len(family.axes))
        with h5py.File(path, "w") as small:
            _copy_attributes(source, small)
            small.attrs[MARKER] = _marker(positions, contents.count, origin)
            if list(positions) != list(range(len(positions))):
                small[POSITIONS] = np.asarray(positions, np.int64)
            for name in sorted({f"{axis}-coordinate" for axis in (*family.axes, "t")} & set(list_names(source))):
                small[name] = open_array(source, name, 1)[()]
            return [piece for name, rank in ranks.items() for piece in _reserve(source, small, name, rank, positions)]


def _copy_attributes(source: h5py.File, small: h5py.File) -> None:
    """Copy the numbers; text and objects of strangers say nothing that is used."""
    for name in source.attrs:
        attribute = source.attrs.get_id(name)
        if (
            attribute.dtype.kind in "fiu"
            and attribute.dtype.itemsize * math.prod(attribute.shape) < MAX_ATTRIBUTE_BYTES
        ):
            small.attrs[name] = source.attrs[name]


def _reserve(source: h5py.File, small: h5py.File, name: str, rank: int, positions: Sequence[int]) -> list[Piece]:
    """Make room for trajectories of a dataset, contiguous as there; neighbours are fetched together."""
    remote = open_array(source, name, rank)
    offset = remote.id.get_offset()
    if remote.chunks is not None or offset is None:
        raise bad_file(source.filename, f"{name!r} is stored in chunks", "fetch the whole file")
    leading, shape = remote.shape[:-rank], remote.shape[-rank:]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((*leading, len(positions), *shape[1:]))
    place = h5py.h5d.create(small.id, name.encode(), remote.id.get_type(), space, properties).get_offset()
    stride = math.prod(shape[1:]) * np.dtype(remote.dtype).itemsize
    pieces = []
    for start, stop in _runs(positions):
        pieces.append(Piece(offset + start * stride, place, (stop - start) * stride))
        place += pieces[-1].num_bytes
    return pieces
