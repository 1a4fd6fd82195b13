import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import requests

from ups.data.families import Dataset
from ups.data.hdf5 import open_array, open_file, read_array
from ups.data.inspection import inspect
from ups.data.sources import list_files
from ups.data.trajectories import TrajectoryReader
from ups.errors import DataFault
from ups.files import digest_of

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
import fsspec  # noqa: E402
from botocore.exceptions import EndpointConnectionError  # noqa: E402

NAME = "1D_Burgers_Sols_Nu0.01.hdf5"
SECRET = "do-not-show-me"
N, T, X = 40, 6, 1024


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of PDEBench's layout, of 1 MB."""
    path = tmp_path_factory.mktemp("raw") / NAME
    with h5py.File(path, "w") as file:
        file["tensor"] = np.random.default_rng(0).normal(size=(N, T, X)).astype(np.float32)
        file["x-coordinate"], file["t-coordinate"] = (np.arange(X) + 0.5) / X, np.arange(T + 1) / T
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A storage on this machine."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def folder(server: Any, local: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of that storage with the file, as a run has it."""
    host, port = server.get_host_and_port()
    names = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in (names | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # which has the connections of other tests
    storage = fsspec.filesystem("s3", use_listings_cache=False)
    storage.mkdirs("bucket", exist_ok=True)
    storage.put(str(local), f"bucket/raw/{NAME}")
    return Path("s3://bucket/raw")


@contextmanager
def one_line(message: str) -> Iterator[None]:
    """Expect a fault of one line that names the place and does not show the secret."""
    with pytest.raises(DataFault, match=message) as caught:
        yield
    assert str(caught.value).startswith("s3://") and "\n" not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def lost(*_: Any, **__: Any) -> None:
    """A request to a server that is gone."""
    raise EndpointConnectionError(endpoint_url=f"http://me:{SECRET}@server")


def test_trajectories_are_those_of_the_file(folder: Path, local: Path, tmp_path: Path):
    """A run finds, describes and reads a file on S3 as it does the same file on a disk."""
    found = list_files(folder, tmp_path / "checksums.json")
    assert found == {NAME: {"bytes": local.stat().st_size, "md5": digest_of(local, "md5"), "family": "burgers_1d"}}
    asked = {"names": [NAME], "subsample": {"burgers_1d": {}}}
    (described,) = inspect("find", folder=folder, **asked).values()
    assert [described] == list(inspect("find", folder=local.parent, **asked).values())
    dataset = Dataset.from_json(described)
    with TrajectoryReader(folder, dataset) as remote, TrajectoryReader(local.parent, dataset) as here:
        assert all(np.array_equal(remote.read(i, 1, 4), here.read(i, 1, 4)) for i in (0, 7, N - 1))


def test_partial_reads_stay_partial(folder: Path, local: Path, monkeypatch: pytest.MonkeyPatch):
    """One trajectory takes its own bytes and a few blocks of structure, not the file."""
    dataset = Dataset.from_json(inspect("describe_file", path=local, family=None))
    read: list[int] = []
    fetch = fsspec.get_filesystem_class("s3").open

    def counted(self: Any, *asked: Any, **options: Any) -> Any:
        file = fetch(self, *asked, **options)
        inner = file.cache.fetcher
        file.cache.fetcher = lambda start, end: read.append(end - start) or inner(start, end)
        return file

    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "open", counted)
    with TrajectoryReader(folder, dataset) as reader:
        reader.read(N // 2, 0, 1)
        few = sum(read)
        reader.read(N // 3)
    assert 0 < few <= 3 * 2**16 < local.stat().st_size / 2


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("s3://other/raw", {}, "no such bucket"),
        ("s3://bucket/other", {}, "no such bucket, folder or file"),
        ("s3://bucket/raw", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_a_wrong_place_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, changes: dict[str, str], message: str
):
    """A missing bucket or folder, and a server that is not there, are faults of one line without credentials."""
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with one_line(message):
        list_files(Path(place), tmp_path / "checksums.json")


def test_collection_of_garbage_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """No garbage is collected while h5py waits for bytes: in the thread of s3fs that would wait for h5py itself."""
    states: list[bool] = []
    fetch = fsspec.get_filesystem_class("s3")._call_s3

    async def watched(*asked: Any, **options: Any) -> Any:
        states.append(gc.isenabled())
        return await fetch(*asked, **options)

    with open_file(folder / NAME) as file:
        monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_call_s3", watched)
        read_array(open_array(file, "tensor", 3), 3, (slice(0, 9),))
    assert gc.isenabled() and states != [] and not any(states)


def test_wrong_credentials_are_one_line(folder: Path, server: Any, tmp_path: Path):
    """Credentials that the storage does not know are a fault of one line that does not show them."""
    address = "http://{}:{}/moto-api/reset-auth".format(*server.get_host_and_port())
    try:
        requests.post(address, data=b"0", timeout=10)
        with one_line("the storage denies access"):
            list_files(folder, tmp_path / "checksums.json")
    finally:
        requests.post(address, data=b"inf", timeout=10)


def test_no_credentials_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Without credentials the fault says which variables to set."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with one_line("set AWS_ACCESS_KEY_ID"):
        open_file(folder / NAME)


@pytest.mark.parametrize(("event", "message"), [("lost", "does not answer"), ("replaced", "has changed")])
def test_what_happens_during_reading_is_one_line(
    folder: Path, local: Path, event: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    """A connection that is lost, and a file that is replaced, between two reads are faults of one line from h5py."""
    with open_file(folder / NAME) as file:
        dataset = open_array(file, "tensor", 3)
        read_array(dataset, 3, (0,))
        if event == "replaced":
            fsspec.filesystem("s3").pipe(f"bucket/raw/{NAME}", local.read_bytes() + b"x")
        else:
            monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_call_s3", lost)
        with one_line(message):
            read_array(dataset, 3, (slice(1, 30),))
