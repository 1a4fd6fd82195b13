"""Atomic writing of files (temporary name, flush to disk, rename), JSON, and digests of files."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ups.errors import DataFault, StorageFault

REMEDY = "free some space or choose another folder; the same command resumes"
WEIGHTS = "weights.pt"
UNUSABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),  # a full or failing disk
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # no right to write
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),  # no such place for a file
}


@contextmanager
def storage_faults(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a `StorageFault` that names the file and the remedy."""
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
        StorageFault: the disk is full or read-only; an earlier file at `path` is unchanged.
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
    """Flush the folder, because a power failure may lose a new name although the file's content is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed processes; no other process may write to the folder meanwhile."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity raise a `ValueError`, because JSON has neither."""
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
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def manifest_of(path: Path) -> Path:
    """Path of the manifest beside a file, a JSON with the expected content of it: {"sha256", "bytes"}."""
    return path.with_name(f"{path.name}.json")
