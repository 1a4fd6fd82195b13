"""Fetch of some trajectories of a remote HDF5 file into a small file that is a valid PDEBench file itself.

h5py reads the remote structure in a child process: coordinates, attributes, byte offsets of the arrays. The small file
is written in two parts: its trajectories as plain bytes, and its HDF5 structure, which h5py builds in memory.
"""

import hashlib
import io
import math
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import h5py
import numpy as np

from ups.data import hdf5
from ups.data.arrays import open_data
from ups.data.connections import new_session
from ups.data.download import CheckedPart, lock
from ups.data.families import Family
from ups.data.hdf5 import CORRUPTION, file_fault, list_names, open_array, read_text
from ups.data.http import Advance, HTTPFile
from ups.data.inspection import inspect
from ups.data.layouts import POSITIONS_DATASET, inspect_file
from ups.data.pdebench import FAMILIES
from ups.data.plan import PARTIAL_LAYOUTS, bytes_to_fetch
from ups.data.published import PublishedFile, shown
from ups.errors import ConfigFault, DataFault
from ups.files import storage_faults

MARKER = "ups_partial"  # attribute with the origin of a partial file
MARKER_PATTERN = r"trajectories ([\d,-]+|\d+ chosen ones( \(SHA-256 [0-9a-f]{16}\))?) of \d+ of [\w.+-]+, MD5 \w+"
MAX_RANGES_NAMED = 20
MAX_ATTRIBUTE_BYTES = 2**12
MAX_FRAME_BYTES = 2**24  # of coordinates, attributes and structure of the small file, unpacked


class SparseBuffer(io.RawIOBase):
    """A file in memory that stores only what was written, in `pieces` (position, bytes), and reads zeros elsewhere.

    h5py writes the structure of the small file here, where the trajectories, possibly gigabytes, take no memory. If
    h5py wrote to disk itself, a full disk would be an error inside HDF5, which then cannot close the file.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._position, self._size = 0, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        return self._size

    def write(self, block: bytes | memoryview) -> int:  # type: ignore[override]
        self.pieces.append((self._position, bytes(block)))
        self._position += len(self.pieces[-1][1])
        self._size = max(self._size, self._position)
        return len(self.pieces[-1][1])

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        num_bytes = max(0, min(len(view), self._size - self._position))
        view[:num_bytes] = bytes(num_bytes)
        for place, block in self.pieces:
            start, stop = max(place, self._position), min(place + len(block), self._position + num_bytes)
            if start < stop:
                view[start - self._position : stop - self._position] = block[start - place : stop - place]
        self._position += num_bytes
        return num_bytes

    def to_json(self) -> dict[str, Any]:
        """Its pieces and its size."""
        return {"pieces": [[place, b64encode(block).decode()] for place, block in self.pieces], "size": self._size}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SparseBuffer":
        """The buffer of `to_json`."""
        buffer = cls()
        buffer.pieces = [(place, b64decode(block)) for place, block in content["pieces"]]
        buffer.truncate(content["size"])
        return buffer

    def write_to(self, file: BinaryIO) -> None:
        """Write the pieces at their positions, and make the file as long as this one."""
        for place, block in self.pieces:
            file.seek(place)
            file.write(block)
        file.truncate(self._size)


def fetch_trajectories(
    file: PublishedFile, target: Path, positions: Sequence[int], *, base_url: str | None, advance: Advance
) -> None:
    """Fetch the trajectories at increasing `positions` of a file of layout `tensor` or `fields`.

    The attribute `ups_partial` of the small file names its origin. Unless they are 0, 1, ..., the positions are stored
    beside the trajectories, because splits depend on the position in the published file. The same call resumes a fetch
    that was killed.

    Raises:
        ConfigFault: positions that do not increase.
        DataFault: the server or the remote file does not allow it, or `target` is another file.
        StorageFault: the disk is full or read-only.
    """
    url = file.address(base_url)
    if FAMILIES[file.family].layout not in PARTIAL_LAYOUTS:
        raise DataFault(f"{shown(url)}: the layout of {file.family} is not contiguous; fetch the whole file")
    if not positions or positions[0] < 0 or any(a >= b for a, b in pairwise(positions)):
        raise ConfigFault(
            f"trajectories of {shown(url)}: give increasing positions from 0 on, not {str(positions)[:80]}"
        )
    with lock(target, advance):
        if target.exists():
            _expect_marker(target, positions, file)
            return
        remedy = "free space or name a folder that can be written to; the same command resumes here"
        with storage_faults(target, remedy), new_session() as session:
            _fetch(HTTPFile(session, url, advance), file, target, positions)


def _fetch(remote: HTTPFile, file: PublishedFile, target: Path, positions: Sequence[int]) -> None:
    """Fill `NAME.part` from start to end, the structure last: its size is the number of bytes that have arrived."""
    if file.bytes not in (None, remote.size):
        raise file_fault(repr(remote), f"has {remote.size} bytes, expected {file.bytes}", "check the source")

    def read(start: int, stop: int) -> bytes:
        remote.seek(start)
        return remote.read(stop - start)

    request = {"url": repr(remote), "size": remote.size, "file": asdict(file), "positions": list(positions)}
    answer = inspect("structure", fetch=read, **request)
    places, marker = [tuple(place) for place in answer["places"]], answer["marker"]
    _expect_inside(remote, file, places, positions)
    with _open_part(target, remote.validator, f"{marker} {places}") as part:
        _copy(remote, places, positions, part)
        SparseBuffer.from_json(answer["frame"]).write_to(part.file)
        part.file.flush()
        os.fsync(part.file.fileno())
        part.path.replace(target)


def _expect_inside(
    remote: HTTPFile, file: PublishedFile, places: list[tuple[int, int, int]], positions: Sequence[int]
) -> None:
    """Refuse a structure that leads beyond the remote file, or to more bytes than so many trajectories have."""
    assert remote.size is not None
    num_bytes, expected = sum(stride for *_, stride in places) * len(positions), bytes_to_fetch(file, len(positions))
    if num_bytes > (expected or remote.size):
        what = f"{len(positions)} of its trajectories have {num_bytes} bytes, expected {expected or remote.size}"
        raise file_fault(repr(remote), what, "check the source")
    count = positions[-1] + 1
    if any(min(start, stride) < 0 or start + count * stride > remote.size for _, start, stride in places):
        raise file_fault(repr(remote), f"its arrays lie outside its {remote.size} bytes", "check the source")


@contextmanager
def _open_part(target: Path, validator: str | None, content: str) -> Iterator[CheckedPart]:
    """`NAME.part` of an earlier process if it has the same content of the same version of a file, else an empty one."""
    # Without a version of the file nobody knows what the next bytes belong to: nothing is continued.
    part = CheckedPart(target, f"{validator or uuid4()} {h5py.__version__} {content}")
    with closing(part.file):
        try:
            yield part
        finally:
            if part.size and part.path.exists():
                part.record()
            else:
                for path in part.paths:
                    path.unlink(missing_ok=True)


def read_marker(path: Path) -> str | None:
    """Origin of a partial file, one phrase; None for a whole file."""
    with open_data(path) as file:
        marker = read_text(file, MARKER)
    if marker is not None and not re.fullmatch(MARKER_PATTERN, marker, re.ASCII):
        raise file_fault(path, f"its attribute {MARKER!r} was not written by this program")
    return marker


def _marker(positions: Sequence[int], total: int | str, file: PublishedFile) -> str:
    ranges = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in _ranges(positions)]
    named = ",".join(ranges)
    if len(ranges) > MAX_RANGES_NAMED:
        named = f"{len(positions)} chosen ones (SHA-256 {hashlib.sha256(named.encode()).hexdigest()[:16]})"
    return f"trajectories {named} of {total} of {file.name}, MD5 {file.md5}"


def _ranges(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges (start, stop) of consecutive positions."""
    ranges = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(each[0]), int(each[-1]) + 1) for each in ranges]


def _expect_marker(path: Path, positions: Sequence[int], file: PublishedFile) -> None:
    marker = inspect("marker", path=path) or "not a partial file"
    start, end = _marker(positions, "*", file).split("*", 1)
    if not (marker.startswith(start) and marker.endswith(end)):
        raise file_fault(path, f"is {marker}", "delete it to fetch it anew")


def read_structure(source: io.RawIOBase, file: PublishedFile, positions: Sequence[int]) -> dict[str, Any]:
    """The marker, the frame and the places of the small file, as JSON; `source` is the remote file."""
    family, name = FAMILIES[file.family], repr(source)
    hdf5.before_access(name)
    try:
        with h5py.File(source, "r") as remote:
            count = inspect_file(remote, family).count
            if positions[-1] >= count:
                raise file_fault(name, f"has {count} trajectories, not {positions[-1] + 1}", "ask for fewer")
            marker = _marker(positions, count, file)
            frame, places = _build_small(remote, family, positions, marker)
            if sum(len(block) for _, block in frame.pieces) > MAX_FRAME_BYTES:
                raise file_fault(name, f"its coordinates have over {MAX_FRAME_BYTES >> 20} MiB", "check the source")
    except DataFault:  # a ValueError as well
        raise
    except CORRUPTION as error:
        raise file_fault(name, f"is no HDF5 file that can be read ({error})", "check the URL") from error
    return {"marker": marker, "frame": frame.to_json(), "places": places}


def _is_number(attribute: h5py.h5a.AttrID) -> bool:
    """Whether an attribute is a number or a few; text and objects are not copied from a file of unknown origin."""
    num_bytes = attribute.dtype.itemsize * math.prod(attribute.shape)
    return attribute.dtype.kind in "fiu" and num_bytes < MAX_ATTRIBUTE_BYTES


def _build_small(
    source: h5py.File, family: Family, positions: Sequence[int], marker: str
) -> tuple[SparseBuffer, list[tuple[int, int, int]]]:
    """The small file without the values of its trajectories, and where those of each array are.

    Per array: its first byte in the small file, its first byte in the remote file, and the bytes of one trajectory.
    """
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the bytes of the file, and its MD5, then do not depend on the time of day
    num_axes = len(family.axes)
    ranks = dict.fromkeys(family.arrays, 2 + num_axes) | dict.fromkeys(family.coefficients, 1 + num_axes)
    small, places = SparseBuffer(), []
    with h5py.File(small, "w") as file:
        file.attrs.update({name: source.attrs[name] for name in source.attrs if _is_number(source.attrs.get_id(name))})
        file.attrs[MARKER] = np.bytes_(marker)
        if list(positions) != list(range(len(positions))):
            file[POSITIONS_DATASET] = np.asarray(positions, np.int64)
        for name in sorted({f"{axis}-coordinate" for axis in (*family.axes, "t")} & set(list_names(source))):
            file[name] = open_array(source, name, 1)[()]
        for name, rank in ranks.items():
            stored = open_array(source, name, rank)
            offset, shape = stored.id.get_offset(), stored.shape[1 - rank :]
            if stored.chunks is not None or offset is None:
                raise file_fault(source.filename, f"{name!r} is stored in chunks", "fetch the whole file")
            space = h5py.h5s.create_simple((*stored.shape[:-rank], len(positions), *shape))
            created = h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(stored.dtype), space, properties)
            places.append((created.get_offset(), offset, math.prod(shape) * stored.dtype.itemsize))
    return small, places


def _copy(remote: HTTPFile, places: list[tuple[int, int, int]], positions: Sequence[int], part: CheckedPart) -> None:
    """Fetch the missing bytes in the order of the small file, with one request per range of trajectories."""
    arrived = part.size
    for target, source, stride in sorted(places):
        for start, stop in _ranges(positions):
            num_bytes = (stop - start) * stride
            skip = min(max(0, arrived - target), num_bytes)
            remote.advance(skip)
            part.skip_to(target + skip)
            remote.stream(source + start * stride + skip, source + stop * stride, part.append)
            target += num_bytes
