import gc
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import requests

from tests.training.jobs import launched, prepare, train
from ups.config import LatentsConfig
from ups.data.families import Dataset
from ups.data.hdf5 import open_array, open_file, read_array
from ups.data.inspection import inspect
from ups.data.remote import SharedFolder
from ups.data.sources import list_files
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, DataFault, Fault, StorageFault
from ups.files import digest_of, read_json, write_json
from ups.pipelines.training import encode_latents

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
def one_line(message: str, kind: type[Fault] = DataFault) -> Iterator[None]:
    """Expect a fault of one line that names the place and does not show the secret."""
    with pytest.raises(kind, match=message) as caught:
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


def test_a_folder_is_shared(folder: Path, tmp_path: Path):
    """Files go to the storage and come from it byte for byte, also where they are sent in parts."""
    contents = {"a+b.zarr/c/0/0": np.random.default_rng(0).bytes(2**27), "statistics/a.0.0": b"", "c": b"x"}
    for name, content in contents.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(content)
    one, two = (SharedFolder(folder / "shared", tmp_path / name) for name in "ab")
    one.upload([tmp_path / "a" / name for name in contents])
    names = [tmp_path / "b" / name for name in contents]
    assert two.has(names) and not two.has([tmp_path / "b/d"])
    two.fetch(names)
    assert {name: (tmp_path / "b" / name).read_bytes() for name in contents} == contents


RIGHTS = {"list": DataFault, "read": DataFault, "write": StorageFault}


def _act(shared: SharedFolder, right: str) -> None:
    """What needs this right."""
    file = shared.local / "file"
    file.write_bytes(b"x")
    {"list": shared.has, "read": shared.fetch, "write": shared.upload}[right]([file])


@pytest.mark.parametrize(("right", "kind"), RIGHTS.items())
def test_a_missing_right_is_one_line(
    folder: Path, tmp_path: Path, right: str, kind: type[Fault], monkeypatch: pytest.MonkeyPatch
):
    """Each fault names the right that is missing, and one to write is a fault of storage."""
    shared = SharedFolder(folder, tmp_path)
    assert right == "list" or not shared.has([tmp_path / "file"])

    async def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(SECRET)

    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_call_s3", denied)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_lsdir", denied)
    with one_line(f"denies access; check AWS_ACCESS_KEY_ID .* what they may {right}$", kind):
        _act(shared, right)


@pytest.mark.parametrize(("right", "kind"), RIGHTS.items())
def test_a_lost_network_is_one_line(
    folder: Path, tmp_path: Path, right: str, kind: type[Fault], monkeypatch: pytest.MonkeyPatch
):
    """So is a connection that is lost between two requests."""
    shared = SharedFolder(folder, tmp_path)
    assert right == "list" or not shared.has([tmp_path / "file"])
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_call_s3", lost)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_lsdir", lost)
    with one_line("does not answer as expected .EndpointConnectionError.; check AWS_ENDPOINT_URL", kind):
        _act(shared, right)


def test_a_missing_bucket_is_one_line(folder: Path, tmp_path: Path):
    """It is found by the check before anything is encoded."""
    with one_line("no such bucket.*check launch.latent_store and AWS_ENDPOINT_URL", Fault):
        SharedFolder(Path("s3://other/latents"), tmp_path).check({}, [])


def test_a_store_needs_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without s3fs one line says how to install it."""
    monkeypatch.setattr("ups.data.remote.find_spec", lambda _: None)
    with pytest.raises(ConfigFault, match="need the extra"):
        SharedFolder(Path("s3://bucket/latents"), tmp_path)


def test_two_machines_train_the_same(folder: Path, tmp_path: Path):
    """A machine without raw files that fetches the latents of another, on two processes, trains the same weights."""
    prepare(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/04_feature/latents")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/01_raw")
    weights, receipts = [], []
    for root, num_processes in ((tmp_path / "a", 1), (tmp_path / "b", 2)):
        inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
        launch = launched(num_processes=num_processes, latent_store="s3://bucket/latents")
        latents = LatentsConfig(tolerance={"default": 1e-3}, on_disk=True)
        receipts.append(encode_latents(*inputs, latents, launch, root / "01_raw", root))
        write_json(root / "receipts/latent_cache.json", receipts[-1])
        weights.append(digest_of(train(root, launch={"num_processes": 1}) / "weights.pt"))
    assert weights[0] == weights[1] and receipts[0] == receipts[1]
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
