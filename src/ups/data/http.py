"""HTTP requests for ranges of bytes: checked redirects, retries, and a remote file that can be read at any position.

Requests go through `connections`, retries from `tenacity`, seeking and the cache of blocks from `fsspec`. `HTTPFile`
is used instead of the HTTP file of fsspec, which returns bytes of two versions of a file without an error, raises at a
dropped connection and at status 503, and follows redirects to the local machine.
"""

import email.utils
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import urljoin

import requests
import urllib3
from fsspec.spec import AbstractBufferedFile
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from ups.data.connections import TransferError, host_of, send_request
from ups.data.published import HOSTS, check_address, shown
from ups.errors import DataFault, printable

log = logging.getLogger(__name__)

BLOCK_BYTES = 2**20
ATTEMPTS, PROGRESS_BYTES = 8, 10_000  # attempts in a row that bring less than so many new bytes
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0
MIN_BYTES_PER_SECOND, SPEED_WINDOW_SECONDS = 10_000, 60
MAX_REDIRECTS = 5
MAX_FILE_BYTES = 10**12  # ten times the largest published file
CACHED_BLOCK_BYTES, MAX_CACHED_BLOCKS = 2**16, 256

Advance = Callable[[int], object]
"""Progress callback: bytes that arrived, negative when a transfer starts over, 0 while it waits; may raise to stop."""


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
        if total is not None and total > MAX_FILE_BYTES:
            raise DataFault(f"{shown(url)}: the server names a size that no published file has; check the source")
        # A weak ETag does not identify the bytes: the time of the last change then has to do.
        version = find_version(response.headers.get("ETag", ""), response.headers.get("Last-Modified", ""))
        yield RangeResponse(first, total, version, _blocks(response))


def find_version(*texts: str) -> str | None:
    """The first text that names a version of a file: a strong ETag or a date, of no characters but ASCII."""
    return next((text for text in texts if re.fullmatch(r'"[!#-~]{0,200}"|[A-Z][A-Za-z0-9,: +-]{9,60}', text)), None)


def retry_transfer(url: str, attempt: Callable[[], None], position: Callable[[], int], advance: Advance) -> None:
    """Repeat `attempt` after every `TransferError`, at most `ATTEMPTS` times in a row without much progress.

    `position` returns the number of bytes that have arrived. A line says what failed before every pause, of which
    `advance(0)` is called every second. The last failure is raised as a `DataFault`.
    """
    furthest = position()

    def count_from_progress(state: RetryCallState) -> None:
        nonlocal furthest
        if position() >= furthest + PROGRESS_BYTES:  # a server that sends a byte and hangs up would go on for ever
            furthest, state.attempt_number = position(), 0

    retrying = Retrying(
        retry=retry_if_exception_type(TransferError),
        after=count_from_progress,
        stop=stop_after_attempt(ATTEMPTS),
        wait=_pause_seconds,
        before_sleep=partial(_announce_retry, url),
        sleep=partial(_sleep, advance),
        reraise=True,
    )
    try:
        retrying(attempt)
    except TransferError as error:
        remedy = f"run the same command to resume at byte {position()}"
        raise DataFault(f"{shown(url)}: {error}, {ATTEMPTS} times in a row; {remedy}") from error


def _pause_seconds(state: RetryCallState) -> float:
    """The pause that the server requests, else one that doubles with every attempt."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, TransferError) and error.pause_seconds is not None:
        return min(MAX_PAUSE_SECONDS, error.pause_seconds)
    return wait_exponential_jitter(multiplier=2 * PAUSE_SECONDS, max=MAX_PAUSE_SECONDS, jitter=PAUSE_SECONDS)(state)


def _announce_retry(url: str, state: RetryCallState) -> None:
    assert state.outcome is not None and state.next_action is not None
    later = sum(min(2 * PAUSE_SECONDS * 2**n, MAX_PAUSE_SECONDS) for n in range(state.attempt_number, ATTEMPTS - 1))
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + state.next_action.sleep + later))
    error, seconds = state.outcome.exception(), math.ceil(state.next_action.sleep)
    log.warning("%s: %s; trying again in %d s, and at least until %s", host_of(url), error, seconds, until)


def _sleep(advance: Advance, seconds: float) -> None:
    while seconds > 0:
        advance(0)
        time.sleep(min(1.0, seconds))
        seconds -= 1.0


def _follow_redirects(session: requests.Session, url: str, headers: dict[str, str]) -> requests.Response:
    """The response behind at most `MAX_REDIRECTS` redirects.

    Every redirect is checked and closed unread: `requests` would read its body first, which may be endless.
    """
    address = url
    _expect_allowed(url, url)
    for _ in range(1 + MAX_REDIRECTS):
        response = send_request(session, url, address, headers)
        if not response.is_redirect:
            return response
        response.close()
        address = _resolve_redirect(url, address, response.headers["Location"])
    raise DataFault(f"{shown(url)}: more than {MAX_REDIRECTS} redirects; check the URL")


def _expect_allowed(url: str, address: str) -> str:
    """The host of an address that `url` leads to."""
    try:
        return check_address(address)
    except ValueError as error:
        leads = "" if url == address else f"leads to {shown(address)}: "
        raise DataFault(f"{shown(url)}: {leads}{error}; check the URL") from None


def _resolve_redirect(url: str, base: str, location: str) -> str:
    """The address of a `Location` header in a response of `base`; its host is that of `url` or a registered one."""
    try:
        address = urljoin(base, location)
    except ValueError:
        raise DataFault(f"{shown(url)}: leads to {shown(location)}, which is no address; check the URL") from None
    if base.startswith("https:") and address.startswith("http:"):
        raise DataFault(f"{shown(url)}: redirects from https to http; check the URL")
    if _expect_allowed(url, address) not in (check_address(url), *HOSTS):
        raise DataFault(f"{shown(url)}: leads to a foreign host, {shown(address)}; check the URL, or name a mirror")
    return address


def _expect_content(url: str, response: requests.Response) -> None:
    status, reason = response.status_code, printable(response.reason)[:80]
    if status == 429 or status >= 500:
        raise TransferError(f"HTTP {status} {reason}", _requested_pause(response.headers.get("Retry-After", "")))
    if status not in (200, 206, 416):
        raise DataFault(f"{shown(url)}: HTTP {status} {reason}; check the URL")
    # Proxies answer a range with a login page and status 206; its bytes would end up inside the file.
    kind = printable(response.headers.get("Content-Type", ""))[:80]
    if status == 206 and kind.startswith(("text/html", "multipart/")):
        raise TransferError(f"sent {kind} for a range of bytes")


def _requested_pause(text: str) -> float | None:
    """Seconds until the end of the pause that `Retry-After` requests, as a number or a date; None for other texts."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return None


def _parse_range(response: requests.Response, start: int, stop: int | None) -> tuple[int | None, int | None]:
    """First byte and total size of what the server sends; no first byte if the range is not the requested one."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0 if stop is None else None, _size(length)
    match = re.fullmatch(r"bytes (?:([0-9]+)-[0-9]+|\*)/([0-9]+|\*)", response.headers.get("Content-Range", ""))
    if match is None or (match[1] or match[2]) != str(start):
        return None, None
    return start, _size(match[2])


def _size(text: str) -> int | None:
    """A number of bytes; None for what is no number, `MAX_FILE_BYTES` + 1 for one of many digits."""
    return min(int(text[:16]), MAX_FILE_BYTES + 1) if re.fullmatch(r"[1-9][0-9]*|0", text) else None


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

    A `DataFault` is raised if the server sends no ranges, fails again and again, or replaces the file during reading,
    and by `read` if it is to fetch more than the cache holds: a damaged structure may refer to places without end.
    """

    def __init__(self, session: requests.Session, url: str, advance: Advance) -> None:
        self._session, self._url, self.advance = session, url, advance
        self.size: int | None = None
        self.validator: str | None = None
        self._num_read = 0
        self.stream(0, 1, lambda block: None)  # for the size and the validator of the file
        cache = {"cache_type": "blockcache", "cache_options": {"maxblocks": MAX_CACHED_BLOCKS}}
        super().__init__(None, url, block_size=CACHED_BLOCK_BYTES, size=self.size, **cache)

    def __repr__(self) -> str:
        return shown(self._url)

    def stream(self, start: int, stop: int, write: Callable[[bytes], object]) -> None:
        """Pass every byte from `start` to `stop` to `write` once, over as many connections as it takes."""
        if start == stop:  # a range that a server need not understand
            return
        arrived = start

        def attempt() -> None:
            nonlocal arrived
            with request_range(self._session, self._url, arrived, stop, self.validator) as response:
                self._expect_same_file(response, arrived)
                for block in response.blocks:
                    block = block[: stop - arrived]
                    if not block:  # more than was asked for, which may have no end
                        break
                    write(block)
                    arrived += len(block)
                    self.advance(len(block))
            if arrived < stop:
                raise TransferError(f"the connection closed at byte {arrived} of {stop}")

        retry_transfer(self._url, attempt, lambda: arrived, self.advance)

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Bytes of one block, for the cache of fsspec."""
        self._num_read += end - start
        if self._num_read > MAX_CACHED_BLOCKS * CACHED_BLOCK_BYTES:
            raise DataFault(f"{self!r}: damaged, its structure leads to more places than are read; check the source")
        block = bytearray()
        self.stream(start, min(end, self.size or 0), block.extend)
        return bytes(block)

    def _expect_same_file(self, response: RangeResponse, start: int) -> None:
        if self.size is not None and (response.validator != self.validator or response.total not in (None, self.size)):
            raise DataFault(f"{self!r}: has changed while it was read; run the same command again")
        if response.start != start or response.total is None:
            what = "the server does not send ranges of bytes"
            raise DataFault(f"{self!r}: {what}; fetch the whole file with download.trajectories: null")
        self.size, self.validator = response.total, response.validator
