"""Verified downloads: a partial file beside the target, resumed after a drop, checked by MD5 and only then renamed."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import TracebackType

import requests

from ups.data.checksums import BLOCK_BYTES, md5_of
from ups.data.hdf5 import SIGNATURE, what_is
from ups.data.registry import refuse_outdated_md5
from ups.data.storage import lock
from ups.data.transfer import TransferError, ask, new_session, persist
from ups.errors import DataFault
from ups.files import storage_faults

Advance = Callable[[int], object]


def download_file(url: str, md5: str, target: Path, advance: Advance, *, num_bytes: int | None = None) -> None:
    """Fetch an HDF5 file; under its final name there is the right content or nothing.

    `advance` takes the bytes that arrived, negative when a transfer starts over, 0 now and then; what it raises ends
    the download. A killed download is resumed by the same call; a second process waits for the first.
    """
    with lock(target, lambda: advance(0)):
        if target.exists():
            _expect_md5(target, md5_of(target), md5, f"delete it to fetch {url}")
            advance(target.stat().st_size)
            return
        with storage_faults(target, "free space or make the folder writable, the same command goes on here"):
            _fetch(url, md5, target, num_bytes, advance)


def _fetch(url: str, md5: str, target: Path, num_bytes: int | None, advance: Advance) -> None:
    with PartFile(target, num_bytes) as part, new_session() as session:
        advance(part.size)
        if num_bytes is None or part.size != num_bytes:
            persist(
                url, lambda: _transfer(session, url, part, num_bytes, advance), lambda: part.size, lambda: advance(0)
            )
        try:
            _expect_md5(target, part.md5(), md5, f"fetched from {url}, discarded; run the same command to try again")
        except DataFault:
            part.discard()
            raise
        part.publish()


def _expect_md5(path: Path, actual: str, expected: str, remedy: str) -> None:
    if actual != expected:
        refuse_outdated_md5(path, actual)
        raise DataFault(f"{path}: MD5 is {actual}, expected {expected}; {remedy}")


def _transfer(session: requests.Session, url: str, part: "PartFile", num_bytes: int | None, advance: Advance) -> None:
    """One request that continues the partial file, or starts it over if the server does not resume."""
    offset = part.size
    with ask(session, url, offset, validator=part.validator) as answer:
        if offset and answer.start == offset == answer.total:
            return
        has_changed = None not in (part.validator, answer.validator) and part.validator != answer.validator
        if answer.start not in (0, offset) or (offset and answer.start == offset and has_changed):
            part.discard()
            advance(-offset)
            raise TransferError(f"the server cannot resume at byte {offset} of the same file")
        first = b"" if answer.start else _read_start(url, answer.blocks)
        if num_bytes is not None and answer.total not in (None, num_bytes):
            raise DataFault(f"{url}: the server offers {answer.total} bytes, expected {num_bytes}; check the source")
        if not answer.start:
            part.restart(answer.validator)
            advance(-offset)
        for block in chain([first], answer.blocks):
            part.append(block)
            advance(len(block))
            if num_bytes is not None and part.size > num_bytes:
                part.discard()
                raise DataFault(f"{url}: the server sends more than the expected {num_bytes} bytes; check the source")
    expected = answer.total if num_bytes is None else num_bytes
    if expected is not None and part.size != expected:
        raise TransferError(f"the connection closed after {part.size} of {expected} bytes")


def _read_start(url: str, blocks: Iterator[bytes]) -> bytes:
    """The first bytes of a file that must be HDF5: an error page is refused before it is written."""
    start = b""
    while len(start) < len(SIGNATURE):
        block = next(blocks, b"")
        if not block:
            break
        start += block
    if not start:
        raise TransferError("the server sent nothing")
    if not start.startswith(SIGNATURE):
        raise DataFault(f"{url}: the server sent {what_is(start[:80])}, not an HDF5 file; check the URL or log in")
    return start


class PartFile:
    """What has arrived of a file, in `NAME.part`, hashed beside the writing; `NAME.part.version` has its validator."""

    def __init__(self, target: Path, num_bytes: int | None) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._version = target.with_name(f"{target.name}.part.version")
        self._hasher = ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._stream = self.path.open("ab", buffering=0)
        self.size = self.path.stat().st_size
        self._adopt(num_bytes)

    def __enter__(self) -> "PartFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hasher.shutdown()
        self._stream.close()
        if self.size == 0 and self.path.exists():
            self._remove()

    @property
    def validator(self) -> str | None:
        """The version of the file that the bytes belong to, as its server calls it."""
        return self._version.read_text() if self._version.exists() else None

    def append(self, block: bytes) -> None:
        """Write a block while the one before it is hashed."""
        view = memoryview(block)
        while view:
            written = self._stream.write(view)
            view = view[written:]
            self.size += written
        self._hash(block)

    def restart(self, validator: str | None) -> None:
        """Forget what has arrived: a file of this version follows."""
        self.discard()
        if validator is not None:
            self._version.write_text(validator)

    def discard(self) -> None:
        """Remove what has arrived."""
        self._wait()
        self._stream.close()
        self._remove()
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._stream = self.path.open("ab", buffering=0)
        self.size = 0

    def md5(self) -> str:
        """MD5 of what has arrived."""
        self._wait()
        return self._md5.hexdigest()

    def publish(self) -> None:
        """Give the file its final name."""
        os.fsync(self._stream.fileno())
        self.path.replace(self.target)
        self._version.unlink(missing_ok=True)

    def _adopt(self, num_bytes: int | None) -> None:
        """Hash what an earlier process left, or remove it if it cannot be the start of the file."""
        with self.path.open("rb") as file:
            is_foreign = self.size > 0 and file.read(len(SIGNATURE)) != SIGNATURE
            if is_foreign or (num_bytes is not None and self.size > num_bytes):
                self.discard()
                return
            file.seek(0)
            while block := file.read(BLOCK_BYTES):
                self._hash(block)

    def _hash(self, block: bytes) -> None:
        self._wait()
        self._hashed = self._hasher.submit(self._md5.update, block)

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.result()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)
