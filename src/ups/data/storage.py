"""Disks that are full or closed, and one writer per file."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ups.files import storage_faults

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


def free_bytes(folder: Path) -> int:
    """Free space of the disk that holds a folder, or will hold it."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextmanager
def lock(target: Path, wait: Callable[[], object]) -> Iterator[None]:
    """Wait until no other process makes `target`, calling `wait` now and then; what it raises ends the waiting.

    The lock dies with its process and leaves no file behind.
    """
    path = target.with_name(f".{target.name}.lock")
    with storage_faults(path, "name a folder that can be written to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock_file(path, wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock_file(path: Path, wait: Callable[[], object]) -> int:
    """Lock the file of that name; one that its last holder removed meanwhile protects nothing."""
    waits = 0
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _try_lock(descriptor) and path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)
        if waits == 1:
            log.info("%s is held: waiting for the other run", path)
        waits += 1
        wait()
        time.sleep(POLL_SECONDS)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
