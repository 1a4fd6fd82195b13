"""Servers that mean harm: each ends in one line within seconds, and none is reached that was not named."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ups.data import connections, http
from ups.data.connections import new_session
from ups.data.download import download_file
from ups.data.hdf5 import SIGNATURE
from ups.data.http import HTTPFile
from ups.data.published import is_public, shown
from ups.errors import DataFault

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
START = b"8\r\n" + SIGNATURE + b"\r\n"
Behave = Callable[[Callable[[bytes], None]], None]


def flood(head: bytes, block: bytes) -> Behave:
    """Send the same bytes for ever."""

    def behave(send: Callable[[bytes], None]) -> None:
        send(head)
        while True:
            send(block * 100)

    return behave


def drip(head: bytes, byte: bytes) -> Behave:
    """Send a byte well within the time limit of a socket, for ever."""

    def behave(send: Callable[[bytes], None]) -> None:
        send(head)
        while True:
            send(byte)
            time.sleep(0.05)

    return behave


HOSTILE: dict[str, Behave] = {
    "flood of interim answers": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drip of interim answers": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drip of a status line": drip(b"HTTP/1.1 200 ", b"O"),
    "drip of a header": drip(OK + b"X: ", b"x"),
    "flood of headers": flood(OK, b"X: x\r\n"),
    "long header": flood(OK + b"ETag: ", b"x" * 100),
    "drip of a body": drip(OK + b"Content-Length: 100000\r\n\r\n" + SIGNATURE, b"x"),
    "drip of chunks": drip(CHUNKED + START, b"1\r\nx\r\n"),
    "drip of the size of a chunk": drip(CHUNKED + START, b"0"),
    "flood of trailers": flood(CHUNKED + START + b"0\r\n", b"X: x\r\n"),
    "drip of trailers": drip(CHUNKED + START + b"0\r\n", b"X: x\r\n"),
    "a byte per connection": lambda send: send(OK + b"Content-Length: 100000\r\n\r\n" + SIGNATURE),
    "size of 30 digits": lambda send: send(OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n" + SIGNATURE),
    "size of 5000 digits": lambda send: send(OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + SIGNATURE),
    "negative size": lambda send: send(OK + b"Content-Length: -5\r\n\r\n" + SIGNATURE),
    "two sizes": lambda send: send(OK + b"Content-Length: 5, 6\r\n\r\n" + SIGNATURE),
    "strange digits": lambda send: send(OK + "Content-Length: ٣\r\n\r\n".encode() + SIGNATURE),
    "negative chunk": lambda send: send(CHUNKED + START + b"-5\r\nabcdefgh"),
    "malformed headers": lambda send: send(OK + b"nonsense\r\nX: x\r\nContent-Length: 8\r\n\r\n" + SIGNATURE),
    "control characters": lambda send: send(b"HTTP/1.1 404 \x1b[31mred\x07\r\nContent-Length: 0\r\n\r\n"),
    "long reason": lambda send: send(b"HTTP/1.1 404 " + b"x" * 60_000 + b"\r\n\r\n"),
}


@pytest.fixture
def serve_raw(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Behave], str]]:
    """`serve_raw(behave)` starts a server that reads each request and behaves so; it returns the URL of a file."""
    for name, value in {"ANSWER_SECONDS": 0.4, "BLOCK_SECONDS": 0.4, "TIMEOUT_SECONDS": 0.3}.items():
        monkeypatch.setattr(connections, name, value)
    for name, value in {"ATTEMPTS": 2, "PAUSE_SECONDS": 0.001, "SPEED_WINDOW_SECONDS": 0.4}.items():
        monkeypatch.setattr(http, name, value)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket, behave: Behave) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            behave(connection.sendall)

    def accept(behave: Behave) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection, behave), daemon=True).start()

    def start(behave: Behave) -> str:
        threading.Thread(target=accept, args=(behave,), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/file"

    yield start
    listener.close()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_server_is_left(serve_raw, tmp_path: Path, case: str, caplog, capfd):
    """Whatever a server sends, or how slowly, the download ends in one printable line within seconds."""
    started = time.monotonic()
    with pytest.raises(DataFault) as caught:
        download_file(serve_raw(HOSTILE[case]), "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)
    assert time.monotonic() - started < 5
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
    lines = [record.getMessage() for record in caplog.records]  # of failures that another attempt might repair
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+: .*; trying again in 1 s, .*", line) for line in lines)
    assert all(map(str.isprintable, lines)) and len(lines) < http.ATTEMPTS and capfd.readouterr().err == ""


class Told(logging.Handler):
    """The lines of the log; `first` is set when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.first = [], threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())
        self.first.set()


@pytest.fixture
def told() -> Iterator[Told]:
    """The log of this project."""
    handler = Told()
    logging.getLogger("ups").addHandler(handler)
    yield handler
    logging.getLogger("ups").removeHandler(handler)


@pytest.mark.parametrize("silent", ["server", "name server"])
def test_silence_is_told(serve_raw, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str):
    """A line names a host that does not answer, or whose name is not resolved, before either has given up."""
    assert connections.SILENCE_SECONDS <= 10
    for module, values in ((http, {"ATTEMPTS": 1}), (connections, {"SILENCE_SECONDS": 0.01, "TIMEOUT_SECONDS": 30.0})):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    url = serve_raw(lambda send: told.first.wait(30))  # hangs up as soon as the line is there
    if silent == "name server":
        monkeypatch.setattr(connections, "_resolve", lambda *_: told.first.wait(30) and ["127.0.0.1"])
    started = time.monotonic()
    with pytest.raises(DataFault):
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)
    host = url.split("/")[2]
    assert told.lines == [f"{host}: no answer for 0 s; still waiting, up to 30 s for each of its addresses"]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("url", "why"),
    [("http://127.0.0.1:9/file", "Connection refused"), ("https://mirror.test/file", "Name or service not known")],
)
def test_a_dead_host_is_told(url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A host that refuses or has no address is named before the first pause, with the time until it is asked again."""

    def resolve(host: str, *_: object, **options: object) -> list[tuple]:
        if host == "mirror.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 9))]

    connect_directly(monkeypatch)
    slept: list[list[str]] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(http.time, "sleep", lambda seconds: slept.append(caplog.messages))
    with pytest.raises(DataFault, match=why):
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)
    host = url.split("/")[2]
    pattern = rf"{host}: no connection or no answer \({why}\); trying again in [23] s, and at least until [\d:]{{8}}"
    assert re.fullmatch(pattern, slept[0][0]) and len(caplog.messages) == http.ATTEMPTS - 1


def test_more_than_the_requested_range_is_not_read(serve_raw):
    """A server that answers a range without end gives its bytes and is left."""
    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-0/1000\r\n\r\n"
    with new_session() as session:
        assert HTTPFile(session, serve_raw(flood(head, b"x" * 1000)), lambda count: None).size == 1000


def test_a_file_of_unknown_size_is_bounded(serve_raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a published size no more is written than a published file could have."""
    monkeypatch.setattr("ups.data.download.MAX_FILE_BYTES", 10**6)
    with pytest.raises(DataFault, match="more than the expected 1000000 bytes"):
        url = serve_raw(flood(OK + b"\r\n" + SIGNATURE, b"x" * 1000))
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pause", ["1000000000", "9" * 5000, "-5", "Fri, 31 Dec 9999 23:59:59 GMT", "x" * 9000, "٣", "1e9"]
)
def test_no_server_delays_for_long(pause: str):
    """A pause of years, in the past or of nonsense is one of a few minutes at most."""
    seconds = http._requested_pause(pause)
    assert seconds is None or min(http.MAX_PAUSE_SECONDS, seconds) == http.MAX_PAUSE_SECONDS


@pytest.mark.parametrize("tag", ['"' + "x" * 1000 + '"', '"a\x0bb"', '"é"', "W/" + '"1"', '"1', "", "nonsense\x00"])
def test_a_strange_version_is_none(tag: str):
    """What is long or not plain text reaches neither a file nor the next request; the time of the last change does."""
    assert http.find_version(tag, "") is None
    assert http.find_version(tag, "Thu, 01 Jan 1970 00:00:00 GMT") == "Thu, 01 Jan 1970 00:00:00 GMT"


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: list[str]) -> None:
    """Names have these addresses, one list per question, the last for ever."""
    answers = list(addresses)

    def resolve(host: str, port: int, *_: object, **options: object) -> list[tuple]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def connect_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proxy of the environment."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("addresses", [[["169.254.169.254"]], [["129.69.1.1", "10.0.0.1"]], [["127.0.0.1"]], [["::1"]]])
def test_a_registered_host_is_of_the_internet(addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A published name that resolves to a local or private address, be it one of several, is refused unasked."""
    resolve_to(monkeypatch, *addresses)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    connect_directly(monkeypatch)
    with pytest.raises(DataFault, match="s3.tik.uni-stuttgart.de has the address"):
        url = "https://s3.tik.uni-stuttgart.de/file"
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)


def test_a_name_that_changes_its_address_is_refused(serve_raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The address that is connected to counts, not one that was asked for before; nothing is sent."""
    received: list[bytes] = []
    port = int(serve_raw(received.append).split(":")[2].removesuffix("/file"))
    connect_directly(monkeypatch)
    resolve_to(monkeypatch, ["129.69.1.1"], ["127.0.0.1"])
    with pytest.raises(DataFault, match=r"has the address 127.0.0.1"):
        url = f"https://darus.uni-stuttgart.de:{port}/file"
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)


def test_a_proxy_resolves_names(serve_raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Behind a proxy the name goes to the proxy, which this machine need not be able to resolve."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        connection, _ = listener.accept()
        asked.append(connection.recv(2**16))
        connection.sendall(b"HTTP/1.1 403 no\r\n\r\n")
        connection.close()

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(http, "ATTEMPTS", 1)
    with listener, pytest.raises(DataFault, match="no connection"):
        url = "https://darus.uni-stuttgart.de/file"
        download_file(url, "0" * 32, tmp_path / "file", lambda count: None, num_bytes=50_000)
    assert asked[0].startswith(b"CONNECT darus.uni-stuttgart.de:443 ")


def test_a_connection_lost_in_the_handshake_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a busy load balancer does it: the download tries again, and does not blame the certificate."""
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    accepted = []

    def drop(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                connection.recv(4096)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drop, args=(listener,), daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/f.hdf5"
        with pytest.raises(DataFault) as fault:
            download_file(url, "0" * 32, tmp_path / "f.hdf5", lambda count: None)
    assert len(accepted) > 1 and "certificate" not in str(fault.value)


def test_a_name_is_resolved_once_per_connection(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks over one connection ask the name server nothing."""
    asked: list[list[str]] = []
    resolve = connections._resolve
    monkeypatch.setattr(connections, "_resolve", lambda *place: asked.append(place) or resolve(*place))
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    server = serve(tmp_path)
    monkeypatch.setattr(server.RequestHandlerClass, "protocol_version", "HTTP/1.1")
    with new_session() as session:
        file = HTTPFile(session, f"{server.url}/file", lambda count: None)
        for start in range(0, 10_000, 1000):
            file.stream(start, start + 1000, lambda block: None)
    assert len(asked) == 1 and len(server.requests) == 11


@pytest.mark.parametrize(
    ("address", "expected"),
    [("129.69.5.99", True), ("10.0.0.1", False), ("169.254.169.254", False), ("224.0.0.1", False), ("::1", False)]
    + [("64:ff9b::8145:563", True), ("64:ff9b::7f00:1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_addresses_of_the_internet(address: str, expected: bool):
    """Private, local and link-local addresses are not, in whichever notation."""
    assert is_public(address) is expected


ADDRESSES = {
    "https://me:SECRET@a.test/x": "https://***@a.test/x",
    "https://me:SEC/SE?T#@a.test/x": "https://***@a.test/x",
    "https://a.test/x?X-Amz-Signature=SECRET": "https://a.test/x",
    "me:SECRET@a.test": "***@a.test",
    "https://a.test/\x1b\n": "https://a.test/\\x1b\\n",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_messages_hide_secrets_of_addresses(address: str):
    """User, password and query do not reach a message."""
    assert shown(address) == ADDRESSES[address]
