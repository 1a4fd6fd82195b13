"""Download of a file, and what has arrived of it: resumed after a kill, checked by MD5, one process at a time."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import requests
from filelock import Timeout

from ups.data.connections import new_session
from ups.data.hdf5 import SIGNATURE, describe_content
from ups.data.http import (
    BLOCK_BYTES,
    MAX_FILE_BYTES,
    Advance,
    RangeResponse,
    TransferError,
    find_version,
    request_range,
    retry_transfer,
)
from ups.data.published import refuse_outdated_md5, shown
from ups.errors import DataFault
from ups.files import digest_of, private_lock, publish, storage_faults

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RECORDED_BYTES = 2**26  # between two records of what has arrived in part: what a kill may lose
MAX_VERSION_CHARACTERS = 300


@contextmanager
def lock(target: Path, advance: Advance) -> Iterator[None]:
    """Lock `target` between processes by a hidden file, removed at the end; `advance(0)` is called while waiting."""

    def cancel() -> bool:
        advance(0)
        return False

    path = target.with_name(f".{target.name}.lock")
    with storage_faults(path, "name a folder that can be written to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        file_lock = private_lock(path)
        try:
            file_lock.acquire(timeout=0)
        except Timeout:
            log.info("%s is locked by another run: waiting for it", path)
            file_lock.acquire(poll_interval=POLL_SECONDS, cancel_check=cancel)
    try:
        yield
    finally:
        # Removed while the lock is held: a process that has opened the old file finds it removed and opens a new one.
        path.unlink(missing_ok=True)
        file_lock.release()


def download_file(url: str, md5: str, target: Path, advance: Advance, *, num_bytes: int | None = None) -> None:
    """Fetch an HDF5 file; its final name never holds other content than that of `md5`.

    The same call resumes a download that was killed. A second process that wants the same file waits for the first.

    Raises:
        DataFault: the server, the size or the MD5 is wrong.
        StorageFault: the disk is full or not writable; the bytes that arrived are kept.
    """
    with lock(target, advance):
        if target.exists():
            _expect_md5(target, digest_of(target, "md5"), md5, f"delete it to fetch {shown(url)}")
            advance(target.stat().st_size)
            return
        with storage_faults(target, "free space or make the folder writable; the same command resumes here"):
            _fetch(url, md5, target, num_bytes, advance)


def _fetch(url: str, md5: str, target: Path, num_bytes: int | None, advance: Advance) -> None:
    with closing(PartFile(target, num_bytes)) as part, new_session() as session:
        advance(part.size)
        if num_bytes is None or part.size != num_bytes:
            retry_transfer(url, lambda: _transfer(session, url, part, num_bytes, advance), lambda: part.size, advance)
        actual = part.md5()
        if actual != md5:
            part.discard()
        _expect_md5(target, actual, md5, f"fetched from {shown(url)}, discarded; run the same command to try again")
        part.publish()


def _expect_md5(path: Path, actual: str, expected: str, remedy: str) -> None:
    if actual != expected:
        refuse_outdated_md5(path, actual)
        raise DataFault(f"{path}: MD5 is {actual}, expected {expected}; {remedy}")


def _transfer(session: requests.Session, url: str, part: "PartFile", num_bytes: int | None, advance: Advance) -> None:
    """One request that continues the partial file, or starts it over if the server does not resume."""
    offset, limit = part.size, MAX_FILE_BYTES if num_bytes is None else num_bytes
    with request_range(session, url, offset, validator=part.validator) as response:
        if offset and response.start == offset == response.total:
            return
        if _cannot_resume(response, part):
            part.discard()
            advance(-offset)
            raise TransferError(f"the server cannot resume at byte {offset} of the same file")
        first = b"" if response.start else _read_start(url, response.blocks)
        if num_bytes is not None and response.total not in (None, num_bytes):
            raise DataFault(
                f"{shown(url)}: the server offers {response.total} bytes, expected {num_bytes}; check the source"
            )
        if not response.start:
            part.discard(next_version=response.validator)
            advance(-offset)
        for block in chain([first], response.blocks):
            part.append(block)
            advance(len(block))
            if part.size > limit:
                part.discard()
                raise DataFault(
                    f"{shown(url)}: the server sends more than the expected {limit} bytes; check the source"
                )
    expected = response.total if num_bytes is None else num_bytes
    if expected is not None and part.size != expected:
        raise TransferError(f"the connection closed after {part.size} of {expected} bytes")


def _cannot_resume(response: RangeResponse, part: "PartFile") -> bool:
    """Whether the response is another range than the rest, or the rest of another version of the file."""
    if response.start != part.size:
        return response.start != 0
    return part.size > 0 and None not in (part.validator, response.validator) and part.validator != response.validator


def _read_start(url: str, blocks: Iterator[bytes]) -> bytes:
    """The first blocks, which must start an HDF5 file: an error page is refused before it is written."""
    start = b""
    while len(start) < len(SIGNATURE) and (block := next(blocks, b"")):
        start += block
    if not start:
        raise TransferError("the server sent nothing")
    if not start.startswith(SIGNATURE):
        what = describe_content(start[:80])
        raise DataFault(f"{shown(url)}: the server sent {what}, not an HDF5 file; check the URL or log in")
    return start


class PartFile:
    """The bytes of a file that have arrived, in `NAME.part`; their validator is in `NAME.part.version`.

    A thread hashes each block while the next one is written: MD5 is as slow as a fast disk.
    """

    def __init__(self, target: Path, num_bytes: int | None) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._version = target.with_name(f"{target.name}.part.version")
        self._hasher = ThreadPoolExecutor(1)
        self._pending_hash: Future[None] | None = None
        self._open()
        with self.path.open("rb") as file:
            is_foreign = self.size > 0 and file.read(len(SIGNATURE)) != SIGNATURE
            if is_foreign or (num_bytes is not None and self.size > num_bytes):
                self.discard()
            else:  # hash the bytes that an earlier process has fetched
                file.seek(0)
                hashlib.file_digest(file, lambda: self._md5)

    def close(self) -> None:
        """Keep what has arrived for the next process; an empty file is removed."""
        self._hasher.shutdown()
        self._stream.close()
        if self.size == 0:
            self._remove()

    @property
    def validator(self) -> str | None:
        """The server's name for the version of the file that the bytes belong to."""
        if not self._version.exists():
            return None
        with self._version.open(errors="replace") as file:
            return find_version(file.read(MAX_VERSION_CHARACTERS))

    def append(self, block: bytes) -> None:
        """Write a block while the one before it is hashed."""
        view = memoryview(block)
        while view:  # a write to a disk that fills up may be partial
            written = self._stream.write(view)
            view = view[written:]
            self.size += written
        self._finish_hash()
        self._pending_hash = self._hasher.submit(self._md5.update, block)

    def discard(self, next_version: str | None = None) -> None:
        """Remove what has arrived; the bytes that follow belong to the version `next_version` of the file."""
        self._finish_hash()
        self._stream.close()
        self._remove()
        self._open()
        if next_version is not None:
            self._version.write_text(next_version)

    def md5(self) -> str:
        """MD5 of what has arrived."""
        self._finish_hash()
        return self._md5.hexdigest()

    def publish(self) -> None:
        """Flush the file to disk and give it its final name."""
        os.fsync(self._stream.fileno())
        self.path.replace(self.target)
        self._version.unlink(missing_ok=True)

    def _open(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._stream = self.path.open("ab", buffering=0)
        self.size = self.path.stat().st_size

    def _finish_hash(self) -> None:
        if self._pending_hash is not None:
            self._pending_hash.result()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)


class CheckedPart:
    """`NAME.part` of a version of some trajectories; `NAME.part.version` has the MD5 of the bytes that have arrived.

    An earlier process has left both. Without a record of the same `identity`, or with other bytes, the file starts
    empty; bytes beyond the recorded ones, which a power failure may have lost, are cut off.
    """

    def __init__(self, target: Path, identity: str) -> None:
        self.paths = tuple(target.with_name(f"{target.name}{suffix}") for suffix in (".part", ".part.version"))
        self.path, self._record = self.paths
        self._identity = identity
        self.file = self.path.open("rb+" if self.path.exists() else "wb+")
        self.size = self._recorded = 0
        known = self._record.read_text(errors="replace").split("\n") if self._record.is_file() else []
        is_kept = len(known) == 3 and known[0] == identity and self._advance_to(known[1]) == known[2]
        if not is_kept:
            self.size = 0
            self._md5 = hashlib.md5(usedforsecurity=False)
            self.record()
        self._recorded = self.size
        self.file.truncate(self.size)
        self.file.seek(self.size)

    def skip_to(self, place: int) -> None:
        """Leave a gap of zeros, for the structure."""
        if place > self.size:
            self._md5.update(bytes(place - self.size))
            self.size = self.file.seek(place)

    def append(self, block: bytes) -> None:
        """Write a block."""
        self.file.write(block)
        self._md5.update(block)
        self.size += len(block)
        if self.size - self._recorded >= RECORDED_BYTES:
            self.record()

    def record(self) -> None:
        """Flush what has arrived to disk, and then its MD5."""
        self.file.flush()
        os.fsync(self.file.fileno())
        with publish(self._record) as temporary:
            temporary.write_text(f"{self._identity}\n{self.size}\n{self._md5.hexdigest()}")
        self._recorded = self.size

    def _advance_to(self, size: str) -> str:
        """MD5 of as many bytes as the record names."""
        self.size = int(size) if re.fullmatch(r"[0-9]{1,15}", size) else 0
        self._md5, missing = hashlib.md5(usedforsecurity=False), self.size
        while missing and (block := self.file.read(min(BLOCK_BYTES, missing))):
            self._md5.update(block)
            missing -= len(block)
        return self._md5.hexdigest()
