"""Small PDEBench files in all four layouts, sound or damaged on purpose, and a server for them."""

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.data.own import KDV
from ups.data import http, inspection
from ups.data.families import Families, Family
from ups.data.pdebench import FAMILIES

NAMES = {
    "advection_1d": "1D_Advection_Sols_beta0.4.hdf5",
    "burgers_1d": "1D_Burgers_Sols_Nu0.01.hdf5",
    "diffusion_reaction_1d": "ReacDiff_Nu0.5_Rho1.0.hdf5",
    "diffusion_sorption_1d": "1D_diff-sorp_NA_NA.h5",
    "compressible_ns_1d": "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5",
    "darcy_2d": "2D_DarcyFlow_beta1.0_Train.hdf5",
    "compressible_ns_2d": "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_8_Train.hdf5",
    "diffusion_reaction_2d": "2D_diff-react_NA_NA.h5",
    "shallow_water_2d": "2D_rdb_NA_NA.h5",
    "incompressible_ns_2d": "ns_incom_inhom_2d_8-0.h5",
    "compressible_ns_3d": "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5",
}


def write_file(
    folder: Path,
    family: str,
    name: str | None = None,
    *,
    count: int = 4,
    grid: tuple[int, ...] = (8, 6, 4),
    edit: Callable[[h5py.File], None] = lambda file: None,
) -> Path:
    """A file of five snapshots with values in [0.5, 1.5), the same for the same name and size."""
    path = folder / (name or NAMES[family])
    generator = np.random.default_rng(list(path.name.encode()))
    with h5py.File(path, "w") as file:
        _write_layout(file, FAMILIES[family], count, grid[: len(FAMILIES[family].axes)], generator)
        edit(file)
    return path


def _write_layout(file: h5py.File, family: Family, count: int, grid: tuple[int, ...], generator) -> None:
    def values(*shape: int) -> np.ndarray:
        return generator.uniform(0.5, 1.5, shape).astype(np.float32)

    if family.layout == "groups":
        stored = grid[::-1] if family.name == "diffusion_reaction_2d" else grid
        for key in range(count):
            file[f"{2 * key:04d}/data"] = values(5, *stored, len(family.fields))
            _write_coordinates(file, family, grid, f"{2 * key:04d}/grid/", "", 5)
    elif family.layout == "batch":
        file["velocity"], file["particles"] = values(count, 5, *grid, 2), values(count, 5, *grid, 1)
        file["force"] = values(count, *grid, 2)
        file["t"] = np.tile(np.arange(5, dtype=np.float32) / 4, (count, 1))
        file.attrs["latestIndex"] = 4
    else:
        for field in ("tensor",) if family.layout == "tensor" else family.fields:
            file[field] = values(count, 1 if family.steady else 5, *grid)
        for coefficient in family.coefficients:
            file[coefficient] = values(count, *grid)
        _write_coordinates(file, family, grid, "", "-coordinate", 6)


def _write_coordinates(file, family: Family, grid: tuple[int, ...], prefix: str, suffix: str, num_times: int) -> None:
    file[f"{prefix}t{suffix}"] = np.arange(num_times, dtype=np.float32) / 4
    for axis, n in zip(family.axes, grid, strict=True):
        file[f"{prefix}{axis}{suffix}"] = ((np.arange(n) + 0.5) / n).astype(np.float32)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(family, name, count=, grid=, edit=)` writes one file into the test's folder."""
    return partial(write_file, tmp_path)


@pytest.fixture
def write_all(write: Callable[..., Path]) -> Callable[[], list[Path]]:
    """`write_all()` writes one file of each family."""
    return lambda: [write(family) for family in FAMILIES]


@pytest.fixture
def samples() -> Path:
    """Folder with real files of all families, made by PDEBench's own generators."""
    folder = Path(__file__).parents[2].parent / "shared" / "pdebench"
    if not folder.is_dir():
        pytest.skip("the sample files are not on this machine")
    return folder


class FileServer(ThreadingHTTPServer):
    """Serves the files of a folder, whole or by ranges; `sent` counts the bytes, `requests` has method and range.

    `script` has other answers for the next requests. `drop_after` lists after how many bytes the next connections
    close; `tag` is the ETag, `ranges` can be switched off.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.folder, self.sent, self.requests = folder, 0, []
        self.tag, self.ranges, self.drop_after = '"1"', True, []
        self.script: list[Callable[[BaseHTTPRequestHandler], object]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients may leave when they like


class FileHandler(BaseHTTPRequestHandler):
    """One request to a `FileServer`."""

    server: FileServer

    def do_GET(self) -> None:
        if self.server.script:
            self.server.script.pop(0)(self)
            return
        path = self.server.folder / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        size, match = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        fresh = self.headers.get("If-Range") in (None, self.server.tag)
        start, stop = 0, size
        if match and self.server.ranges and fresh:
            start, stop = int(match[1]), min(size, int(match[2] or size - 1) + 1)
            self.send_response(206 if start < size else 416)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}" if start < size else f"bytes */{size}")
        else:
            self.send_response(200)
        with self.server.lock:
            self.server.requests.append(self.headers.get("Range"))
            limit = self.server.drop_after.pop(0) if self.server.drop_after else None
        self.send_header("ETag", self.server.tag)
        self.send_header("Content-Length", str(max(0, stop - start)))
        self.end_headers()
        self._send(path, start, stop if limit is None else min(stop, start + limit))

    def _send(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            while start < stop and (block := file.read(min(2**20, stop - start))):
                self.wfile.write(block)
                start += len(block)
                with self.server.lock:
                    self.server.sent += len(block)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], FileServer]]:
    """`serve(folder)` starts a server of the files in a folder."""
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    servers: list[FileServer] = []

    def start(folder: Path) -> FileServer:
        servers.append(FileServer(folder))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    # h5py frees files under its one lock. A collection in the server's thread would wait there for the client, which
    # holds the lock while it waits for the server.
    gc.disable()
    yield start
    gc.enable()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that puts a program in the place of the child's interpreter."""

    def replace(code: str) -> None:
        program = tmp_path / "child"
        program.write_text(f"#!{sys.executable}\nimport os, signal, sys, json\nsys.stdin.readline()\n{code}\n")
        program.chmod(0o700)
        monkeypatch.setattr(inspection.sys, "executable", str(program))

    return replace


@pytest.fixture
def kdv_known(families: Families) -> None:
    """Korteweg-de Vries is a known family, as if `families.yml` had defined it."""
    families.define(KDV)
