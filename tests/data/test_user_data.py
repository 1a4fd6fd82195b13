"""A dataset of one's own: one entry in the registry, one HDF5 file in the tensor layout."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data.families import NUM_CONDITIONS, Family, condition_features
from ups.data.normalization import fit_normalization
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.splits import split
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import DataFault

BETA, NUM_TRAJECTORIES, NUM_SNAPSHOTS, NUM_POINTS = 0.5, 20, 11, 32
NAME = f"Wave_beta{BETA}.hdf5"
WAVE = Family("wave_1d", "u_tt = beta^2 u_xx", ("u",), ("x",), "periodic", ("beta",), "tensor", r"Wave_.*\.hdf5")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with standing waves, written as the documentation says, and the family in the registry."""
    monkeypatch.setitem(FAMILIES, WAVE.name, WAVE)
    raw = tmp_path / "raw"
    raw.mkdir()
    x, t = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS, np.linspace(0, 1, NUM_SNAPSHOTS)
    phase = np.random.default_rng(0).uniform(0, 2 * np.pi, (NUM_TRAJECTORIES, 1, 1))
    with h5py.File(raw / NAME, "w") as file:
        file["tensor"] = np.sin(2 * np.pi * x + phase) * np.cos(2 * np.pi * BETA * t)[:, None]
        file["x-coordinate"] = x
        file["t-coordinate"] = t
        file.attrs["beta"] = BETA
    return raw


def test_own_dataset_goes_all_the_way(folder, tmp_path):
    """Found, summed, described, split, measured, read: the same functions as for PDEBench's files."""
    files = list_files(folder, tmp_path / "sums.json")
    datasets = find_datasets(folder, list(files))
    (dataset,) = datasets.values()
    assert (dataset.name, dataset.family, dataset.counts) == ("Wave_beta0.5", "wave_1d", (NUM_TRAJECTORIES,))
    assert (dataset.grid, dataset.lengths, dataset.boundary) == ((NUM_POINTS,), (1.0,), ("periodic",))
    assert dataset.parameters == {"beta": BETA}
    splits = split(folder, datasets, seed=0, valid_fraction=0.1, test_fraction=0.1)
    assert {kind: len(indices) for kind, indices in splits[dataset.name].items()} == {
        "train": 14,
        "valid": 3,
        "test": 3,
    }
    statistics = fit_normalization(folder, datasets, splits, lambda count: None)["wave_1d"]["fields"]["u"]
    with TrajectoryReader(folder, dataset) as reader:
        train = np.stack([reader.read(i) for i in splits[dataset.name]["train"]])
    assert train.shape == (14, NUM_SNAPSHOTS, 1, NUM_POINTS)
    assert statistics["std"] == pytest.approx(train.std(), rel=1e-5)
    assert len(condition_features(dataset)) == NUM_CONDITIONS


def test_parameter_may_be_in_the_file_name(folder):
    """Without an attribute the name says beta."""
    with h5py.File(folder / NAME, "r+") as file:
        del file.attrs["beta"]
    assert find_datasets(folder, [NAME])["Wave_beta0.5"].parameters == {"beta": BETA}


def test_file_without_an_entry_is_refused(folder, monkeypatch):
    """A file that no family claims is refused with the known names."""
    monkeypatch.delitem(FAMILIES, WAVE.name)
    with pytest.raises(DataFault, match="matches no known family"):
        find_datasets(folder, [NAME])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "table"}, "layout is 'table'"),
        ({"boundary": "open"}, "boundary is 'open'.*periodic"),
        ({"axes": ("r",)}, "axes is"),
        ({"attributes": {"speed": "c"}}, "attributes has 'speed', expected some of beta"),
        ({"fields": ("u", "v")}, "use 'fields'"),
    ],
)
def test_wrong_entry_is_refused(change, message):
    """An entry that the pipeline could not understand is refused when it is written, with what is known."""
    entry = {field: getattr(WAVE, field) for field in WAVE.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        Family(**entry | change)
