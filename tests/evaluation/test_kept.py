"""Scores of predictions in files: those that the evaluation has kept, and those of anybody."""

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from tests.data.conftest import write_file
from tests.evaluation.test_external import CORRECTOR, LAUNCH, NOTHING_CHOSEN, config, stages
from tests.untrained import receipt
from ups import Family, write_dataset
from ups.data.families import Families
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader, inspect_file
from ups.errors import ConfigFault, DataFault
from ups.evaluation.external import score_predictions
from ups.evaluation.predictions import Compute
from ups.pipelines.evaluation import evaluate

KEPT = ["codec", "persistence", "operator", "steady", "diffusion"]
COMPUTE = Compute(torch.device("cpu"), 10**9)


@pytest.fixture(scope="module")
def evaluated(trained: Path) -> tuple[list[dict[str, Any]], Path]:
    """Records of an evaluation that keeps the rollouts of some methods, and the folder where they are."""
    how = config(None).model_copy(update={"keep_predictions": KEPT})
    given = stages(trained) | {"corrector": CORRECTOR}
    records, rollouts = evaluate(
        receipt(trained, "latent_cache"), how, *NOTHING_CHOSEN, LAUNCH, trained / "01_raw", trained, **given
    )
    return records, trained / rollouts["path"]


def score(predictions: Path, truth: Path, **changed: Any) -> list[dict[str, Any]]:
    """The records of a file, in pieces that fit into a gigabyte."""
    arguments = {"family": None, "method": None, "compute": COMPUTE, "seed": 0, "test_split_of": None} | changed
    return score_predictions(predictions, truth, **arguments)["records"]


def error_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The only record of this metric."""
    (record,) = (record for record in records if record["metric"] == "nRMSE")
    return record


def test_the_family_is_said_once(tmp_path: Path):
    """A data root knows the family of its files: naming another one beside it is refused before a file is read."""
    with pytest.raises(ConfigFault, match=f"{tmp_path} knows the family of waves.hdf5"):
        score(tmp_path / "absent.npz", tmp_path / "waves.hdf5", family="burgers_1d", test_split_of=tmp_path)


def test_records_of_kept_rollouts_are_those_of_the_evaluation(trained: Path, evaluated: tuple):
    """Every number, interval and error of a trajectory is the same to the last digit, also of ensembles.

    Missing are the shares of limited steps and values and the error without limits, which files do not tell, and the
    digest of the trajectories.
    """
    records, folder = evaluated
    found = sorted(folder.glob("*.zarr"))
    assert {path.name.split(".")[-2] for path in found} == set(KEPT)
    for path in found:
        dataset, method = path.name.removesuffix(".zarr").rsplit(".", 1)
        (truth,) = (trained / "01_raw").glob(f"{dataset}*.h*5")
        expected = [r for r in records if (r["dataset"], r["method"], r["horizon"]) == (dataset, method, "rollout")]
        unknown = ("limited_steps", "limited_values", "nRMSE_without_limits")
        expected = [record for record in expected if record["metric"] not in unknown]
        expected = [{key: value for key, value in record.items() if key != "digest"} for record in expected]
        assert expected and score(path, truth) == expected, path.name
    ensembles = [path for path in found if path.name.endswith(".diffusion.zarr")]
    assert all("CRPS" in {record["metric"] for record in score_of(path, trained)} for path in ensembles)


def score_of(path: Path, trained: Path) -> list[dict[str, Any]]:
    """The records of kept rollouts."""
    (truth,) = (trained / "01_raw").glob(f"{path.name.removesuffix('.diffusion.zarr')}*.h*5")
    return score(path, truth)


def test_kept_rollouts_are_scored_by_their_own_truth(trained: Path, evaluated: tuple, tmp_path: Path):
    """Another file is refused: the rollouts know their trajectories."""
    other = tmp_path / "1D_Advection_Sols_beta0.7.hdf5"
    (kept,) = evaluated[1].glob("1D_Advection*.operator.zarr")
    shutil.copyfile(next((trained / "01_raw").glob("1D_Advection*")), other)
    with pytest.raises(DataFault, match=r"beta0.7.hdf5: is not the truth of .*; choose 1D_Advection\S*0.4.hdf5"):
        score(kept, other)


def test_a_truth_of_the_same_name_is_told_apart_by_its_content(trained: Path, evaluated: tuple, tmp_path: Path):
    """Files of two seeds have the same names."""
    (kept,) = evaluated[1].glob("1D_Advection*.operator.zarr")
    (truth,) = (trained / "01_raw").glob("1D_Advection*")
    other = Path(shutil.copy(truth, tmp_path))
    assert score(kept, other) == score(kept, truth)
    with h5py.File(other, "a") as file:
        file["tensor"][:] = file["tensor"][:][::-1]
    with pytest.raises(DataFault, match="has another content than when the evaluation kept .*; name the file of"):
        score(kept, other)


def test_a_truth_that_is_not_finite_is_refused(tmp_path: Path):
    """Its scores would be NaN."""
    truth = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    np.savez(tmp_path / "p.npz", u=np.ones((4, 5, 32), np.float32))
    with h5py.File(truth, "a") as file:
        file["tensor"][2, 1, 3] = np.nan
    with pytest.raises(DataFault, match="'u' of trajectory 2, snapshot 1, is NaN"):
        score(tmp_path / "p.npz", truth)


def test_the_truth_may_define_its_family(tmp_path: Path, families: Families):
    """`ups score` needs no families.yml for a file that `write_dataset` wrote."""
    known, u = dict(families), np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    wave = Family("wave_1d", "u_t = u_x", ("u",), ("x",), "periodic", ())
    truth = write_dataset(tmp_path / "truth.hdf5", wave, {"u": u}, parameters={}, dx=0.125, dt=0.1)
    families.clear()
    families.update(known)
    np.savez(tmp_path / "predicted.npz", u=u)
    assert error_of(score(tmp_path / "predicted.npz", truth))["value"] == 0


def test_a_scaled_truth_has_the_error_of_its_scale(tmp_path: Path):
    """Predictions 1.1 times the truth have an nRMSE of 0.1, in every kind of file and form of array."""
    truth = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    with h5py.File(truth) as file:
        u = 1.1 * file["tensor"][:]
    np.save(tmp_path / "stacked.npy", u[:, :, None])
    np.savez(tmp_path / "named.npz", u=u)
    zarr.save_group(str(tmp_path / "named.zarr"), u=u)
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tensor"] = u
    for name in ("stacked.npy", "named.npz", "named.zarr", "foreign.h5"):
        record = error_of(score(tmp_path / name, truth))
        assert record["value"] == pytest.approx(0.1, rel=1e-4) and record["num_trajectories"] == 4
        assert (record["method"], record["horizon"]) == (Path(name).stem, "rollout")


def test_the_truth_may_be_a_folder(tmp_path: Path):
    """A zarr store is a folder: it is scored against as the file with the same values is."""
    truth = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    dataset = inspect_file(truth)
    with h5py.File(truth) as file:
        u, x, t = file["tensor"][:], file["x-coordinate"][:], file["t-coordinate"][: len(dataset.times)]
    store = tmp_path / "advection.zarr"
    zarr.save_group(str(store), u=u, x=x, t=t)
    zarr.open_group(store).attrs.update({"family": "advection_1d"} | dataset.parameters)
    np.save(tmp_path / "scaled.npy", 1.1 * u[:, :, None])
    assert error_of(score(tmp_path / "scaled.npy", store))["value"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_truth_itself_has_no_error(family: str, tmp_path: Path):
    """The fields of a file, as an array per field, agree with PDEBench's layout of every family."""
    truth = write_file(tmp_path, family, count=3)
    dataset = inspect_file(truth)
    with TrajectoryReader(tmp_path, dataset) as reader:
        u = np.stack([reader.read(index) for index in range(3)])
    np.savez(tmp_path / "same.npz", **dict(zip(FAMILIES[family].fields, np.moveaxis(u, 2, 0), strict=True)))
    assert error_of(score(tmp_path / "same.npz", truth))["value"] == 0.0
    assert error_of(score(truth, truth, method="truth"))["value"] == 0.0


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"t": 2.0}, "has snapshots .* apart at first, those of .* apart; predict at the times of the truth"),
        ({"family": "burgers_1d"}, "has predictions of burgers_1d, not of advection_1d"),
        ({"t": 1.0, "family": "advection_1d-32"}, None),
    ],
)
def test_what_predictions_say_of_themselves_must_suit_the_truth(tmp_path: Path, stated: dict, problem: str | None):
    """Rollouts of another time step, or of another equation, of the same shape."""
    truth = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    with h5py.File(truth) as file:
        arrays = {"u": file["tensor"][:]}
        if "t" in stated:
            arrays["t"] = stated["t"] * file["t-coordinate"][: arrays["u"].shape[1]]
    store = zarr.open_group(tmp_path / "p.zarr", mode="w")
    for name, values in arrays.items():
        store.create_array(name, data=values)
    store.attrs.update({name: value for name, value in stated.items() if name == "family"})
    if problem is None:
        assert error_of(score(tmp_path / "p.zarr", truth))["value"] == 0
    else:
        with pytest.raises(DataFault, match=problem):
            score(tmp_path / "p.zarr", truth)


def test_predictions_of_another_shape_are_refused(tmp_path: Path):
    """Too few trajectories or times, or an odd number of members: one line says what is expected."""
    truth = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    for shape, problem in (((3, 5, 32), "4 of 5"), ((4, 4, 32), "4 of 5"), ((4, 3, 5, 32), "3 members")):
        np.savez(tmp_path / "p.npz", u=np.zeros(shape, np.float32))
        with pytest.raises(DataFault, match=problem) as fault:
            score(tmp_path / "p.npz", truth)
        assert "\n" not in str(fault.value)
