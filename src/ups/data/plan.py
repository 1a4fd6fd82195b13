"""What a download will do, told before the first byte: files, sizes, what is there, free disk."""

import logging
from dataclasses import dataclass
from pathlib import Path

from ups.data.partial import partial_name
from ups.data.registry import RemoteFile
from ups.data.selection import GIGABYTE, bytes_to_fetch, is_partial
from ups.data.storage import free_bytes
from ups.errors import ConfigFault, DataFault, StorageFault

log = logging.getLogger(__name__)

MAX_LINES = 40


@dataclass(frozen=True)
class PlannedFile:
    """One file to have: `name` in the folder, `bytes` in all (None: unknown), `arrived` of them already."""

    file: RemoteFile
    name: str
    trajectories: int | None
    bytes: int | None
    arrived: int
    is_there: bool

    @property
    def missing(self) -> int:
        """Bytes still to fetch, as far as known."""
        return 0 if self.is_there or self.bytes is None else max(0, self.bytes - self.arrived)


@dataclass(frozen=True)
class Plan:
    """Files to have in a folder, and the free space of its disk."""

    folder: Path
    files: tuple[PlannedFile, ...]
    free: int

    @property
    def missing(self) -> int:
        """Bytes still to fetch, as far as known."""
        return sum(file.missing for file in self.files)

    @property
    def total(self) -> int:
        """Bytes of all files, as far as known."""
        return sum(file.bytes or 0 for file in self.files)


def make_plan(folder: Path, files: list[RemoteFile], trajectories: int | None) -> Plan:
    """Compare what is wanted with what is there; a file of the wrong size is refused here."""
    if not files:
        raise ConfigFault("nothing to download: name download.families or download.files")
    planned = tuple(
        _plan_file(folder, file, trajectories if is_partial(file, trajectories) else None) for file in files
    )
    return Plan(folder, planned, free_bytes(folder))


def announce(plan: Plan) -> None:
    """Log the plan, and refuse it if the disk is too small."""
    there, unknown = sum(file.is_there for file in plan.files), sum(file.bytes is None for file in plan.files)
    log.info(
        "download plan: %d files, %s%s, to %s", len(plan.files), _gigabytes(plan.total), _and(unknown), plan.folder
    )
    for file in plan.files[:MAX_LINES]:
        log.info("%9s, %s: %s", _gigabytes(file.bytes), _state(file), file.name)
    if len(plan.files) > MAX_LINES:
        log.info("... and %d more", len(plan.files) - MAX_LINES)
    tests = [file.name for file in plan.files if file.file.kind == "test"]
    if tests:
        log.warning("%d test files (%s, ...) hold one trajectory each: no stage trains on them", len(tests), tests[0])
    log.info("%d are there; %s to fetch, %s free", there, _gigabytes(plan.missing), _gigabytes(plan.free))
    if plan.missing > plan.free:
        need = f"{_gigabytes(plan.missing)} to fetch, {_gigabytes(plan.free)} free"
        raise StorageFault(f"{plan.folder}: {need}; free space, select less, or set download.trajectories")


def _plan_file(folder: Path, file: RemoteFile, trajectories: int | None) -> PlannedFile:
    name = file.name if trajectories is None else partial_name(file.name, trajectories)
    path, part = folder / name, folder / f"{name}.part"
    size = bytes_to_fetch(file, trajectories)
    if path.exists() and not path.is_file():
        raise DataFault(f"{path}: is not a file; remove it to fetch {file.url}")
    if path.exists() and trajectories is None and size not in (None, path.stat().st_size):
        raise DataFault(f"{path}: has {path.stat().st_size} bytes, expected {size}; delete it to fetch {file.url}")
    arrived = path.stat().st_size if path.exists() else part.stat().st_size if part.is_file() else 0
    return PlannedFile(file, name, trajectories, size, arrived, path.exists())


def _state(file: PlannedFile) -> str:
    if file.is_there:
        return "there"
    return f"to fetch, {_gigabytes(file.arrived)} have arrived" if file.arrived else "to fetch"


def _and(unknown: int) -> str:
    return f" and {unknown} files of unknown size" if unknown else ""


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIGABYTE:.3g} GB"
