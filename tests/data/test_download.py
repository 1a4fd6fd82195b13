import hashlib
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ups.data import connections, http, published
from ups.data.download import download_file
from ups.data.hdf5 import SIGNATURE
from ups.errors import DataFault, StorageFault
from ups.files import digest_of

CONTENT = SIGNATURE + bytes(range(256)) * 400
MD5 = hashlib.md5(CONTENT).hexdigest()
NAME = "1D_Advection_Sols_beta0.4.hdf5"

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Gives the answers of a script, one per request, then serves the file."""

    script: list[Answer]
    ranges: list[str | None]

    def do_GET(self) -> None:
        self.ranges.append(self.headers.get("Range"))
        (self.script.pop(0) if self.script else serve)(self)

    def log_message(self, *_: object) -> None:
        pass


def reply(status: int, body: bytes = b"", cut: int | None = None, **headers: str) -> Answer:
    """Answer with these headers; `cut` closes the connection after so many bytes of the body."""

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body[:cut])

    return answer


def serve(handler: Handler) -> None:
    """Serve the file as a good server does, from the byte the client asks for."""
    start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
    if start >= len(CONTENT):
        reply(416, Content_Range=f"bytes */{len(CONTENT)}")(handler)
    elif start:
        content_range = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        reply(206, CONTENT[start:], Content_Range=content_range)(handler)
    else:
        reply(200, CONTENT)(handler)


@pytest.fixture
def server(monkeypatch):
    """`server(*answers)` scripts a local server and returns its URL; `Handler.ranges` has what it was asked."""
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(connections, "TIMEOUT_SECONDS", 0.5)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.script, Handler.ranges = [], []
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def start(*answers: Answer) -> str:
        Handler.script[:] = answers
        return f"http://127.0.0.1:{httpd.server_port}/file"

    yield start
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the file shall be."""
    return tmp_path / "deep" / NAME


def visible(target: Path) -> list[str]:
    """What a download leaves in the folder, locks apart."""
    return sorted(path.name for path in target.parent.iterdir() if not path.name.startswith("."))


def fetch(url: str, target: Path, md5: str = MD5) -> int:
    """Download and return the sum of the reported bytes."""
    seen: list[int] = []
    download_file(url, md5, target, seen.append, num_bytes=len(CONTENT))
    return sum(seen)


def expect_fault(url: str, target: Path, match: str, md5: str = MD5) -> None:
    """The download fails in one line, with nothing under the final name."""
    with pytest.raises(DataFault, match=match) as caught:
        fetch(url, target, md5)
    assert "\n" not in str(caught.value)
    assert not target.exists()


def drop(bytes_sent: int) -> Answer:
    """Send a part of what was asked, then close the connection."""

    def answer(handler: Handler) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        content_range = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        reply(206 if start else 200, CONTENT[start:], bytes_sent, Content_Range=content_range)(handler)

    return answer


def test_file_arrives_whole(server, target):
    """The file is there with the right content, no partial file is left, all bytes were reported."""
    assert fetch(server(), target) == len(CONTENT)
    assert target.read_bytes() == CONTENT
    assert visible(target) == [NAME]


def test_a_planted_lock_is_refused(server, target, tmp_path):
    """A link in the place of the download's lock ends in one line before anything is fetched."""
    victim, planted = tmp_path / "victim", target.with_name(f".{target.name}.lock")
    victim.write_text("mine")
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(victim)
    with pytest.raises(StorageFault, match="lock is not a plain file"):
        fetch(server(), target)
    assert victim.read_text() == "mine" and not target.exists()


def test_drops_are_resumed(server, target):
    """After each drop the transfer goes on at the byte where it stopped."""
    assert fetch(server(drop(1000), drop(2000), drop(3000)), target) == len(CONTENT)
    assert Handler.ranges == [None, "bytes=1000-", "bytes=3000-", "bytes=6000-"]
    assert target.read_bytes() == CONTENT


def test_killed_download_is_resumed(server, target):
    """A partial file of an earlier process is continued."""
    target.parent.mkdir()
    target.with_name(f"{NAME}.part").write_bytes(CONTENT[:5000])
    assert fetch(server(), target) == len(CONTENT)
    assert Handler.ranges == ["bytes=5000-"]
    assert target.read_bytes() == CONTENT


def test_complete_partial_file_is_only_checked(server, target):
    """If the process died between the last byte and the renaming, nothing is fetched again."""
    target.parent.mkdir()
    target.with_name(f"{NAME}.part").write_bytes(CONTENT)
    fetch(server(), target)
    assert Handler.ranges == []
    assert target.read_bytes() == CONTENT


def test_unknown_size_is_no_obstacle(server, target):
    """Without a size from the table a complete partial file is recognized by the server's answer 416."""
    target.parent.mkdir()
    target.with_name(f"{NAME}.part").write_bytes(CONTENT)
    download_file(server(), MD5, target, lambda n: None)
    assert Handler.ranges == [f"bytes={len(CONTENT)}-"]
    assert target.read_bytes() == CONTENT


BAD_RESUMES = {
    "whole file instead of the range": reply(200, CONTENT),
    "another range": reply(206, CONTENT[10:], Content_Range=f"bytes 10-{len(CONTENT) - 1}/{len(CONTENT)}"),
    "no range": reply(206, CONTENT[5000:]),
    "range refused": reply(416, Content_Range="bytes */17"),
}


@pytest.mark.parametrize("case", BAD_RESUMES)
def test_server_that_cannot_resume_starts_over(server, target, case):
    """If the server does not send the range that was asked, the file is fetched anew and never pasted together."""
    target.parent.mkdir()
    target.with_name(f"{NAME}.part").write_bytes(CONTENT[:5000])
    assert fetch(server(BAD_RESUMES[case]), target) == len(CONTENT)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_asked_again(server, target, status):
    """Too many requests and errors of the server are repaired by waiting."""
    fetch(server(reply(status), reply(status)), target)
    assert len(Handler.ranges) == 3
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("value", ["7", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_retry_after_is_honoured(server, target, monkeypatch, value):
    """The server's wish for a pause counts, up to a limit."""
    pauses: list[float] = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)
    fetch(server(reply(503, Retry_After=value)), target)
    assert sum(pauses) == (7.0 if value == "7" else http.MAX_PAUSE_SECONDS)


@pytest.mark.parametrize("status", [403, 404, 410])
def test_refusal_is_final(server, target, status):
    """A file that is missing or forbidden is not asked for twice."""
    expect_fault(server(reply(status)), target, f"HTTP {status}")
    assert len(Handler.ranges) == 1


def test_retries_end(server, target):
    """A server that never recovers is given up, with the byte where the next run resumes."""
    expect_fault(server(drop(2000), *[reply(503)] * http.ATTEMPTS), target, "503.*resume at byte 2000")


def test_silent_server_times_out(server, target, monkeypatch):
    """A server that accepts and says nothing is asked again."""
    monkeypatch.setattr(connections, "TIMEOUT_SECONDS", 0.1)
    silence, started = threading.Event(), time.monotonic()
    try:
        fetch(server(lambda handler: silence.wait(60)), target)
    finally:
        silence.set()
    assert target.read_bytes() == CONTENT and time.monotonic() - started < 10


def test_slow_server_is_left(server, target, monkeypatch):
    """A transfer below the minimum speed is broken off, even if bytes still trickle in."""
    monkeypatch.setattr(http, "SPEED_WINDOW_SECONDS", 0)
    monkeypatch.setattr(http, "MIN_BYTES_PER_SECOND", 10**12)
    monkeypatch.setattr(http, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(http, "ATTEMPTS", 1)
    expect_fault(server(reply(200, CONTENT)), target, "slower than.*resume at byte 1000")


def test_web_page_is_refused(server, target):
    """A login page with status 200 is recognized by its first bytes and leaves nothing behind."""
    page = b"<!DOCTYPE html><title>Sign in</title>" * 1000
    expect_fault(server(reply(200, page)), target, "HTML page.*Sign in")
    assert visible(target) == []


def test_wrong_size_is_refused_early(server, target):
    """A server that offers another size than the table is refused before the transfer."""
    expect_fault(server(reply(200, CONTENT + b"more")), target, f"offers {len(CONTENT) + 4} bytes")
    assert visible(target) == []


def test_wrong_md5_leaves_nothing(server, target):
    """The message has expected and actual MD5, the wrong bytes are deleted."""
    expect_fault(server(), target, f"MD5 is {MD5}, expected {'0' * 32}", md5="0" * 32)
    assert visible(target) == []


def test_an_outdated_file_is_called_so(server, target, monkeypatch):
    """Where a server sends an outdated version, or one is there already, the fault says what is wrong with it."""
    monkeypatch.setattr(published, "_read_outdated", lambda: {MD5: NAME})
    expect_fault(server(), target, "is an outdated version of advection_1d", md5="0" * 32)
    target.write_bytes(CONTENT)
    with pytest.raises(DataFault, match="is an outdated version of advection_1d"):
        fetch(server(), target, md5="0" * 32)


def test_foreign_partial_file_is_not_continued(server, target):
    """A partial file that is no HDF5 is thrown away."""
    target.parent.mkdir()
    target.with_name(f"{NAME}.part").write_bytes(b"<html>" * 100)
    fetch(server(), target)
    assert Handler.ranges == [None]


def test_existing_file_is_checked_and_kept(server, target):
    """A file that is there is not fetched again; a wrong one is reported, not overwritten."""
    url = server()
    fetch(url, target)
    assert fetch(url, target) == len(CONTENT)
    assert len(Handler.ranges) == 1
    with pytest.raises(DataFault, match="delete it"):
        fetch(url, target, md5="0" * 32)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/file", "/etc/passwd"])
def test_other_schemes_are_refused(target, url):
    """Only http and https are fetched."""
    expect_fault(url, target, "only https is fetched")


def test_redirects_to_other_schemes_are_refused(server, target):
    """A redirect to a local file is not followed."""
    expect_fault(server(reply(302, Location="file:///etc/passwd")), target, "only https is fetched")


PUBLISHED = "https://darus.uni-stuttgart.de/api/access/datafile/1"
FOREIGN = [
    *("https://10.0.0.1/", "http://169.254.169.254/latest", "http://localhost:1/", "https://localhost./"),
    *("https://127.1/", "https://2130706433/", "https://0x7f000001/", "https://[::ffff:7f00:1]/", "https://a.test/"),
    *(
        "https://a.test\\.s3.tik.uni-stuttgart.de/",
        "https://me:secret@s3.tik.uni-stuttgart.de/",
        "//a.test/?token=secret",
    ),
    *(
        "https://s3.tik.uni-stuttgart.de.a.test/",
        "https://s3.tik.uni-stuttgart.de:x/",
        "ftp://s3.tik.uni-stuttgart.de/",
    ),
]


@pytest.mark.parametrize("location", FOREIGN)
def test_redirects_to_foreign_hosts_are_refused(location):
    """A published address leads to registered hosts alone; what a redirect carries for the next server is not told."""
    with pytest.raises(DataFault, match=f"^{PUBLISHED}: ") as caught:
        http._resolve_redirect(PUBLISHED, PUBLISHED, location)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_redirects_from_https_to_http_are_refused():
    """An encrypted transfer stays so."""
    with pytest.raises(DataFault, match="from https to http"):
        http._resolve_redirect(PUBLISHED, PUBLISHED, "http://127.0.0.1/")


@pytest.mark.parametrize("base", [PUBLISHED, "https://mirror.test/x", "http://127.0.0.1:80/x"])
def test_redirects_to_the_object_store_and_within_a_host_are_followed(base):
    """DaRUS hands out signed addresses of its object store, and so may a mirror; a host may send on to itself."""
    for location in ("https://s3.tik.uni-stuttgart.de/bucket/key?X-Amz-Signature=1", "/other"):
        assert http._resolve_redirect(base, base, location).endswith(location)


def test_few_redirects_are_followed(server, target):
    """Relative and absolute redirects lead to the file."""
    assert fetch(server(*[reply(307, Location="/other")] * 3), target) == len(CONTENT)


def test_credentials_are_not_sent(server, target, tmp_path, monkeypatch):
    """What `.netrc` knows about the host stays there."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sent: list[str | None] = []

    def note(handler: Handler) -> None:
        sent.append(handler.headers.get("Authorization"))
        serve(handler)

    fetch(server(note), target)
    assert sent == [None]


def test_endless_redirects_end(server, target):
    """A redirect that leads to itself is given up."""
    expect_fault(server(*[reply(302, Location="/file")] * 40), target, "redirects")


def test_changed_file_starts_over(server, target):
    """A file that is replaced at the server between two tries is fetched anew, be the server's range old or new."""
    old = reply(200, CONTENT[:3000] + bytes(len(CONTENT) - 3000), 5000, ETag='"old"')
    new = reply(206, CONTENT[5000:], Content_Range=f"bytes 5000-{len(CONTENT) - 1}/{len(CONTENT)}", ETag='"new"')
    fetch(server(old, new), target)
    assert Handler.ranges == [None, "bytes=5000-", None]
    assert target.read_bytes() == CONTENT


def test_version_is_sent_along(server, target):
    """A resumed request names the version it wants, also after the process was killed."""
    seen: list[str | None] = []

    def note(handler: Handler) -> None:
        seen.append(handler.headers.get("If-Range"))
        serve(handler)

    stop = lambda count: None if count < 5000 else 1 / 0  # noqa: E731
    url = server(reply(200, CONTENT, 5000, ETag='"v1"'), note)
    with pytest.raises(ZeroDivisionError):
        download_file(url, MD5, target, stop, num_bytes=len(CONTENT))
    assert visible(target) == [f"{NAME}.part", f"{NAME}.part.version"]
    fetch(url, target)
    assert seen == ['"v1"']
    assert visible(target) == [NAME]


def test_weak_version_is_no_version(server, target):
    """A weak ETag says nothing about bytes and is not sent."""
    fetch(server(reply(200, CONTENT, 5000, ETag='W/"v1"')), target)
    assert target.read_bytes() == CONTENT


def test_chunked_transfer_arrives(server, target):
    """A server that does not tell the size is read to its end."""

    def chunked(handler: Handler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(CONTENT), 1000):
            block = CONTENT[start : start + 1000]
            handler.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    download_file(server(chunked), MD5, target, lambda count: None)
    assert target.read_bytes() == CONTENT


def test_page_in_place_of_a_range_is_not_pasted(server, target):
    """A web page that answers a resumed request with 206 is not taken for the rest of the file."""
    content_range = f"bytes 5000-{len(CONTENT) - 1}/{len(CONTENT)}"
    page = reply(206, b"<html>" * 10, Content_Range=content_range, Content_Type="text/html")
    fetch(server(drop(5000), page), target)
    assert target.read_bytes() == CONTENT


def test_endless_file_is_cut_off(server, target):
    """A server that sends more than the table promises is left."""

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(CONTENT)

    expect_fault(server(endless), target, "sends more than")
    assert visible(target) == []


def test_full_disk_keeps_what_arrived(server, target):
    """A disk that fills up is a storage fault; the bytes so far are kept and the same call goes on there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    url = server()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageFault, match=f"{NAME}: .*the same command resumes"):
            fetch(url, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.with_name(f"{NAME}.part").stat().st_size == 50_000
    assert not target.exists()
    fetch(url, target)
    assert Handler.ranges == [None, "bytes=50000-"]
    assert target.read_bytes() == CONTENT


def test_closed_folder_is_refused(server, target):
    """A folder that cannot be made is a storage fault."""
    target.parent.write_text("a file in the place of the folder")
    with pytest.raises(StorageFault, match="deep"):
        fetch(server(), target)


def test_nothing_hidden_is_left(server, target):
    """Locks vanish with the download, be it good or bad."""
    fetch(server(), target)
    assert list(target.parent.iterdir()) == [target]


def test_two_downloads_fetch_once(server, target):
    """Of two that want the same file one waits and finds it."""
    url = server()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: fetch(url, target), range(2))) == [len(CONTENT)] * 2
    assert len(Handler.ranges) == 1


def test_random_drops_arrive_whole(server, target):
    """Whatever the pattern of drops, the content is right and hardly a byte is sent twice."""
    sizes = [1 + int.from_bytes(os.urandom(2)) % 20000 for _ in range(20)]
    assert fetch(server(*map(drop, sizes)), target) == len(CONTENT)
    assert digest_of(target, "md5") == MD5
