"""Faults that befall `kedro run` while it trains: exit code, one line, nothing left, and the same command goes on."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.jobs import (
    SECONDS_PER_JOB,
    assert_nothing_left,
    assert_same_training,
    finish,
    folder_of,
    free_port,
    has_reached,
    lines_of,
    processes_of,
    start_agent,
    start_kedro,
    status_of,
    wait_until,
)
from ups.files import read_json, write_json

pytestmark = pytest.mark.faults

STEPS = "operator.steps=16"
SLOW = {"UPS_TESTING": "1", "UPS_FAULT": "slow:rank0:step10"}
Kedro = subprocess.Popen[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow store for all: making a new one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def start(root: Path, store: str) -> Iterator[Callable[..., Kedro]]:
    """`start()` trains the operator in `root` with `kedro run`; what still runs at the end of the test is killed."""
    started: list[Kedro] = []

    def kedro(place: Path = root, *params: str, **environment: str) -> Kedro:
        started.append(start_kedro(place, STEPS, *params, **{"MLFLOW_TRACKING_URI": store} | environment))
        return started[-1]

    yield kedro
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.fixture(scope="module")
def expected(encoded: Path, store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed command."""
    root = shutil.copytree(encoded, tmp_path_factory.mktemp("expected") / "root")
    assert finish(start_kedro(root, STEPS, MLFLOW_TRACKING_URI=store)) == (0, "")
    return folder_of(root)


def in_slow_step(root: Path) -> bool:
    """Wait for the step that an injected fault makes slow."""
    return wait_until(lambda: has_reached(root, 10), SECONDS_PER_JOB)


def test_a_killed_command(root: Path, start: Callable[..., Kedro], expected: Path):
    """R02: with `kedro run` killed, torchrun and all ranks are gone in five seconds; the same command goes on."""
    process = start(**SLOW)
    assert in_slow_step(root) and len(processes_of(root)) == 3
    process.kill()
    assert wait_until(lambda: not processes_of(root), 5)
    assert finish(start()) == (0, "")
    assert_same_training(folder_of(root), expected)
    assert status_of(root)["resumed_at_step"] == 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_first_node_that_is_stopped(root: Path, start: Callable[..., Kedro], expected: Path, number: signal.Signals):
    """R37: an agent outlives a killed or interrupted `kedro run`, joins the same command again and ends with it."""
    with free_port() as port:
        nodes = ("launch.num_processes=1", "launch.num_nodes=2", f"launch.rendezvous=127.0.0.1:{port}")
    process, agent = start(root, *nodes, **SLOW), start_agent(root, OMP_NUM_THREADS="1", **SLOW)
    assert in_slow_step(root)
    process.send_signal(number)
    assert finish(process)[0] == (75 if number == signal.SIGTERM else -number)
    assert finish(start(root, *nodes)) == (0, "")
    code, told = finish(agent)
    assert code == 0 and told.count("operator: joined") == 2, told
    assert_same_training(folder_of(root), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_told_to_stop(root: Path, start: Callable[..., Kedro], expected: Path, number: signal.Signals):
    """R03, R36: SIGTERM or Ctrl-C ends with code 75 after its step is saved; the same command loses nothing."""
    process = start(**SLOW)
    assert in_slow_step(root)
    os.killpg(process.pid, number)
    code, errors = finish(process)
    assert (code, errors.count("\n")) == (75, 1) and errors.startswith("FAULT 75 preempted: operator was interrupted")
    assert_nothing_left(root)
    status = status_of(root)
    assert (status["state"], status["code"], status["checkpoints"][-1]) == ("preempted", 75, "step_00000011.pt")
    assert finish(start()) == (0, "")
    assert_same_training(folder_of(root), expected)
    assert status_of(root)["resumed_at_step"] == 11


def test_ctrl_c_twice(root: Path, start: Callable[..., Kedro], expected: Path):
    """R36: a second Ctrl-C stops hard, leaves no process, and the same command goes on."""
    process = start(**SLOW)
    assert in_slow_step(root)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    code, _ = finish(process)
    assert code not in (0, None)
    assert_nothing_left(root)
    assert finish(start()) == (0, "")
    assert_same_training(folder_of(root), expected)


def test_two_commands_on_one_folder(root: Path, start: Callable[..., Kedro], expected: Path):
    """R20: a second command exits with code 8 and the process id of the first, which is not disturbed."""
    first = start(**SLOW | {"UPS_FAULT": "slow:rank0:step2,slow:rank0:step4,slow:rank0:step6"})
    assert wait_until(lambda: bool(processes_of(root)))
    code, errors = finish(start())
    assert code == 8 and f"FAULT 8 locked: operator: process {first.pid} works in" in errors
    assert finish(first) == (0, "")
    assert_same_training(folder_of(root), expected)


def test_faults_have_their_codes(root: Path, start: Callable[..., Kedro]):
    """R08, R10: what a training process reports is the exit code and the only line of the command."""
    faults = ",".join(f"nan:rank1:step{step}" for step in range(9))
    changes = "operator.max_skipped_steps=2"
    code, errors = finish(start(root, changes, UPS_TESTING="1", UPS_FAULT=faults))
    assert (code, errors.count("\n")) == (4, 1) and errors.startswith("FAULT 4 diverged: operator: loss")
    code, errors = finish(start(UPS_TESTING="1", UPS_FAULT="full-disk:rank0:step4"))
    assert (code, errors.count("\n")) == (6, 1) and "No space left on device" in errors


def test_nothing_is_injected_by_accident(root: Path, start: Callable[..., Kedro], expected: Path):
    """Without `UPS_TESTING=1` a fault that is asked for does not strike."""
    assert finish(start(UPS_FAULT="sigkill:rank1:step5")) == (0, "")
    assert status_of(root)["restarts"] == []
    assert_same_training(folder_of(root), expected)


@pytest.mark.parametrize("hanging", [False, True])
def test_tracking_that_does_not_answer(root: Path, start: Callable[..., Kedro], expected: Path, hanging: bool):
    """R30: with MLflow down or hanging the weights are the same, every line is on disk, and the status says so."""
    with free_port(listen=hanging) as port:
        begin = time.monotonic()
        code, errors = finish(start(MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}"))
        seconds = time.monotonic() - begin
    assert code == 0, errors
    assert_same_training(folder_of(root), expected)
    assert [line["step"] for line in lines_of(folder_of(root)) if "loss" in line] == list(range(1, 17))
    assert status_of(root)["tracking"] == "degraded"
    assert seconds < SECONDS_PER_JOB


@pytest.mark.parametrize("name", ["a b", "Grüße 'Welt' $x & ü", "d" * 200])
def test_odd_folder_names(root: Path, tmp_path: Path, store: str, expected: Path, name: str):
    """R35: spaces, quotes, letters beyond ASCII and long names in the path change nothing."""
    place = tmp_path / name / "root"
    place.parent.mkdir()
    root.rename(place)
    root.mkdir()
    process = start_kedro(place, STEPS, MLFLOW_TRACKING_URI=store)
    assert finish(process) == (0, "")
    assert_same_training(folder_of(place), expected)


def in_namespace(mount: str, root: Path, store: str) -> tuple[int, str]:
    """The end of a command that sees a mount of its own below `root`."""
    wrap = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    return finish(start_kedro(root, STEPS, wrap=wrap, MLFLOW_TRACKING_URI=store))


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0, reason="no mounts"
)


@needs_mounts
def test_a_read_only_folder(root: Path, store: str):
    """R35: a folder that may not be written to ends with code 6 and its name."""
    code, errors = in_namespace(f"mount --bind '{root}' '{root}' && mount -o remount,ro,bind '{root}'", root, store)
    assert (code, errors.count("\n")) == (6, 1), errors
    assert str(root) in errors and "Read-only file system" in errors


@needs_mounts
@pytest.mark.parametrize("kilobytes", [40, 100, 160])
def test_a_disk_that_is_really_full(root: Path, store: str, kilobytes: int):
    """R10: a small disk under the run folders ends with code 6, wherever it becomes full, or is large enough."""
    (root / "06_models/operator").mkdir()
    mount = f"mount -t tmpfs -o size={kilobytes}k none '{root}/06_models/operator'"
    code, errors = in_namespace(mount, root, store)
    assert code == 6, errors
    assert errors.count("\n") == 1 and "No space left on device" in errors


def test_missing_inputs(root: Path, start: Callable[..., Kedro]):
    """R38: a stage whose inputs do not exist yet ends with code 3 and says what to run."""
    (root / "04_feature/latent_cache.json").unlink()
    code, errors = finish(start())
    assert (code, errors.count("\n")) == (
        3,
        1,
    ) and "latent_cache.json does not exist yet: run the nodes before" in errors


def test_inputs_of_another_run(root: Path, start: Callable[..., Kedro]):
    """R38: a receipt that does not fit what lies in its folder ends with code 3 and says what differs."""
    receipt = read_json(root / "04_feature/latent_cache.json")
    receipt["key"]["codec weights"] = "0" * 64
    write_json(root / "04_feature/latent_cache.json", receipt)
    code, errors = finish(start())
    assert (code, errors.count("\n")) == (3, 1) and "was made from another codec weights" in errors
