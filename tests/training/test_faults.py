"""Faults that befall a training job: each is told, none hangs or leaves anything, and what can go on goes on."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.training.jobs import (
    SECONDS_PER_JOB,
    SECONDS_TO_VANISH,
    assert_nothing_left,
    assert_same_training,
    at_most,
    finish,
    folder_of,
    free_port,
    has_reached,
    launched,
    lines_of,
    meanwhile,
    processes_of,
    start_agent,
    status_of,
    torchrun_of,
    train,
    watched,
    worker_of,
)
from ups.errors import DataFault, Diverged, Fault, LostWorker, OutOfMemory, Preempted, StorageFault, Unsynchronised
from ups.files import read_json
from ups.models.weights import load
from ups.runs.agent import FirstNode

pytestmark = pytest.mark.faults

Undisturbed = Callable[[int], Path]
Inject = Callable[[str], None]
SLOW = "slow:rank0:step10"


def fault_of(root: Path, expected: type[Fault], stage: str = "operator", **changes: Any) -> Fault:
    """The fault that ends a stage within a minute, as its status tells it."""
    with at_most(SECONDS_PER_JOB), pytest.raises(expected) as caught:
        train(root, stage, **changes)
    fault, status = caught.value, status_of(root, stage)
    assert (status["code"], status["kind"], status["what"]) == (fault.exit_code, fault.kind, str(fault))
    assert (status["rank"], status["signal"]) == (fault.rank, fault.signal)
    assert "\n" not in str(fault) and type(fault) is expected
    assert_nothing_left(root)
    return fault


def in_slow_step(root: Path) -> Callable[[], bool]:
    """Whether the job in `root` is in the step that an injected fault makes slow."""
    return lambda: has_reached(root, 10)


def assert_close(folder: Path, expected: Path) -> None:
    """The weights in two folders differ by rounding alone."""
    found = load(folder / "weights.pt")["weights"]
    for name, value in load(expected / "weights.pt")["weights"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_processes", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_killed_rank(root: Path, undisturbed: Undisturbed, inject: Inject, num_processes: int, rank: int):
    """R01, R07: a job that loses a rank goes on by itself from its last checkpoint and says which rank and signal."""
    inject(f"sigkill:rank{rank}:step10")
    with at_most(SECONDS_PER_JOB):
        folder = train(root, launch={"num_processes": num_processes})
    assert_same_training(folder, undisturbed(num_processes))
    status = status_of(root)
    assert (status["state"], status["code"]) == ("finished", 0)
    assert status["resumed_at_step"] in (4, 8)  # the state of step 8 may still be on its way to disk
    (told,) = status["restarts"]
    assert f"rank {rank} was killed by SIGKILL (maybe by the kernel, for want of memory)" in told


def test_a_rank_that_is_killed_again_and_again(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R01: after `launch.restarts` restarts the job is given up with code 9; the same command goes on."""
    inject("sigkill:rank1:step10,sigkill:rank1:step14")
    fault = fault_of(root, LostWorker, launch={"restarts": 1})
    assert (fault.rank, fault.signal, len(status_of(root)["restarts"])) == (1, "SIGKILL", 1)
    assert_same_training(train(root), undisturbed(2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_torchrun(root: Path, undisturbed: Undisturbed, inject: Inject, number: signal.Signals):
    """R02, R03: a job whose torchrun is killed or told to stop goes on by itself; told to stop it loses no step."""
    inject(SLOW)
    with at_most(SECONDS_PER_JOB), meanwhile(in_slow_step(root), lambda: torchrun_of(root).send_signal(number)):
        folder = train(root)
    assert_same_training(folder, undisturbed(2))
    assert len(status_of(root)["restarts"]) == 1
    assert status_of(root)["resumed_at_step"] == (8 if number == signal.SIGKILL else 11)


def test_workers_vanish_with_their_torchrun(root: Path, inject: Inject):
    """R02: no rank outlives torchrun by more than ten seconds."""
    inject(SLOW)
    workers: list[psutil.Process] = []

    def kill() -> None:
        workers.extend(processes_of(root))
        torchrun_of(root).kill()

    with meanwhile(in_slow_step(root), kill):
        fault = fault_of(root, LostWorker, launch={"restarts": 0})
    assert "ended without a fault report (torchrun: -9)" in str(fault)
    assert len(workers) == 3
    assert not psutil.wait_procs(workers, SECONDS_TO_VANISH)[1]


def test_torchrun_told_to_stop_twice(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R03: a second SIGTERM while the first is obeyed does no harm."""
    inject(SLOW)

    def stop() -> None:
        process = torchrun_of(root)
        process.terminate()
        time.sleep(0.5)
        if process.is_running():
            process.terminate()

    with at_most(SECONDS_PER_JOB), meanwhile(in_slow_step(root), stop):
        folder = train(root)
    assert_same_training(folder, undisturbed(2))


@pytest.mark.parametrize("rank", ["0", "1", "*"])
def test_told_to_stop_during_a_save(root: Path, undisturbed: Undisturbed, inject: Inject, rank: str):
    """R03: a rank told to stop while its state is being written has all ranks save one and the same later step."""
    inject(f"sigterm:rank{rank}:step10")
    told = {"checkpoint_steps": 1, "restarts": 0}
    fault_of(root, Preempted, launch=told)
    assert status_of(root)["checkpoints"][-1] == "step_00000011.pt"
    assert_same_training(train(root, launch=told), undisturbed(2))
    assert status_of(root)["resumed_at_step"] == 11


def test_everything_killed_at_once(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R04: a machine that goes without a word loses no more than `launch.checkpoint_steps` steps."""
    inject(SLOW)

    def kill() -> None:
        for process in processes_of(root):
            process.kill()

    with meanwhile(in_slow_step(root), kill):
        fault_of(root, LostWorker, launch={"restarts": 0})
    assert_same_training(train(root), undisturbed(2))
    assert status_of(root)["resumed_at_step"] == 8


def test_a_checkpoint_is_due_by_the_clock(root: Path, inject: Inject):
    """R04: without a step count that is reached, time alone makes checkpoints."""
    inject("sigkill:rank1:step10")
    train(root, launch={"checkpoint_steps": 1000, "checkpoint_minutes": 1e-5})
    assert status_of(root)["resumed_at_step"] >= 4


@pytest.mark.parametrize("rank", [0, 1])
def test_no_memory_once(root: Path, inject: Inject, rank: int):
    """R05: a step for which one rank finds no memory is skipped by all, and the run goes on."""
    inject(f"oom-forward:rank{rank}:step5")
    with at_most(SECONDS_PER_JOB):
        folder = train(root)
    assert status_of(root)["restarts"] == []
    lines = [line for line in lines_of(folder) if "skipped_steps" in line]
    assert lines[-1]["skipped_steps"] == 1
    assert [line["step"] for line in lines if "loss" not in line] == [6]


FOUR = ",".join(f"oom-forward:rank1:step{step}" for step in (9, 10, 11, 12))


@pytest.mark.parametrize("faults", [FOUR, "oom-backward:rank1:step10", "oom-backward:rank0:step0"])
def test_too_little_memory(root: Path, undisturbed: Undisturbed, inject: Inject, faults: str):
    """R05, R06: four skipped steps or a backward pass without memory start the job again with half the micro-batch."""
    inject(faults)
    with at_most(SECONDS_PER_JOB):
        folder = train(root)
    (told,) = status_of(root)["restarts"]
    assert "set launch.micro_batch_tokens below that" in told
    found = read_json(folder / "run.json")["launch"]["micro_batch_tokens"]
    ((place, tokens),) = read_json(root / "06_models/tuning.json").items()
    assert re.fullmatch(r"operator on 2 x cpu, ddp, [0-9a-f]{8}", place) and tokens == found
    if faults != FOUR:
        assert_close(folder, undisturbed(2))


@pytest.mark.parametrize("faults", [FOUR, "oom-backward:rank1:step10"])
def test_too_little_memory_for_one_sample(root: Path, inject: Inject, faults: str):
    """R05, R06: where a micro-batch cannot get smaller the job ends with code 5 and names the batch."""
    inject(faults)
    fault = fault_of(root, OutOfMemory, launch={"micro_batch_tokens": 1})
    assert "8 tokens of " in str(fault)
    assert status_of(root)["checkpoints"] and status_of(root)["restarts"] == []


@pytest.mark.parametrize(("kind", "step"), [("nan", 7), ("nan", 0), ("spike", 120)])
def test_a_gradient_not_fit_to_use(root: Path, inject: Inject, kind: str, step: int):
    """R08: NaN or a spike on one rank is skipped by all, and the losses stay finite."""
    inject(f"{kind}:rank1:step{step}")
    with at_most(SECONDS_PER_JOB):
        folder = train(root, steps=step + 10)
    lines = [line for line in lines_of(folder) if "skipped_steps" in line]
    assert [line["skipped_steps"] for line in lines] == [0.0] * step + [1.0] * 10
    assert [line["step"] for line in lines if "loss" not in line] == [step + 1]
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_more_spoilt_gradients_than_may_be(root: Path, inject: Inject):
    """R08: NaN beyond `max_skipped_steps` ends the run with code 4, and the last checkpoint is good."""
    inject("slow:rank0:step8,nan:rank1:step9,nan:rank1:step10,nan:rank0:step11")
    fault = fault_of(root, Diverged)
    assert "at step 12, unusable gradients since step 9; lower operator.learning_rate" in str(fault)
    weights = load(folder_of(root) / "checkpoints/step_00000008.pt")["update"]["model"]
    assert all(value.isfinite().all() for value in weights.values())
    train(root)
    assert status_of(root)["resumed_at_step"] == 8


def test_a_stopped_rank(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R09: a rank that stands still is found within the time-out; the stacks of the others are in the log."""
    inject("sigstop:rank1:step10")
    with at_most(SECONDS_PER_JOB):
        folder = train(root, launch={"timeout_seconds": 12})
    assert_same_training(folder, undisturbed(2))
    assert "rank 1 is stopped, no step for 12 s" in status_of(root)["restarts"][0]
    assert "most recent call first" in (folder / "train.log").read_text()


def test_a_stopped_rank_without_restart(root: Path, inject: Inject):
    """R09: without restarts the job ends with code 9 within time-out and 30 s."""
    inject("sigstop:rank0:step10")
    begin = time.monotonic()
    fault = fault_of(root, LostWorker, launch={"timeout_seconds": 8, "restarts": 0})
    assert time.monotonic() - begin < 8 + 30
    assert fault.rank == 0


def test_a_full_disk(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R10: a checkpoint that finds no room ends the job with code 6; the one before is intact, the job resumable."""
    inject("full-disk:rank0:step8")
    fault = fault_of(root, StorageFault)
    assert "No space left on device" in str(fault) and "step_00000008.pt" in str(fault)
    assert status_of(root)["checkpoints"] == ["step_00000004.pt"]
    assert_same_training(train(root), undisturbed(2))
    assert status_of(root)["resumed_at_step"] == 4


def test_a_file_that_may_not_grow(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R10: a real limit on the size of files ends the job in the same way."""
    inject(SLOW)

    def limit() -> None:
        worker_of(root, 0).rlimit(psutil.RLIMIT_FSIZE, (20_000, 20_000))

    with meanwhile(in_slow_step(root), limit):
        fault = fault_of(root, StorageFault)
    assert "File too large" in str(fault) and "step_00000012.pt" in str(fault)
    assert_same_training(train(root), undisturbed(2))


def test_disk_that_does_not_answer(root: Path, undisturbed: Undisturbed, inject: Inject):
    """R32: data that do not come end the job with a line that asks for the disk, and the stalled process is gone."""
    inject("stall-data:rank1:step10")
    fault = fault_of(root, LostWorker, launch={"timeout_seconds": 12, "restarts": 0})
    assert f"check the disk of {root}" in str(fault) and fault.rank == 1
    assert_same_training(train(root), undisturbed(2))


def test_a_corrupt_latent(root: Path):
    """R34: an altered chunk of the cache ends the job with code 3 and the file, and is not tried again."""
    for path in root.glob("04_feature/latents/*/*Advection*.zarr/fields/c/*/0/0/0"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    fault = fault_of(root, DataFault)
    assert "wrong checksum in" in str(fault) and "Advection" in str(fault)
    assert status_of(root)["restarts"] == []


def test_an_internal_error(root: Path, inject: Inject):
    """An error of ours ends the job with code 70, its place in the code, and no restart."""
    inject("raise:rank1:step10")
    fault = fault_of(root, Fault)
    assert "RuntimeError: injected error (injection.py:" in str(fault) and fault.rank == 1
    assert status_of(root)["restarts"] == []


def test_ranks_that_disagree(root: Path, inject: Inject):
    """Gradients that differ between ranks are found in the first steps, for they are an error of ours."""
    inject("desync:rank1:step1")
    assert "ranks 0 and 1 have different gradients" in str(fault_of(root, Unsynchronised))


def test_two_jobs_at_once(root: Path, tmp_path: Path, encoded: Path, undisturbed: Undisturbed):
    """R31: jobs on one machine find ports of their own and learn what each learns alone."""
    expected, other = undisturbed(2), tmp_path / "other"
    subprocess.run(["cp", "-r", str(encoded), str(other)], check=True)
    with at_most(90), ThreadPoolExecutor(2) as pool:
        for folder in pool.map(train, (root, other)):
            assert_same_training(folder, expected)


def test_a_rendezvous_that_is_taken(root: Path):
    """R31: a port that another program holds ends the job with code 9, not with a hang."""
    with free_port(listen=True) as port:
        launch = {"num_nodes": 2, "num_processes": 1, "rendezvous": f"127.0.0.1:{port}", "timeout_seconds": 8}
        assert fault_of(root, LostWorker, launch=launch | {"restarts": 0}).exit_code == 9


def test_two_nodes(root: Path, undisturbed: Undisturbed):
    """R37: two nodes, on the second of which there is only an agent, learn what two ranks of one node do."""
    with free_port() as port:
        launch = {"num_nodes": 2, "num_processes": 1, "rendezvous": f"127.0.0.1:{port}"}
    first = FirstNode(root, launched(**launch))
    agent = start_agent(root, OMP_NUM_THREADS="1")
    with at_most(SECONDS_PER_JOB), watched(root) as addresses:
        folder = train(root, launch=launch)
    first.close(None)
    code, told = finish(agent)
    assert code == 0, told
    assert told.splitlines()[-3:] == [
        "operator: joined",
        "operator: done",
        f"the run on {os.uname().nodename} has finished",
    ]
    assert addresses == {"127.0.0.1"}  # that of the rendezvous
    assert_same_training(folder, undisturbed(2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_agent_that_is_started_again(root: Path, undisturbed: Undisturbed, inject: Inject, number: signal.Signals):
    """R37: an agent ends with code 75 at Ctrl-C, and leaves nothing when it is killed; its successor goes on."""
    inject(SLOW + ",slow:rank1:step10")
    with free_port() as port:
        launch = {"num_nodes": 2, "num_processes": 1, "rendezvous": f"127.0.0.1:{port}"}
    first = FirstNode(root, launched(**launch))
    agents = [start_agent(root, OMP_NUM_THREADS="1")]

    def replace() -> None:
        agents[0].send_signal(number)
        agents[0].wait(SECONDS_TO_VANISH)
        agents.append(start_agent(root, OMP_NUM_THREADS="1"))

    with at_most(2 * SECONDS_PER_JOB), meanwhile(in_slow_step(root), replace):
        folder = train(root, launch=launch)
    first.close(None)
    assert [finish(agent)[0] for agent in agents] == [75 if number == signal.SIGINT else -number, 0]
    assert_same_training(folder, undisturbed(2))
    assert len(status_of(root)["restarts"]) == 1


def test_a_node_that_does_not_come(root: Path):
    """R37: a node that is waited for in vain ends the job with code 9 within the time-out."""
    with free_port() as port:
        launch = {"num_nodes": 2, "num_processes": 1, "rendezvous": f"127.0.0.1:{port}", "timeout_seconds": 8}
    begin = time.monotonic()
    fault = fault_of(root, LostWorker, launch=launch | {"restarts": 0})
    assert time.monotonic() - begin < 8 + 30
    assert "nodes" in str(fault)
