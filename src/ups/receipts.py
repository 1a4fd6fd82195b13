"""Steps done once: a folder per fingerprint, a lock while it is worked in, a receipt when it is finished."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ups.errors import Locked
from ups.files import read_json, storage_faults, write_json

log = logging.getLogger(__name__)

RECEIPT, SIZES = "receipt.json", "files"
Receipt = dict[str, Any]


def once(
    name: str, folder: Path, identity: str, work: Callable[[Path], Receipt], *, root: Path, force: bool = False
) -> Receipt:
    """The receipt of step `name`: the stored one if it is up to date, else that of doing `work` in its folder.

    The step's folder is `folder/<first 12 digits of identity>`. `work` may find there what an interrupted run left and
    go on from it. The receipt adds to what `work` returns: path relative to `root` and fingerprint. The sizes of all
    files are kept with the stored one alone: those of logs vary, and what follows must not depend on them.

    Raises:
        Locked: another process works in the same folder.
    """
    place = folder / identity[:12]
    with storage_faults(place):
        place.mkdir(parents=True, exist_ok=True)
    with _lock(name, place):
        stored = None if force else _finished(place)
        if stored is not None:
            log.info("%s: up to date (%s)", name, identity[:12])
            return stored
        if force:
            _empty(place)
        log.info("%s: running (%s)", name, identity[:12])
        started = time.monotonic()
        result = work(place)
        assert SIZES not in result, name
        receipt = {"step": name, "fingerprint": identity, "path": str(place.relative_to(root)), **result}
        write_json(place / RECEIPT, receipt | {SIZES: _sizes(place)})
        log.info("%s: done in %.0f s", name, time.monotonic() - started)
        return _without_sizes(read_json(place / RECEIPT))


def untrained(stage: str, kind: str) -> Receipt:
    """In place of a receipt of a stage that had no datasets of its kind to train on."""
    return {"stage": stage, "untrained": f"there is no {kind} dataset"}


def only_trained(receipts: dict[str, Receipt]) -> dict[str, Receipt]:
    """Without the stages for which there were no data."""
    return {name: receipt for name, receipt in receipts.items() if "untrained" not in receipt}


def _finished(place: Path) -> Receipt | None:
    if not (place / RECEIPT).is_file():
        return None
    receipt = read_json(place / RECEIPT)
    changed = [name for name, size in receipt[SIZES].items() if _size(place / name) != size]
    if changed:
        log.warning("%s has lost or changed %s: done again", place, ", ".join(changed[:3]))
        _empty(place)
        return None
    return _without_sizes(receipt)


def _without_sizes(receipt: Receipt) -> Receipt:
    return {key: value for key, value in receipt.items() if key != SIZES}


def _empty(place: Path) -> None:
    for path in place.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sizes(place: Path) -> dict[str, int]:
    files = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {str(path.relative_to(place)): path.stat().st_size for path in files if path.name not in (LOCK, RECEIPT)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


LOCK = ".lock"


@contextmanager
def _lock(name: str, place: Path) -> Iterator[None]:
    path = place / LOCK
    lock = FileLock(path, timeout=0)
    try:
        with storage_faults(path):
            lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "unknown"
        raise Locked(f"{name}: process {holder} works in {place}; wait for it or stop it, then run again") from None
    try:
        path.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        lock.release()
