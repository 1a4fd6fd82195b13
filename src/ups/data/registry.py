"""Every published PDEBench file, one typed record each: recognised by name, by id, by the names of earlier tools."""

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault

TABLE = Path(__file__).with_name("pdebench_files.csv")
OUTDATED_TABLE = Path(__file__).with_name("pdebench_outdated.csv")

# Names of tasks in the earlier Universal Physics Stack: a family, and which of its files if not all.
ALIASES: dict[str, tuple[str, str]] = {
    "advection1d": ("advection_1d", r".*"),
    "burgers1d": ("burgers_1d", r".*"),
    "diff_react1d": ("diffusion_reaction_1d", r".*"),
    "diff_sorp2d": ("diffusion_sorption_1d", r".*"),  # PDEBench has diffusion-sorption in 1D only
    "darcy2d": ("darcy_2d", r".*"),
    "react_diff2d": ("diffusion_reaction_2d", r".*"),
    "swe2d": ("shallow_water_2d", r".*"),
    "shallow_water2d_varied": ("shallow_water_2d", r".*"),  # the one file varies the radius of the dam
    "ns2d_cond": ("incompressible_ns_2d", r".*"),  # conditioned on the forcing
    "comp_ns2d": ("compressible_ns_2d", r"2D_CFD_Rand_.*_128_.*"),
    "ns2d_turb": ("compressible_ns_2d", r"2D_CFD_Turb_.*"),
}


@dataclass(frozen=True)
class RemoteFile:
    """One published file; `folder` is its place in the collection, `bytes` and the sizes are None where unknown.

    `kind` is `train` (10,000 trajectories, say) or `test` (one trajectory of a classical problem). `copy_of` names an
    earlier file with the same bytes.
    """

    name: str
    family: str
    kind: str
    parameters: dict[str, float]
    grid: tuple[int, ...] | None
    num_trajectories: int | None
    num_snapshots: int | None
    folder: str
    url: str
    md5: str
    bytes: int | None
    copy_of: str | None

    def address(self, base_url: str | None) -> str:
        """Where to fetch the file: the published URL, or its place below the root of a mirror."""
        return self.url if base_url is None else f"{base_url.rstrip('/')}/{self.folder}/{self.name}"


@cache
def read_registry() -> dict[str, RemoteFile]:
    """All published files by name, family by family."""
    with TABLE.open(newline="") as file:
        return {row["name"]: _parse(row) for row in csv.DictReader(file)}


def find_file(name: str) -> RemoteFile:
    """The file of that name; a URL or an id is recognised too, to say which file is meant or why it is refused."""
    registry = read_registry()
    if name in registry:
        return registry[name]
    if match := re.fullmatch(r"(?:https?://.*/)?(\d{5,7})", name):
        refuse_outdated_id(int(match[1]))
        named = next((file.name for file in registry.values() if file.url.endswith(f"/{match[1]}")), None)
        if named is not None:
            raise ConfigFault(f"download.files takes names: write {named} for {name!r}")
    near = difflib.get_close_matches(name, registry, n=3) or [*list(registry)[:3], "..."]
    raise ConfigFault(f"unknown file {name!r} in download.files; close to it: {', '.join(near)}")


def find_family_files(name: str) -> list[RemoteFile]:
    """Files of a family, or of a task of the earlier Universal Physics Stack, byte copies left out."""
    family, pattern = ALIASES.get(name, (name, r".*"))
    if family not in FAMILIES:
        known = [*FAMILIES, *ALIASES]
        near = difflib.get_close_matches(name, known, n=3) or known
        raise ConfigFault(f"unknown family {name!r} in download.families; close to it: {', '.join(near)}")
    files = [file for file in read_registry().values() if file.family == family and file.copy_of is None]
    return [file for file in files if re.fullmatch(pattern, file.name)]


def refuse_outdated_id(file_id: int) -> None:
    """Refuse the ids of the first Advection and Burgers files, tests among them: they still download."""
    if 133022 <= file_id <= 133028 or file_id == 133100 or 133109 <= file_id <= 133113:
        _refuse(f"file id {file_id}", "advection_1d", ConfigFault)
    if 133114 <= file_id <= 133144:
        _refuse(f"file id {file_id}", "burgers_1d", ConfigFault)


def refuse_outdated_md5(path: Path, md5: str) -> None:
    """Refuse a file whose content is an outdated version of a published one."""
    name = _read_outdated().get(md5)
    if name is not None:
        _refuse(str(path), "burgers_1d" if "Burgers" in name else "advection_1d", DataFault)


def _refuse(what: str, family: str, fault: type[ConfigFault] | type[DataFault]) -> None:
    wrong = "advects at speed 2 beta" if family == "advection_1d" else "has twice the flux, on (-1, 1)"
    raise fault(f"{what} is an outdated version of {family} that {wrong}; PDEBench replaced it in 2023: fetch it anew")


@cache
def _read_outdated() -> dict[str, str]:
    """Names of the outdated training files by MD5."""
    with OUTDATED_TABLE.open(newline="") as file:
        return {row["md5"]: row["name"] for row in csv.DictReader(file)}


def _parse(row: dict[str, str]) -> RemoteFile:
    pairs = [pair.split("=") for pair in row["parameters"].split()]
    return RemoteFile(
        name=row["name"],
        family=row["family"],
        kind=row["kind"],
        parameters={name: float(value) for name, value in pairs},
        grid=tuple(int(n) for n in row["grid"].split("x")) if row["grid"] else None,
        num_trajectories=_whole(row["num_trajectories"]),
        num_snapshots=_whole(row["num_snapshots"]),
        folder=row["folder"],
        url=row["url"],
        md5=row["md5"],
        bytes=_whole(row["bytes"]),
        copy_of=row["copy_of"] or None,
    )


def _whole(text: str) -> int | None:
    return int(text) if text else None
