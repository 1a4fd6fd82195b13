"""Atomic writing of files (temporary name, flush to disk, rename), JSON, digests of files; number of cores."""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ups.errors import DataFault, Locked, StorageFault

if TYPE_CHECKING:
    from filelock import FileLock

REMEDY = "free some space, allow access or choose another folder; the same command resumes"
MAX_OPEN_FILES = 8192
NOT_PLAIN = "is not a plain file but a link, pipe, device or folder; delete it and run again"
WEIGHTS, RUN = "weights.pt", "run.json"  # of a trained stage: the model, and what it was trained from
NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*")
DIGEST = re.compile(r"[0-9a-f]{64}")
NO_PLACE = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}  # for a file of this name
UNUSABLE = NO_PLACE | {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),  # a full or failing disk
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # no right to write
}


os.umask(UMASK := os.umask(0o077))  # it can be read only by setting it, which is safe before there are threads


@contextmanager
def storage_faults(path: Path | None = None, remedy: str = REMEDY) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a `StorageFault` that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        if (fault := storage_fault(error, path, remedy)) is None:
            raise
        raise fault from error


def storage_fault(error: OSError, path: Path | None = None, remedy: str = REMEDY) -> StorageFault | None:
    """The fault of a full or read-only disk, or of a name that no file can have; None for other errors."""
    if error.errno not in UNUSABLE:
        return None
    remedy = "choose another name" if error.errno in NO_PLACE else remedy
    return StorageFault(f"{path or error.filename or 'a file'}: {os.strerror(error.errno)}; {remedy}")


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and rename it to `path`, else remove it.

    Raises:
        StorageFault: the disk is full or read-only; an earlier file at `path` is unchanged.
    """
    # In a folder that others may write to, a link under a name that can be foreseen would lead to a file of ours.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with storage_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            yield temporary
            os.fsync(descriptor)
            os.fchmod(descriptor, 0o666 & ~UMASK)
            temporary.replace(path)
            _flush_folder(path.parent)
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Flush the folder, because a power failure may lose a new name although the file's content is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete temporary files of killed processes, or those for `name`; no other process may write them meanwhile."""
    for path in folder.glob(".*.tmp" if name is None else f".{escape(name)}.*.tmp"):
        path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity raise a `ValueError`, because JSON has neither."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def plain(path: str | Path, flags: int) -> int:
    """Opener for `open` that takes plain files alone; it follows a link only to read.

    Raises:
        DataFault, StorageFault: a pipe, device or folder, or to write a link; a pipe would be waited for without end.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    kind = StorageFault if writes else DataFault
    refused = kind(f"{path} {NOT_PLAIN}")
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise refused from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading; raises as `plain`."""
    return open(path, "rb", opener=plain)


def private_lock(path: Path, timeout: float = -1) -> "FileLock":
    """A lock between processes by a file that only its owner may read; `timeout` in seconds, -1 waits without end.

    Raises:
        StorageFault: `path` is a link, pipe, device or folder: locking would change what is there.
    """
    from filelock import FileLock  # reading needs none

    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise StorageFault(f"{path} {NOT_PLAIN}")
    return FileLock(path, timeout=timeout, mode=0o600)


def allow_open_files() -> None:
    """Let this process keep MAX_OPEN_FILES files open, if the system allows it: many start with a limit of 1024."""
    import resource  # of POSIX systems alone, unlike this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextmanager
def only_writer(path: Path, poll_seconds: float | None = None) -> Iterator[None]:
    """No other process holds this for `path` meanwhile. If one does, ask every `poll_seconds` until it has ended.

    Raises:
        Locked: another process holds it, and there are no `poll_seconds`.
    """
    from filelock import Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_name(f".{path.name.removeprefix('.')}.lock")
    lock = private_lock(place, timeout=0 if poll_seconds is None else -1)
    try:
        with storage_faults(place):
            lock.acquire(poll_interval=poll_seconds)
    except Timeout:
        raise Locked(f"another process writes {path}; wait for it or stop it") from None
    try:
        yield
    finally:
        place.unlink(missing_ok=True)  # before others can lock it: they notice, and make a new one
        lock.release()


def private_folder(folder: Path) -> Path:
    """Make the folder, which only its owner can enter; raises `StorageFault` if it belongs to somebody else."""
    with storage_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder


def read_json(path: Path, kind: Any = Any) -> Any:
    """Read JSON, as a value of the type `kind`, be it a dataclass; a missing or damaged file is a `DataFault`."""
    if not path.exists():
        raise DataFault(f"{path} does not exist yet: run the nodes before this one, or `kedro run --pipeline full`")
    try:
        with open_plain(path) as file:
            text = file.read().decode("utf-8")
        content = json.loads(text, parse_constant=_refuse_constant)
    except DataFault:  # a ValueError as well
        raise
    except (ValueError, RecursionError) as error:
        raise DataFault(f"{path} is not valid JSON ({error}); delete it and run again") from error
    return content if kind is Any else _as(path, text, kind)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _as(path: Path, text: str, kind: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError  # files of any content do without

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))[:80]
        what = f"{place}: {problem['msg']}" if place else problem["msg"]
        raise DataFault(f"{path} is damaged ({' '.join(what.split())}); delete it and run again") from error


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def manifest_of(path: Path) -> Path:
    """Path of the manifest beside a file, a JSON with the expected content of it: {"sha256", "bytes"}."""
    return path.with_name(f"{path.name}.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the file `path`; raises `DataFault` if it is missing or is none."""
    content = read_json(manifest_of(path))
    if not isinstance(content, dict) or not is_digest(content.get("sha256")) or type(content.get("bytes")) is not int:
        raise DataFault(f"{manifest_of(path)} is not the manifest of {path.name}; delete it and run again")
    return content


def is_remote(path: Path) -> bool:
    """Whether a path is on S3: `s3://BUCKET/FOLDER`, which pathlib writes as `s3:/BUCKET/FOLDER`."""
    return path.parts[:1] == ("s3:",)


def relative(path: Path, folder: Path) -> str:
    """A path as seen from `folder`, for a file that may be moved along with it; one on S3 as it is."""
    return str(path) if is_remote(path) else os.path.relpath(path, folder)


def resolved(path: str, folder: Path) -> Path:
    """The absolute path that is `path` as seen from `folder`; one on S3 as it is."""
    return Path(path) if is_remote(Path(path)) else (folder / path).resolve()


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a table in Markdown, in which a bar within a cell does not end it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def is_digest(value: Any) -> bool:
    """Whether a value from JSON is a SHA-256."""
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def from_here(path: Path) -> Path:
    """The path from the working folder, if it lies below it: short enough for a line of a terminal."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def place_of(root: Path, receipt: Any) -> Path:
    """The folder below `root` that a receipt names in `path`.

    Raises:
        DataFault: there is no such name, or it leads out of `root`, be it by a link.
    """
    path = receipt.get("path") if isinstance(receipt, dict) else None
    if not isinstance(path, str) or not all(NAME.fullmatch(part) for part in Path(path).parts):
        raise DataFault(f"{root}: a receipt with path {path!r} is not of a step; delete its JSON file and run again")
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise DataFault(f"{root / path} leads out of {root} by a link; put the files there and run again")
    return root / path


def num_cores() -> int:
    """Cores that this process may use: a batch system or `taskset` may leave it few of many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
