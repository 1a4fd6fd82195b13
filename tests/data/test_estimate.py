"""Sizes known before any value is read: those of the files and latents that are written afterwards."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.training.jobs import section
from tests.untrained import make_root_of, receipt
from ups.config import WHOLE
from ups.data import estimate
from ups.data.estimate import (
    Size,
    Tokens,
    bytes_per_value,
    expect_room,
    files_to_fetch,
    files_to_simulate,
    raw_bytes,
    size_of,
    sizes_of,
)
from ups.data.families import Dataset, Subsample
from ups.data.latent_shards import Layout, scale_of
from ups.data.pdebench import FAMILIES
from ups.data.plan import make_plan
from ups.data.published import find_file
from ups.data.recognition import find_files
from ups.data.simulated import simulate_files
from ups.data.trajectories import find_datasets, thin
from ups.errors import ConfigFault, OutOfMemory, StorageFault
from ups.files import read_json

TOKENS = Tokens(
    patch_size=(1, 2, 2), max_tokens=(256, 1024, 1024), components=64, value_bytes=dict.fromkeys(FAMILIES, 4)
)
SIZE = Size("gas", "compressible_ns_1d", 4, 5, (8,), 1000, 300, 500, 700)


def whole(path: Path) -> Dataset:
    """The dataset of one file."""
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    return dataset


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_bytes_are_those_of_the_arrays(write, family: str):
    """Fields and coefficients in a file have the estimated size, in every layout."""
    path, sizes = write(family), []

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim > 2:  # not the coordinates
            sizes.append(item.nbytes)

    with h5py.File(path) as file:
        file.visititems(visit)
    assert raw_bytes(whole(path)) == sum(sizes)


def test_latents_have_the_estimated_size(tmp_path: Path):
    """The float32 values of a latent cache have the estimated bytes, coefficients of a steady family included."""
    root = make_root_of(tmp_path, ("advection_1d", "darcy_2d"), count=5)
    tokens = Tokens(**section("codec").model.model_dump(exclude={"tolerance"}), value_bytes=dict.fromkeys(FAMILIES, 4))
    for name, entry in receipt(root, "datasets")["datasets"].items():
        manifest = read_json(root / receipt(root, "latent_cache")["path"] / "manifest.json")
        arrays = manifest["datasets"][name]["arrays"].values()
        written = sum(4 * math.prod(array["shape"]) for array in arrays)
        assert size_of(Dataset.from_json(entry), tokens).latent_bytes == written


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3, 1e-4])
def test_noise_takes_no_more_than_estimated(tolerance: float, num_axes: int):
    """White noise of unit variance, which cannot be predicted, takes the estimated bytes or up to a quarter less."""
    z = np.random.default_rng(0).standard_normal((4, 1024, 4)).astype(np.float32)
    scale = scale_of(tolerance)
    layout = Layout((1, *z.shape), scale, num_axes)
    found = sum(len(layout.pack(z[start : start + layout.piece])) for start in range(0, 4, layout.piece)) / z.size
    assert bytes_per_value(tolerance) - 0.25 < found < bytes_per_value(tolerance)


def test_a_snapshot_needs_its_points_twice_and_its_latents(write):
    """Values of 3 fields on 8 points, twice, and as many latents; with a stride also the points that it skips."""
    before = whole(write("compressible_ns_1d"))
    after = thin(Path(), before, Subsample(every_point=2))
    assert [size_of(dataset, TOKENS).snapshot_bytes for dataset in (before, after)] == [4 * 3 * 24, 4 * 3 * 20]


def test_simulated_files_have_the_planned_sizes(tmp_path: Path):
    """Datasets planned from recipes have the counts, snapshots, grids and sizes of the files that are simulated."""
    sizes = {"num_trajectories": 5, "resolution": 8, "num_snapshots": 3, "duration": 0.1, "seed": 0}
    recipes = [
        {"family": "advection_1d", "parameters": {"beta": 0.4}} | sizes,
        {"family": "incompressible_ns_2d", "parameters": {}} | sizes,
        {"family": "darcy_2d", "parameters": {"beta": 1.0}} | sizes | {"num_snapshots": 1},
    ]
    planned = files_to_simulate(tmp_path, recipes)
    simulate_files(tmp_path, recipes, "", lambda count: None)
    written = find_datasets(tmp_path, find_files(tmp_path))
    of_both = ({name: size_of(entry, TOKENS) for name, entry in datasets.items()} for datasets in (planned, written))
    assert next(of_both) == next(of_both)


def test_published_files_have_sizes_before_they_are_fetched(tmp_path: Path):
    """The table gives trajectories, snapshots and grid, of the first trajectories too; what it lacks is named."""
    files = [find_file("1D_Burgers_Sols_Nu0.01.hdf5"), replace(find_file("2D_rdb_NA_NA.h5"), num_snapshots=None)]
    datasets, unknown = files_to_fetch(make_plan(tmp_path, files, 100))
    assert (unknown, list(datasets)) == (["2D_rdb_NA_NA_first100.h5"], ["1D_Burgers_Sols_Nu0.01_first100"])
    missing = frozenset(name for dataset in datasets.values() for name in dataset.files)
    (size,) = sizes_of(tmp_path, datasets, WHOLE.of(FAMILIES), TOKENS, missing)
    assert (size.num_trajectories, size.num_snapshots, size.grid) == (100, 201, (1024,))
    assert size.raw_bytes == size.missing_bytes == 4 * 100 * 201 * 1024


def test_strides_shrink_latents_but_not_files(write):
    """Raw bytes are those of the whole files, latents those of the part that is used."""
    path = write("advection_1d")
    part = {"advection_1d": asdict(Subsample(every_point=2, first_trajectories=3))}
    (size,) = sizes_of(path.parent, {path.stem: whole(path)}, part, TOKENS, frozenset())
    assert (size.raw_bytes, size.missing_bytes, size.num_trajectories, size.grid) == (4 * 4 * 5 * 8, 0, 3, (4,))
    assert size.latent_bytes == 3 * 4 * 5 * 4


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A disk with 750 free bytes."""
    monkeypatch.setattr(estimate, "free_disk_bytes", lambda folder: 750)
    return 750


def test_a_full_disk_is_refused(free: int):
    """Raw files still to come and latents must fit; latents that are there already count as written."""
    assert expect_room(Path("root"), [SIZE], 50, 700) == free
    with pytest.raises(StorageFault, match=r"^root: 500 bytes of latents and 300 bytes of raw files need 751 bytes, "):
        expect_room(Path("root"), [SIZE], 49, 700)
    with pytest.raises(StorageFault, match=r"^root: the latent cache need[^\n]*use less data \(section subsample\)$"):
        expect_room(Path("root"), [replace(SIZE, missing_bytes=0, latent_bytes=751)], 0, 700)


def test_a_snapshot_above_the_budget_is_refused(free: int):
    """A dataset of which one snapshot does not fit into the budget is named, with the budget and the remedy."""
    what = r"^gas: one snapshot needs 700 bytes of memory, a process may use 699 bytes; raise launch.memory_gigabytes"
    with pytest.raises(OutOfMemory, match=what):
        expect_room(Path("root"), [SIZE, replace(SIZE, name="less", snapshot_bytes=1)], 500, 699)


def test_a_stride_that_does_not_suit_is_refused_before_a_download(tmp_path: Path):
    """Strides are checked against the table of published files."""
    datasets, _ = files_to_fetch(make_plan(tmp_path, [find_file("1D_Burgers_Sols_Nu0.01.hdf5")], None))
    options = {"burgers_1d": {"every_point": 3}}
    with pytest.raises(ConfigFault, match="every_point = 3 does not divide the 1024 points"):
        sizes_of(tmp_path, datasets, options, TOKENS, frozenset())


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (8.23e9, "8.23 GB"), (999.9e6, "1 GB"), (2.5e15, "2500 TB")]
)
def test_bytes_are_readable(size: float, words: str):
    """Three digits and a decimal unit."""
    assert estimate.readable(size) == words
