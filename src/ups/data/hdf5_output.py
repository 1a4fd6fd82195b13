"""New files of HDF5 on a disk that may be full."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py


class _Output(io.RawIOBase):
    """A file that keeps the error of its first failed write, after which it writes nothing: HDF5 must see none.

    After an error of a full disk HDF5 can neither write nor close a file, and may crash the process at its end.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        return self._kept(lambda: self._file.truncate(size), 0)

    def write(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        return self._kept(lambda: _write_all(self._file, view), len(view))

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def _kept(self, call: Callable[[], int], otherwise: int) -> int:
        if self.error is None:
            try:
                return call()
            except OSError as error:
                self.error = error
        return otherwise


def _write_all(file: io.FileIO, view: memoryview) -> int:
    written = 0
    while written < len(view):
        written += file.write(view[written:])
    return written


@contextmanager
def create_file(path: Path) -> Iterator[h5py.File]:
    """A new file of HDF5; the `OSError` of a full disk is raised when it is closed."""
    with path.open("w+b", buffering=0) as raw:
        output = _Output(raw)
        with h5py.File(output, "w") as file:
            yield file
    if output.error is not None:
        raise output.error
