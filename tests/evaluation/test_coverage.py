"""What is measured of the training split: ranges, features, and the usual error."""

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.data.conftest import write_file
from tests.evaluation.conftest import TRAINED
from tests.evaluation.test_external import LAUNCH, config
from tests.untrained import make_root, receipt
from ups.data.families import Dataset
from ups.data.trajectories import TrajectoryReader
from ups.errors import DataFault
from ups.evaluation.coverage import MAX_TRAJECTORIES, MIN_TRAJECTORIES, chosen_trajectories, usual_errors
from ups.pipelines.evaluation import measure_coverage


def measure(root: Path) -> dict[str, Any]:
    """The coverage of every family of a data root."""
    stages = {stage: receipt(root, stage) for stage in ("codec", "operator", "steady")}
    cache, how = receipt(root, "latent_cache"), config(None).model_copy(update={"keep_predictions": ["operator"]})
    return measure_coverage(cache, how, LAUNCH, root / "01_raw", root, **stages)["families"]


@pytest.fixture(scope="module")
def measured(trained: Path) -> dict[str, Any]:
    """The coverage of five families."""
    return measure(trained)


def test_every_family_is_measured(trained: Path, measured: dict[str, Any]):
    """Fields, coefficients, time step and parameters of each; steady families have no time step."""
    assert set(measured) == set(TRAINED)
    assert list(measured["incompressible_ns_2d"]["fields"]) == ["Vx", "Vy", "particles"]
    assert list(measured["incompressible_ns_2d"]["coefficients"]) == ["force_x", "force_y"]
    assert measured["darcy_2d"]["dt"] is None and measured["advection_1d"]["dt"] is not None
    assert all(family["error"] > 0 for family in measured.values())
    assert not list((trained / "06_models/coverage").rglob("*.zarr"))  # rollouts that are kept are of the test split


def test_the_means_are_those_of_the_training_split(trained: Path, measured: dict[str, Any]):
    """In units of the normalization, over all snapshots of the training trajectories and of no others."""
    datasets = receipt(trained, "datasets")
    name, entry = next((n, e) for n, e in datasets["datasets"].items() if e["family"] == "compressible_ns_1d")
    with TrajectoryReader(trained / "01_raw", Dataset.from_json(entry)) as reader:
        u = np.concatenate([reader.read(index) for index in datasets["splits"][name]["train"]]).astype(float)
    for channel, (field, is_log) in enumerate({"density": True, "pressure": True, "Vx": False}.items()):
        found = measured["compressible_ns_1d"]["fields"][field]
        means = (np.log(u[:, channel]) if is_log else u[:, channel]).mean(-1)
        expected = (means - found["mean"]) / found["std"]
        assert [found["low"][0], found["high"][0]] == pytest.approx([expected.min(), expected.max()], abs=1e-5)


def test_parameters_and_time_steps_range_over_the_datasets_of_a_family(tmp_path: Path):
    """Two files of Burgers' equation give the range of their viscosities and time steps."""
    (tmp_path / "01_raw").mkdir()
    for nu, dt in ((0.01, 0.5), (0.1, 0.25)):

        def edit(file: h5py.File, nu: float = nu, dt: float = dt) -> None:
            file.attrs["Nu"] = nu
            file["t-coordinate"][:] = dt * np.arange(6)

        write_file(tmp_path / "01_raw", "burgers_1d", f"1D_Burgers_Sols_Nu{nu}.hdf5", count=5, edit=edit)
    make_root(tmp_path, ("operator",))
    found = measure(tmp_path)["burgers_1d"]
    assert found["parameters"] == {"nu": [0.01, 0.1]} and found["dt"] == [0.25, 0.5]


def records(*errors: float | None, method: str = "operator", horizon: str = "rollout") -> dict[str, Any]:
    """The record of a method with the errors of its trajectories."""
    kind = {"family": "advection_1d", "method": method, "metric": "nRMSE", "horizon": horizon}
    return kind | {"trajectories": list(errors)}


def test_the_usual_error_is_the_median_of_rollouts():
    """Over the trajectories of all datasets of a family, of the model without corrector."""
    others = [records(9.0, 9.0, method="codec"), records(8.0, horizon="one_step")]
    assert usual_errors([records(0.1, 0.5), records(0.2, None, 0.3), *others]) == {"advection_1d": 0.3}


def test_an_error_that_is_not_finite_is_a_fault():
    """One line says of which family, before anything is written."""
    with pytest.raises(DataFault, match="validation error of advection_1d"):
        usual_errors([records(None, None, 0.1)])


@pytest.mark.parametrize(("points", "count"), [(64, MAX_TRAJECTORIES), (512**3, MIN_TRAJECTORIES)])
def test_of_large_data_a_part_is_described(points: int, count: int):
    """Trajectories are evenly spaced from the first to the last, at most a thousand, and fewer of large ones."""
    times = tuple(0.1 * step for step in range(21))
    settings = {"lengths": (1.0,), "boundary": ("periodic",), "parameters": {"beta": 1.0}}
    dataset = Dataset("a", "advection_1d", ("a",), (9000,), times, (points,), **settings)
    chosen = chosen_trajectories(dataset, list(range(1, 9000)))
    assert (len(chosen), chosen[0], chosen[-1]) == (count, 1, 8999)
    assert max(np.diff(chosen)) <= math.ceil(8999 / (count - 1))
