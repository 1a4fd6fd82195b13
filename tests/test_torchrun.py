"""The command that starts a job, and which job may be started again."""

import sys
from pathlib import Path

import pytest

from tests.training.jobs import launched
from ups.torchrun import command, rank_of

FOLDER = Path("/data/06_models/operator/0123456789ab")


def test_one_node_needs_no_rendezvous():
    """On one node torchrun finds a free port itself and never starts workers again on its own."""
    assert command("ups.training.train", FOLDER, launched(num_processes=3)) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=0"),
        *("-m", "ups.training.train", str(FOLDER)),
    ]


def test_nodes_meet_at_the_rendezvous():
    """On several nodes the command names the meeting place, the job, and how long the others are waited for."""
    launch = launched(num_nodes=2, rendezvous="head:29500", timeout_seconds=40)
    words = command("ups.training.train", FOLDER, launch)
    expected = {"--nnodes=2", "--rdzv-endpoint=head:29500", "--rdzv-id=operator-0123456789ab"}
    assert expected | {"--rdzv-backend=c10d", "--rdzv-conf=join_timeout=40"} <= set(words)
    assert "--standalone" not in words


@pytest.mark.parametrize(("name", "rank"), [("alive.rank0", 0), ("fault.rank12.json", 12)])
def test_rank_in_a_file_name(name: str, rank: int):
    """The rank is read from the name of its file, even below a folder with `rank` in its name."""
    assert rank_of(Path("/rank7.d") / name) == rank
