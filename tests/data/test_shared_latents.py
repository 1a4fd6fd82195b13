"""Latents that machines share; a local folder stands in for the bucket (`test_remote.py` has a server)."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from tests.data.latents import encoding_of, points_as_tokens, write_cache
from ups.data import latent_shards, remote
from ups.data.families import Dataset
from ups.data.remote import SharedFolder
from ups.data.trajectories import find_datasets
from ups.errors import DataFault, StorageFault
from ups.files import read_json

ADVECTION, DARCY = "1D_Advection_Sols_beta0.4", "2D_DarcyFlow_beta1.0_Train"
SPLITS = {name: {"train": [0, 2, 3], "valid": [4], "test": [1, 5]} for name in (ADVECTION, DARCY)}
KEY = {"codec weights": "abc"}
NUM_SHARDS, NUM_FILES = 18, 30  # the shards of fields have statistics


class Bucket(DirFileSystem):
    """A storage that counts what is asked of it, and can fail."""

    protocol, cachable = "bucket", False

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), LocalFileSystem(auto_mkdir=True))
        self.reads, self.writes, self.reads_left, self.is_writable = 0, 0, 10**6, True

    def cat_file(self, path: str, *range_: Any, **options: Any) -> bytes:
        if self.reads == self.reads_left:
            raise KeyboardInterrupt
        self.reads += 1
        return super().cat_file(path, *range_, **options)

    def pipe_file(self, path: str, value: bytes, *mode: Any, **options: Any) -> Any:
        if not self.is_writable:
            raise DataFault("the storage denies access")
        self.writes += 1
        return super().pipe_file(path, value, *mode, **options)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The storage, in `tmp_path/storage`, in place of S3."""
    bucket = Bucket(tmp_path / "storage")
    monkeypatch.setattr(remote, "_storage", lambda: bucket)
    monkeypatch.setattr(remote, "_storage_faults", lambda *_: nullcontext())
    return bucket


@pytest.fixture
def datasets(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Dataset]:
    """Six trajectories of a transient and of a steady family, in shards of one trajectory."""
    monkeypatch.setattr(latent_shards, "SHARD_BYTES", 6 * 8 * 4)
    paths = [write(family, count=6) for family in ("advection_1d", "darcy_2d")]
    return find_datasets(paths[0].parent, [path.name for path in paths])


def shared(folder: Path) -> SharedFolder:
    """The store of the cache in a folder."""
    return SharedFolder(Path("s3://bucket/latents/key"), folder)


def encoded(folder: Path, datasets: dict[str, Dataset], **options: Any) -> dict[str, bytes]:
    """Write a cache beside the raw files, with the store; its files."""
    write_cache(folder, folder.parent, datasets, SPLITS, key=KEY, store=shared(folder), **options)
    return files_in(folder)


def files_in(folder: Path) -> dict[str, bytes]:
    """Shards and statistics."""
    paths = [*folder.rglob("c/*/*/0/0"), *folder.glob("statistics/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refused(u: Tensor, family: str, kind: str) -> Tensor:
    """An encoder that must not be called."""
    raise AssertionError("encoded")


@pytest.mark.parametrize(("on_disk", "num_files"), [(True, NUM_FILES), (False, 12)])
def test_another_machine_encodes_nothing(
    bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset], on_disk: bool, num_files: int
):
    """A second machine has the files of the first byte for byte and their manifest, reads no raw file, adds nothing."""
    first = encoded(tmp_path / "a", datasets, on_disk=on_disk)
    assert bucket.writes == len(first) == num_files and bucket.reads == 0
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    for path in tmp_path.glob("*.hdf5"):
        path.unlink()
    assert encoded(tmp_path / "b", datasets, on_disk=on_disk, encode=refused) == first
    assert (bucket.reads, bucket.writes) == (num_files, num_files)
    assert read_json(tmp_path / "b/manifest.json") == read_json(tmp_path / "a/manifest.json")


def test_only_what_is_missing_travels(bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset]):
    """What one machine could encode before it was lost, and what the other has on its disk, is not made again."""
    expected = encoded(tmp_path / "whole", datasets)
    shutil.rmtree(tmp_path / "storage")
    counts: list[int] = []

    def lost(u: Tensor, family: str, kind: str) -> Tensor:
        if len(counts) == 7:
            raise KeyboardInterrupt
        counts.append(1)
        return points_as_tokens(u, family, kind)

    with pytest.raises(KeyboardInterrupt):
        encoded(tmp_path / "a", datasets, encode=lost)
    stored = files_in(tmp_path / "storage/bucket/latents/key")
    assert 0 < len(stored) < NUM_FILES
    (tmp_path / "b").mkdir()
    bucket.reads = 0
    bucket.writes = 0
    counts.clear()
    assert encoded(tmp_path / "b", datasets) == expected == files_in(tmp_path / "storage/bucket/latents/key")
    assert (bucket.reads, bucket.writes) == (len(stored), NUM_FILES - len(stored))
    for name in ("0", "3"):
        shutil.rmtree(tmp_path / f"b/{DARCY}.zarr/coefficients/c/{name}")
    assert encoded(tmp_path / "b", datasets, encode=refused) == expected
    assert (bucket.reads, bucket.writes) == (len(stored) + 2, NUM_FILES - len(stored))


def test_an_interrupted_fetch_goes_on(bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset]):
    """A machine that is stopped after any number of files completes its cache, and fetches no whole shard twice."""
    expected = encoded(tmp_path / "a", datasets)
    for count in (0, 7, 22):
        bucket.reads, bucket.reads_left = 0, count
        with pytest.raises(KeyboardInterrupt):
            encoded(tmp_path / str(count), datasets, encode=refused)
        bucket.reads_left = 10**6
        assert encoded(tmp_path / str(count), datasets, encode=refused) == expected
        assert NUM_FILES <= bucket.reads <= NUM_FILES + 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_ranks_fetch_their_shares(bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset]):
    """Three ranks fetch every file once."""
    expected, encoding = encoded(tmp_path / "a", datasets), None
    for rank in range(3):
        encoding = encoding_of(tmp_path / "b", datasets, store=shared(tmp_path / "b"))
        encoding.write_share(tmp_path, refused, lambda _: None, memory_bytes=2**28, rank=rank, world_size=3)
        assert bucket.reads == (rank + 1) * NUM_FILES // 3
    assert files_in(tmp_path / "b") == expected


DAMAGES: list[Callable[[bytes, np.random.Generator], bytes]] = [
    lambda content, random: flipped(content, int(random.integers(8 * len(content)))),
    lambda content, random: content[: int(random.integers(len(content)))],
    lambda content, random: content[int(random.integers(1, len(content))) :],
    lambda content, random: content + random.bytes(int(random.integers(1, 100))),
    lambda content, random: random.bytes(len(content)),
]


def flipped(content: bytes, bit: int) -> bytes:
    """The content with one bit flipped."""
    altered = bytearray(content)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


@pytest.mark.parametrize("scale", [None, 2.0**-10])
def test_no_damaged_piece_is_accepted(
    bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset], scale: float | None
):
    """Of 20 random damages each is a line that names the shard, which is encoded anew after it was deleted there."""
    expected, random = encoded(tmp_path / "a", datasets, scale=scale), np.random.default_rng(0)
    store = tmp_path / "storage/bucket/latents/key"
    for number in range(20):
        name = str(random.choice(sorted(expected)))
        (store / name).write_bytes(DAMAGES[number % len(DAMAGES)](expected[name], random))
        (tmp_path / "a" / name).unlink()
        with pytest.raises(DataFault, match="^s3://bucket/latents/key/.*: it or .* damaged; .*again$") as fault:
            encoded(tmp_path / "a", datasets, scale=scale, encode=refused)
        shard = str(fault.value).removeprefix("s3://bucket/latents/key/").partition(":")[0]
        assert "/c/" in shard and ("statistics" in name or shard == name)
        (store / shard).unlink()
        assert encoded(tmp_path / "a", datasets, scale=scale) == expected == files_in(store)


def test_statistics_of_another_dataset_are_refused(bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset]):
    """A sound file in the wrong place has another size."""
    encoded(tmp_path / "a", datasets)
    statistics = tmp_path / "storage/bucket/latents/key/statistics"
    shutil.copy(statistics / f"{DARCY}.0.0", statistics / f"{ADVECTION}.0.0")
    with pytest.raises(DataFault, match=f"^s3://bucket/latents/key/{ADVECTION}.zarr/fields/c/0/0/0/0: .* damaged"):
        encoded(tmp_path / "b", datasets, encode=refused)


def test_a_store_is_checked_before_anything_is_encoded(bucket: Bucket, tmp_path: Path, datasets: dict[str, Dataset]):
    """Latents of something else are refused, and a missing right to write unless nothing is missing."""
    encoding = encoding_of(tmp_path / "a", datasets, store=shared(tmp_path / "a"))
    files = [file for shard in encoding.shards for file in encoding.files(shard)]
    assert len(files) == NUM_FILES
    bucket.is_writable = False
    with pytest.raises(StorageFault, match="denies"):
        shared(tmp_path / "a").check(KEY, files)
    bucket.is_writable = True
    shared(tmp_path / "a").check(KEY, files)
    bucket.is_writable = False
    with pytest.raises(StorageFault, match="denies"):
        shared(tmp_path / "a").check(KEY, files)
    bucket.is_writable = True
    first = encoded(tmp_path / "a", datasets)
    bucket.is_writable = False
    shared(tmp_path / "b").check(KEY, [tmp_path / "b" / file.relative_to(tmp_path / "a") for file in files])
    assert encoded(tmp_path / "b", datasets, encode=refused) == first
    with pytest.raises(DataFault, match="^s3://bucket/latents/key/made_from.json: .* something else; name another"):
        shared(tmp_path / "b").check({"codec weights": "other"}, [])
