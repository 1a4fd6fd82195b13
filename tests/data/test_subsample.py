"""Strides, ranges of snapshots and first trajectories: the smaller data are slices of the whole, read in part."""

import json
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.data.conftest import write_file
from ups.data import layouts
from ups.data.families import Dataset, Subsample, condition_features
from ups.data.inspection import inspect
from ups.data.normalization import check_values, fit_normalization
from ups.data.pdebench import FAMILIES
from ups.data.recognition import find_files
from ups.data.splits import split
from ups.data.trajectories import TrajectoryReader, find_datasets, take_first, thin
from ups.errors import ConfigFault, DataFault

EVERY_SECOND = Subsample(every_point=2, every_snapshot=2, first_snapshot=1, last_snapshot=4)


def whole(path: Path) -> Dataset:
    """The dataset of one file."""
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    return dataset


def points(u: np.ndarray, k: int, num_axes: int) -> np.ndarray:
    """Every k-th point along the last axes."""
    return u[(..., *(slice(None, None, k),) * num_axes)]


def assert_sliced(folder: Path, dataset: Dataset, subsample: Subsample) -> None:
    """Assert that a thinned dataset is read as numpy slices the whole arrays."""
    thinned, axes = thin(folder, dataset, subsample), len(dataset.grid)
    stop = None if subsample.last_snapshot is None else subsample.last_snapshot + 1
    chosen = slice(subsample.first_snapshot, stop, subsample.every_snapshot)
    chosen = slice(None) if FAMILIES[dataset.family].steady else chosen
    with TrajectoryReader(folder, dataset) as a, TrajectoryReader(folder, thinned) as b:
        for index in (0, dataset.num_trajectories - 1):
            expected = points(a.read(index)[chosen], subsample.every_point, axes)
            assert np.array_equal(b.read(index), expected)
            assert np.array_equal(b.read(index, len(expected) - 1), expected[-1:])
            given = points(a.read_coefficients(index), subsample.every_point, axes)
            assert np.array_equal(b.read_coefficients(index), given)


@pytest.mark.parametrize("family", FAMILIES)
def test_strides_are_those_of_numpy(tmp_path: Path, family: str):
    """Every second point and snapshot of the file is what slices of the whole arrays give, in every layout."""
    path = write_file(tmp_path, family)
    assert_sliced(tmp_path, whole(path), EVERY_SECOND)
    assert_sliced(tmp_path, whole(path), Subsample(every_point=2))
    assert_sliced(tmp_path, whole(path), Subsample(every_snapshot=3))
    assert_sliced(tmp_path, whole(path), Subsample(first_snapshot=1, last_snapshot=2))


def test_strides_are_those_of_numpy_on_real_files(samples: Path):
    """The same holds for files of PDEBench's generators, compressed ones too."""
    datasets = find_datasets(samples, find_files(samples))
    for dataset in datasets.values():
        assert_sliced(samples, dataset, Subsample(every_point=2, every_snapshot=2, first_snapshot=1))


def test_times_grid_and_lengths_are_those_of_the_kept_points(write):
    """With every second point and snapshot dt and dx double, and a periodic domain keeps its length."""
    before = whole(write("compressible_ns_2d"))
    after = thin(Path(), before, EVERY_SECOND)
    assert (after.times, after.grid) == ((0.25, 0.75), (4, 3)) and after.lengths == before.lengths
    dt = [10 ** condition_features(dataset)[0] for dataset in (before, after)]
    assert np.allclose(dt, (0.25, 0.5))


def test_spacing_between_walls_is_exact(write):
    """Every third of eight points between walls leaves three, 3 dx apart, so their cells cover 9 dx."""
    before = whole(write("diffusion_sorption_1d"))
    after = thin(Path(), before, Subsample(every_point=3))
    assert after.grid == (3,) and np.isclose(after.lengths[0] / 3, 3 * before.lengths[0] / 8)


def test_first_trajectories_are_counted_over_files(tmp_path: Path):
    """The first 5 of files with 3 each are the first file and two of the second; a third file is not opened."""
    for number in range(3):
        write_file(tmp_path, "incompressible_ns_2d", f"ns_incom_inhom_2d_8-{number}.h5", count=3)
    (dataset,) = find_datasets(tmp_path, find_files(tmp_path)).values()
    taken = take_first(dataset, Subsample(first_trajectories=5))
    assert (taken.files, taken.counts) == (dataset.files[:2], (3, 2))
    assert take_first(dataset, Subsample(first_trajectories=50)) == dataset


def test_positions_stay_those_of_the_published_file(write):
    """The positions that a partial file records are read although only its first trajectories are used."""
    stored = [5, 3, 8, 1]
    path = write("advection_1d", edit=lambda file: file.create_dataset("ups_trajectories", data=stored))
    with TrajectoryReader(path.parent, take_first(whole(path), Subsample(first_trajectories=3))) as reader:
        assert [reader.published_position(index) for index in range(3)] == stored[:3]


@pytest.mark.parametrize(
    ("chunks", "values", "expected"),
    [
        ((1, 2, 8), 2**20, [slice(1, 2, 2), slice(3, 4, 2)]),  # chunked: one at a time
        (None, 2**20, [slice(1, 4, 2)]),  # contiguous: as many as a block may hold
        (None, 8, [slice(1, 2, 2), slice(3, 4, 2)]),
    ],
)
def test_only_what_is_kept_is_read(write, monkeypatch: pytest.MonkeyPatch, chunks: tuple, values: int, expected: list):
    """No snapshot is read that a stride leaves out, and never more at once than a block of values or one snapshot."""

    def store(file: h5py.File) -> None:
        u = file.pop("tensor")[:]
        file.create_dataset("tensor", data=u, chunks=chunks)

    path, asked = write("advection_1d", edit=store), []
    dataset, read = thin(path.parent, whole(path), EVERY_SECOND), layouts.read_array

    def spy(array: h5py.Dataset, rank: int, index: tuple = ()) -> np.ndarray:
        asked.append(index[1])
        return read(array, rank, index)

    monkeypatch.setattr(layouts, "read_array", spy)
    monkeypatch.setattr(layouts, "BLOCK_ELEMENTS", values)
    with TrajectoryReader(path.parent, dataset) as reader:
        reader.read(0)
    assert asked == expected


def test_statistics_are_those_of_the_kept_values(write):
    """Mean and standard deviation are those of numpy over the slices, not over the whole file."""
    path = write("advection_1d")
    dataset = thin(path.parent, whole(path), EVERY_SECOND)
    splits = {dataset.name: {"train": [0, 1], "valid": [2], "test": [3]}}
    found = fit_normalization(path.parent, {dataset.name: dataset}, splits, lambda count: None)
    with h5py.File(path) as file:
        kept = file["tensor"][:2, 1:5:2, ::2].astype(np.float64)
    u = found["advection_1d"]["fields"]["u"]
    assert np.allclose((u["mean"], u["std"]), (kept.mean(), kept.std()), rtol=1e-12)


def test_a_bad_value_is_named_by_its_place_in_the_file(write):
    """The snapshot of a NaN is counted as in the file, not among those that are kept."""
    path = write(
        "advection_1d", edit=lambda file: file["tensor"].write_direct(np.full(1, np.nan, "f4"), None, (2, 3, 4))
    )
    with pytest.raises(DataFault, match="trajectory 2, snapshot 3, is NaN"):
        check_values(path.parent, thin(path.parent, whole(path), EVERY_SECOND), lambda count: None)


def test_splits_do_not_depend_on_strides(write):
    """Copies of a state are in one split although their first snapshots are left out; the first trajectories count."""

    def copy_state(file: h5py.File) -> None:
        file["tensor"][5, 0] = file["tensor"][2, 0]

    path, fractions = write("advection_1d", count=12, edit=copy_state), (1, 0.2, 0.2)
    options = {"every_point": 4, "first_snapshot": 1, "first_trajectories": 8}
    given = {"names": [path.name], "subsample": {"advection_1d": options}}
    given |= dict(zip(("seed", "valid_fraction", "test_fraction"), fractions, strict=True))
    answer = inspect("describe", folder=path.parent, **given)
    datasets = {path.stem: take_first(whole(path), Subsample(first_trajectories=8))}
    assert answer["splits"] == split(path.parent, datasets, *fractions)
    assert any({2, 5} <= set(indices) for indices in answer["splits"][path.stem].values())


def test_options_are_kept_in_json(write):
    """A dataset read back from a receipt is read with the same strides."""
    dataset = thin(Path(), whole(write("advection_1d")), EVERY_SECOND)
    assert Dataset.from_json(json.loads(json.dumps(asdict(dataset)))) == dataset


@pytest.mark.parametrize(
    ("family", "subsample", "what"),
    [
        ("advection_1d", {"every_point": 3}, "every_point = 3 does not divide the 8 points of the periodic axis x"),
        ("diffusion_sorption_1d", {"every_point": 8}, "every_point = 8 leaves fewer than 2 of the 8 points"),
        ("advection_1d", {"every_snapshot": 5}, "every_snapshot = 5 need snapshot 5 of .*, whose last one is 4"),
        ("advection_1d", {"first_snapshot": 4}, "first_snapshot = 4, every_snapshot = 1 need snapshot 5 of"),
        ("advection_1d", {"last_snapshot": 7}, "last_snapshot = 7, every_snapshot = 1 need snapshot 7 of"),
    ],
)
def test_options_that_do_not_suit_a_file_are_refused(write, family: str, subsample: dict, what: str):
    """One line names the option, the file and the remedy, and reaches the parent as a wrong parameter."""
    path = write(family)
    options = {"subsample": {family: subsample}}
    with pytest.raises(ConfigFault, match=rf"^subsample, {family}: {what}[^\n]*; (choose|lower)[^\n]*$"):
        inspect("find", folder=path.parent, names=[path.name], **options)
