"""Training splits filled up with simulated trajectories."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_simulate import write
from tests.evaluation.test_kept import COMPUTE
from ups.config import WHOLE, SimulateConfig, SplitConfig, SubsampleConfig
from ups.data import supplement as module
from ups.data.families import Dataset, Subsample
from ups.data.simulate import simulate
from ups.data.supplement import SEED_OFFSET, fill_up, recipes_like
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault, DataFault
from ups.evaluation.entries import Described, scored_trajectories, trajectories_digest
from ups.evaluation.external import score_predictions
from ups.files import write_json
from ups.pipelines.data import describe_datasets, list_folder
from ups.runs.stage_cache import Receipt
from ups.solvers import SIMULATED_FAMILIES

SPLIT = SplitConfig(seed=0, valid_fraction=0.25, test_fraction=0.25)


def described(root: Path, fill_to: int, subsample: SubsampleConfig = WHOLE, *, below: int | None = None) -> Receipt:
    """The receipt of the datasets in `root/given`, whose training splits below `fill_to`, or `below`, are filled up."""
    fill_below = fill_to if below is None else below
    raw, config = root / "given", SimulateConfig(seed=0, fill_below=fill_below, fill_to=fill_to, datasets=[])
    return describe_datasets({}, {}, list_folder("folder", raw, root), SPLIT, subsample, config, raw, root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root, with three trajectories of shallow water in a folder of their own."""
    (tmp_path / "given").mkdir()
    write(tmp_path / "given", "shallow_water_2d", num_trajectories=3)
    return tmp_path


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_only_the_training_split_gets_trajectories(family: str, tmp_path: Path):
    """It has as many as asked for, which are those that the solver makes; the given ones stay where they were."""
    (tmp_path / "given").mkdir()
    path = write(tmp_path / "given", family, num_trajectories=3)
    before, after = described(tmp_path, 0), described(tmp_path, 6)
    (name,) = after["datasets"]
    assert {kind: after["splits"][name][kind] for kind in ("valid", "test")} == {
        kind: before["splits"][name][kind] for kind in ("valid", "test")
    }
    added = after["splits"][name]["train"][len(before["splits"][name]["train"]) :]
    assert len(after["splits"][name]["train"]) == 6 and added == list(range(3, 3 + len(added)))
    (recipe,) = recipes_like(tmp_path / "given", _datasets(before), before["splits"], 6, 6, 0).values()
    simulate(tmp_path / path.name, **recipe)
    (alone,) = find_datasets(tmp_path, [path.name]).values()
    with (
        TrajectoryReader(tmp_path / "given", _datasets(after)[name]) as reader,
        TrajectoryReader(tmp_path, alone) as expected,
    ):
        # A second file of four begins with the fifth trajectory: only the first ones are in the file made here.
        for number, index in enumerate(added[: alone.num_trajectories]):
            np.testing.assert_array_equal(reader.read(index), expected.read(number))
            np.testing.assert_array_equal(reader.read_coefficients(index), expected.read_coefficients(number))


def _datasets(receipt: Receipt) -> dict[str, Dataset]:
    return {name: Dataset.from_json(entry) for name, entry in receipt["datasets"].items()}


def test_added_trajectories_are_not_the_given_ones(root: Path):
    """The given file was simulated with the same seed: the same initial states would be in training and test."""
    receipt = described(root, 8)
    ((name, dataset),) = _datasets(receipt).items()
    with TrajectoryReader(root / "given", dataset) as reader:
        starts = [reader.read(index, 0, 1) for index in range(dataset.num_trajectories)]
    assert len({start.tobytes() for start in starts}) == len(starts) == 2 + 8
    assert len(receipt["splits"][name]["train"]) == 8


def test_a_split_of_enough_given_trajectories_is_left_alone(root: Path):
    """It has one trajectory: with a bound of one it keeps that alone, with a bound of two it is filled up to four."""
    receipts = [described(root, 4, below=below) for below in (0, 1, 2)]
    assert [len(split["train"]) for receipt in receipts for split in receipt["splits"].values()] == [1, 1, 4]
    with pytest.raises(ValueError, match="fill_to is 4, below fill_below, which is 5"):
        described(root, 4, below=5)


def test_what_is_filled_up_is_another_receipt(root: Path):
    """Later steps see that the training split is another; a split that is large enough changes nothing."""
    assert described(root, 1) == described(root, 0)
    receipts = [described(root, fill_to) for fill_to in (0, 4, 5)]
    assert len({receipt["fingerprint"] for receipt in receipts}) == 3
    assert len(receipts[1]["sources"]) == 2


def test_added_trajectories_are_not_scored(root: Path):
    """The test trajectories are the same with and without them, and for a copy of the given file elsewhere."""
    without, filled = described(root, 0), described(root, 8)
    ((name, dataset),) = _datasets(filled).items()
    write_json(root / "04_feature/datasets.json", filled)
    own = Described.below(root).test_trajectories(name)
    assert trajectories_digest(own) == trajectories_digest(_scored(without, name)) and len(own["files"]) == 1
    with TrajectoryReader(root / "given", dataset) as reader:
        u = np.stack([reader.read(index) for index in filled["splits"][name]["test"]])
    np.savez(root / "predictions.npz", h=u[:, :, 0])
    copy = shutil.copy(root / "given" / dataset.files[0], root)
    asked = {"family": None, "method": None, "compute": COMPUTE, "seed": 0, "test_split_of": root}
    scores = score_predictions(root / "predictions.npz", Path(copy), **asked)
    assert trajectories_digest(scores["trajectories"]) == trajectories_digest(own)


def _scored(receipt: Receipt, name: str) -> dict[str, Any]:
    md5 = {file: entry["md5"] for file, entry in receipt["sources"].items()}
    return scored_trajectories(receipt["datasets"][name], md5, receipt["splits"][name]["test"])


def test_trajectories_are_simulated_once(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The second run finds their file; a run that finds none simulates it again."""
    first = described(root, 4)
    (path,) = (root / "01_raw" / "supplement").rglob("*.h5")
    stamp = path.stat().st_mtime_ns
    assert described(root, 4) == first and path.stat().st_mtime_ns == stamp
    path.unlink()
    assert described(root, 4) == first and path.is_file()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "heat_2d"}, "there is no solver for heat_2d"),
        ({"grid": (8, 16)}, "its grid 8 x 16 has different numbers of points"),
        ({"lengths": (5.0, 4.0)}, "PDEBench's has 5"),
        ({"times": (0.0, 0.1, 0.3)}, "its times are not 0, dt, 2 dt, ...: 0, 0.1, 0.3, ..."),
        ({"times": (0.1, 0.2, 0.3)}, "its times are not 0, dt, 2 dt, ...: 0.1, 0.2, 0.3, ..."),
        ({"boundary": ("outflow", "periodic")}, "different boundary conditions: outflow, periodic"),
        ({"subsample": Subsample(every_point=2)}, "only a part of its points or snapshots is used"),
    ],
)
def test_other_problems_than_those_of_the_solvers_are_left_alone(
    root: Path, changes: dict, reason: str, caplog: pytest.LogCaptureFixture
):
    """The log says what is different."""
    receipt = described(root, 0)
    ((name, dataset),) = _datasets(receipt).items()
    changed = {name: replace(dataset, **changes)}
    with caplog.at_level(logging.WARNING, module.__name__):
        assert recipes_like(root / "given", changed, receipt["splits"], 8, 8, 0) == {}
    assert reason in caplog.text


def test_the_solver_must_follow_a_given_trajectory(root: Path, caplog: pytest.LogCaptureFixture):
    """Its misfit is 0 for trajectories of its own, and 1 if it leaves a state that changes as it is."""
    path = write(root / "given", "advection_1d", num_trajectories=3)
    dataset = find_datasets(root / "given", [path.name])[path.stem]
    still = replace(dataset, parameters={"beta": 0.0})
    assert module.misfit(root / "given", dataset, 1) < 1e-6
    assert module.misfit(root / "given", still, 1) == pytest.approx(1.0)
    with caplog.at_level(logging.WARNING, module.__name__):
        assert recipes_like(root / "given", {path.stem: still}, {path.stem: {"train": [1]}}, 8, 8, 0) == {}
    assert "the solver's error on its trajectory 1 is 100.0% of the change there, above 2%" in caplog.text


def test_the_first_trajectories_of_a_file_can_be_filled_up(root: Path):
    """A limit on the given trajectories is no other grid and no other times."""
    few = SubsampleConfig(default=WHOLE.default.model_copy(update={"first_trajectories": 3}))
    (split,) = described(root, 6, few)["splits"].values()
    assert len(split["train"]) == 6


def test_the_kind_of_initial_states_and_the_boundary_follow_from_the_name(tmp_path: Path):
    """Turbulence is continued with turbulence, outflow with outflow."""
    path = write(tmp_path, "compressible_ns_2d", start="Turb", boundary="outflow", duration=0.01)
    turbulent = path.rename(tmp_path / path.name.replace("Rand", "Turb").replace("periodic", "trans"))
    (dataset,) = find_datasets(tmp_path, [turbulent.name]).values()
    recipe = recipes_like(tmp_path, {dataset.name: dataset}, {dataset.name: {"train": [0]}}, 2, 2, 3)[dataset.name]
    assert (recipe["start"], recipe["boundary"], recipe["seed"]) == ("Turb", "outflow", 3 + SEED_OFFSET)


def test_files_on_s3_are_not_filled_up(root: Path):
    """The fault says what to set instead."""
    with pytest.raises(ConfigFault, match=r"simulate\.fill_below needs files on disk"):
        recipes_like(Path("s3://bucket/raw"), {}, {}, 8, 8, 0)


def test_trajectories_of_another_grid_are_refused(root: Path):
    """A solver that writes another grid than the dataset has is a fault before anything is trained."""
    receipt = described(root, 0)
    recipes = recipes_like(root / "given", _datasets(receipt), receipt["splits"], 4, 4, 0)
    ((name, recipe),) = recipes.items()
    with pytest.raises(DataFault, match=f"do not continue {name}"):
        fill_up(receipt, root / "given", root / "more", {name: recipe | {"resolution": 16}}, "", lambda _: None)
