"""Downloads under drops, crowds and load; measured numbers are printed, `pytest -s` shows them."""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ups.data.download import download_file
from ups.data.hdf5 import SIGNATURE
from ups.files import digest_of

NAME = "file.hdf5"
NUM_DROPS = 50
MEGABYTE = 10**6

CLIENT = """
import sys
from pathlib import Path
from ups.data.download import download_file
url, md5, target, size = sys.argv[1:]
download_file(url, md5, Path(target), lambda count: None, num_bytes=int(size))
"""

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with open(sys.argv[1], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.flush()
            start = 0
            while start < size:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, size - start)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def write_random(path: Path, size: int) -> str:
    """Write a file that starts like HDF5 and return its MD5."""
    content = SIGNATURE + os.urandom(size - len(SIGNATURE))
    path.write_bytes(content)
    return hashlib.md5(content).hexdigest()


def test_random_drop_points(serve, tmp_path):
    """After a drop anywhere the MD5 is right and at most 5 % of the bytes are sent twice, in 50 of 50 cases."""
    size, server, generator = 2 * MEGABYTE, serve(tmp_path), random.Random(0)
    md5 = write_random(tmp_path / NAME, size)
    worst = 0.0
    for number in range(NUM_DROPS):
        server.sent, server.drop_after = 0, [generator.randrange(size)]
        target = tmp_path / "local" / f"{number}.hdf5"
        download_file(f"{server.url}/{NAME}", md5, target, lambda count: None, num_bytes=size)
        assert digest_of(target, "md5") == md5
        worst = max(worst, server.sent / size)
    sys.stdout.write(f"\n{NUM_DROPS} drops: at most {worst:.4f} times the bytes\n")
    assert worst <= 1.05


@pytest.mark.slow
def test_eight_processes_fetch_one_file_once(serve, tmp_path):
    """Of eight processes that start at once one fetches, the others wait and find the file."""
    size, server = 64 * MEGABYTE, serve(tmp_path)
    md5 = write_random(tmp_path / NAME, size)
    target = tmp_path / "local" / NAME
    command = [sys.executable, "-c", CLIENT, f"{server.url}/{NAME}", md5, str(target), str(size)]
    clients = [subprocess.Popen(command) for _ in range(8)]
    assert [client.wait(120) for client in clients] == [0] * 8
    assert (len(server.requests), server.sent) == (1, size)
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.slow
def test_killed_downloads_go_on(serve, tmp_path):
    """A download killed again and again fetches hardly a byte twice and ends with the right file."""
    size, server = 256 * MEGABYTE, serve(tmp_path)
    md5 = write_random(tmp_path / NAME, size)
    target = tmp_path / "local" / NAME
    part = target.with_name(f"{NAME}.part")
    command = [sys.executable, "-c", CLIENT, f"{server.url}/{NAME}", md5, str(target), str(size)]
    for number in range(1, 4):
        client = subprocess.Popen(command)
        while client.poll() is None and not (part.exists() and part.stat().st_size > number * size // 5):
            time.sleep(0.005)
        client.kill()
        client.wait(30)
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert digest_of(target, "md5") == md5
    assert [path.name for path in target.parent.iterdir() if not path.name.endswith(".lock")] == [NAME]


@pytest.fixture
def fast_server(tmp_path: Path) -> Iterator[str]:
    """URL of a process that sends the file as fast as the kernel can."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path / NAME)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}/{NAME}"
    process.kill()
    process.wait(30)


@pytest.mark.slow
def test_throughput(fast_server, tmp_path):
    """Fetching, hashing and writing keep up with 300 MB/s, or with three quarters of MD5 itself on a busy machine."""
    size = 1024 * MEGABYTE
    with (tmp_path / NAME).open("wb") as file:
        file.write(SIGNATURE)
        file.truncate(size)
    started = time.perf_counter()
    md5 = digest_of(tmp_path / NAME, "md5")
    hashing = size / MEGABYTE / (time.perf_counter() - started)
    best = 0.0
    for number in range(3):
        started = time.perf_counter()
        download_file(fast_server, md5, tmp_path / f"{number}.hdf5", lambda count: None, num_bytes=size)
        best = max(best, size / MEGABYTE / (time.perf_counter() - started))
        (tmp_path / f"{number}.hdf5").unlink()
    sys.stdout.write(f"\nloopback with hashing: {best:.0f} MB/s; MD5 alone: {hashing:.0f} MB/s\n")
    assert best > min(300, 0.75 * hashing)
