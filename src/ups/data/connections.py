"""Connections to checked addresses alone, whose answers arrive within bounds of bytes and of seconds.

A direct connection resolves the name of its host, refuses the host if one of its addresses is not allowed, and checks
the address it is connected to before it sends anything, because a name may have other addresses a moment later. Behind
a proxy of the environment (`HTTPS_PROXY`, `NO_PROXY`) the proxy resolves names, often those of a network that this
machine does not see: then the name alone is checked, by `published.check_address`, and the certificate by TLS.
"""

import http.client
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool

from ups.data.published import HOSTS, is_loopback, is_public, shown
from ups.errors import DataFault

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0  # to connect to one address of a host, and without a byte of an answer
SILENCE_SECONDS = 5.0  # until the user is told that nothing has answered
ANSWER_SECONDS, ANSWER_BYTES = 60.0, 2**16  # for all headers, those of interim answers included
BLOCK_SECONDS, BLOCK_OVERHEAD_BYTES = 60.0, 2**16  # for one block of a body; lines that frame it and follow it


class AddressError(Exception):
    """A host has an address that it must not have."""


class TransferError(Exception):
    """A transfer failed in a way that another request may repair, after `pause_seconds` if the server names a pause."""

    def __init__(self, reason: str, pause_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds


class BoundedStream(io.RawIOBase):
    """The bytes of a connection, of which the next so many may be read within the next so many seconds.

    The timeout of a socket alone is none: it starts anew with every byte.
    """

    def __init__(self, connection: socket.socket, stream: io.RawIOBase) -> None:
        self._connection, self._stream, self._timeout = connection, stream, connection.gettimeout()
        self._deadline, self._num_bytes = 0.0, 0

    def allow(self, num_bytes: int, seconds: float) -> None:
        """Start a new bound."""
        self._deadline, self._num_bytes = time.monotonic() + seconds, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the server is too slow")
        if self._num_bytes <= 0:
            raise http.client.HTTPException("the server sends more headers than are read")
        timeout = seconds if self._timeout is None else min(self._timeout, seconds)
        if timeout != self._connection.gettimeout():  # a system call, too slow to be made for every block
            self._connection.settimeout(timeout)
        count = self._stream.readinto(memoryview(buffer)[: self._num_bytes]) or 0
        self._num_bytes -= count
        return count

    def close(self) -> None:
        super().close()
        self._stream.close()


class BoundedResponse(http.client.HTTPResponse):
    """A response with bounds for its headers and for every block; headers without end are read in neither place."""

    def __init__(self, connection: socket.socket, debuglevel: int = 0, method: str | None = None) -> None:
        super().__init__(connection, debuglevel, method)
        self._bounds = BoundedStream(connection, self.fp.detach())
        self._bounds.allow(ANSWER_BYTES, ANSWER_SECONDS)
        self.fp = io.BufferedReader(self._bounds)

    def read1(self, n: int = -1) -> bytes:
        self._bounds.allow(n + BLOCK_OVERHEAD_BYTES, BLOCK_SECONDS)
        return super().read1(n)


class CheckedHTTPConnection(HTTPConnection):
    """A plain connection, to this machine only."""

    response_class = BoundedResponse

    def _new_conn(self) -> socket.socket:
        if self.proxy is None:
            _expect(self.host, _resolve(self.host, self.port), loopback=True)
        connection = super()._new_conn()
        if self.proxy is None:
            _expect_peer(self.host, connection, loopback=True)
        return connection


class CheckedHTTPSConnection(HTTPSConnection):
    """An encrypted connection, to public addresses unless the host is not registered: then the user has named it."""

    response_class = BoundedResponse

    def _new_conn(self) -> socket.socket:
        is_checked = self.proxy is None and self.host in HOSTS
        if is_checked:
            _expect(self.host, _resolve(self.host, self.port), loopback=False)
        connection = super()._new_conn()
        if is_checked:
            _expect_peer(self.host, connection, loopback=False)
        return connection


def _resolve(host: str, port: int) -> list[str]:
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _expect(host: str, addresses: list[str], *, loopback: bool) -> None:
    for address in addresses:
        if not (is_loopback(address) if loopback else is_public(address)):
            kind = "this machine" if loopback else "the internet"
            raise AddressError(f"{host} has the address {address}, which is not one of {kind}")


def _expect_peer(host: str, connection: socket.socket, *, loopback: bool) -> None:
    try:
        _expect(host, [connection.getpeername()[0]], loopback=loopback)
    except AddressError:
        connection.close()
        raise


CHECKED = {HTTPConnection: CheckedHTTPConnection, HTTPSConnection: CheckedHTTPSConnection}


class CheckedAdapter(HTTPAdapter):
    """The transport of `requests` with connections of the classes above; those of SOCKS proxies are left alone."""

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> HTTPConnectionPool:
        pool = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = CHECKED.get(pool.ConnectionCls, pool.ConnectionCls)
        return pool


def new_session() -> requests.Session:
    """A session that keeps connections open, sends no credentials from `.netrc` and follows no redirect by itself."""
    # Their lines name URLs, with the signature that a redirect carries.
    logging.getLogger("urllib3.connection").setLevel(logging.ERROR)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.INFO)
    session = requests.Session()
    session.auth = lambda request: request
    session.get_redirect_target = lambda response: None
    for scheme in ("http://", "https://"):
        session.mount(scheme, CheckedAdapter())
    return session


def send_request(session: requests.Session, url: str, address: str, headers: dict[str, str]) -> requests.Response:
    """The answer of `address`, to which `url` has led; its body is not read.

    Raises:
        DataFault: the address or the certificate is refused, or the answer is none.
        TransferError: no connection or no answer.
    """
    direct = {"http": ""}  # http is fetched from this machine alone, which a proxy would take for itself
    options = {"stream": True, "timeout": TIMEOUT_SECONDS, "allow_redirects": False, "proxies": direct}
    try:
        with _announce_silence(host_of(address)):
            return session.get(address, headers=headers, **options)
    except AddressError as error:
        raise DataFault(f"{shown(url)}: {error}; check the URL and the name server") from error
    except requests.exceptions.SSLError as error:
        if not any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)):
            raise TransferError(f"no secure connection ({_cause(error)})") from error
        raise DataFault(f"{shown(url)}: the certificate is not trusted; check the clock and the proxy") from error
    except (requests.ConnectionError, requests.Timeout) as error:
        raise TransferError(f"no connection or no answer ({_cause(error)})") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, UnicodeError) as error:
        raise DataFault(f"{shown(url)}: no valid request or answer ({type(error).__name__}); check the URL") from error


def host_of(address: str) -> str:
    """Host and port of an address, for a message."""
    return shown(urlsplit(address).netloc)


@contextmanager
def _announce_silence(host: str) -> Iterator[None]:
    """Say that a host does not answer, if the lines within take `SILENCE_SECONDS`: a name server may be silent, too."""
    text = "%s: no answer for %.0f s; still waiting, up to %.0f s for each of its addresses"
    timer = threading.Timer(SILENCE_SECONDS, log.warning, (text, host, SILENCE_SECONDS, TIMEOUT_SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cause(error: BaseException) -> str:
    """What the operating system says about a failed connection, or else the kind of the error."""
    known = (cause.strerror for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror)
    return next(known, type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """What led to an error, the latest first."""
    while error is not None and (error := error.__cause__ or error.__context__) is not None:
        yield error
