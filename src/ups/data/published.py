"""The table of all published PDEBench files, searched by name, family or former task name, and what may be fetched."""

import csv
import ipaddress
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault, nearest, printable

TABLE = Path(__file__).with_name("pdebench_files.csv")
OUTDATED_TABLE = Path(__file__).with_name("pdebench_outdated.csv")

# The files are at DaRUS, which answers with a redirect to a signed address in its university's object store.
HOSTS = ("darus.uni-stuttgart.de", "s3.tik.uni-stuttgart.de")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # IPv4 addresses as networks without IPv4 see them
MAX_SHOWN_CHARACTERS = 200

# Families of the Advection and Burgers files that PDEBench has replaced but still serves, by the id of the file.
OUTDATED_IDS = dict.fromkeys([*range(133022, 133029), 133100, *range(133109, 133114)], "advection_1d")
OUTDATED_IDS |= dict.fromkeys(range(133114, 133145), "burgers_1d")

# Task names of former versions of this project: the family, and a pattern of the names of its files.
ALIASES: dict[str, tuple[str, str]] = {
    "advection1d": ("advection_1d", r".*"),
    "burgers1d": ("burgers_1d", r".*"),
    "diff_react1d": ("diffusion_reaction_1d", r".*"),
    "diff_sorp2d": ("diffusion_sorption_1d", r".*"),  # PDEBench has diffusion-sorption in 1D only
    "darcy2d": ("darcy_2d", r".*"),
    "react_diff2d": ("diffusion_reaction_2d", r".*"),
    "swe2d": ("shallow_water_2d", r".*"),
    "shallow_water2d_varied": ("shallow_water_2d", r".*"),  # the one file varies the radius of the dam
    "ns2d_cond": ("incompressible_ns_2d", r".*"),  # the forcing is an input
    "comp_ns2d": ("compressible_ns_2d", r"2D_CFD_Rand_.*_128_.*"),
    "ns2d_turb": ("compressible_ns_2d", r"2D_CFD_Turb_.*"),
}


@dataclass(frozen=True)
class PublishedFile:
    """One published file; `bytes`, `grid` and the numbers are None where the publishers do not give them.

    `kind` is `train` (typically 10,000 trajectories) or `test` (one trajectory of a classical problem). `folder` is the
    path in PDEBench's collection, which a mirror repeats. `copy_of` names another file with the same bytes.
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
        """The published URL of the file, or its URL below `base_url`, the root of a mirror."""
        return self.url if base_url is None else f"{base_url.rstrip('/')}/{self.folder}/{self.name}"


def check_address(address: str) -> str:
    """The host of an address that may be fetched: https, or http from this machine, without user and password.

    Raises:
        ValueError: what is wrong, without the address, which may hold a secret.
    """
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port  # reading `port` checks it
    except ValueError:
        raise ValueError("it is no address") from None  # the error of Python has a part of the address
    if "@" in parts.netloc:
        raise ValueError("a user or password in an address reaches logs and files; name an address without")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ValueError("only https is fetched, and http from this machine (127.0.0.1, localhost)")
    if not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]+", host) or re.search(r"[\\\s\x00-\x20\x7f]", address):
        raise ValueError("it has no host, or characters that an address cannot have")
    return host


def is_loopback(host: str) -> bool:
    """Whether a host is this machine; other spellings, such as 127.1 and 0x7f000001, are names to be refused."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_public(address: str) -> bool:
    """Whether an IP address, or the IPv4 address within an IPv6 one, is of no private or local network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(ip.packed[-4:]) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        ip = inner or ip
    return ip.is_global and not ip.is_multicast


def shown(address: str) -> str:
    """An address for a message, not too long, without user, password and query, which may be secrets."""
    text = re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*:/+)?.*@", r"\1***@", address, flags=re.DOTALL)
    return printable(re.split(r"[?#]", text)[0])[:MAX_SHOWN_CHARACTERS]


@cache
def read_published_files() -> dict[str, PublishedFile]:
    """All published files by name, in the order of the table: family by family."""
    with TABLE.open(newline="") as file:
        return {row["name"]: _parse(row) for row in csv.DictReader(file)}


def find_file(name: str) -> PublishedFile:
    """The file of that name; for a URL or a file id, the `ConfigFault` gives the name to write."""
    registry = read_published_files()
    if name in registry:
        return registry[name]
    if match := re.fullmatch(r"(?:https?://.*/)?(\d{5,7})", name):
        if family := OUTDATED_IDS.get(int(match[1])):
            _refuse(f"file id {match[1]}", family, ConfigFault)
        if named := next((file.name for file in registry.values() if file.url.endswith(f"/{match[1]}")), None):
            raise ConfigFault(f"download.files takes names: write {named} for {name!r}")
    raise ConfigFault(f"unknown file {name!r} in download.files{nearest(name, registry)}")


def find_family_files(name: str) -> list[PublishedFile]:
    """Files of a family, or of a former task name (`ALIASES`), without copies of the same bytes."""
    family, pattern = ALIASES.get(name, (name, r".*"))
    if family not in FAMILIES:
        raise ConfigFault(f"unknown family {name!r} in download.families{nearest(name, FAMILIES)}")
    files = [file for file in read_published_files().values() if file.family == family and file.copy_of is None]
    return [file for file in files if re.fullmatch(pattern, file.name)]


def refuse_outdated_md5(path: Path, md5: str) -> None:
    """Refuse a file whose MD5 is that of an outdated version of a published file."""
    if name := _read_outdated().get(md5):
        _refuse(str(path), "burgers_1d" if "Burgers" in name else "advection_1d", DataFault)


def _refuse(what: str, family: str, fault: type[ConfigFault] | type[DataFault]) -> None:
    wrong = "advects at speed 2 beta" if family == "advection_1d" else "has twice the flux, on (-1, 1)"
    raise fault(f"{what} is an outdated version of {family} that {wrong}; PDEBench replaced it in 2023: fetch it anew")


@cache
def _read_outdated() -> dict[str, str]:
    """Names of the outdated training files by MD5."""
    with OUTDATED_TABLE.open(newline="") as file:
        return {row["md5"]: row["name"] for row in csv.DictReader(file)}


def _parse(row: dict[str, str]) -> PublishedFile:
    """The record of a row of the table, whose columns have the names of the record's attributes."""
    pairs = [pair.split("=") for pair in row["parameters"].split()]
    values: dict[str, Any] = {name: text or None for name, text in row.items()}
    values |= {name: int(row[name]) for name in ("num_trajectories", "num_snapshots", "bytes") if row[name]}
    values["parameters"] = {name: float(value) for name, value in pairs}
    values["grid"] = tuple(int(n) for n in row["grid"].split("x")) if row["grid"] else None
    return PublishedFile(**values)
