"""HTTP as it is: ranges, redirects, busy servers and broken connections, told apart from what no retry repairs."""

import email.utils
import ipaddress
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from ups.data.checksums import BLOCK_BYTES
from ups.errors import DataFault

TIMEOUT_SECONDS = 30
ATTEMPTS = 8  # in a row without a new byte
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
MIN_BYTES_PER_SECOND, SPEED_WINDOW_SECONDS = 10_000, 60
MAX_REDIRECTS = 5


class TransferError(Exception):
    """A transfer failed in a way that the next try may repair."""

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class Answer:
    """What a server sends: the file from byte `start` on, of `total` bytes, in the version that `validator` names.

    `start` is None if it is not the range that was asked for; `total` and `validator` are None where unknown;
    `is_range` tells a part of the file from the whole.
    """

    start: int | None
    total: int | None
    validator: str | None
    is_range: bool
    blocks: Iterator[bytes]


def new_session() -> requests.Session:
    """Connections that are kept open and carry no credentials, whatever `.netrc` says."""
    session = requests.Session()
    session.auth = lambda request: request
    session.get_redirect_target = lambda response: None  # `_follow` checks and follows them
    return session


@contextmanager
def ask(
    session: requests.Session, url: str, start: int = 0, stop: int | None = None, validator: str | None = None
) -> Iterator[Answer]:
    """Ask for the bytes from `start` to `stop`, or for the whole file if it is no longer the version `validator`."""
    headers = {"Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        headers |= {"If-Range": validator} if validator else {}
    response = _follow(session, url, headers)
    with response:
        _expect_content(url, response)
        first, total = _offered_range(response, start)
        yield Answer(first, total, _validator(response), response.status_code == 206, _read_blocks(response))


def persist(url: str, attempt: Callable[[], None], position: Callable[[], int], wait: Callable[[], object]) -> None:
    """Repeat `attempt` after failures that may pass, as long as `position` advances; `wait` is called every second."""
    failures, best = 0, position()
    while True:
        try:
            return attempt()
        except TransferError as error:
            failures = 0 if position() > best else failures + 1
            best = max(best, position())
            if failures == ATTEMPTS:
                what = f"{error}, {ATTEMPTS} times in a row"
                raise DataFault(f"{url}: {what}; run the same command to resume at byte {position()}") from error
            pause = PAUSE_SECONDS * 2**failures * random.uniform(0.75, 1.25)  # noqa: S311
            _sleep(pause if error.pause_seconds is None else error.pause_seconds, wait)


def _sleep(seconds: float, wait: Callable[[], object]) -> None:
    remaining = min(MAX_PAUSE_SECONDS, seconds)
    while remaining > 0:
        wait()
        time.sleep(min(1.0, remaining))
        remaining -= 1.0


def _follow(session: requests.Session, url: str, headers: dict[str, str]) -> requests.Response:
    """The answer behind a few redirects, each of them checked."""
    address = _expect_web_address(url, url, "")
    for _ in range(1 + MAX_REDIRECTS):
        response = _get(session, url, address, headers)
        if not response.is_redirect:
            return response
        response.close()
        target = _expect_web_address(url, response.headers["Location"], address)
        _expect_no_downgrade(url, address, target)
        address = target
    raise DataFault(f"{url}: more than {MAX_REDIRECTS} redirects; check the URL")


def _get(session: requests.Session, url: str, address: str, headers: dict[str, str]) -> requests.Response:
    try:
        return session.get(address, headers=headers, stream=True, timeout=TIMEOUT_SECONDS, allow_redirects=False)
    except requests.exceptions.SSLError as error:
        raise DataFault(f"{url}: the certificate is not trusted; check the clock and the proxy") from error
    except (requests.ConnectionError, requests.Timeout) as error:
        raise TransferError(f"no connection ({type(error).__name__})") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, UnicodeError) as error:
        raise DataFault(f"{url}: {' '.join(str(error).split())}; check the URL") from error


def _expect_web_address(url: str, location: str, base: str) -> str:
    """The address that a location means, seen from `base`, if it is one of the web."""
    try:
        address = urljoin(base, location)
        parts = urlsplit(address)
    except ValueError as error:
        raise DataFault(f"{url}: leads to {location[:80]!r} ({error}); check the URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DataFault(f"{url}: leads to {address[:80]!r}; only http and https are fetched")
    return address


def _expect_no_downgrade(url: str, address: str, target: str) -> None:
    """Nothing leads from an encrypted to a plain connection, or from the internet to this machine or network."""
    old, new = urlsplit(address), urlsplit(target)
    if old.scheme == "https" and new.scheme == "http":
        raise DataFault(f"{url}: redirects from https to http; check the URL")
    if new.hostname != old.hostname and _is_local(new.hostname or "") and not _is_local(old.hostname or ""):
        raise DataFault(f"{url}: redirects to the local address {new.hostname}; check the URL")


def _is_local(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:  # a name
        return host == "localhost" or host.endswith((".localhost", ".internal", ".local"))


def _expect_content(url: str, response: requests.Response) -> None:
    status = response.status_code
    if status == 429 or status >= 500:
        raise TransferError(f"HTTP {status} {response.reason}", _retry_after(response))
    if status not in (200, 206, 416):
        raise DataFault(f"{url}: HTTP {status} {response.reason}; check the URL")
    if status == 206 and response.headers.get("Content-Type", "").startswith(("text/html", "multipart/")):
        raise TransferError(f"sent {response.headers['Content-Type']} for a range of bytes")


def _retry_after(response: requests.Response) -> float | None:
    """Seconds the server asks to wait, given as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    parsed = email.utils.parsedate_tz(value)
    return None if parsed is None else max(0.0, email.utils.mktime_tz(parsed) - time.time())


def _validator(response: requests.Response) -> str | None:
    """What `If-Range` takes: a strong ETag, else the time of the last change."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")


def _offered_range(response: requests.Response, start: int) -> tuple[int | None, int | None]:
    """First byte and total size of what the server sends; no first byte if the range is not the one asked for."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if match is None or (match[1] or match[2]) != str(start):
        return None, None
    return start, int(match[2]) if match[2] != "*" else None


def _read_blocks(response: requests.Response) -> Iterator[bytes]:
    """Blocks as they arrive; gives up on a server slower than the minimum."""
    since, received = time.monotonic(), 0
    while True:
        try:
            block = response.raw.read1(BLOCK_BYTES)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TransferError(f"the transfer broke off ({type(error).__name__})") from error
        if not block:
            return
        yield block
        received += len(block)
        if (elapsed := time.monotonic() - since) > SPEED_WINDOW_SECONDS:
            if received < MIN_BYTES_PER_SECOND * elapsed:
                raise TransferError(f"slower than {MIN_BYTES_PER_SECOND} bytes per second")
            since, received = time.monotonic(), 0
