"""Listening sockets of a job that trains: torch unpickles what arrives at them."""

from pathlib import Path

import pytest

from tests.training.jobs import SECONDS_PER_JOB, at_most, train, watched

LOOPBACK = ("127.0.0.1", "::1")


@pytest.mark.parametrize("num_processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_port_beyond_loopback(root: Path, num_processes: int):
    """A job on one node listens on the loopback interface alone, a single process on no port at all."""
    with at_most(SECONDS_PER_JOB), watched(root) as addresses:
        folder = train(root, launch={"num_processes": num_processes}, steps=2)
    assert addresses <= set(LOOPBACK)
    assert bool(addresses) == (num_processes > 1)
    assert not [path for path in folder.iterdir() if path.name.startswith("store.")]
