"""Everything a server can do wrong: the right file in the end, or one clear line and nothing left behind."""

import hashlib
import itertools
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ups.data import http
from ups.data.download import download_file
from ups.data.hdf5 import SIGNATURE
from ups.errors import DataFault
from ups.files import digest_of

CONTENT = SIGNATURE + bytes(range(256)) * 1000
SIZE, NAME = len(CONTENT), "file.hdf5"
MD5 = hashlib.md5(CONTENT).hexdigest()
PAGE = b"<!DOCTYPE html><title>Sign in</title>" * 50

Answer = Callable[[BaseHTTPRequestHandler], object]


def reply(status: int, body: bytes = b"", cut: int | None = None, **headers: str) -> Answer:
    """Answer with these headers; `cut` closes the connection after so many bytes of the body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body[:cut])

    return answer


def raw(text: bytes) -> Answer:
    """Answer with bytes that need not be HTTP."""
    return lambda handler: handler.wfile.write(text)


def part(start: int, stop: int, content_range: str | None = None, **headers: str) -> Answer:
    """Answer with a range, be it the one asked for or not."""
    return reply(206, CONTENT[start:stop], Content_Range=content_range or f"bytes {start}-{stop - 1}/{SIZE}", **headers)


HALF = SIZE // 2
FIRST = reply(200, CONTENT, HALF)
OLD = reply(200, CONTENT[:9] + bytes(SIZE - 9), HALF, ETag='"0"')
FOREVER = 100

REPAIRED: dict[str, list[Answer]] = {
    "nothing wrong": [],
    "drop": [FIRST],
    "drop before the first byte": [reply(200, CONTENT, 0)],
    "drop inside the signature": [reply(200, CONTENT, 3)],
    "drop before the last byte": [reply(200, CONTENT, SIZE - 1)],
    "closed without an answer": [raw(b"")],
    "half a status line": [raw(b"HTTP/1.1 2")],
    "nonsense for HTTP": [raw(b"hello\r\n\r\n")],
    "too many requests": [reply(429)],
    "too many requests, wait": [reply(429, Retry_After="0")],
    "busy": [reply(503)],
    "busy until a date": [reply(503, Retry_After="Thu, 01 Jan 1970 00:00:00 GMT")],
    "busy until nonsense": [reply(503, Retry_After="soon")],
    "busy with a page": [reply(503, PAGE)],
    "broken gateway": [reply(502), reply(504)],
    "internal error": [reply(500)],
    "whole file for a range": [FIRST, reply(200, CONTENT)],
    "whole file for a range, dropped again": [FIRST, reply(200, CONTENT, HALF // 2)],
    "another range": [FIRST, part(10, SIZE)],
    "range without its place": [FIRST, reply(206, CONTENT[HALF:])],
    "range of nonsense": [FIRST, part(HALF, SIZE, "bytes all")],
    "range in other units": [FIRST, part(HALF, SIZE, f"items {HALF}-{SIZE - 1}/{SIZE}")],
    "range of unknown size": [FIRST, part(HALF, SIZE, f"bytes {HALF}-{SIZE - 1}/*")],
    "shorter range": [FIRST, part(HALF, HALF + 1000)],
    "page for a range": [FIRST, part(HALF, SIZE, Content_Type="text/html")],
    "range refused": [FIRST, reply(416)],
    "range refused, other size": [FIRST, reply(416, Content_Range="bytes */17")],
    "changed version": [OLD, part(HALF, SIZE, ETag='"1"')],
    "changed version, whole": [OLD, reply(200, CONTENT, ETag='"1"')],
    "no size": [reply(200, CONTENT, Content_Length="")],
    "moved": [reply(301, Location=f"/{NAME}")],
    "five redirects": [reply(302, Location=f"/{NAME}")] * 5,
    "dropped redirect": [reply(302, PAGE, 3, Location=f"/{NAME}")],
}  # fmt: skip

REFUSED: dict[str, tuple[list[Answer], str]] = {
    "web page": ([reply(200, PAGE)], "HTML page.*Sign in"),
    "XML error": ([reply(200, b"<?xml version='1.0'?><Error/>")], "HTML page"),
    "JSON error": ([reply(200, b'{"status": "ERROR"}')], "foreign content"),
    "other file": ([reply(200, bytes(SIZE))], "foreign content"),
    "packed file": ([reply(200, b"\x1f\x8b" + CONTENT, Content_Encoding="gzip")], "foreign content"),
    "empty file, again and again": ([reply(200)] * FOREVER, "sent nothing"),
    "wrong content": ([reply(200, CONTENT[:-1] + b"x")], f"expected {MD5}"),
    "too small": ([reply(200, CONTENT[:-1])], f"offers {SIZE - 1} bytes"),
    "too large": ([reply(200, CONTENT + b"x")], f"offers {SIZE + 1} bytes"),
    "too large without a size": ([reply(200, CONTENT + b"x" * SIZE, Content_Length="")], "more than the expected"),
    "not there": ([reply(404)], "HTTP 404"),
    "gone": ([reply(410, PAGE)], "HTTP 410"),
    "forbidden": ([reply(403)], "HTTP 403"),
    "log in": ([reply(401, WWW_Authenticate="Basic")], "HTTP 401"),
    "no content": ([reply(204)], "HTTP 204"),
    "redirect to nowhere": ([reply(302)], "HTTP 302"),
    "redirect to a file": ([reply(302, Location="file:///etc/passwd")], "only https is fetched"),
    "redirect to FTP": ([reply(302, Location="ftp://127.0.0.1/file")], "only https is fetched"),
    "redirect to data": ([reply(302, Location="data:text/plain,hello")], "only https is fetched"),
    "redirect without a host": ([reply(302, Location="http:///file")], "HTTP 404"),
    "redirect to a broken address": ([reply(302, Location="http://[::1/file")], "leads to"),
    "redirect with an endless page": (
        [reply(302, PAGE, None, Location="ftp://a.test/", Content_Length="9" * 12)],
        "http",
    ),
    "redirect in a circle": ([reply(302, Location=f"/{NAME}")] * FOREVER, "more than 5 redirects"),
    "busy for ever": ([reply(503)] * FOREVER, "503.*4 times in a row"),
    "too many requests for ever": ([reply(429, Retry_After="0")] * FOREVER, "429.*4 times in a row"),
    "nonsense for ever": ([raw(b"hello\r\n\r\n")] * FOREVER, "no connection.*4 times in a row"),
    "closed for ever": ([raw(b"")] * FOREVER, "no connection.*4 times in a row"),
}

BAD_URLS = {
    "file": "file:///etc/passwd",
    "FTP": "ftp://127.0.0.1/file",
    "path": "/etc/passwd",
    "no host": "http://",
    "no scheme": "127.0.0.1/file",
    "bad port": "http://127.0.0.1:x/file",
    "bad address": "http://[::1/file",
    "bad host": "http://a..b/file",
    "script": "javascript:alert(1)",
    "nobody there": "http://127.0.0.1:9/file",
}


@pytest.fixture
def url(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Answer]], str]:
    """`url(answers)` scripts a server and returns the URL of its file."""
    monkeypatch.setattr(http, "ATTEMPTS", 4)
    (tmp_path / NAME).write_bytes(CONTENT)
    server = serve(tmp_path)

    def start(answers: list[Answer]) -> str:
        server.script[:] = answers
        return f"{server.url}/{NAME}"

    return start


@pytest.mark.parametrize("case", REPAIRED)
def test_fault_is_repaired(url, tmp_path, case):
    """The right file in the end and nothing beside it; the reported bytes add up to its size."""
    target, arrived = tmp_path / "local" / NAME, []
    download_file(url(REPAIRED[case]), MD5, target, arrived.append, num_bytes=SIZE)
    assert digest_of(target, "md5") == MD5
    assert sum(arrived) == SIZE
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("case", REFUSED)
def test_fault_is_told(url, tmp_path, case):
    """One line with the URL or the file, and nothing left behind."""
    answers, message = REFUSED[case]
    expect_refusal(url(answers), tmp_path / "local" / NAME, message)


@pytest.mark.parametrize("case", BAD_URLS)
def test_bad_url_is_told(tmp_path, monkeypatch, case):
    """One line with the URL, and nothing left behind."""
    monkeypatch.setattr(http, "ATTEMPTS", 2)
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    expect_refusal(BAD_URLS[case], tmp_path / "local" / NAME, re.escape(BAD_URLS[case]))


def expect_refusal(address: str, target: Path, message: str) -> None:
    """The download fails in one line and leaves an empty folder."""
    with pytest.raises(DataFault, match=message) as caught:
        download_file(address, MD5, target, lambda count: None, num_bytes=SIZE)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(("first", "second"), list(itertools.product(["drop", "busy", "another range"], repeat=2)))
def test_faults_in_a_row_are_repaired(url, tmp_path, first, second):
    """One fault after the other changes nothing."""
    target = tmp_path / "local" / NAME
    download_file(url(REPAIRED[first] + REPAIRED[second]), MD5, target, lambda count: None, num_bytes=SIZE)
    assert digest_of(target, "md5") == MD5
