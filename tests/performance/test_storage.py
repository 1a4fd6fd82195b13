from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch

from ups.performance.storage import TINY, tiny_samples
from ups.runs.machine import medians

ENTRY = {"dataset": {"family": "advection_1d", "boundary": ["periodic"]}, "condition": [0.5]}


def test_the_first_round_is_a_warm_up():
    """A contender's time is the median of the rounds after the first, in which all are called in turns."""
    called, seconds = [], chain([90.0, 90.0], *repeat([1.0, 4.0], 2), [7.0, 8.0])

    def contender(name: str) -> float:
        called.append(name)
        return next(seconds)

    found = medians({name: lambda name=name: contender(name) for name in "ab"}, rounds=3)
    assert found == {"a": 1.0, "b": 4.0}
    assert called == list("ab" * 4)


def test_tiny_trajectories_are_read_from_disk(tmp_path: Path):
    """Of any number of tiny trajectories each has one step; a batch holds what its shard holds, here the same steps."""
    samples = tiny_samples(tmp_path, ENTRY, 300)
    assert samples.num_samples == {"advection_1d": 300}
    batch = samples.load("advection_1d", np.array([299, 0, 150]))
    assert batch.z.shape == (3, *TINY[1:])
    assert torch.equal(batch.z[0], batch.z[2]) and torch.equal(batch.z_next[0], batch.z_next[1])
    stored = np.fromfile(next(tmp_path.rglob("c/0/0/0/0")), "<f4", count=np.prod(TINY))
    assert np.array_equal(torch.cat([batch.z[1], batch.z_next[1]]).flatten().numpy(), stored)
