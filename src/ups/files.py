"""Files that are either whole or absent: write beside, flush to disk, rename."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ups.errors import DataFault, StorageFault

BLOCK = 1 << 22
REMEDY = "free some space or choose another place, the same command goes on"
WEIGHTS = "weights.pt"
UNUSABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),  # full or failing
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),  # closed
}


@contextmanager
def storage_faults(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Turn the errors of a full or closed disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        raise StorageFault(f"{path}: {os.strerror(error.errno)}; {remedy}") from error


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and rename it to `path`, else remove it.

    Raises:
        StorageFault: the disk is full or closed; what was at `path` before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Bring a new name to disk as well (POSIX)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left in a folder that nobody else writes to."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity are refused, for JSON has neither."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or damaged file is a `DataFault` that names it."""
    if not path.is_file():
        raise DataFault(f"{path} does not exist yet: run the nodes before this one, or `kedro run --pipeline full`")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataFault(f"{path} is not valid JSON ({error}); delete it and run again") from error


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file, read in blocks."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def manifest_of(path: Path) -> Path:
    """The file that says what `path` must hold: {"sha256", "bytes"}."""
    return path.with_name(f"{path.name}.json")
