"""From some parameters to others."""

from dataclasses import replace
from pathlib import Path

import torch

from tests.evaluation.test_external import score, value
from tests.training.jobs import launched, section
from tests.untrained import make_root, receipt
from ups.data.simulate import simulate
from ups.files import WEIGHTS, digest_of, write_json
from ups.runs.run import Run
from ups.training import loop
from ups.training.distributed import Ranks
from ups.training.stages import operator

SIZES = {"resolution": 16, "num_snapshots": 6, "duration": 0.5, "seed": 0}


def write_advection(folder: Path, *betas: float, num_trajectories: int) -> None:
    """Simulate one file for each speed."""
    folder.mkdir(exist_ok=True)
    for beta in betas:
        path, parameters = folder / f"1D_Advection_Sols_beta{beta}.hdf5", {"beta": beta}
        simulate(path, family="advection_1d", parameters=parameters, num_trajectories=num_trajectories, **SIZES)


def train_operator(root: Path, steps: int) -> None:
    """Train the operator of a data root in this process."""
    place = root / receipt(root, "operator")["path"]
    run = replace(Run.read(place), launch=launched(checkpoint_steps=10_000))
    config = section(steps=steps, learning_rate=0.01, log_every=50, validate_every=1000)
    torch.manual_seed(0)
    loop.train(operator.build(config, run), config, run, Ranks(0, 1, torch.device("cpu")))
    write_json(root / "receipts/operator.json", receipt(root, "operator") | {"weights": digest_of(place / WEIGHTS)})


def test_an_operator_is_scored_on_parameters_it_has_not_seen(tmp_path: Path):
    """Trained on a folder with speeds 0.1 and 1.0, the operator is better than persistence on files of speed 0.4."""
    root = tmp_path / "root"
    root.mkdir()
    write_advection(root / "01_raw", 0.1, 1.0, num_trajectories=16)
    make_root(root, ("operator",))
    train_operator(root, 80)
    write_advection(tmp_path / "unseen", 0.4, num_trajectories=4)
    records = score(root, tmp_path / "unseen")
    assert {(record["dataset"], record["num_trajectories"]) for record in records} == {("1D_Advection_Sols_beta0.4", 4)}
    assert value(records, "operator") < 0.8 * value(records, "persistence")
