import errno
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from torch import Tensor

from tests.data.latents import encoding_of, points_as_tokens, write_cache
from ups.data import latent_cache, latent_shards
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault, DataFault
from ups.files import read_json, write_json

ADVECTION, DARCY = "1D_Advection_Sols_beta0.4", "2D_DarcyFlow_beta1.0_Train"
SPLITS = {name: {"train": [0, 2, 3], "valid": [4], "test": [1, 5]} for name in (ADVECTION, DARCY)}
GRIDS = {"advection_1d": [8], "darcy_2d": [8, 6]}
KEY = {"codec weights": "abc", "normalization": {"mean": 0.5}, "source files": {ADVECTION: "def"}}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of one trajectory of advection, in pieces of two snapshots."""
    monkeypatch.setattr(latent_shards, "SHARD_BYTES", 6 * 8 * 4)
    monkeypatch.setattr(latent_shards, "COMPRESSED_PIECE_BYTES", 2 * 8 * 4)


@pytest.fixture
def datasets(write: Callable[..., Path]) -> dict[str, Dataset]:
    """Six trajectories of a transient and of a steady family."""
    paths = [write(family, count=6) for family in GRIDS]
    return find_datasets(paths[0].parent, [path.name for path in paths])


@pytest.fixture
def folder(tmp_path: Path, datasets: dict[str, Dataset]) -> Path:
    """A finished cache of these datasets."""
    write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY)
    return tmp_path / "cache"


def shards(folder: Path) -> dict[Path, int]:
    """Every shard and the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("c/*/*/0/0")}


def _shard(folder: Path, index: int) -> Path:
    return folder / f"{ADVECTION}.zarr/fields/c/{index}/0/0/0"


@pytest.mark.parametrize("scale", [None, 2.0**-10])
@pytest.mark.parametrize(("name", "kind"), [(ADVECTION, "fields"), (DARCY, "fields"), (DARCY, "coefficients")])
def test_reads_what_zarr_reads(tmp_path: Path, datasets: dict[str, Dataset], name: str, kind: str, scale: float | None):
    """Every span of snapshots equals a plain zarr read of the same cache, whose integers count `scale_factor`."""
    write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY, scale=scale)
    cache, array = LatentCache.open(tmp_path / "cache", KEY), zarr.open_array(tmp_path / f"cache/{name}.zarr/{kind}")
    z = array[:] * np.float32(array.attrs.get("scale_factor", 1.0))
    assert z.shape[0] == 6
    for index in range(6):
        for start in range(z.shape[1]):
            for stop in range(start + 1, z.shape[1] + 1):
                np.testing.assert_array_equal(cache.read(name, kind, index, start, stop), z[index, start:stop])


@pytest.mark.parametrize(("axis", "count"), [(-1, 2), (-2, 1)])
def test_differences_keep_the_largest_multiples(axis: int, count: int):
    """Multiples of either sign up to the largest that is accepted come back exactly; a ramp gives zeros."""
    largest = latent_shards.MAX_MULTIPLE
    values = np.random.default_rng(0).choice(np.array([-largest, -1, 0, largest], "<i4"), (3, 5, 7))
    code = latent_shards.to_differences(values, axis, count)
    np.testing.assert_array_equal(latent_shards.from_differences(code, axis, count), values)
    ramp = np.arange(7, dtype="<i4") * np.ones((3, 5, 1), "<i4")
    assert not latent_shards.to_differences(ramp, axis, count)[:, 1:, 2:].any()


def test_holds_the_encoded_trajectories(folder: Path, tmp_path: Path, datasets: dict[str, Dataset]):
    """The cache gives back, bit for bit, what the codec made of each trajectory."""
    cache = LatentCache.open(folder, KEY)
    with TrajectoryReader(tmp_path, datasets[ADVECTION]) as reader:
        for index in range(6):
            u = reader.read(index)
            np.testing.assert_array_equal(cache.read(ADVECTION, "fields", index), u.swapaxes(1, 2))


@pytest.mark.parametrize("scale", [None, 2.0**-10])
def test_latents_that_are_not_on_disk_are_the_same(tmp_path: Path, datasets: dict[str, Dataset], scale: float | None):
    """Encoded when they are read, latents and statistics equal those of a cache on disk bit for bit."""
    for name, on_disk in (("disk", True), ("fly", False)):
        write_cache(tmp_path / name, tmp_path, datasets, SPLITS, key=KEY, scale=scale, on_disk=on_disk)
    disk, fly = (LatentCache.open(tmp_path / name, KEY) for name in ("disk", "fly"))
    assert not shards(tmp_path / "fly") and fly.datasets == disk.datasets
    encoded = fly.encoded_by(points_as_tokens)
    for cache in (encoded, encoded.only("darcy_2d")):
        for kind in ("fields", "coefficients"):
            np.testing.assert_array_equal(cache.read(DARCY, kind, 3), disk.read(DARCY, kind, 3))
    np.testing.assert_array_equal(encoded.read(ADVECTION, "fields", 2, 1, 3), disk.read(ADVECTION, "fields", 2, 1, 3))


def test_a_full_disk_leaves_reading_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What was verified is then known to this process alone; a mapped page without room would end it."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert np.isfinite(LatentCache.open(folder, KEY).read(ADVECTION, "fields", 0)).all()


def test_preloading_changes_nothing(folder: Path):
    """After its pages were read ahead a cache gives the same latents, and counts their bytes."""
    cache = LatentCache.open(folder, KEY)
    assert cache.num_bytes == sum(path.stat().st_size for path in shards(folder))
    before = cache.read(ADVECTION, "fields", 2)
    cache.preload()
    np.testing.assert_array_equal(cache.read(ADVECTION, "fields", 2), before)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_rounding_stays_below_its_tolerance(tmp_path: Path, datasets: dict[str, Dataset], tolerance: float):
    """The RMS error of rounded latents is between a third of the tolerance and the tolerance."""
    scale = latent_shards.scale_of(tolerance)
    for name, chosen in (("exact", None), ("rounded", scale)):
        write_cache(tmp_path / name, tmp_path, datasets, SPLITS, key=KEY, scale=chosen)
    exact, rounded = (
        np.stack([LatentCache.open(tmp_path / folder, KEY).read(DARCY, "coefficients", index) for index in range(6)])
        for folder in ("exact", "rounded")
    )
    error = np.sqrt(np.square(exact - rounded).mean())
    assert tolerance / 3 < error <= tolerance
    np.testing.assert_array_equal(rounded, np.rint(exact / scale) * np.float32(scale))


@pytest.mark.parametrize("num_axes", [1, 2])
def test_smooth_latents_are_compressed(num_axes: int):
    """Rounded smooth latents take less than a tenth of their bytes as float32."""
    layout = latent_shards.Layout((1, 8, 64, 16), 2.0**-8, num_axes)
    z = np.exp(-np.arange(16.0)) * np.sin(np.arange(64) / 10)[:, None] * np.ones((8, 1, 1))
    assert len(layout.pack(z.astype(np.float32))) < z.astype(np.float32).nbytes / 10


def test_a_tolerance_below_float32_is_refused(tmp_path: Path, datasets: dict[str, Dataset]):
    """Multiples that float32 cannot hold are a fault that names the parameter."""
    with pytest.raises(ConfigFault, match="latents.tolerance is too small .* raise it"):
        write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY, scale=2.0**-30)


def test_interrupted_write_goes_on_where_it_stopped(tmp_path: Path, datasets: dict[str, Dataset]):
    """After an interruption only shards that are not whole yet are written."""
    encoded = []

    def interrupted(u: Tensor, family: str, kind: str) -> Tensor:
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.append(u)
        return points_as_tokens(u, family, kind)

    with pytest.raises(KeyboardInterrupt):
        write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY, encode=interrupted)
    before = shards(tmp_path / "cache")
    write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY)
    after = shards(tmp_path / "cache")
    assert len(before) == 4 and len(after) == 18
    assert {path: after[path] for path in before} == before


def test_ranks_share_the_shards(tmp_path: Path, datasets: dict[str, Dataset]):
    """Three ranks write every shard once; the cache is byte for byte that of one process."""
    write_cache(tmp_path / "one", tmp_path, datasets, SPLITS, key=KEY)
    encoding, counts = encoding_of(tmp_path / "three", datasets), []
    for rank in range(3):
        share = {"memory_bytes": 2**28, "rank": rank, "world_size": 3}
        encoding.write_share(tmp_path, points_as_tokens, counts.append, **share)
    assert sum(counts) == len(encoding.shards) == 18
    for path in shards(tmp_path / "three"):
        assert path.read_bytes() == (tmp_path / "one" / path.relative_to(tmp_path / "three")).read_bytes()
    write_cache(tmp_path / "three", tmp_path, datasets, SPLITS, key=KEY)
    assert read_json(tmp_path / "three/manifest.json") == read_json(tmp_path / "one/manifest.json")


@pytest.mark.parametrize("shard_bytes", [4 * 8 * 4, 6 * 8 * 4, 2**26], ids=["part", "one trajectory", "all"])
def test_memory_changes_nothing(
    tmp_path: Path, datasets: dict[str, Dataset], shard_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Slabs of one piece and slabs of many trajectories give the same files, wherever shards begin."""
    monkeypatch.setattr(latent_shards, "SHARD_BYTES", shard_bytes)
    contents = []
    for memory_bytes in (1, 2**28):
        encoding = encoding_of(tmp_path / str(memory_bytes), datasets)
        encoding.write_share(tmp_path, points_as_tokens, lambda count: None, memory_bytes=memory_bytes)
        files = [*encoding.folder.rglob("c/*/*/0/0"), *encoding.folder.glob("statistics/*")]
        contents.append({path.relative_to(encoding.folder): path.read_bytes() for path in files})
    assert contents[0] == contents[1]


def test_only_broken_shards_are_written_again(folder: Path, tmp_path: Path, datasets: dict[str, Dataset]):
    """Missing, truncated, altered and empty shards are replaced; the others keep their time of change."""
    content, before = _shard(folder, 0).read_bytes(), shards(folder)
    broken = {_shard(folder, index) for index in range(4)}
    _shard(folder, 0).unlink()
    _shard(folder, 1).write_bytes(_shard(folder, 1).read_bytes()[:50])
    flip(_shard(folder, 2))
    _shard(folder, 3).write_bytes(b"")
    write_cache(folder, tmp_path, datasets, SPLITS, key=KEY)
    after = shards(folder)
    assert {path for path in before if after[path] != before[path]} == broken
    assert _shard(folder, 0).read_bytes() == content


def test_damaged_statistics_are_made_again(folder: Path, tmp_path: Path, datasets: dict[str, Dataset]):
    """Without its manifest a cache with altered statistics gets those of before."""
    expected = read_json(folder / "manifest.json")
    (folder / "manifest.json").unlink()
    flip(folder / f"statistics/{ADVECTION}.0.0")
    write_cache(folder, tmp_path, datasets, SPLITS, key=KEY)
    assert read_json(folder / "manifest.json") == expected


def flip(path: Path) -> None:
    """Alter one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [flip, Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1), lambda path: os.truncate(path, 0)],
    ids=["flipped", "missing", "truncated", "emptied"],
)
def test_damaged_shard_is_refused(folder: Path, damage: Callable[[Path], None]):
    """A shard with an altered byte, a missing end or no file at all is a fault that names the file."""
    damage(_shard(folder, 3))
    with pytest.raises(DataFault, match=r"fields/c/3/0/0/0.*delete .*cache and run again"):
        LatentCache.open(folder, KEY).read(ADVECTION, "fields", 3)


def test_unfinished_cache_is_refused(folder: Path):
    """Without its manifest a cache is not opened."""
    (folder / "manifest.json").unlink()
    with pytest.raises(DataFault, match="no finished latent cache"):
        LatentCache.open(folder, KEY)


@pytest.mark.parametrize("part", KEY)
def test_cache_of_something_else_is_refused(folder: Path, part: str):
    """A cache made from other inputs is not opened, and the fault names the part that differs and no other."""
    others = set(KEY) - {part}
    with pytest.raises(DataFault, match=f"another {part}:") as fault:
        LatentCache.open(folder, KEY | {part: "something else"})
    assert not any(other in str(fault.value) for other in others)


def test_statistics_are_of_the_training_split(folder: Path):
    """RMS of fluctuation and step, and all limits, equal numpy's over the training trajectories alone."""
    z = zarr.open_array(folder / f"{ADVECTION}.zarr/fields", mode="r")[:].astype(np.float64)
    train = z[SPLITS[ADVECTION]["train"]]
    assert np.abs(z).max() > np.abs(train).max()
    fluctuation = np.sqrt(((train - train.mean(axis=2, keepdims=True)) ** 2).mean())
    change = np.sqrt((np.diff(train, axis=1) ** 2).mean())
    mean = train.mean(axis=2, keepdims=True)
    max_fluctuation = 1.5 * np.abs(train - mean).max()
    rms = np.sqrt(((train - mean) ** 2).mean(axis=(2, 3)))
    growth = max(1.0, (rms[:, 1:] / rms[:, :-1]).max())
    expected = {
        "fluctuation_rms": fluctuation,
        "step_rms": change,
        "max_mean": 1.5 * np.abs(mean).max() + max_fluctuation / 10,
        "max_fluctuation": max_fluctuation,
        "max_growth": growth,
        "max_rms": 1.5 * rms.max(),
    }
    statistics = LatentCache.open(folder, KEY).datasets[ADVECTION]["statistics"]
    assert statistics == {name: pytest.approx([value]) for name, value in expected.items()}


def test_fields_that_decay_need_not_shrink(tmp_path: Path, write: Callable[..., Path]):
    """Where every step halves the fluctuation the largest growth is 1: a rollout may stand still."""

    def decay(file: h5py.File) -> None:
        file["tensor"][:] = file["tensor"][:] * (0.5 ** np.arange(5.0))[None, :, None]

    datasets = find_datasets(tmp_path, [write("advection_1d", count=6, edit=decay).name])
    write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY)
    assert LatentCache.open(tmp_path / "cache", KEY).datasets[ADVECTION]["statistics"]["max_growth"] == [1.0]


@pytest.mark.parametrize("bad", [slice(None), slice(1)], ids=["all", "first snapshot"])
def test_latents_that_are_not_finite_are_refused(tmp_path: Path, datasets: dict[str, Dataset], bad: slice):
    """A codec that gives NaN leaves no manifest, and the fault names dataset and trajectory."""

    def diverged(u: Tensor, family: str, kind: str) -> Tensor:
        z = points_as_tokens(u, family, kind).clone()
        z[bad] = np.nan
        return z

    with pytest.raises(DataFault, match=f"{ADVECTION}, trajectory 0, are not finite"):
        write_cache(tmp_path / "cache", tmp_path, datasets, SPLITS, key=KEY, encode=diverged)
    assert not (tmp_path / "cache/manifest.json").exists()


def test_number_of_open_maps_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """More trajectories than may be open at once are read all the same, and read again."""
    monkeypatch.setattr(latent_shards, "MAX_OPEN_SHARDS", 2)
    cache = LatentCache.open(folder, KEY)
    first = [cache.read(ADVECTION, "fields", index).copy() for index in range(6)]
    for index in range(6):
        np.testing.assert_array_equal(cache.read(ADVECTION, "fields", index), first[index])
    assert cache._arrays[ADVECTION, "fields"]._open.cache_info().currsize <= 2


HOSTILE: list[tuple[str, object]] = [
    ("shape", [6, 1 << 62, 8]),
    ("shape", [6, -1, 8, 1]),
    ("shape", "all"),
    ("scale", "object"),
    ("scale", -1.0),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE, ids=str)
def test_a_hostile_manifest_is_one_line(folder: Path, name: str, value: object):
    """Shapes and types that cannot be, and JSON that is no manifest, end in one line with the remedy."""
    manifest = read_json(folder / latent_cache.MANIFEST)
    manifest["datasets"][ADVECTION]["arrays"]["fields"][name] = value
    for content in (manifest, [], manifest | {"datasets": {"../x": manifest["datasets"][DARCY]}}):
        write_json(folder / latent_cache.MANIFEST, content)
        with pytest.raises(DataFault, match="manifest.json is damaged .*; delete .* and run again"):
            LatentCache.open(folder, KEY)


def test_huge_shapes_allocate_nothing(folder: Path):
    """A shape that the file does not have is refused, also where the product has more than 64 bits."""
    manifest = read_json(folder / latent_cache.MANIFEST)
    manifest["datasets"][ADVECTION]["arrays"]["fields"]["shape"] = [6, 1 << 62, 1 << 62, 1]
    write_json(folder / latent_cache.MANIFEST, manifest)
    with pytest.raises(DataFault, match="latent cache damaged"):
        LatentCache.open(folder, KEY).read(ADVECTION, "fields", 0)


def test_shards_lie_in_the_cache(folder: Path, tmp_path: Path):
    """A shard that is a link out of the cache is refused."""
    _shard(folder, 0).rename(tmp_path / "elsewhere")
    _shard(folder, 0).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataFault, match="a link leads out of the cache"):
        LatentCache.open(folder, KEY).read(ADVECTION, "fields", 0)
