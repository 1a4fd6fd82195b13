"""Verified downloads: a partial file beside the target, resumed after a drop, checked by MD5 and only then renamed."""

import csv
import difflib
import email.utils
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import requests
import urllib3
from filelock import FileLock

from ups.data.checksums import BLOCK_BYTES, md5_of
from ups.data.hdf5 import SIGNATURE, what_is
from ups.data.layouts import find_family
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault

TABLE = Path(__file__).with_name("pdebench_files.csv")
TIMEOUT_SECONDS = 30
ATTEMPTS = 8  # in a row without a new byte
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
MIN_BYTES_PER_SECOND, SPEED_WINDOW_SECONDS = 10_000, 60


@dataclass(frozen=True)
class RemoteFile:
    """One published file; `folder` is its place in the collection."""

    name: str
    family: str
    folder: str
    url: str
    md5: str
    bytes: int


class TransferError(Exception):
    """A transfer failed in a way that the next try may repair."""

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


def read_table() -> dict[str, RemoteFile]:
    """The published files by name."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["name"]: RemoteFile(**row | {"family": _family(row["name"]), "bytes": int(row["bytes"])}) for row in rows
    }


def select(families: list[str], names: list[str]) -> list[RemoteFile]:
    """Files of whole families, each content once although some are published twice, and files by name."""
    table = read_table()
    for what, asked, known in (("family", families, list(FAMILIES)), ("file", names, list(table))):
        for name in asked:
            if name not in known:
                near = difflib.get_close_matches(name, known) or known[:5]
                raise ConfigFault(f"unknown {what} {name!r} in the download list; close to it: {', '.join(near)}")
    chosen: dict[str, RemoteFile] = {}
    for file in table.values():
        if file.family in families:
            chosen.setdefault(file.md5, file)
    by_name = {file.name: file for file in chosen.values()} | {name: table[name] for name in names}
    return [file for file in table.values() if file.name in by_name]


def _family(name: str) -> str:
    family = find_family(name)
    assert family is not None, f"{name} in {TABLE.name} matches no family"
    return family.name


def download_file(
    url: str, md5: str, target: Path, advance: Callable[[int], None], *, num_bytes: int | None = None
) -> None:
    """Fetch an HDF5 file; under its final name there is the right content or nothing.

    `advance` takes the bytes that arrived, negative when a transfer starts over. A killed download is resumed by the
    same call; a second process waits for the first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with FileLock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            _expect_md5(target, md5, f"delete it to fetch {url}")
            advance(target.stat().st_size)
            return
        _fetch(url, part, num_bytes, advance)
        try:
            _expect_md5(part, md5, f"fetched from {url}, discarded; run the same command to try again")
        except DataFault:
            part.unlink()
            raise
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)


def _expect_md5(path: Path, expected: str, remedy: str) -> None:
    actual = md5_of(path)
    if actual != expected:
        raise DataFault(f"{path}: MD5 is {actual}, expected {expected}; {remedy}")


def _fetch(url: str, part: Path, num_bytes: int | None, advance: Callable[[int], None]) -> None:
    """Fill the partial file, with retries as long as bytes arrive."""
    if part.exists() and _first_bytes(part) != SIGNATURE:
        part.unlink()
    best = _size(part)
    advance(best)
    failures = 0
    while num_bytes is None or _size(part) != num_bytes:
        try:
            _transfer(url, part, num_bytes, advance)
            return
        except TransferError as error:
            failures = 0 if _size(part) > best else failures + 1
            best = max(best, _size(part))
            if failures == ATTEMPTS:
                what = f"{error}, {ATTEMPTS} times in a row"
                raise DataFault(f"{url}: {what}; run the same command to resume at byte {_size(part)}") from error
            pause = PAUSE_SECONDS * 2**failures if error.pause_seconds is None else error.pause_seconds
            time.sleep(min(MAX_PAUSE_SECONDS, pause))


def _transfer(url: str, part: Path, num_bytes: int | None, advance: Callable[[int], None]) -> None:
    """One request that continues the partial file, or starts it over if the server does not resume."""
    offset = _size(part)
    with _get(url, offset) as response:
        start, total = _offered_range(response, offset)
        if offset and start == offset == total:
            return
        if start not in (0, offset):
            part.unlink(missing_ok=True)
            advance(-offset)
            raise TransferError(f"the server cannot resume at byte {offset}")
        blocks = _read_blocks(response)
        first = b"" if start else _read_start(url, blocks)
        if num_bytes is not None and total not in (None, num_bytes):
            raise DataFault(f"{url}: the server offers {total} bytes, expected {num_bytes}; check the table of files")
        advance(start - offset)
        with part.open("ab" if start else "wb") as file:
            for block in chain([first], blocks):
                file.write(block)
                advance(len(block))
    if total is not None and _size(part) != total:
        raise TransferError(f"the connection closed after {_size(part)} of {total} bytes")


def _get(url: str, offset: int) -> requests.Response:
    """The answer to a request from byte `offset` on, if it is one worth reading."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS)
    except requests.exceptions.SSLError as error:
        raise DataFault(f"{url}: the certificate is not trusted; check the clock and the proxy") from error
    except (requests.ConnectionError, requests.Timeout) as error:
        raise TransferError(f"no connection ({type(error).__name__})") from error
    except requests.RequestException as error:
        raise DataFault(f"{url}: {error}; only http and https are fetched, with few redirects") from error
    hops = [answer.url for answer in (*response.history, response)]
    status = response.status_code
    if status in (200, 206, 416) and not (hops[0].startswith("https:") and any(h.startswith("http:") for h in hops)):
        return response
    response.close()
    if status == 429 or status >= 500:
        raise TransferError(f"HTTP {status} {response.reason}", _retry_after(response))
    what = f"HTTP {status} {response.reason}" if status >= 400 else "redirects from https to http"
    raise DataFault(f"{url}: {what}; check the URL in the table of files")


def _retry_after(response: requests.Response) -> float | None:
    """Seconds the server asks to wait, given as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    parsed = email.utils.parsedate_tz(value)
    return None if parsed is None else max(0.0, email.utils.mktime_tz(parsed) - time.time())


def _offered_range(response: requests.Response, offset: int) -> tuple[int | None, int | None]:
    """First byte and total size of what the server sends; no first byte if the range is not the one asked for."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if match is None or (match[1] or match[2]) != str(offset):
        return None, None
    return offset, int(match[2]) if match[2] != "*" else None


def _read_start(url: str, blocks: Iterator[bytes]) -> bytes:
    """The first bytes of a file that must be HDF5: an error page is refused before it is written."""
    start = b""
    while len(start) < len(SIGNATURE):
        block = next(blocks, b"")
        if not block:
            break
        start += block
    if not start.startswith(SIGNATURE):
        raise DataFault(f"{url}: the server sent {what_is(start[:80])}, not an HDF5 file; check the URL or log in")
    return start


def _read_blocks(response: requests.Response) -> Iterator[bytes]:
    """Blocks as they arrive; gives up on a server slower than the minimum."""
    since, received = time.monotonic(), 0
    while True:
        try:
            block = response.raw.read1(BLOCK_BYTES)
        except urllib3.exceptions.HTTPError as error:
            raise TransferError(f"the transfer broke off ({type(error).__name__})") from error
        if not block:
            return
        yield block
        received += len(block)
        if (elapsed := time.monotonic() - since) > SPEED_WINDOW_SECONDS:
            if received < MIN_BYTES_PER_SECOND * elapsed:
                raise TransferError(f"slower than {MIN_BYTES_PER_SECOND} bytes per second")
            since, received = time.monotonic(), 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(SIGNATURE))
