import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backbones import SMALL
from tests.training.jobs import (
    assert_same_training,
    at_most,
    folder_of,
    inputs_of,
    launched,
    lines_of,
    losses,
    noisy,
    section,
    status_of,
    train,
)
from tests.training.toys import CPU, ranks, toy_run, toy_stage
from ups.config.training import TrainingSection
from ups.data.samples import LatentBatch, LatentSamples
from ups.errors import Diverged
from ups.files import WEIGHTS, digest_of, read_json
from ups.models.weights import load
from ups.runs.run import Run
from ups.training import loop
from ups.training.distributed import Ranks
from ups.training.parallel import full_state
from ups.training.stage import Stage
from ups.training.stages import operator


def test_latents_are_keyed_by_the_raw_files(encoded: Path):
    """The key of the latents has the MD5 sum of every raw file they were made from."""
    sources = inputs_of(encoded)["latent_cache"]["key"]["source files"]
    assert sources == {path.name: digest_of(path, "md5") for path in (encoded / "01_raw").glob("*.hdf5")}


def test_two_ranks_learn_what_one_learns(undisturbed: Callable[[int], Path]):
    """On two ranks the losses are those of one rank to four digits, and so are the weights."""
    one, two = undisturbed(1), undisturbed(2)
    for kind in ("loss", "valid_loss"):
        expected, found = ([line[kind] for line in lines_of(folder) if kind in line] for folder in (one, two))
        assert found == pytest.approx(expected, rel=1e-4)
    weights_of_two = load(two / "weights.pt")["weights"]
    for name, expected in load(one / "weights.pt")["weights"].items():
        torch.testing.assert_close(weights_of_two[name], expected, rtol=1e-3, atol=1e-4)


def test_validation_scores_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last validation is of the averaged weights, which are written, and not of those of the optimizer."""
    scored = []
    monkeypatch.setattr(loop, "validate", lambda stage, model, *_: scored.append(full_state(model)) or {"key": 1.0})
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    config = section(steps=4, validate_every=4, ema_decay=0.9)
    run = toy_run(tmp_path)
    run.write()
    loop.train(toy_stage(), config, run, ranks())
    saved = load(tmp_path / WEIGHTS)["weights"]
    assert len(scored) == 1 and all(torch.equal(scored[0][name], weight) for name, weight in saved.items())


@pytest.mark.slow
def test_options_of_the_backbone_know_no_ranks(root: Path):
    """With attention in windows, a U shape and skipped blocks two ranks learn what one learns."""
    choices = {"mixing": "attention", "window": 4, "levels": 2, "num_layers": 3, "drop_path": 0.3}
    found = []
    for num_processes in (1, 2):
        launch = {"num_processes": num_processes, "force": True}
        folder = train(root, launch=launch, model=SMALL | choices | {"hidden_channels": (16, 16, 16)})
        found.append([line["loss"] for line in lines_of(folder) if "loss" in line])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_every_rank_sees_its_share(undisturbed: Callable[[int], Path]):
    """Two ranks have seen as many samples each, together those of one rank, dataset by dataset."""
    (alone,), both = (read_json(undisturbed(n) / "sampling.json")["samples_per_rank"] for n in (1, 2))
    assert sum(both[0].values()) == sum(both[1].values())
    assert {name: sum(rank.get(name, 0) for rank in both) for name in alone} == alone


def test_a_finished_run_says_so(undisturbed: Callable[[int], Path]):
    """A run that met nothing is finished, with weights, their manifest, its metrics, and no checkpoint left."""
    folder = undisturbed(2)
    status = read_json(folder / "status.json")
    assert (status["state"], status["code"], status["restarts"], status["checkpoints"]) == ("finished", 0, [], [])
    assert read_json(folder / "weights.pt.json")["sha256"] == digest_of(folder / "weights.pt")
    assert [step for step, _ in losses(folder)] == list(range(1, 25))


def test_a_killed_rank_changes_nothing(root: Path, undisturbed: Callable[[int], Path], inject: Callable[[str], None]):
    """A job that loses a rank is started again by itself and ends with the losses and weights of an undisturbed one."""
    inject("sigkill:rank1:step10")
    assert_same_training(train(root), undisturbed(2))
    assert len(status_of(root)["restarts"]) == 1


def test_a_finished_stage_is_not_trained_again(root: Path, undisturbed: Callable[[int], Path]):
    """The second call finds the stage up to date, whatever the number of processes."""
    folder = train(root, launch={"num_processes": 1})
    before = (folder / "weights.pt").stat().st_mtime_ns
    assert train(root) == folder_of(root)
    assert (folder / "weights.pt").stat().st_mtime_ns == before


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Iterator[Run]:
    """The run of an operator that is trained in this process, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with at_most(90):
        yield Run(tmp_path, "operator", "", {}, inputs_of(root), launched(checkpoint_steps=1000), "cpu", root)
    torch.set_num_threads(num_threads)


def train_here(stage: Stage, config: TrainingSection, run: Run) -> None:
    """Train in this process."""
    loop.train(stage, config, run, Ranks(0, 1, torch.device("cpu")))


def test_operator_overfits_four_trajectories(run: Run):
    """On four trajectories, without noise, a few hundred steps make the loss five times smaller."""
    config = section(
        steps=300, noise=noisy(0.0), learning_rate=0.01, weight_decay=0.0, log_every=20, validate_every=300
    )
    torch.manual_seed(0)
    stage = operator.build(config, run)
    train_here(replace(stage, train=_first_four(stage.train)), config, run)
    first, *_, last = (line["loss"] for line in lines_of(run.folder) if "loss" in line)
    assert last < first / 5


def _first_four(samples: LatentSamples) -> LatentSamples:
    for entry in samples.cache.datasets.values():
        entry["split"]["train"] = entry["split"]["train"][:2]
    return LatentSamples(samples.cache, "train")


def test_training_ends_early(run: Run, monkeypatch: pytest.MonkeyPatch):
    """When validation has not improved for `patience` validations training ends, with weights."""
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(loop, "validate", lambda stage, *_: dict.fromkeys(stage.train.families, next(values)))
    config = section(steps=100, validate_every=4, patience=2)
    train_here(operator.build(config, run), config, run)
    assert lines_of(run.folder)[-1]["step"] == 16
    assert (run.folder / "weights.pt").is_file()


def test_validations_have_the_same_noise(tmp_path: Path):
    """Noise of validation follows from the seed and the family, so that losses of different steps can be compared."""
    stage = replace(toy_stage(), loss=lambda model, batch, draw: draw.normal())
    run, first, second = toy_run(tmp_path), section(seed=0), section(seed=1)
    losses = [loop.validate(stage, stage.model, config, run, ranks()) for config in (first, first, second)]
    assert losses[0] == losses[1] and len({*losses[0].values(), *losses[2].values()}) == 2 * len(losses[0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_validation_by_parts_is_that_of_the_whole(tmp_path: Path, world_size: int):
    """With memory for one sample at a time every rank has the same losses, in as many forward passes as any other."""

    class Silent(Ranks):
        def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
            return value

    def losses(rank: int, gigabytes: float) -> tuple[dict[str, float], int]:
        calls: list[int] = []
        stage = toy_stage()
        own = replace(stage, loss=lambda *asked: calls.append(1) or stage.loss(*asked))
        run = toy_run(tmp_path, memory_gigabytes=gigabytes, num_processes=1)
        return loop.validate(own, own.model, section(), run, Silent(rank, world_size, CPU)), len(calls)

    found = [(losses(rank, 1.0), losses(rank, 2e-6)) for rank in range(world_size)]
    assert all(whole[0] == pytest.approx(parts[0], rel=1e-5) for whole, parts in found)
    assert {whole[1] for whole, _ in found} == {3} and len({parts[1] for _, parts in found}) == 1
    assert found[0][1][1] > 3


def test_a_model_knows_its_last_validation_error(run: Run):
    """Model and weights keep the losses with which they were validated last: the result is what was validated."""
    config = section(steps=8, validate_every=4)
    stage = operator.build(config, run)
    train_here(stage, config, run)
    before = next(line for line in lines_of(run.folder) if "valid_loss" in line)
    expected = torch.tensor([before.get(f"valid_loss/{family}", 0.0) for family in stage.settings["sizes"]["families"]])
    assert expected.count_nonzero() == len(stage.valid.families)
    for error in (
        stage.model.statistics.validation_error,
        load(run.folder / "weights.pt")["weights"]["statistics.validation_error"],
    ):
        assert torch.equal(error, expected)


def test_latents_that_are_not_finite_end_the_training(run: Run):
    """NaN in the latents ends the training once more steps were skipped than may be, and no weights are written."""

    class Spoilt(LatentSamples):
        def load(self, *place: Any) -> LatentBatch:
            batch = super().load(*place)
            return replace(batch, z=batch.z * torch.nan)

    stage = operator.build(section(log_every=10), run)
    spoilt = Spoilt(stage.train.cache, "train")
    with pytest.raises(Diverged, match="at step 10, unusable gradients since step 0; lower"):
        train_here(replace(stage, train=spoilt), section(log_every=10), run)
    assert not (run.folder / "weights.pt").exists()


def test_a_run_folder_says_what_it_was_made_from(undisturbed: Callable[[int], Path]):
    """`run.json` has stage, section, inputs and places relative to the folder."""
    content = json.loads((undisturbed(1) / "run.json").read_text())
    assert (content["stage"], content["config"]) == ("operator", section().model_dump(mode="json"))
    assert content["data_root"] == "../../.." and content["raw"] is None
    assert content["inputs"].keys() == {"latent_cache"}
