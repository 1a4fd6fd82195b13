"""HTTP requests for ranges of bytes: checked redirects, retries, and a remote file that can be read at any position.

Connections come from `requests`, retries from `tenacity`, seeking and the cache of blocks from `fsspec`. `HTTPFile`
is used instead of the HTTP file of fsspec, which returns bytes of two versions of a file without an error, raises at a
dropped connection and at status 503, and follows redirects to the local machine.
"""

import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from fsspec.spec import AbstractBufferedFile
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from ups.errors import DataFault

BLOCK_BYTES = 2**20
TIMEOUT_SECONDS = 30
ATTEMPTS = 8  # in a row without a new byte
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
MIN_BYTES_PER_SECOND, SPEED_WINDOW_SECONDS = 10_000, 60
MAX_REDIRECTS = 5
CACHED_BLOCK_BYTES, MAX_CACHED_BLOCKS = 2**16, 256

Advance = Callable[[int], object]
"""Progress callback: bytes that arrived, negative when a transfer starts over, 0 while it waits; may raise to stop."""


class TransferError(Exception):
    """A transfer failed in a way that another request may repair, after `pause_seconds` if the server names a pause."""

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class RangeResponse:
    """A response with the bytes of a file from position `start` on.

    `start` is None if the server sends another range than requested, or the whole file instead of a range with an end;
    `total`, the size of the whole file, and `validator`, its version, are None where the server does not give them.
    """

    start: int | None
    total: int | None
    validator: str | None
    blocks: Iterator[bytes]


def new_session() -> requests.Session:
    """A session that keeps connections open, sends no credentials from `.netrc` and follows no redirect by itself."""
    session = requests.Session()
    session.auth = lambda request: request
    session.get_redirect_target = lambda response: None
    return session


@contextmanager
def request_range(
    session: requests.Session, url: str, start: int = 0, stop: int | None = None, validator: str | None = None
) -> Iterator[RangeResponse]:
    """Request the bytes `start` to `stop`; the server sends the whole file if its version is no longer `validator`.

    Raises:
        DataFault: the URL, a redirect or the status is refused for good.
        TransferError: no connection, a busy server or a broken transfer.
    """
    headers = {"Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        headers |= {"If-Range": validator} if validator else {}
    with _follow_redirects(session, url, headers) as response:
        _expect_content(url, response)
        first, total = _parse_range(response, start, stop)
        tag = response.headers.get("ETag", "")
        # A weak ETag does not identify the bytes: the time of the last change then has to do.
        version = tag if tag.startswith('"') else response.headers.get("Last-Modified")
        yield RangeResponse(first, total, version, _blocks(response))


def retry_transfer(url: str, attempt: Callable[[], None], position: Callable[[], int], advance: Advance) -> None:
    """Repeat `attempt` after every `TransferError`, at most `ATTEMPTS` times in a row without a new byte.

    `position` returns the number of bytes that have arrived. `advance(0)` is called every second of a pause. The last
    failure is raised as a `DataFault`.
    """
    furthest = position()

    def count_from_progress(state: RetryCallState) -> None:
        nonlocal furthest
        if position() > furthest:
            furthest, state.attempt_number = position(), 0

    retrying = Retrying(
        retry=retry_if_exception_type(TransferError),
        after=count_from_progress,
        stop=stop_after_attempt(ATTEMPTS),
        wait=_pause_seconds,
        sleep=partial(_sleep, advance),
        reraise=True,
    )
    try:
        retrying(attempt)
    except TransferError as error:
        remedy = f"run the same command to resume at byte {position()}"
        raise DataFault(f"{url}: {error}, {ATTEMPTS} times in a row; {remedy}") from error


def _pause_seconds(state: RetryCallState) -> float:
    """The pause that the server requests, else one that doubles with every attempt."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, TransferError) and error.pause_seconds is not None:
        return min(MAX_PAUSE_SECONDS, error.pause_seconds)
    return wait_exponential_jitter(multiplier=2 * PAUSE_SECONDS, max=MAX_PAUSE_SECONDS, jitter=PAUSE_SECONDS)(state)


def _sleep(advance: Advance, seconds: float) -> None:
    while seconds > 0:
        advance(0)
        time.sleep(min(1.0, seconds))
        seconds -= 1.0


def _follow_redirects(session: requests.Session, url: str, headers: dict[str, str]) -> requests.Response:
    """The response behind at most `MAX_REDIRECTS` redirects.

    Every redirect is checked and closed unread: `requests` would read its body first, which may be endless.
    """
    address = _resolve_address(url, url, "")
    for _ in range(1 + MAX_REDIRECTS):
        response = _send_request(session, url, address, headers)
        if not response.is_redirect:
            return response
        response.close()
        target = _resolve_address(url, response.headers["Location"], address)
        _expect_safe_redirect(url, address, target)
        address = target
    raise DataFault(f"{url}: more than {MAX_REDIRECTS} redirects; check the URL")


def _send_request(session: requests.Session, url: str, address: str, headers: dict[str, str]) -> requests.Response:
    try:
        return session.get(address, headers=headers, stream=True, timeout=TIMEOUT_SECONDS, allow_redirects=False)
    except requests.exceptions.SSLError as error:
        raise DataFault(f"{url}: the certificate is not trusted; check the clock and the proxy") from error
    except (requests.ConnectionError, requests.Timeout) as error:
        raise TransferError(f"no connection ({type(error).__name__})") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, UnicodeError) as error:
        raise DataFault(f"{url}: {' '.join(str(error).split())}; check the URL") from error


def _resolve_address(url: str, location: str, base: str) -> str:
    """The absolute http or https address of a `Location` header in a response of `base`."""
    try:
        address = urljoin(base, location)
        parts = urlsplit(address)
    except ValueError as error:
        raise DataFault(f"{url}: leads to {location[:80]!r} ({error}); check the URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DataFault(f"{url}: leads to {address[:80]!r}; only http and https are fetched")
    return address


def _expect_safe_redirect(url: str, address: str, target: str) -> None:
    """Refuse a redirect from an encrypted to a plain connection, or from the internet to this machine or network."""
    old, new = urlsplit(address), urlsplit(target)
    if old.scheme == "https" and new.scheme == "http":
        raise DataFault(f"{url}: redirects from https to http; check the URL")
    if _is_local(new.hostname or "") and not _is_local(old.hostname or ""):
        raise DataFault(f"{url}: redirects to the local address {new.hostname}; check the URL")


def _is_local(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:  # a name, not an IP address
        return host == "localhost" or host.endswith((".localhost", ".internal", ".local"))


def _expect_content(url: str, response: requests.Response) -> None:
    status = response.status_code
    if status == 429 or status >= 500:
        pause_seconds = None
        with suppress(urllib3.exceptions.InvalidHeader):  # `Retry-After` should hold a number of seconds or a date
            pause_seconds = urllib3.Retry().get_retry_after(response.raw)
        raise TransferError(f"HTTP {status} {response.reason}", pause_seconds)
    if status not in (200, 206, 416):
        raise DataFault(f"{url}: HTTP {status} {response.reason}; check the URL")
    # Proxies answer a range with a login page and status 206; its bytes would end up inside the file.
    if status == 206 and response.headers.get("Content-Type", "").startswith(("text/html", "multipart/")):
        raise TransferError(f"sent {response.headers['Content-Type']} for a range of bytes")


def _parse_range(response: requests.Response, start: int, stop: int | None) -> tuple[int | None, int | None]:
    """First byte and total size of what the server sends; no first byte if the range is not the requested one."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0 if stop is None else None, int(length) if length.isdecimal() else None
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if match is None or (match[1] or match[2]) != str(start):
        return None, None
    return start, int(match[2]) if match[2] != "*" else None


def _blocks(response: requests.Response) -> Iterator[bytes]:
    """Blocks as they arrive, until the server is slower than the minimum."""
    since, received = time.monotonic(), 0
    while True:
        try:
            # `read1` returns what has arrived: a dropped connection then loses no byte that was received.
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


class HTTPFile(AbstractBufferedFile):
    """One version of the file at a URL, read at any position through a cache of blocks of 64 KiB.

    A `DataFault` is raised if the server sends no ranges, fails again and again, or replaces the file during reading.
    h5py reports a failed transfer as a damaged file, so `fault` keeps the first failure. h5py names the file by its
    `repr`, which is the URL.
    """

    def __init__(self, session: requests.Session, url: str, advance: Advance) -> None:
        self._session, self._url, self.advance = session, url, advance
        self.size: int | None = None
        self.validator: str | None = None
        self.fault: DataFault | None = None
        self.stream(0, 1, lambda block: None)  # for the size and the validator of the file
        cache = {"cache_type": "blockcache", "cache_options": {"maxblocks": MAX_CACHED_BLOCKS}}
        super().__init__(None, url, block_size=CACHED_BLOCK_BYTES, size=self.size, **cache)

    def __repr__(self) -> str:
        return self._url

    def stream(self, start: int, stop: int, write: Callable[[bytes], object]) -> None:
        """Pass every byte from `start` to `stop` to `write` once, over as many connections as it takes."""
        arrived = start

        def attempt() -> None:
            nonlocal arrived
            with request_range(self._session, self._url, arrived, stop, self.validator) as response:
                self._expect_same_file(response, arrived)
                for block in response.blocks:
                    block = block[: stop - arrived]
                    write(block)
                    arrived += len(block)
                    self.advance(len(block))
            if arrived < stop:
                raise TransferError(f"the connection closed at byte {arrived} of {stop}")

        retry_transfer(self._url, attempt, lambda: arrived, self.advance)

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Bytes of one block, for the cache of fsspec."""
        block = bytearray()
        try:
            self.stream(start, min(end, self.size or 0), block.extend)
        except DataFault as error:
            self.fault = self.fault or error
            raise
        return bytes(block)

    def _expect_same_file(self, response: RangeResponse, start: int) -> None:
        if self.size is not None and (response.validator != self.validator or response.total not in (None, self.size)):
            raise DataFault(f"{self._url}: has changed while it was read; run the same command again")
        if response.start != start or response.total is None:
            what = "the server does not send ranges of bytes"
            raise DataFault(f"{self._url}: {what}; fetch the whole file with download.trajectories: null")
        self.size, self.validator = response.total, response.validator
