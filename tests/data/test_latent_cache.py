import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from ups.data import latent_cache
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache, write_latents, write_manifest
from ups.data.trajectories import TrajectoryReader, find_single_grid_datasets
from ups.errors import DataFault
from ups.files import read_json, write_json

ADVECTION, DARCY = "1D_Advection_Sols_beta0.4", "2D_DarcyFlow_beta1.0_Train"
SPLITS = {name: {"train": [0, 2, 3], "valid": [4], "test": [1, 5]} for name in (ADVECTION, DARCY)}
GRIDS = {"advection_1d": [8], "darcy_2d": [8, 6]}
KEY = {"codec weights": "abc", "normalization": {"mean": 0.5}, "source files": {ADVECTION: "def"}}


def points_as_tokens(u: np.ndarray, family: str, kind: str) -> np.ndarray:
    """A codec that makes every grid point a token and every field a latent channel."""
    return u.reshape(*u.shape[:2], -1).swapaxes(1, 2)


@pytest.fixture
def datasets(write: Callable[..., Path]) -> dict[str, Dataset]:
    """Six trajectories of a transient and of a steady family."""
    paths = [write(family, count=6) for family in GRIDS]
    return find_single_grid_datasets(paths[0].parent, [path.name for path in paths])


@pytest.fixture
def folder(tmp_path: Path, datasets: dict[str, Dataset]) -> Path:
    """A finished cache of these datasets."""
    _write_cache(tmp_path / "cache", tmp_path, datasets)
    return tmp_path / "cache"


def _write_cache(folder: Path, raw: Path, datasets: dict[str, Dataset], dtype: str = "float32") -> None:
    write_latents(folder, raw, datasets, points_as_tokens, dtype, lambda count: None)
    write_manifest(folder, KEY, datasets, SPLITS, GRIDS)


def chunks(folder: Path) -> dict[Path, int]:
    """Every chunk file and the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("c/*/0/0/0")}


def _chunk(folder: Path, index: int) -> Path:
    return folder / f"{ADVECTION}.zarr/fields/c/{index}/0/0/0"


@pytest.mark.parametrize(("name", "kind"), [(ADVECTION, "fields"), (DARCY, "fields"), (DARCY, "coefficients")])
def test_reads_what_zarr_reads(folder: Path, name: str, kind: str):
    """The memory-mapped read of each trajectory equals a plain zarr read of the same cache."""
    cache, array = LatentCache.open(folder, KEY), zarr.open_array(folder / f"{name}.zarr" / kind, mode="r")
    assert array.shape[0] == 6
    for index in range(6):
        np.testing.assert_array_equal(cache.read(name, kind, index), array[index])


def test_holds_the_encoded_trajectories(folder: Path, tmp_path: Path, datasets: dict[str, Dataset]):
    """The cache gives back, bit for bit, what the codec made of each trajectory."""
    cache = LatentCache.open(folder, KEY)
    with TrajectoryReader(tmp_path, datasets[ADVECTION]) as reader:
        for index in range(6):
            z = points_as_tokens(reader.read(index), "advection_1d", "fields")
            np.testing.assert_array_equal(cache.read(ADVECTION, "fields", index), z)


def test_interrupted_write_goes_on_where_it_stopped(tmp_path: Path, datasets: dict[str, Dataset]):
    """After an interruption only trajectories that are not stored yet are encoded."""
    encoded = []

    def interrupted(u: np.ndarray, family: str, kind: str) -> np.ndarray:
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.append(u)
        return points_as_tokens(u, family, kind)

    with pytest.raises(KeyboardInterrupt):
        write_latents(tmp_path / "cache", tmp_path, datasets, interrupted, "float32", lambda count: None)
    before = chunks(tmp_path / "cache")
    _write_cache(tmp_path / "cache", tmp_path, datasets)
    after = chunks(tmp_path / "cache")
    assert len(before) == 4 and len(after) == 18
    assert {path: after[path] for path in before} == before


def test_only_broken_chunks_are_written_again(folder: Path, tmp_path: Path, datasets: dict[str, Dataset]):
    """Missing, truncated, altered and empty chunks are replaced; the others keep their time of change."""
    content, before = _chunk(folder, 0).read_bytes(), chunks(folder)
    broken = {_chunk(folder, index) for index in range(4)}
    _chunk(folder, 0).unlink()
    _chunk(folder, 1).write_bytes(_chunk(folder, 1).read_bytes()[:50])
    flip(_chunk(folder, 2))
    _chunk(folder, 3).write_bytes(b"")
    _write_cache(folder, tmp_path, datasets)
    after = chunks(folder)
    assert {path for path in before if after[path] != before[path]} == broken
    assert _chunk(folder, 0).read_bytes() == content


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
def test_damaged_chunk_is_refused(folder: Path, damage: Callable[[Path], None]):
    """A chunk with an altered byte, a missing end or no file at all is a fault that names the file."""
    damage(_chunk(folder, 3))
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


def test_half_precision(tmp_path: Path, datasets: dict[str, Dataset]):
    """Option float16 halves the chunks and keeps three digits."""
    for dtype in ("float16", "float32"):
        _write_cache(tmp_path / dtype, tmp_path, datasets, dtype)
    half, full = (LatentCache.open(tmp_path / d, KEY).read(ADVECTION, "fields", 0) for d in ("float16", "float32"))
    assert half.dtype == np.float16 and 2 * half.nbytes == full.nbytes
    np.testing.assert_allclose(half, full, rtol=1e-3)


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

    datasets = find_single_grid_datasets(tmp_path, [write("advection_1d", count=6, edit=decay).name])
    write_latents(tmp_path / "cache", tmp_path, datasets, points_as_tokens, "float32", lambda count: None)
    write_manifest(tmp_path / "cache", KEY, datasets, SPLITS, GRIDS)
    assert LatentCache.open(tmp_path / "cache", KEY).datasets[ADVECTION]["statistics"]["max_growth"] == [1.0]


@pytest.mark.parametrize("bad", [slice(None), slice(1)], ids=["all", "first snapshot"])
def test_latents_that_are_not_finite_are_refused(tmp_path: Path, datasets: dict[str, Dataset], bad: slice):
    """A codec that gives NaN leaves no manifest, and the fault names dataset and trajectory."""

    def diverged(u: np.ndarray, family: str, kind: str) -> np.ndarray:
        z = points_as_tokens(u, family, kind).copy()
        z[bad] = np.nan
        return z

    write_latents(tmp_path / "cache", tmp_path, datasets, diverged, "float32", lambda count: None)
    with pytest.raises(DataFault, match=f"{ADVECTION}, trajectory 0, are not finite"):
        write_manifest(tmp_path / "cache", KEY, datasets, SPLITS, GRIDS)
    assert not (tmp_path / "cache/manifest.json").exists()


def test_number_of_open_maps_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """More trajectories than may be open at once are read all the same, and read again."""
    monkeypatch.setattr(latent_cache, "MAX_OPEN_CHUNKS", 2)
    cache = LatentCache.open(folder, KEY)
    first = [cache.read(ADVECTION, "fields", index).copy() for index in range(6)]
    for index in range(6):
        np.testing.assert_array_equal(cache.read(ADVECTION, "fields", index), first[index])


HOSTILE: list[tuple[str, object]] = [
    ("shape", [6, 1 << 62, 8]),
    ("shape", [6, -1, 8, 1]),
    ("shape", "all"),
    ("dtype", "object"),
    ("dtype", None),
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
    """A shape that the file does not have is refused by its size, also where the product has more than 64 bits."""
    manifest = read_json(folder / latent_cache.MANIFEST)
    manifest["datasets"][ADVECTION]["arrays"]["fields"]["shape"] = [6, 1 << 62, 1 << 62, 1]
    write_json(folder / latent_cache.MANIFEST, manifest)
    with pytest.raises(DataFault, match="missing or truncated"):
        LatentCache.open(folder, KEY).read(ADVECTION, "fields", 0)


def test_chunks_lie_in_the_cache(folder: Path, tmp_path: Path):
    """A chunk that is a link out of the cache is refused."""
    _chunk(folder, 0).rename(tmp_path / "elsewhere")
    _chunk(folder, 0).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataFault, match="leads out of the cache by a link"):
        LatentCache.open(folder, KEY).read(ADVECTION, "fields", 0)
