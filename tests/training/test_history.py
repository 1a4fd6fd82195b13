"""What a run records, when patience ends it, and how its records move to another number of ranks."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.jobs import section
from tests.training.toys import CPU, ranks, toy_batches, toy_update
from ups.errors import Diverged, OutOfMemory
from ups.training.distributed import Ranks
from ups.training.history import StepTimer, TrainingHistory
from ups.training.update import StepResult


def history() -> TrainingHistory:
    """A run that has not begun."""
    return TrainingHistory("operator", CPU)


def outcome(loss: float | None, taken: float = 1.0) -> StepResult:
    """A step with this loss; None: no memory."""
    values = (None, None) if loss is None else (torch.tensor(loss), torch.tensor(taken))
    return StepResult(*values, stop=False, save=False)


@pytest.mark.parametrize(
    ("losses", "is_exhausted"),
    [([], False), ([1.0, 2.0], False), ([1.0, 2.0, 2.0], True), ([3.0, 2.0, 1.0], False), ([1.0, 0.5, 2.0, 0.5], True)],
)
def test_patience(losses: list[float], is_exhausted: bool):
    """Training is over when the best validation is as many validations old as patience allows, and never without."""
    run = history()
    run.validations = [{"a": loss} for loss in losses]
    assert run.is_exhausted(2) == is_exhausted
    assert not run.is_exhausted(None)


def test_best_weights_are_kept_with_patience(tmp_path: Path):
    """With patience the weights of the best validation are kept, not those of a later one."""
    run, update = history(), toy_update(tmp_path, section())
    run.add_validation({"a": 1.0}, update, keep_best=True)
    best = {name: value.clone() for name, value in run.best.items()}
    for parameter in update.average.parameters():
        parameter.zero_()
    run.add_validation({"a": 2.0}, update, keep_best=True)
    assert all(torch.equal(run.best[name], value) for name, value in best.items())


def test_steps_that_count_in_no_mean(tmp_path: Path):
    """The mean loss is that of the steps that were taken; the others are counted as skipped."""
    run, update, batches = history(), toy_update(tmp_path, section()), toy_batches(tmp_path)
    steps = [outcome(1.0), outcome(None), outcome(0.0, taken=0.0), outcome(3.0)]
    for step, result in enumerate(steps):
        run.add(result, batches.read(step))
    update.num_skipped += 1
    metrics = run.metrics(update, section(), ranks())
    assert (metrics["loss"], metrics["skipped_steps"], run.step) == (2.0, 2.0, 4)


def test_samples_of_steps_without_memory_are_not_seen(tmp_path: Path):
    """Those of a step that an unusable gradient skips are: the host does not wait to learn of it."""
    run, batches = history(), toy_batches(tmp_path)
    taken, skipped = batches.read(0), batches.read(1)
    run.add(outcome(1.0), taken)
    run.add(outcome(None), skipped)
    assert run.seen == taken.seen
    run.add(outcome(0.0, taken=0.0), skipped)
    assert run.seen == taken.seen + skipped.seen


def test_too_many_steps_without_memory_end_the_run(tmp_path: Path):
    """Three steps may be skipped for want of memory; the fourth is told with its tokens and the remedy."""
    run, share = history(), toy_batches(tmp_path).read(0)
    for _ in range(3):
        run.add(outcome(None), share)
    told = rf"4 steps did not fit .* {share.tokens} tokens of {share.key}; set launch.micro_batch_tokens"
    with pytest.raises(OutOfMemory, match=told) as caught:
        run.add(outcome(None), share)
    assert caught.value.tokens == share.tokens


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_validation_that_is_not_finite_ends_the_run(tmp_path: Path, loss: float):
    """A validation loss of NaN or infinity is told with step and remedy."""
    with pytest.raises(Diverged, match=r"validation loss \w+ at step 0; lower operator.learning_rate"):
        history().add_validation({"a": loss}, toy_update(tmp_path, section()), keep_best=False)


def test_a_baseline_that_diverges_names_its_own_parameter(tmp_path: Path):
    """The learning rate of baselines is that of the section `baselines`."""
    update = toy_update(tmp_path, section())
    with pytest.raises(Diverged, match=r"lower baselines.learning_rate"):
        TrainingHistory("baseline", CPU).add_validation({"a": math.nan}, update, keep_best=False)


def saved(owners: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint of so many ranks holds."""
    common = {"step": 8, "num_skipped_for_memory": 1, "validations": [{"a": 0.5}], "best": None, "num_losses": 2.0}
    return common | {"ranks": owners}


OWNERS = [{"loss_sum": 1.0, "seen": {"a": 3}}, {"loss_sum": 2.0, "seen": {"a": 1, "b": 2}}]


def restored(owners: list[dict[str, Any]], world_size: int) -> list[TrainingHistory]:
    """The history of every rank that goes on from a checkpoint of `owners`."""
    members = []
    for rank in range(world_size):
        member = history()
        member.restore(saved(owners), Ranks(rank, world_size, CPU))
        members.append(member)
    return members


def test_each_rank_gets_back_its_own():
    """On as many ranks as before each goes on with its own loss and counts."""
    members = restored(OWNERS, 2)
    assert [float(member.loss_sum) for member in members] == [1.0, 2.0]
    assert [member.seen for member in members] == [Counter(owner["seen"]) for owner in OWNERS]
    assert {(member.step, float(member.num_losses)) for member in members} == {(8, 2.0)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_is_lost_or_doubled_on_other_numbers_of_ranks(world_size: int):
    """The sums over all ranks are the same whatever the number of ranks that go on."""
    members = restored(OWNERS, world_size)
    assert sum(float(member.loss_sum) for member in members) == 3.0
    assert sum((member.seen for member in members), Counter()) == Counter(a=4, b=2)


def test_state_of_one_rank_is_restored():
    """What `state` returns is what `restore` goes on from."""
    (member,) = restored(OWNERS[1:], 1)
    assert member.state(ranks()) == saved(OWNERS[1:])


def test_timer_asks_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    """A checkpoint is due so many minutes after the last one."""
    times = iter([100.0, 219.0, 221.0, 222.0, 223.0])
    monkeypatch.setattr("ups.training.history.time.monotonic", lambda: next(times))
    timer = StepTimer(2.0, CPU, peak_rate=1.0)
    due = [timer.save_is_due(), timer.save_is_due()]
    timer.saved()
    assert [*due, timer.save_is_due()] == [False, True, False]


def test_utilization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Operations are those of this rank's half of the batch; utilization is their rate over the given peak."""
    update, share = toy_update(tmp_path, section()), toy_batches(tmp_path).read(0)
    clock = [0.0]
    monkeypatch.setattr("ups.training.history.now", lambda device: clock[0])
    timer = StepTimer(2.0, CPU, peak_rate=1000.0)
    for seconds in (30.0, 2.0, 2.0):  # the first step is left out
        timer.count(timer.wait_for(lambda: share), update, world_size=2)
        clock[0] += seconds
    metrics = timer.metrics()
    assert metrics["flops_per_second"] == update.flops_per_sample(share) * share.size / 4.0
    assert metrics["flops_utilization"] == metrics["flops_per_second"] / 1000.0
    assert 0.1 < metrics["peak_memory_gigabytes"] < 100.0
    assert timer.flops == 0.0


@pytest.mark.parametrize(("num_steps", "rate", "cores"), [(1, 1 / 50.0, 0.9), (4, 1 / 2.0, 0.5)])
def test_a_first_step_is_left_out(num_steps: int, rate: float, cores: float, monkeypatch: pytest.MonkeyPatch):
    """The first takes 50 seconds, of which 45 of the CPU, others 2 and 1; where it is the only one it is counted."""
    clock = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr("ups.training.history.now", lambda device: clock["wall"])
    monkeypatch.setattr("ups.training.history.time.process_time", lambda: clock["cpu"])
    update = SimpleNamespace(stage=SimpleNamespace(phase=None), flops_per_sample=lambda share: 8.0)
    timer, share = StepTimer(2.0, CPU, peak_rate=1.0), SimpleNamespace(key="family", step=0, size=3)
    for step in range(num_steps):
        timer.count(timer.wait_for(lambda: share), update, world_size=1)
        clock["wall"] += 2.0 if step else 50.0
        clock["cpu"] += 1.0 if step else 45.0
    metrics = timer.metrics()
    assert metrics["steps_per_second"] == rate
    assert metrics["cpu_cores"] == cores
    assert metrics["flops_per_second"] == rate * 24.0


def test_a_first_step_before_a_restart_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A validation between a first step and the next line ends its time."""
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("ups.training.history.now", lambda device: next(clock))
    update = SimpleNamespace(stage=SimpleNamespace(phase=None), flops_per_sample=lambda share: 8.0)
    timer, share = StepTimer(2.0, CPU, peak_rate=1.0), SimpleNamespace(key="family", step=0, size=3)
    timer.count(share, update, world_size=1)
    timer.restart()
    timer.wait_for(lambda: share)
    assert not timer.left_out.any()


def test_energy_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch):
    """What a GPU used before does not count, and what it used before the last line does; a CPU has no such line."""
    assert "energy_kilojoules" not in StepTimer(2.0, CPU, peak_rate=1.0).metrics()
    counter = iter([40.0, 42.0, 45.0])
    monkeypatch.setattr("ups.training.history.energy_kilojoules", lambda device: next(counter))
    timer = StepTimer(2.0, CPU, peak_rate=1.0)
    assert [timer.metrics()["energy_kilojoules"] for _ in range(2)] == [2.0, 5.0]


@pytest.mark.parametrize(("num_skipped", "goes_on"), [(2, True), (3, False)])
def test_as_many_steps_may_be_skipped_as_are_allowed(num_skipped: int, goes_on: bool, tmp_path: Path):
    """With at most two skipped steps two are reported, and the third ends the training."""
    config, run = section(max_skipped_steps=2), history()
    update = toy_update(tmp_path, config)
    update.num_skipped.fill_(num_skipped)
    run.add(outcome(1.0), toy_batches(tmp_path).read(0))
    if goes_on:
        assert run.metrics(update, config, ranks())["skipped_steps"] == num_skipped
    else:
        with pytest.raises(Diverged, match="unusable gradients"):
            run.metrics(update, config, ranks())
