"""Expected seconds of a training step, where steps of some keys take longer and come less often."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.training.jobs import launched, section
from tests.training.toys import ranks, toy_run, toy_stage
from ups.performance import pace
from ups.performance.pace import TIMED_FRACTIONS, PaceTimer, clock_of, seconds_per_step

PAUSE = 0.1


def test_keys_count_with_their_probability():
    """One step of three is of the slow key: (2 * 1 s + 1 * 4 s) / 3, in whatever order keys first come."""
    timer = object.__new__(PaceTimer)
    keys = {3: "slow", 5: "fast"}
    sampler = SimpleNamespace(keys=["fast", "slow"], draw=lambda step: (keys[step], None))
    sampler.probabilities = lambda step: np.array([2.0, 1.0]) / 3
    timer.steps, timer.batches = list(keys) * len(TIMED_FRACTIONS), SimpleNamespace(sampler=sampler)
    assert timer.expected([4.0, 1.0] * len(TIMED_FRACTIONS)) == pytest.approx(2.0)


def test_hard_families_count_as_often_as_they_were_trained(tmp_path: Path):
    """With `max_difficulty` shares follow the validations of the training: losses over their geometric mean, 0.2."""
    config = section(steps=800, validate_every=10, max_difficulty=8.0)
    losses = {"advection_1d": 0.1, "burgers_1d": 0.1, "darcy_2d": 0.8}
    timer = PaceTimer(toy_stage(), config, 800, toy_run(tmp_path), ranks(), [losses])
    sampler = timer.batches.sampler
    shares = sampler.weights * [losses[key] / 0.2 for key in sampler.keys]
    seconds = [3.0 if sampler.draw(step)[0] == "darcy_2d" else 1.0 for step in timer.steps]
    is_darcy = [key == "darcy_2d" for key in sampler.keys]
    assert timer.expected(seconds) == pytest.approx(1 + 2 * shares[is_darcy].sum() / shares.sum())


@pytest.mark.parametrize(("device", "counts"), [("cpu", False), ("cuda", True)])
def test_waiting_counts_on_a_gpu_alone(device: str, counts: bool, tmp_path: Path):
    """While this process waits, another program has the CPU; or its own GPU works."""
    timer = PaceTimer(toy_stage(), section(), 1000, toy_run(tmp_path), ranks())
    assert timer.clock is clock_of("cpu")
    timer.clock, timer.update = clock_of(device), _wait
    assert (timer.seconds(1)[0] >= PAUSE) == counts


def _wait(*_: object, **__: object) -> SimpleNamespace:
    time.sleep(PAUSE)
    return SimpleNamespace(loss=None)


def test_steps_count_as_they_are_throughout_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps that take 1 s in the first half of the training and 3 s in the second take 2 s."""
    monkeypatch.setattr(PaceTimer, "_seconds_of", lambda self, step, repeats: 1.0 if step < 800 else 3.0)
    timer = PaceTimer(toy_stage(), section(steps=9999), 1600, toy_run(tmp_path), ranks())
    assert timer.expected(timer.seconds(1)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"compile": True}, True),
        ({"sharding": "fsdp"}, True),
        ({"exchange_precision": "bfloat16"}, True),
        ({"activation_checkpointing": True}, True),
        ({"deterministic": True}, True),
        ({"checkpoint_steps": 9}, False),
        ({"timeout_seconds": 99}, False),
    ],
)
def test_pace_is_measured_again_where_steps_change(
    changed: dict[str, Any], again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With another pace a baseline has another number of steps."""
    measured: list[str] = []
    monkeypatch.setattr(pace, "run_query", lambda worker, *_: measured.append(worker) or {"operator": 1.0})
    config = SimpleNamespace(pace_seconds=1.0, pace_rounds=1)
    stages = {"operator": {"stage": "operator", "config": section().model_dump(), "inputs": {}}}
    for launch in (launched(), launched(**changed)):
        assert seconds_per_step("pace", stages, config, launch, tmp_path)["seconds_per_step"] == {"operator": 1.0}
    assert len(measured) == 1 + again
