import json
import math
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data import normalization
from ups.data.normalization import fit_normalization
from ups.data.recognition import find_files
from ups.data.trajectories import find_datasets
from ups.errors import DataFault

SPLITS = {"train": [0, 2], "valid": [1], "test": [3]}


def fit(folder: Path, advance=lambda n: None) -> dict:
    """Statistics of a folder whose datasets have four trajectories each."""
    datasets = find_datasets(folder, find_files(folder))
    return fit_normalization(folder, datasets, dict.fromkeys(datasets, SPLITS), advance)


def put(name: str, index: tuple, value: float):
    """Edit that changes single values."""

    def edit(file: h5py.File) -> None:
        values = file[name][:]
        values[index] = value
        file[name][:] = values

    return edit


@pytest.mark.parametrize("slab_elements", [1, 40, 2**24])
def test_statistics_are_those_of_the_train_split(write, tmp_path, monkeypatch, slab_elements):
    """Mean and std agree with numpy on the train trajectories, however the reading is cut."""
    monkeypatch.setattr(normalization, "SLAB_ELEMENTS", slab_elements)
    path = write("burgers_1d")
    with h5py.File(path) as file:
        u = file["tensor"][SPLITS["train"]].astype(np.float64)
    statistics = fit(tmp_path)["burgers_1d"]["fields"]["u"]
    assert statistics == {"log": False, "mean": pytest.approx(u.mean()), "std": pytest.approx(u.std())}


def test_valid_and_test_do_not_matter(write, tmp_path):
    """Huge values outside the train split leave the statistics as they are."""
    write("burgers_1d")
    before = fit(tmp_path)
    write("burgers_1d", edit=lambda file: [put("tensor", (i,), 1e9)(file) for i in (1, 3)])
    assert fit(tmp_path) == before


@pytest.mark.parametrize("size", [1e16, 1e-13])
@pytest.mark.parametrize(("family", "name"), [("burgers_1d", "tensor"), ("compressible_ns_1d", "density")])
def test_magnitudes_whose_squares_leave_float32_are_refused(write, tmp_path, family: str, name: str, size: float):
    """Scores would be 0 or NaN; a field that is zero everywhere has no magnitude."""
    write(family, edit=lambda file: file[name].write_direct(size * file[name][:]))
    with pytest.raises(DataFault, match="choose other units"):
        fit(tmp_path)
    write("burgers_1d", edit=lambda file: file["tensor"].write_direct(0 * file["tensor"][:]))
    (tmp_path / "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5").unlink(missing_ok=True)
    assert fit(tmp_path)["burgers_1d"]["fields"]["u"]["std"] == 1.0


def test_coefficients_may_be_small(write, tmp_path):
    """A permeability in square metres is of the order 1e-13, and no score squares it."""
    write("darcy_2d", edit=lambda file: file["nu"].write_direct(1e-13 * file["nu"][:]))
    assert fit(tmp_path)["darcy_2d"]["coefficients"]["nu"]["mean"] < math.log(1e-12)


def test_positive_fields_are_normalized_in_the_log(write, tmp_path):
    """Density, pressure and depth are positive by nature and span decades; Darcy's permeability too."""
    paths = {family: write(family) for family in ("compressible_ns_1d", "darcy_2d", "shallow_water_2d")}
    statistics = fit(tmp_path)
    with h5py.File(paths["darcy_2d"]) as file:
        log_nu = np.log(file["nu"][SPLITS["train"]].astype(np.float64))
    fields = statistics["compressible_ns_1d"]["fields"]
    assert [fields[name]["log"] for name in ("density", "pressure", "Vx")] == [True, True, False]
    assert statistics["darcy_2d"]["coefficients"]["nu"]["mean"] == pytest.approx(log_nu.mean())
    assert statistics["darcy_2d"]["coefficients"]["nu"]["std"] == pytest.approx(log_nu.std())


def test_forces_are_normalized_as_they_are(write, tmp_path):
    """The forcing of incompressible flow has both signs."""
    write("incompressible_ns_2d", edit=lambda file: file["force"].write_direct(-file["force"][:]))
    coefficients = fit(tmp_path)["incompressible_ns_2d"]["coefficients"]
    assert [coefficients[name]["log"] for name in ("force_x", "force_y")] == [False, False]
    assert coefficients["force_x"]["mean"] < 0


def test_datasets_of_one_family_share_their_statistics(write, tmp_path):
    """One scale per family: the mean over two files is the mean of both."""
    for beta, value in ((1.0, 0.0), (2.0, 4.0)):
        write("advection_1d", f"1D_Advection_Sols_beta{beta}.hdf5", edit=put("tensor", (), value))
    u = fit(tmp_path)["advection_1d"]["fields"]["u"]
    assert (u["mean"], u["std"]) == (pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize(("value", "std"), [(5.0, 5e-6), (0.0, 1.0)])
def test_std_of_a_constant_field_is_not_zero(write, tmp_path, value, std):
    """A field that never changes can still be divided by its std."""
    write("advection_1d", edit=put("tensor", (), value))
    assert fit(tmp_path)["advection_1d"]["fields"]["u"]["std"] == pytest.approx(std)


def test_small_variations_on_a_large_mean_survive(write, tmp_path):
    """The merge of slabs does not cancel: a std of 0.01 beside a mean of 1000."""
    noise = np.random.default_rng(0).normal(1000, 0.01, (4, 5, 8)).astype(np.float32)
    write("advection_1d", edit=lambda file: file["tensor"].write_direct(noise))
    expected = noise[SPLITS["train"]].astype(np.float64).std()
    assert fit(tmp_path)["advection_1d"]["fields"]["u"]["std"] == pytest.approx(expected, rel=1e-6)


BAD_VALUES = {
    "NaN in train": ("advection_1d", "tensor", (2, 4, 0), math.nan, "'u' of trajectory 2, snapshot 4"),
    "infinite in test": ("advection_1d", "tensor", (3, 0, 1), math.inf, "'u' of trajectory 3, snapshot 0"),
    "negative density": ("compressible_ns_2d", "density", (1, 2, 0, 0), -1.0, "'density' of trajectory 1, snapshot 2"),
    "no pressure": ("compressible_ns_3d", "pressure", (0, 1), 0.0, "'pressure' of trajectory 0, snapshot 1"),
    "dry": ("shallow_water_2d", "0004/data", (3,), 0.0, "'h' of trajectory 2, snapshot 3"),
    "no permeability": ("darcy_2d", "nu", (3, 0, 0), 0.0, "'nu' of trajectory 3"),
    "NaN force": ("incompressible_ns_2d", "force", (1, 0, 0, 1), math.nan, "'force_y' of trajectory 1"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("slab_elements", [1, 2**24])
def test_bad_values_are_located(write, tmp_path, monkeypatch, case, slab_elements):
    """A value that is not finite or not positive stops with file, field, trajectory and snapshot, in any split."""
    monkeypatch.setattr(normalization, "SLAB_ELEMENTS", slab_elements)
    family, name, index, value, expected = BAD_VALUES[case]
    path = write(family, edit=put(name, index, value))
    with pytest.raises(DataFault, match=expected) as caught:
        fit(tmp_path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_real_values_are_all_sound(samples):
    """Every value of the real files passes, and the result is plain JSON with one entry per family."""
    datasets = find_datasets(samples, find_files(samples))
    splits = {name: {"train": list(range(dataset.num_trajectories))} for name, dataset in datasets.items()}
    seen: list[int] = []
    statistics = fit_normalization(samples, datasets, splits, seen.append)
    assert json.loads(json.dumps(statistics)) == statistics
    assert len(statistics) == 11
    assert sum(seen) == sum(dataset.num_trajectories for dataset in datasets.values())
