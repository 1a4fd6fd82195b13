"""Which published files to fetch: by family, name, parameter values, grid, number and total size."""

import logging
from collections import defaultdict

from ups.data.pdebench import FAMILIES, Family
from ups.data.registry import RemoteFile, find_family_files, find_file
from ups.errors import ConfigFault

log = logging.getLogger(__name__)

GIGABYTE = 10**9
PARTIAL_LAYOUTS = ("tensor", "fields")  # contiguous, so that trajectories are ranges of bytes
METADATA_BYTES = 2**18  # read of a remote file before its trajectories


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
) -> list[RemoteFile]:
    """Files of `families` that meet every condition, in the order of the registry, and `files` by name.

    `parameters` lists the values wanted of each parameter; families without it are not concerned. `max_gigabytes`
    takes files as long as the sum stays below; what is named in `files` comes first and must fit.
    """
    named = [find_file(name) for name in files]
    of_families = _unique([file for name in families for file in find_family_files(name)])
    chosen = [file for file in of_families if kind in (file.kind, "all")]
    chosen = [file for file in _with_parameters(chosen, parameters) if resolution is None or _has(file, resolution)]
    _expect_some(families, chosen, kind, resolution)
    chosen = [file for file in _first_per_family(chosen, files_per_family) if file not in named]
    for file in [*named, *chosen]:
        _expect_partial(file, trajectories)
    selected = _within(named, chosen, max_gigabytes, trajectories)
    _expect_one_grid(selected)
    return selected


def bytes_to_fetch(file: RemoteFile, trajectories: int | None) -> int | None:
    """Size of a file, or of its first trajectories; None if the registry does not know it."""
    if file.bytes is None or not is_partial(file, trajectories):
        return file.bytes
    assert file.num_trajectories is not None and trajectories is not None
    return file.bytes * trajectories // file.num_trajectories + METADATA_BYTES


def is_partial(file: RemoteFile, trajectories: int | None) -> bool:
    """Whether so many trajectories are less than the file."""
    return trajectories is not None and (file.num_trajectories is None or trajectories < file.num_trajectories)


def _unique(files: list[RemoteFile]) -> list[RemoteFile]:
    return list({file.name: file for file in files}.values())


def _with_parameters(files: list[RemoteFile], parameters: dict[str, list[float]]) -> list[RemoteFile]:
    """Files with one of the wanted values of every parameter that their family has."""
    for name, wanted in parameters.items():
        known = sorted({file.parameters[name] for file in files if name in file.parameters})
        missing = [value for value in wanted if value not in known]
        if missing or not wanted:
            values = ", ".join(f"{value:g}" for value in known) or "no value: none of these families has it"
            what = f"download.parameters asks for {name} = {', '.join(f'{v:g}' for v in missing) or '[]'}"
            raise ConfigFault(f"{what}; the files have {values}")
        files = [file for file in files if name not in _family(file).parameters or file.parameters.get(name) in wanted]
    return files


def _has(file: RemoteFile, resolution: int) -> bool:
    return file.grid is not None and max(file.grid) == resolution


def _family(file: RemoteFile) -> Family:
    return FAMILIES[file.family]


def _expect_some(families: list[str], chosen: list[RemoteFile], kind: str, resolution: int | None) -> None:
    """Every family asked for has a file that meets the conditions."""
    for name in families:
        all_files = find_family_files(name)
        if not any(file in chosen for file in all_files):
            grids = sorted({max(file.grid) for file in all_files if file.grid and kind in (file.kind, "all")})
            what = f"no file of {name} has kind {kind}, these parameters and resolution {resolution}"
            raise ConfigFault(f"{what}; resolutions of that kind: {', '.join(map(str, grids)) or 'none known'}")


def _first_per_family(files: list[RemoteFile], count: int | None) -> list[RemoteFile]:
    by_family: dict[str, list[RemoteFile]] = defaultdict(list)
    for file in files:
        by_family[file.family].append(file)
    return [file for group in by_family.values() for file in group[:count]]


def _expect_partial(file: RemoteFile, trajectories: int | None) -> None:
    if is_partial(file, trajectories) and _family(file).layout not in PARTIAL_LAYOUTS:
        what = f"{file.name} stores its trajectories compressed or one by one, not as ranges of bytes"
        raise ConfigFault(f"download.trajectories = {trajectories}: {what}; fetch it whole with `null`")


def _within(
    named: list[RemoteFile], chosen: list[RemoteFile], max_gigabytes: float | None, trajectories: int | None
) -> list[RemoteFile]:
    """The named files, and of the others as many as fit."""
    if max_gigabytes is None:
        return _unique([*named, *chosen])
    room, selected = max_gigabytes * GIGABYTE, []
    for file in _unique([*named, *chosen]):
        size = bytes_to_fetch(file, trajectories)
        if file in named and (size is None or size > room):
            known = "an unknown size" if size is None else f"{size / GIGABYTE:.1f} GB"
            raise ConfigFault(f"{file.name} has {known}, download.max_gigabytes = {max_gigabytes:g} leaves too little")
        if size is not None and size <= room:
            room -= size
            selected.append(file)
    if left_out := len(_unique([*named, *chosen])) - len(selected):
        log.info("download.max_gigabytes = %g leaves out %d files", max_gigabytes, left_out)
    if chosen and not any(file in selected for file in chosen) and not named:
        sizes = [size for file in chosen if (size := bytes_to_fetch(file, trajectories)) is not None]
        least = f"the smallest file has {min(sizes) / GIGABYTE:.2f} GB" if sizes else "no size is known"
        raise ConfigFault(f"download.max_gigabytes = {max_gigabytes:g} is too little: {least}")
    return selected


def _expect_one_grid(files: list[RemoteFile]) -> None:
    """One grid per family, as the models need it."""
    first: dict[str, RemoteFile] = {}
    for file in (file for file in files if file.kind == "train"):
        other = first.setdefault(file.family, file)
        if other.grid != file.grid:
            what = f"{other.name} has {_points(other)}, {file.name} has {_points(file)} points"
            raise ConfigFault(f"clashing grids of {file.family}: {what}; set download.resolution to one of them")


def _points(file: RemoteFile) -> str:
    return " x ".join(map(str, file.grid or ()))
