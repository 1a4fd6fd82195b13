"""From some parameters to others, and from all families to one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.conftest import write_file
from tests.evaluation.test_external import CORRECTOR, LAUNCH, config, score, stages, value
from tests.training.jobs import launched, section
from tests.untrained import make_root, make_stage, receipt
from ups.data.simulate import simulate
from ups.files import WEIGHTS, digest_of, write_json
from ups.pipelines.evaluation import evaluate
from ups.pipelines.studies import score_finetuned
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


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with an operator of two families, and one that went on with the first."""
    root = tmp_path_factory.mktemp("finetuned")
    write_advection(root / "01_raw", 0.1, 1.0, num_trajectories=5)
    write_file(root / "01_raw", "burgers_1d", grid=(16,))
    make_root(root, ("operator",))
    make_stage(root, "finetune")
    return root


def score_both(root: Path, finetuned: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of the operator and of what a receipt says it has become."""
    before = [receipt(root, name) for name in ("latent_cache", "codec", "operator")]
    return score_finetuned(*before, finetuned, section("finetune"), config(None), LAUNCH, root / "01_raw", root)


def test_the_finetuned_operator_stands_beside_what_it_was(finetuned: Path):
    """Both have every score of the family's test split; those of the operator are those of the normal evaluation."""
    records = score_both(finetuned, receipt(finetuned, "finetune"))
    cache, raw = receipt(finetuned, "latent_cache"), finetuned / "01_raw"
    given = stages(finetuned) | {"corrector": CORRECTOR}
    everything, _ = evaluate(cache, config(None), LAUNCH, raw, finetuned, **given)
    expected = [r for r in everything if (r["family"], r["method"]) == ("advection_1d", "operator")]
    keys = {(r["dataset"], r["metric"], r["horizon"]) for r in expected}
    assert [record for record in records if record["method"] == "operator"] == expected
    after = [record for record in records if record["method"] == "finetuned"]
    assert {(r["dataset"], r["metric"], r["horizon"]) for r in after} == keys
    assert [r["value"] for r in after] != [r["value"] for r in expected]
    assert len(records) == len(after) + len(expected)


def test_an_operator_that_learned_nothing_more_has_the_same_scores(finetuned: Path):
    """With the operator's own weights as the finetuned ones both methods have equal records."""
    records = score_both(finetuned, receipt(finetuned, "operator"))
    before, after = ([r for r in records if r["method"] == method] for method in ("operator", "finetuned"))
    assert [record | {"method": "operator"} for record in after] == before
