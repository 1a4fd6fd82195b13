import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from tests.training.jobs import PROJECT, lines_of, section
from tests.training.toys import CPU, toy_run, toy_stage
from ups.files import WEIGHTS, write_json
from ups.models.weights import load
from ups.training import loop, parallel
from ups.training.distributed import Ranks
from ups.training.stage import Stage

L = pytest.importorskip("lightning")
from ups.training.lightning import StageData, StageModule, trainer_options  # noqa: E402

STEPS = 20
CONFIG = section(steps=STEPS, clip_norm=0.2, validate_every=10, log_every=5)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def weights(folder: Path) -> dict[str, Tensor]:
    """The averaged weights that a training wrote."""
    return load(folder / WEIGHTS)["weights"]


def same(found: Path, expected: Path) -> bool:
    """Whether two trainings wrote the same weights, bit for bit."""
    one, other = weights(found), weights(expected)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loop_on_rank(rank: int, world_size: int, folder: Path, how: str = "ddp") -> None:
    """Train the toy in the loop, as one of several ranks; `how`: `launch.sharding`, or `torch` for torch's own DDP."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    group = dist.group.WORLD if world_size > 1 else None
    stage = toy_stage()
    if how == "torch":
        stage, how = exchanged_by_torch(stage), "ddp"
        parallel.gradient_sync = lambda *_: nullcontext()
    loop.train(stage, CONFIG, toy_run(folder, sharding=how), Ranks(rank, world_size, CPU, group))


def exchanged_by_torch(stage: Stage) -> Stage:
    """The stage with gradients of its model that torch's DistributedDataParallel averages in every backward pass."""
    spread = nn.parallel.DistributedDataParallel(stage.model)
    return replace(stage, loss=lambda model, *rest: stage.loss(spread if model is stage.model else model, *rest))


def fit(module: StageModule, **options: Any) -> Any:
    """Train with Lightning; returns the Trainer."""
    path = options.pop("ckpt_path", None)
    trainer = L.Trainer(**trainer_options(module.config) | {"enable_checkpointing": False} | QUIET | options)
    trainer.fit(module, StageData(module), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_those_of_the_loop(tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch):
    """After 20 steps, clipped or skipped, Lightning has the weights of the loop on as many ranks, bit for bit."""
    monkeypatch.setenv("UPS_TESTING", "1")
    monkeypatch.setenv("UPS_FAULT", "nan:rank0:step5")
    folders = tmp_path / "loop", tmp_path / "lightning"
    folders[0].mkdir()
    multiprocessing.spawn(loop_on_rank, (world_size, folders[0]), world_size)
    several = {"strategy": "ddp_spawn"} if world_size > 1 else {}
    fit(StageModule(toy_stage(), CONFIG, toy_run(folders[1])), devices=world_size, **several)
    assert same(folders[1], folders[0])


def test_all_ways_to_train_have_the_same_weights(tmp_path: Path):
    """One rank, two, torch's own DDP, shards on two ranks and Lightning are within 1e-5 after 20 steps."""
    for name, ranks, how in [("one", 1, "ddp"), ("two", 2, "ddp"), ("torch", 2, "torch"), ("shards", 2, "fsdp")]:
        (tmp_path / name).mkdir()
        multiprocessing.spawn(loop_on_rank, (ranks, tmp_path / name, how), ranks)
    fit(StageModule(toy_stage(), CONFIG, toy_run(tmp_path / "lightning")))
    one, start = weights(tmp_path / "one"), toy_stage().model.state_dict()
    for name in ("two", "torch", "shards", "lightning"):
        other = weights(tmp_path / name)
        assert max((other[key] - one[key]).abs().max() for key in one) < 1e-5, name
    assert min((one[key] - start[key]).abs().max() for key in one) > 1e-2


def test_a_stage_of_a_run_folder(undisturbed: Callable[[int], Path], tmp_path: Path):
    """A stage rebuilt from a run folder is trained to its weights, and logs its losses."""
    logged: list[float] = []

    class Losses(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, module: StageModule) -> None:
            logged.append(float(trainer.callback_metrics["valid_loss"]))

    fit(StageModule.of_run(undisturbed(1), tmp_path), callbacks=[Losses()])
    assert same(tmp_path, undisturbed(1))
    expected = [line["valid_loss"] for line in lines_of(undisturbed(1)) if "valid_loss" in line]
    assert logged == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_of_lightning_resumes_exactly(tmp_path: Path):
    """Training that is resumed from a checkpoint of step 10 ends with the weights of one that was not interrupted."""
    whole, first, rest = (StageModule(toy_stage(), CONFIG, toy_run(tmp_path / name)) for name in ("a", "b", "c"))
    fit(whole)
    stopped = fit(first, max_steps=STEPS // 2, enable_checkpointing=True, default_root_dir=tmp_path)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(rest, ckpt_path=tmp_path / "half.ckpt")
    assert (stopped.global_step, resumed.global_step) == (STEPS // 2, STEPS)
    assert same(tmp_path / "c", tmp_path / "a") and not same(tmp_path / "b", tmp_path / "a")


def test_training_ends_with_patience(tmp_path: Path):
    """Weights that no longer improve end the training after `patience` validations, as in the loop."""
    config = section(steps=STEPS, learning_rate=1e-30, validate_every=2, patience=2)
    stage = replace(toy_stage(), loss=lambda model, batch, draw: model(batch.x).square().mean(1))
    assert fit(StageModule(stage, config, toy_run(tmp_path))).global_step == 6


def test_the_page_has_a_program_that_runs(
    undisturbed: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The program on the page about GPUs trains the operator of a data root to the weights of the loop."""
    trained = undisturbed(1)
    root = trained.parents[2]
    write_json(root / "06_models/operator.json", {"path": str(trained.relative_to(root))})
    (tmp_path / "data").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (PROJECT / "notebooks/gpus.md").read_text(), re.DOTALL)
    known: dict[str, Any] = {}
    exec(program, known)
    assert same(tmp_path / "lightning/operator", trained)
    assert known["trainer"].checkpoint_callback.best_model_score < math.inf
