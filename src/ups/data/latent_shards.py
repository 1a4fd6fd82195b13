"""Arrays of latents on disk: zarr v3 shards of small pieces, each with a checksum of its own.

An array (trajectories, T, N, D) is cut in time into pieces (zarr's inner chunks) of one or a few snapshots, so that a
training step reads little more than it uses; pieces are joined in shards, one file each, so that there are few files.
`zarr.open_array` reads them. Reading here imports neither zarr nor, without compression, numcodecs: training processes
start sooner. Checksums are verified once: a file beside the array remembers, for every piece, the inode's time of
change (ctime) of the shard in which it was verified, for all processes.

Latents are stored as float32, or rounded to whole multiples of `scale` as compressed int32: component after component,
so that the small ones of smooth fields are runs of zeros, and as differences of neighbours, on grids of one axis second
differences along the tokens, on others differences in time.
"""

import errno
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from ups.errors import DataFault
from ups.files import allow_open_files, open_plain, plain, publish

SHARD_BYTES = 2**26
LARGE_SNAPSHOT_BYTES = 2**20  # larger snapshots are pieces of their own
COMPRESSED_PIECE_BYTES = 2**16  # of smaller ones compression saves less
CHECKSUM_BYTES, CHECKSUM_BLOCK = 4, 2**20
MAX_OPEN_SHARDS = 128  # files that a process keeps open of each array
MAX_MULTIPLE = 2**24  # larger multiples of the scale are not exact in float32
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)  # to write to
MISSING = 2**64 - 1  # zarr's offset of a piece that does not exist


@dataclass(frozen=True)
class Layout:
    """How latents (trajectories, T, N, D) of a grid of `num_axes` axes are cut; int32 counts `scale`, None: float32."""

    shape: tuple[int, int, int, int]
    scale: float | None
    num_axes: int

    @cached_property
    def piece(self) -> int:
        """Snapshots of a piece: 1 or 2, for which two neighbouring snapshots cost at most 1.5 times their bytes.

        Small compressed snapshots are joined up to `COMPRESSED_PIECE_BYTES`.
        """
        snapshot_bytes = 4 * math.prod(self.shape[2:])
        smallest = 1 if snapshot_bytes >= LARGE_SNAPSHOT_BYTES else 2
        joined = COMPRESSED_PIECE_BYTES // snapshot_bytes if self.scale else 0
        return min(self.shape[1], max(smallest, joined))

    @property
    def differences(self) -> tuple[int, int]:
        """The axis of a piece (D, t, N) along which differences are taken, and how often."""
        return (-1, 2) if self.num_axes == 1 else (-2, 1)

    @cached_property
    def shard(self) -> tuple[int, int]:
        """Trajectories and snapshots of a shard, whole pieces of about `SHARD_BYTES` before compression."""
        piece_bytes = 4 * self.piece * math.prod(self.shape[2:])
        per_trajectory = -(-self.shape[1] // self.piece)
        if per_trajectory * piece_bytes > SHARD_BYTES:
            return 1, self.piece * max(1, SHARD_BYTES // piece_bytes)
        return min(self.shape[0], SHARD_BYTES // (per_trajectory * piece_bytes)), self.piece * per_trajectory

    @cached_property
    def pieces_per_trajectory(self) -> int:
        """Pieces of one trajectory in a shard."""
        return self.shard[1] // self.piece

    @cached_property
    def pieces_per_shard(self) -> int:
        return self.shard[0] * self.pieces_per_trajectory

    @property
    def num_shards(self) -> tuple[int, int]:
        """Shards along trajectories and time."""
        return -(-self.shape[0] // self.shard[0]), -(-self.shape[1] // self.shard[1])

    def spans(self, row: int, column: int) -> tuple[range, range]:
        """The trajectories and snapshots of a shard."""
        (k, t), (count, num_snapshots) = self.shard, self.shape[:2]
        return range(row * k, min(count, (row + 1) * k)), range(column * t, min(num_snapshots, (column + 1) * t))

    def pack(self, z: np.ndarray) -> bytes:
        """A piece from its snapshots z (t, N, D); a last piece with fewer is filled with zeros."""
        if len(z) < self.piece:
            z = np.concatenate([z, np.zeros((self.piece - len(z), *z.shape[1:]), z.dtype)])
        if self.scale is None:
            return with_checksum(np.ascontiguousarray(z, "<f4").tobytes())
        from numcodecs import blosc

        multiples = np.rint(z / np.float32(self.scale)).astype("<i4").transpose(2, 0, 1)
        code = np.ascontiguousarray(to_differences(multiples, *self.differences))
        return with_checksum(bytes(blosc.compress(code, b"zstd", 1, blosc.BITSHUFFLE)))

    def unpack(self, content: np.ndarray) -> np.ndarray:
        """Snapshots (t, N, D) of a piece without its checksum; a view into `content` where they are stored as float32.

        Raises:
            ValueError: the piece has another size.
        """
        t, n, d = self.piece, *self.shape[2:]
        if self.scale is None:
            return content.view("<f4").reshape(t, n, d)
        from numcodecs import blosc

        if int.from_bytes(content[4:8].tobytes(), "little") != 4 * t * n * d:  # in Blosc's header
            raise ValueError("wrong size")
        try:
            code = np.frombuffer(blosc.decompress(content), "<i4").reshape(d, t, n)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return from_differences(code, *self.differences).transpose(1, 2, 0) * np.float32(self.scale)


def to_differences(values: np.ndarray, axis: int, count: int) -> np.ndarray:
    """int32 `values` as their differences d along an axis, taken `count` times, coded as 2 d, or -2 d - 1 where d < 0.

    So small differences of either sign have the same high bits, zeros.
    """
    for _ in range(count):
        values = np.diff(values, axis=axis, prepend=np.int32(0))
    return (values << 1) ^ (values >> 31)


def from_differences(code: np.ndarray, axis: int, count: int) -> np.ndarray:
    """The inverse of `to_differences`."""
    values = (code.view("<u4") >> 1).view("<i4") ^ -(code & 1)
    for _ in range(count):
        values = np.cumsum(values, axis=axis, dtype="<i4")
    return values


def scale_of(tolerance: float | None) -> float | None:
    """The largest power of two with scale / sqrt(12), the RMS of rounding to its multiples, at most `tolerance`.

    It is the RMS error of the normalized fields too, because the codec's bases are orthonormal.
    """
    return None if tolerance is None else 2.0 ** math.floor(math.log2(math.sqrt(12) * tolerance))


def with_checksum(content: bytes) -> bytes:
    """`content` and its crc32c, as zarr's codec of this name appends it."""
    return content + google_crc32c.value(content).to_bytes(CHECKSUM_BYTES, "little")


def checksum_agrees(content: np.ndarray) -> bool:
    """Whether the last four bytes are the crc32c of those before; other threads run between two blocks of it."""
    checksum, end = 0, len(content) - CHECKSUM_BYTES
    for start in range(0, end, CHECKSUM_BLOCK):
        checksum = google_crc32c.extend(checksum, content[start : min(end, start + CHECKSUM_BLOCK)].tobytes())
    return end > 0 and checksum == int.from_bytes(content[end:].tobytes(), "little")


def shard_path(array: Path, row: int, column: int) -> Path:
    """The file of a shard."""
    return array / "c" / str(row) / str(column) / "0" / "0"


def write_shard(path: Path, layout: Layout, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write a shard of packed pieces, each with its number in the shard, and publish it when all are there."""
    index = np.full((layout.pieces_per_shard, 2), MISSING, "<u8")
    with publish(path) as temporary, temporary.open("wb") as file:
        offset = 0
        for number, content in pieces:
            index[number] = offset, len(content)
            offset += file.write(content)
        file.write(with_checksum(index.tobytes()))


class LatentArray:
    """Reads a finished array; every piece is verified before its first use."""

    def __init__(self, array: Path, layout: Layout) -> None:
        self.array, self.layout = array, layout
        allow_open_files()
        self._open = lru_cache(MAX_OPEN_SHARDS)(self._open_shard)
        self._verified: np.ndarray | None = None

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Snapshots `start` to `stop` of a trajectory, float32 (t, N, D).

        Raises:
            DataFault: a piece is missing, truncated or altered.
        """
        layout = self.layout
        (k, t), piece = layout.shard, layout.piece
        row, place = index // k, index % k * layout.pieces_per_trajectory
        self._open(row, start // t)  # before memory is taken for a shape that may be wrong
        z = np.empty((stop - start, *layout.shape[2:]), np.float32)
        for first in range(start - start % piece, stop, piece):
            number = place + first % t // piece
            begin, end = max(start, first), min(stop, first + piece)
            z[begin - start : end - start] = self._piece(row, first // t, number)[begin - first : end - first]
        return z

    def verify(self, row: int, column: int) -> None:
        """Verify all pieces of a shard; raises as `read`."""
        trajectories, snapshots = self.layout.spans(row, column)
        for index in trajectories:
            for start in range(snapshots.start, snapshots.stop, self.layout.piece):
                self.read(index, start, start + 1)

    def shards(self) -> list[Path]:
        """The files of all shards that are there."""
        paths = (shard_path(self.array, row, column) for row, column in np.ndindex(self.layout.num_shards))
        return [path for path in paths if path.is_file()]

    def preload(self) -> None:
        """Ask the system to read all shards ahead into its page cache; it does so in the background."""
        for path in self.shards() if hasattr(os, "posix_fadvise") else []:
            with open_plain(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _piece(self, row: int, column: int, number: int) -> np.ndarray:
        file, index, changed = self._open(row, column)
        offset, size = index[number].tolist()
        piece = np.frombuffer(os.pread(file.fileno(), size, offset), np.uint8)
        place = (row * self.layout.num_shards[1] + column) * self.layout.pieces_per_shard + number
        if self.verified[place] != changed:
            if not checksum_agrees(piece):
                raise self._damaged(row, column, "wrong checksum in")
            self.verified[place] = changed
        try:
            return self.layout.unpack(piece[:-CHECKSUM_BYTES])
        except ValueError:
            raise self._damaged(row, column, "a piece of another size in") from None

    @property
    def verified(self) -> np.ndarray:
        """Per piece the ctime of its shard when it was verified, in ns; shared by all processes where it can be.

        A process that cannot write beside the array remembers its own verifications alone.
        """
        if self._verified is None:
            count = math.prod(self.layout.num_shards) * self.layout.pieces_per_shard
            path = self.array.with_name(f"{self.array.name}.verified")
            try:
                with open(path, "a+b", opener=plain) as file:
                    os.truncate(file.fileno(), 8 * count)
                    if hasattr(os, "posix_fallocate"):  # a page that finds no room when it is written ends the process
                        os.posix_fallocate(file.fileno(), 0, 8 * count)
                    self._verified = np.memmap(file, "<i8", "r+", shape=(count,)).view(np.ndarray)
            except OSError as error:
                if error.errno not in NO_PLACE:
                    raise
                self._verified = np.zeros(count, "<i8")
        return self._verified

    def _open_shard(self, row: int, column: int) -> tuple[BinaryIO, np.ndarray, int]:
        """File, index (pieces, 2) of offsets and sizes, and ctime of a shard."""
        path = shard_path(self.array, row, column)
        index_bytes = 16 * self.layout.pieces_per_shard + CHECKSUM_BYTES
        if not path.is_file() or path.stat().st_size <= index_bytes:
            raise self._damaged(row, column, "there is no or no whole")
        if not path.resolve().is_relative_to(self.array.resolve()):
            raise self._damaged(row, column, "a link leads out of the cache at")
        file = open_plain(path)  # closed when the least recently used is forgotten
        status = os.fstat(file.fileno())
        content = np.frombuffer(os.pread(file.fileno(), index_bytes, status.st_size - index_bytes), np.uint8)
        if not checksum_agrees(content):
            raise self._damaged(row, column, "wrong checksum of the index of")
        index = content[:-CHECKSUM_BYTES].view("<u8").reshape(-1, 2)
        trajectories, snapshots = self.layout.spans(row, column)
        by_trajectory = index.reshape(-1, self.layout.pieces_per_trajectory, 2)
        present = by_trajectory[: len(trajectories), : -(-len(snapshots) // self.layout.piece)]
        if (present > status.st_size).any() or (present.sum(-1) > status.st_size - index_bytes).any():
            raise self._damaged(row, column, "pieces are missing in")
        return file, index, status.st_ctime_ns

    def _damaged(self, row: int, column: int, what: str) -> DataFault:
        folder = self.array.parent.parent
        path = shard_path(self.array, row, column)
        return DataFault(f"latent cache damaged: {what} {path}; delete {folder} and run again")
