"""How long a training step takes on average, where steps of some keys take longer and come less often."""

from types import SimpleNamespace

import pytest

from ups.training.pace import Contender


def test_keys_count_as_often_as_they_are_drawn():
    """One step of three is of the slow key: (2 * 1 s + 1 * 4 s) / 3, in whatever order keys first come."""
    contender = object.__new__(Contender)
    keys = {3: "slow", 5: "fast"}
    sampler = SimpleNamespace(keys=["fast", "slow"], probabilities=[2 / 3, 1 / 3], draw=lambda step: (keys[step], None))
    contender.steps, contender.batches = list(keys), SimpleNamespace(sampler=sampler)
    assert contender.expected([4.0, 1.0]) == pytest.approx(2.0)
