"""Autoregressive prediction."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from ups.surrogate.surrogate import rollout, rollout_steps


def test_rollout_applies_the_step_to_its_own_output():
    """Prediction k is the step applied k times to the initial condition."""
    u_0 = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    u = rollout(lambda u: 2 * u + 1, u_0, num_steps=3)
    expected = torch.stack([2**k * u_0 + 2**k - 1 for k in range(1, 4)], 1)
    assert torch.equal(u, expected)


@pytest.mark.parametrize("shape", [(2, 1, 8), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
def test_time_is_the_second_axis(shape: tuple[int, ...]):
    """A rollout of states (B, ...) is (B, num_steps, ...), without the initial condition."""
    u_0 = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u = rollout(lambda u: u.roll(1, -1), u_0, num_steps=4)
    assert u.shape == (shape[0], 4, *shape[1:])
    assert torch.equal(u[:, 0], u_0.roll(1, -1))
    assert torch.equal(u[:, 3], u_0.roll(4, -1))


def test_rollout_evaluates_one_step_per_snapshot():
    """`num_steps` predictions cost as many calls."""
    calls = []
    rollout(lambda u: calls.append(1) or u, torch.ones(1, 1), num_steps=5)
    assert len(calls) == 5


def test_steps_are_made_one_after_the_other():
    """A rollout without end makes no step before it is asked for, and none twice."""
    calls = []

    def step(u: Tensor) -> Tensor:
        calls.append(u)
        return u + 1

    states = rollout_steps(step, torch.zeros(2))
    assert not calls
    assert [u[0].item() for u in islice(states, 3)] == [1.0, 2.0, 3.0] and next(states)[0] == 4.0
    assert len(calls) == 4
