"""A file in memory that holds only what was written: the frame of an HDF5 file without its gigabytes."""

import io
from typing import BinaryIO


class SparseBuffer(io.RawIOBase):
    """Bytes by position, zero where nothing was written; `pieces` are the writes in their order.

    HDF5 writes its structure here, so that a full disk is met by plain writes of ours and not inside HDF5, which cannot
    close a file then.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._position, self._size = 0, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

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

    def write_to(self, file: BinaryIO) -> None:
        """Write the pieces to a file of the same size."""
        for place, block in self.pieces:
            file.seek(place)
            file.write(block)
        file.truncate(self._size)
