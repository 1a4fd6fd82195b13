"""What is said of a job that has ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contents import expect_one_line
from ups.errors import ConfigFault, DataFault, Diverged, Fault, LostWorker, OutOfMemory, Preempted, StorageFault
from ups.files import write_json
from ups.runs.run import Run
from ups.runs.status import find_fault, warnings_in, write_status

KILLED = "rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 42)\n"
PEER = {"kind": "LostPeer", "what": "gloo: Connection closed by peer"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run folder of an operator whose three ranks have come to life."""
    place = tmp_path / "operator/0123456789ab"
    place.mkdir(parents=True)
    for rank in range(3):
        (place / f"alive.rank{rank}").write_text(f"host {40 + rank}")
    (place / "train.log").write_text("$ torchrun\n")
    return place


def ended(folder: Path, reports: dict[int, dict[str, Any]], output: str = "", returncode: int = 1) -> Fault:
    """The fault of a job of three ranks that reported this, the one with the lowest number first."""
    for rank, report in reports.items():
        write_json(Run.fault_file(folder, rank), {"rank": rank, "time": float(rank), **report})
    start = (folder / "train.log").stat().st_size
    with (folder / "train.log").open("a") as log:
        log.write(output)
    return find_fault(folder, 3, returncode, start)


REPORTS = [
    ({1: {"kind": "Diverged", "what": "loss nan"}}, Diverged, 1),
    ({0: PEER, 2: {"kind": "StorageFault", "what": "disk full"}}, StorageFault, 2),
    ({0: PEER, 1: {"kind": "Fault", "what": "IndexError: 7"}, 2: {"kind": "ConfigFault", "what": "x"}}, ConfigFault, 2),
    ({0: PEER, 1: {"kind": "Fault", "what": "IndexError: 7"}, 2: PEER}, Fault, 1),
    ({0: {"kind": "Preempted", "what": "saved"}, 1: {"kind": "Fault", "what": "IndexError"}, 2: PEER}, Fault, 1),
    ({rank: {"kind": "Preempted", "what": "saved step 3"} for rank in range(3)}, Preempted, 0),
    ({0: PEER, 1: PEER, 2: PEER}, LostWorker, None),
    ({}, LostWorker, None),
]


@pytest.mark.parametrize(("reports", "kind", "rank"), REPORTS)
def test_the_cause_is_told_not_its_consequences(folder: Path, reports: dict, kind: type[Fault], rank: int | None):
    """A fault with a known cause comes before an internal error, both before ranks that merely lost the others."""
    fault = ended(folder, reports)
    assert (type(fault), fault.rank) == (kind, rank)
    assert "\n" not in str(fault)


@pytest.mark.parametrize(
    ("output", "signal", "rank"),
    [
        (KILLED.format(rank=1, code=-9), "SIGKILL", 1),
        (KILLED.format(rank=0, code=1) + KILLED.format(rank=2, code=-9), "SIGKILL", 2),
        (KILLED.format(rank=1, code=-11), "SIGSEGV", 1),
        ("", None, 1),
    ],
)
def test_a_rank_that_said_nothing_was_killed(folder: Path, output: str, signal: str | None, rank: int):
    """Of ranks without a report that is named which torchrun says was killed, with the signal."""
    fault = ended(folder, {0: PEER}, output)
    assert (type(fault), fault.rank, fault.signal) == (LostWorker, rank, signal)


def test_the_only_rank_was_killed(folder: Path):
    """Where nobody is left to report, torchrun's words say which rank was killed."""
    fault = ended(folder, {}, KILLED.format(rank=0, code=-9))
    assert (type(fault), fault.rank, fault.signal) == (LostWorker, 0, "SIGKILL")


def test_nodes_that_do_not_meet(folder: Path):
    """A torchrun that waits for other nodes in vain is a lost worker."""
    for path in folder.glob("alive.*"):
        path.unlink()
    fault = ended(folder, {}, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n")
    assert type(fault) is LostWorker and "did not find each other at launch.rendezvous" in str(fault)


def test_the_output_of_earlier_jobs_does_not_count(folder: Path):
    """Who was killed is read from the output of the last job alone."""
    with (folder / "train.log").open("a") as log:
        log.write(KILLED.format(rank=1, code=-9))
    fault = ended(folder, {0: PEER}, KILLED.format(rank=2, code=-9))
    assert fault.rank == 2


def test_a_job_that_never_came_to_life(folder: Path):
    """Where no rank has begun, that is said, with torchrun's exit code and the log."""
    for path in folder.glob("alive.*"):
        path.unlink()
    fault = ended(folder, {}, returncode=1)
    assert fault.exit_code == 70
    assert "no training process could start (torchrun: 1)" in str(fault)


def test_warnings_of_a_job_are_found_once_each(folder: Path):
    """Of what the ranks of the last job have logged, warnings are found, without time and rank and without repeats."""
    line = "2026-01-01 00:00:00,000 rank {} {} {}\n".format
    log = folder / "train.log"
    log.write_text(line(0, "WARNING", "of an earlier job"))
    start = log.stat().st_size
    said = [(0, "WARNING", "a: 3 snapshots vanish"), (1, "INFO", "encoded"), (1, "WARNING", "a: 3 snapshots vanish")]
    with log.open("a") as file:
        file.write("".join(line(*each) for each in [*said, (1, "WARNING", "b")]))
    assert warnings_in(log, start) == ["a: 3 snapshots vanish", "b"]


def test_details_survive(folder: Path):
    """What a fault knows beyond its words is known to the launcher."""
    report = {"kind": "OutOfMemory", "what": "too large", "details": {"tokens": 48}}
    fault = ended(folder, {1: report})
    assert isinstance(fault, OutOfMemory) and fault.tokens == 48


def test_status_has_all_that_is_known(folder: Path):
    """`status.json` has state, fault, restarts, where training went on, what it refused and what is saved."""
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/step_00000004.pt").touch()
    write_json(folder / "started.json", {"step": 4, "refused": ["step_00000008.pt was altered"], "eager_because": None})
    fault = LostWorker("rank 1 was killed")
    fault.rank, fault.signal = 1, "SIGKILL"
    write_status(folder, "failed", fault, ["first"], "degraded")
    assert json.loads((folder / "status.json").read_text()) == {
        "stage": "operator",
        "state": "failed",
        "code": 9,
        "kind": "lost worker",
        "what": "rank 1 was killed",
        "rank": 1,
        "signal": "SIGKILL",
        "resumed_at_step": 4,
        "refused_checkpoints": ["step_00000008.pt was altered"],
        "eager_because": None,
        "checkpoints": ["step_00000004.pt"],
        "restarts": ["first"],
        "tracking": "degraded",
    }


def test_a_wrong_report_is_one_line(folder: Path):
    """Whatever stands in the fault file of a rank, the launcher says what is wrong in one line."""
    path, report = Run.fault_file(folder, 1), {"kind": "Fault", "what": "IndexError: 7", "rank": 1, "time": 0.5}
    write_json(path, report)
    expect_one_line(path, lambda: find_fault(folder, 3, 1, 0), tuple(report))


@pytest.mark.parametrize("kind", ["printable", "BaseException", "__doc__", "LostPeers", ""])
def test_a_report_of_an_unknown_kind_is_one_line(folder: Path, kind: str):
    """A fault file names a class of faults and nothing else."""
    with pytest.raises(DataFault, match=r"fault\.rank1\.json is damaged \(.*unknown kind of fault\); delete it"):
        ended(folder, {1: {"kind": kind, "what": "x"}})


def test_a_wrong_start_is_one_line(folder: Path):
    """Whatever stands in `started.json`, the launcher says what is wrong in one line."""
    write_json(folder / "started.json", {"step": 3, "refused": ["step_4.pt"], "eager_because": None})
    expect_one_line(folder / "started.json", lambda: write_status(folder, "running", None, [], "ok"))


@pytest.mark.parametrize("field", ["step", "refused", "eager_because"])
def test_a_wrong_field_of_a_start_is_one_line(folder: Path, field: str):
    """Each field of `started.json` has its type."""
    write_json(folder / "started.json", {field: [1]})
    with pytest.raises(DataFault, match=rf"started\.json is damaged \({field}.*\); delete it and run again$"):
        write_status(folder, "running", None, [], "ok")
