"""What an agent of another node does, and when it ends."""

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.jobs import finish, free_port, has_reached, launched, start_agent, start_kedro, wait_until
from ups.errors import ConfigFault, DataFault, Fault, GateFailed, Locked, LostWorker, Preempted
from ups.files import digest_of, private_folder, read_json, write_json
from ups.runs import agent as module
from ups.runs.agent import ANNOUNCEMENT, Agent, Announcement, FirstNode, check_rendezvous, hold, source_digest
from ups.runs.run import Run
from ups.runs.torchrun import JOB, NODES, Job

HOST = os.uname().nodename
WORKER = "ups.training.worker"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    for name in ("BEAT_SECONDS", "LOST_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(module, name, getattr(module, name) / 100)


def run_in(root: Path) -> FirstNode:
    """A run on two nodes, announced in `root`."""
    with free_port() as port:
        launch = launched(num_nodes=2, num_processes=1, rendezvous=f"127.0.0.1:{port}")
    return FirstNode(root, launch)


def announcement(**changes: Any) -> Announcement:
    """Of a run that fits this node."""
    same = {"host": HOST, "source": source_digest(), "torch": module.version("torch"), "num_nodes": 2}
    return Announcement(**{"id": "0", "rendezvous": "127.0.0.1:29500"} | same | changes)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Future[None]]:
    """How an agent ends that is at work in `tmp_path` until the end of the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(Agent(tmp_path, wait_minutes=0.5).serve)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that an agent starts; none of them is run, and all end well at once."""
    commands: list[list[str]] = []

    @contextmanager
    def started(command: list[str], *_: Any) -> Iterator[SimpleNamespace]:
        commands.append(command)
        yield SimpleNamespace(returncode=0, poll=lambda: 0, wait=lambda _: 0, kill=lambda: None)

    monkeypatch.setattr(module, "started", started)
    return commands


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on two nodes whose run folder is below `tmp_path`."""
    folder = tmp_path / "06_models/operator/0123"
    folder.mkdir(parents=True)
    launch = launched(num_nodes=2, num_processes=1, rendezvous="127.0.0.1:29500")
    Run(folder, "operator", "", {}, {}, launch, "cpu", tmp_path).write()
    return Job("89ab", WORKER, "06_models/operator/0123")


def announce(root: Path, job: Job) -> None:
    """Write `job.json`."""
    write_json(root / NODES / JOB, asdict(job))


def test_an_agent_ends_with_its_run(tmp_path: Path, serving: Future[None]):
    """A run that finishes ends an agent, that was started before it, well."""
    first = run_in(tmp_path)
    assert wait_until(lambda: (tmp_path / NODES / f"agent.{HOST}.json").exists(), 10)
    first.close(None)
    assert serving.result(10) is None


@pytest.mark.parametrize("fault", [LostWorker("rank 1 was killed"), GateFailed("nRMSE"), Fault("ours")])
def test_an_agent_fails_with_its_run(tmp_path: Path, serving: Future[None], fault: Fault):
    """A run that fails ends its agent with the same exit code, the name of the first node and what went wrong."""
    first = run_in(tmp_path)
    assert wait_until(lambda: (tmp_path / NODES / f"agent.{HOST}.json").exists(), 10)
    first.close(fault)
    with pytest.raises(type(fault)) as caught:
        serving.result(10)
    assert str(caught.value) == f"the run on {HOST} has failed: {fault}"


def test_an_interrupted_run_is_waited_for(tmp_path: Path, serving: Future[None], caplog: pytest.LogCaptureFixture):
    """After an interruption the agent says so, waits for the same command and takes part again."""
    caplog.set_level(logging.INFO)
    for number, fault in enumerate((Preempted("SIGTERM"), None)):
        first = run_in(tmp_path)
        assert wait_until(lambda: caplog.text.count("takes part in the run on") == number + 1, 10)  # noqa: B023
        first.close(fault)
        assert wait_until(lambda: f"the run on {HOST} was interrupted; start it there again" in caplog.text, 10)
    assert serving.result(10) is None


def test_no_agent_waits_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Without a run an agent says what it waits for, and ends with code 9 when its time is over."""
    caplog.set_level(logging.INFO)
    with pytest.raises(LostWorker, match="waited 0.01 minutes: no `kedro run` with launch.num_nodes > 1 works in"):
        Agent(tmp_path, wait_minutes=0.01).serve()
    assert "waiting, minute 0 of 0.01: no `kedro run`" in caplog.text and str(tmp_path) in caplog.text


@pytest.mark.parametrize("ended", [True, False])
def test_an_earlier_run_is_no_run(tmp_path: Path, job: Job, joined: list[list[str]], ended: bool):
    """What a run left that has ended, or was killed, is neither joined nor taken for the end."""
    write_json(private_folder(tmp_path / NODES) / ANNOUNCEMENT, asdict(announcement(ended=ended)))
    announce(tmp_path, job)
    with pytest.raises(LostWorker, match="no `kedro run`"):
        Agent(tmp_path, wait_minutes=0.02).serve()
    assert joined == []


def test_a_run_that_ends_before_it_is_joined_ends_the_agent(tmp_path: Path):
    """An agent that has waited for a run ends like it, however short it was."""
    agent = Agent(tmp_path, wait_minutes=0.5)
    run_in(tmp_path).close(GateFailed("rollouts"))
    with pytest.raises(GateFailed, match="has failed: rollouts"):
        agent.serve()


def test_a_killed_run_is_missed(tmp_path: Path):
    """A first node that is silent counts as lost."""
    first, agent = run_in(tmp_path), Agent(tmp_path, wait_minutes=0.02)
    threading.Timer(0.5, first._closed.set).start()  # what a kill does to its thread
    with pytest.raises(LostWorker, match=f"the run on {HOST} is silent; start it there again"):
        agent.serve()


def test_a_killed_agent_learns_the_end_of_its_run(tmp_path: Path):
    """An agent that is started again after its run has ended ends like it, once."""
    agent = Agent(tmp_path, wait_minutes=0.01)
    agent._admit(announcement())
    agent._lock.release()
    agent._place.release()
    write_json(tmp_path / NODES / ANNOUNCEMENT, asdict(announcement(ended=True)))
    successor = Agent(tmp_path, wait_minutes=0.01)
    successor.serve()
    successor._lock.release()
    with pytest.raises(LostWorker):
        Agent(tmp_path, wait_minutes=0.01).serve()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source": "0" * 64}, "has other source code than"),
        ({"torch": "1.0"}, "torch is"),
        ({"rendezvous": "10.0.0.1:29500"}, "agents are for other nodes"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], told: str):
    """Another source or version of torch, or the first node itself, ends an agent with code 2."""
    with pytest.raises(ConfigFault, match=told):
        Agent(tmp_path, wait_minutes=1)._admit(announcement(**changes))


def test_one_agent_per_node(tmp_path: Path):
    """A second agent on a node, or more agents than nodes, end with code 8; a folder that is absent with code 3."""
    agent = Agent(tmp_path, wait_minutes=1)
    with pytest.raises(Locked, match=f"works on {HOST} already"):
        Agent(tmp_path, wait_minutes=1)
    other = hold(tmp_path / NODES / "place.1.lock", "")
    with pytest.raises(Locked, match="all 2 nodes of the run"):
        agent._admit(announcement())
    agent._admit(announcement(num_nodes=3))
    other.release()
    with pytest.raises(DataFault, match="mount the disk"):
        Agent(tmp_path / "absent", wait_minutes=1)


def test_a_job_is_joined_once(tmp_path: Path, job: Job, joined: list[list[str]]):
    """Every job is joined once, also one that was started again, by a command that names this node's own folder."""
    agent = Agent(tmp_path, wait_minutes=1)
    for announced in (job, job, replace(job, id="cdef"), replace(job, id="cdef")):
        announce(tmp_path, announced)
        agent._join_job(announcement())
    assert [command[4:] for command in joined] == [
        [str(tmp_path / job.path), name, "join"] for name in ("89ab", "cdef")
    ]


def test_the_job_of_a_killed_agent_is_started_again(tmp_path: Path, job: Job, joined: list[list[str]]):
    """An agent withdraws the job that its killed predecessor has joined: the first node then starts it again."""
    agent = Agent(tmp_path, wait_minutes=1)
    announce(tmp_path, job)
    agent._join_job(announcement())
    agent._lock.release()
    successor = Agent(tmp_path, wait_minutes=1)
    successor._join_job(announcement())
    assert len(joined) == 1 and not (tmp_path / NODES / JOB).exists()
    announce(tmp_path, replace(job, id="cdef"))
    successor._join_job(announcement())
    assert len(joined) == 2


@pytest.mark.parametrize(
    ("path", "rendezvous", "told"),
    [("../elsewhere", "127.0.0.1:29500", "is not of a step"), (None, "127.0.0.1:1", "names another rendezvous")],
)
def test_no_job_leads_elsewhere(
    tmp_path: Path, job: Job, joined: list[list[str]], path: str | None, rendezvous: str, told: str
):
    """A run folder outside of the data root, or one that names another place to meet, is refused."""
    agent = Agent(tmp_path, wait_minutes=1)
    announce(tmp_path, replace(job, path=path or job.path))
    with pytest.raises(DataFault, match=told):
        agent._join_job(announcement(rendezvous=rendezvous))
    assert joined == []


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_too_few_gpus_are_refused(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, num_gpus: int):
    """A node that has fewer GPUs than processes, or none, is refused with code 2."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    run = Run.read(tmp_path / job.path)
    launch = run.launch.model_copy(update={"device": "auto", "num_processes": 2})
    with pytest.raises(ConfigFault, match="has none" if num_gpus == 0 else "needs as many GPUs, found 1"):
        Agent(tmp_path, wait_minutes=1)._check(replace(run, device="cuda", launch=launch), announcement())


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_a_rendezvous_elsewhere_is_refused(host: str):
    """The first node must have the address of the rendezvous."""
    with pytest.raises(ConfigFault, match=f"launch.rendezvous={host}:29500"):
        check_rendezvous(f"{host}:29500")


def test_one_run_in_a_data_root(tmp_path: Path):
    """A port that is taken is refused with code 2, a second run on several nodes with code 8; the folder is private."""
    with free_port(listen=True) as port, pytest.raises(ConfigFault, match="in use"):
        check_rendezvous(f"127.0.0.1:{port}")
    first = run_in(tmp_path)
    with pytest.raises(Locked, match="another run on several nodes works in"):
        run_in(tmp_path)
    first.close(None)
    run_in(tmp_path).close(None)
    assert stat.S_IMODE((tmp_path / NODES).stat().st_mode) == 0o700


STAGES = ("codec", "operator", "steady", "diffusion", "consistency")
SLOW = {"UPS_TESTING": "1", "UPS_FAULT": "slow:rank0:step5"}


def weights_of(root: Path) -> dict[str, str]:
    """The SHA-256 of the weights of every stage."""
    found = {path.parts[-3]: digest_of(path) for path in root.glob("06_models/*/*/weights.pt")}
    assert sorted(found) == sorted(STAGES)
    return found


def run_on_two_nodes(root: Path, steps: tuple[str, ...], kills: dict[str, Callable[[], bool]]) -> list[str]:
    """Run steps with an agent, which is killed and started again whenever a stage is where it is to be killed.

    Returns:
        The faults for which stages were started again.
    """
    root.mkdir()
    with free_port() as port:
        nodes = ("launch.num_processes=1", "launch.num_nodes=2", f"launch.rendezvous=127.0.0.1:{port}")
    run, agent = start_kedro(root, *nodes, steps=steps, **SLOW), start_agent(root, **SLOW)
    try:
        for stage, is_there in kills.items():
            assert wait_until(is_there, 120), stage
            agent.kill()
            agent.wait()
            agent = start_agent(root, **SLOW)
        assert finish(run, 200) == (0, "")
        code, told = finish(agent)
    finally:
        for process in (run, agent):
            process.kill()
    assert code == 0 and told.endswith(f"the run on {HOST} has finished\n"), told
    statuses = (read_json(path) for path in sorted(root.glob("06_models/*/*/status.json")))
    return [fault for status in statuses for fault in status["restarts"]]


@pytest.mark.faults
def test_a_pipeline_on_two_nodes_survives_its_agent(tmp_path: Path):
    """R37: a whole pipeline whose agent is killed twice ends by itself with the weights of an undisturbed one."""
    disturbed = tmp_path / "disturbed"
    kills = {
        "operator": lambda: has_reached(disturbed, 4, "operator"),  # while both nodes train
        "diffusion": lambda: bool(list(disturbed.glob("06_models/diffusion/*/alive.rank0"))),  # while they connect
    }
    assert len(run_on_two_nodes(disturbed, ("--pipeline", "full"), kills)) == 2
    undisturbed = tmp_path / "undisturbed"
    assert run_on_two_nodes(undisturbed, ("--to-nodes", "train_steady,train_consistency"), {}) == []
    assert weights_of(disturbed) == weights_of(undisturbed)
