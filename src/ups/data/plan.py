"""Selection of published files by family, name, parameters, grid and size, and the plan of their download."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from ups.data.pdebench import FAMILIES
from ups.data.published import PublishedFile, find_family_files, find_file
from ups.errors import ConfigFault, DataFault, StorageFault

log = logging.getLogger(__name__)

GIGABYTE = 10**9
PARTIAL_LAYOUTS = ("tensor", "fields")  # stored contiguously: a trajectory is a range of bytes
METADATA_BYTES = 2**18  # estimate of the bytes that are read of a remote file before its trajectories
MAX_LINES = 40  # of files in the log


def select(
    families: list[str],
    files: list[str],
    *,
    parameters: dict[str, list[float]],
    kind: str,
    resolution: int | None,
    files_per_family: int | None,
    max_gigabytes: float | None,
    trajectories: int | None,
) -> list[PublishedFile]:
    """The files named in `files`, then those of `families` that meet every condition.

    `parameters` has the allowed values of each parameter; it does not apply to families without that parameter.
    `kind` is `train`, `test` or `all`, `resolution` the number of points along the longest axis. Files are taken as
    long as their sum stays below `max_gigabytes`; those in `files` come first and must fit. `trajectories` is the
    number to fetch of each file, None for all.

    Raises:
        ConfigFault: a family, file, parameter value or grid does not exist, or the limits leave no file.
    """
    named = [find_file(name) for name in dict.fromkeys(files)]
    of_families = {file.name: file for name in families for file in find_family_files(name)}
    chosen = _with_parameters([file for file in of_families.values() if kind in (file.kind, "all")], parameters)
    if resolution is not None:
        chosen = [file for file in chosen if file.grid and max(file.grid) == resolution]
    _expect_each_family(families, chosen, kind, resolution)
    chosen = [file for file in _first_per_family(chosen, files_per_family) if file not in named]
    for file in [*named, *chosen]:
        if is_partial(file, trajectories) and FAMILIES[file.family].layout not in PARTIAL_LAYOUTS:
            what = f"{file.name} stores its trajectories compressed or one by one, not as ranges of bytes"
            raise ConfigFault(f"download.trajectories = {trajectories}: {what}; fetch it whole with `null`")
    return _limit_size(named, chosen, max_gigabytes, trajectories)


def bytes_to_fetch(file: PublishedFile, trajectories: int | None) -> int | None:
    """Size of a file, or of its first `trajectories`; None if the table of published files does not have it."""
    if file.bytes is None or not is_partial(file, trajectories):
        return file.bytes
    assert file.num_trajectories is not None and trajectories is not None
    return file.bytes * trajectories // file.num_trajectories + METADATA_BYTES


def partial_name(name: str, count: int) -> str:
    """Name of the file with the first `count` trajectories of the file `name`."""
    return str(Path(name).with_stem(f"{Path(name).stem}_first{count}"))


def is_partial(file: PublishedFile, trajectories: int | None) -> bool:
    """Whether `trajectories` is less than the number in the file."""
    return trajectories is not None and (file.num_trajectories is None or trajectories < file.num_trajectories)


def _with_parameters(files: list[PublishedFile], parameters: dict[str, list[float]]) -> list[PublishedFile]:
    """Files with one of the allowed values of every parameter that their family has."""
    for name, wanted in parameters.items():
        known = sorted({file.parameters[name] for file in files if name in file.parameters})
        missing = [value for value in wanted if value not in known]
        if missing or not wanted:
            values = ", ".join(f"{value:g}" for value in known) or "no value: none of these families has it"
            what = f"download.parameters asks for {name} = {', '.join(f'{v:g}' for v in missing) or '[]'}"
            raise ConfigFault(f"{what}; the files have {values}")
        without = {family.name for family in FAMILIES.values() if name not in family.parameters}
        files = [file for file in files if file.family in without or file.parameters.get(name) in wanted]
    return files


def _expect_each_family(families: list[str], chosen: list[PublishedFile], kind: str, resolution: int | None) -> None:
    for name in families:
        all_files = find_family_files(name)
        if not any(file in chosen for file in all_files):
            grids = sorted({max(file.grid) for file in all_files if file.grid and kind in (file.kind, "all")})
            what = f"no file of {name} has kind {kind}, these parameters and resolution {resolution}"
            raise ConfigFault(f"{what}; resolutions of that kind: {', '.join(map(str, grids)) or 'none known'}")


def _first_per_family(files: list[PublishedFile], count: int | None) -> list[PublishedFile]:
    by_family: dict[str, list[PublishedFile]] = {}
    for file in files:
        by_family.setdefault(file.family, []).append(file)
    return [file for group in by_family.values() for file in group[:count]]


def _limit_size(
    named: list[PublishedFile], chosen: list[PublishedFile], max_gigabytes: float | None, trajectories: int | None
) -> list[PublishedFile]:
    """The named files, and as many of the chosen ones as stay below `max_gigabytes` in sum."""
    if max_gigabytes is None:
        return [*named, *chosen]
    remaining, selected = max_gigabytes * GIGABYTE, []
    for file in [*named, *chosen]:
        size = bytes_to_fetch(file, trajectories)
        if file in named and (size is None or size > remaining):
            known = "an unknown size" if size is None else f"{size / GIGABYTE:.1f} GB"
            raise ConfigFault(f"{file.name} has {known}, download.max_gigabytes = {max_gigabytes:g} leaves too little")
        if size is not None and size <= remaining:
            remaining -= size
            selected.append(file)
    if left_out := len(named) + len(chosen) - len(selected):
        log.info("download.max_gigabytes = %g leaves out %d files", max_gigabytes, left_out)
    if chosen and not selected:
        sizes = [size for file in chosen if (size := bytes_to_fetch(file, trajectories)) is not None]
        least = f"the smallest file has {min(sizes) / GIGABYTE:.2f} GB" if sizes else "no size is known"
        raise ConfigFault(f"download.max_gigabytes = {max_gigabytes:g} is too little: {least}")
    return selected


@dataclass(frozen=True)
class PlannedFile:
    """A file of the plan: its `name` in the folder, its `bytes` (None: unknown) and how many of them have `arrived`.

    `trajectories` is None for a whole file; `is_complete` where the file has its final name already.
    """

    file: PublishedFile
    name: str
    trajectories: int | None
    bytes: int | None
    arrived: int
    is_complete: bool


@dataclass(frozen=True)
class DownloadPlan:
    """The files that a folder shall hold."""

    folder: Path
    files: tuple[PlannedFile, ...]

    @property
    def missing(self) -> int:
        """Bytes still to fetch, as far as known."""
        return sum(max(0, file.bytes - file.arrived) for file in self.files if file.bytes and not file.is_complete)


def make_plan(folder: Path, files: list[PublishedFile], trajectories: int | None) -> DownloadPlan:
    """Compare the wanted files (none: `ConfigFault`) with those in the folder (one of another size: `DataFault`)."""
    if not files:
        raise ConfigFault("nothing to download: name download.families or download.files")
    return DownloadPlan(folder, tuple(_plan_file(folder, file, trajectories) for file in files))


def log_plan(plan: DownloadPlan) -> None:
    """Log the plan; a `StorageFault` if the disk has less free space than there is to fetch."""
    complete, unknown = sum(file.is_complete for file in plan.files), sum(file.bytes is None for file in plan.files)
    size = _gigabytes(sum(file.bytes or 0 for file in plan.files))
    size += f" and {unknown} files of unknown size" if unknown else ""
    log.info("download plan: %d files, %s, to %s", len(plan.files), size, plan.folder)
    for file in plan.files[:MAX_LINES]:
        arrived = f", {_gigabytes(file.arrived)} have arrived" if file.arrived else ""
        state = "complete" if file.is_complete else f"to fetch{arrived}"
        log.info("%9s, %s: %s", _gigabytes(file.bytes), state, file.name)
    if len(plan.files) > MAX_LINES:
        log.info("... and %d more", len(plan.files) - MAX_LINES)
    tests = [file.name for file in plan.files if file.file.kind == "test"]
    if tests:
        log.warning("%d test files (%s, ...) hold one trajectory each: no stage trains on them", len(tests), tests[0])
    free = free_disk_bytes(plan.folder)
    need = f"{_gigabytes(plan.missing)} to fetch, {_gigabytes(free)} free"
    log.info("%d are complete; %s", complete, need)
    if plan.missing > free:
        raise StorageFault(f"{plan.folder}: {need}; free space, select less, or set download.trajectories")


def _plan_file(folder: Path, file: PublishedFile, trajectories: int | None) -> PlannedFile:
    if not is_partial(file, trajectories):
        trajectories = None
    name = file.name if trajectories is None else partial_name(file.name, trajectories)
    path, part = folder / name, folder / f"{name}.part"
    size = bytes_to_fetch(file, trajectories)
    if path.exists() and not path.is_file():
        raise DataFault(f"{path}: is not a file; remove it to fetch {file.url}")
    if path.exists() and trajectories is None and size not in (None, path.stat().st_size):
        raise DataFault(f"{path}: has {path.stat().st_size} bytes, expected {size}; delete it to fetch {file.url}")
    arrived = path.stat().st_size if path.exists() else part.stat().st_size if part.is_file() else 0
    return PlannedFile(file, name, trajectories, size, arrived, path.exists())


def free_disk_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds a folder, or will hold it."""
    folder = folder.absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIGABYTE:.3g} GB"
