"""How long a training step takes on average, where some take longer than others and come less often."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.jobs import section
from tests.training.toys import ranks, toy_run, toy_stage
from ups.training.pace import SHARES, Contender


def test_keys_count_as_often_as_they_are_drawn():
    """One step of three is of the slow key: (2 * 1 s + 1 * 4 s) / 3, in whatever order keys first come."""
    contender = object.__new__(Contender)
    keys = {3: "slow", 5: "fast"}
    sampler = SimpleNamespace(keys=["fast", "slow"], probabilities=[2 / 3, 1 / 3], draw=lambda step: (keys[step], None))
    contender.steps, contender.batches = list(keys) * len(SHARES), SimpleNamespace(sampler=sampler)
    assert contender.expected([4.0, 1.0] * len(SHARES)) == pytest.approx(2.0)


def test_steps_count_as_they_are_throughout_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps that take 1 s in the first half of the training and 3 s in the second take 2 s."""
    monkeypatch.setattr(Contender, "_seconds_of", lambda self, step, repeats: 1.0 if step < 800 else 3.0)
    contender = Contender(toy_stage(), section(steps=1600), toy_run(tmp_path), ranks())
    assert contender.expected(contender.seconds(1)) == pytest.approx(2.0)
