"""Jobs on a real Slurm: what is interrupted is queued again and resumes, what is cancelled stays so."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import slurm
from tests.runs.test_submission import job
from ups.files import read_json
from ups.runs.submission import Job
from ups.session import job_of

PROJECT = Path(__file__).parents[2]
# Ends with 0 in a second run, and with 75 once it has got a SIGTERM, as a run does that has saved its step.
RUN = """#!/bin/bash
trap 'echo "got TERM"; sleep 1; echo saved; exit 75' TERM
echo "started with $*"
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then echo resumed; exit 0; fi
while true; do sleep 0.2; done
"""
pytestmark = pytest.mark.skipif(not slurm.is_installed(), reason="Slurm and munge are not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of one node."""
    with slurm.cluster(tmp_path_factory.mktemp("slurm")):
        yield


def submitted(script: str, folder: Path) -> str:
    """The number of the job of a script, which runs in `folder`."""
    command = ["sbatch", "--parsable", f"--output={folder}/log.txt"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=True).stdout.strip()


def run_again(number: str) -> None:
    """Let a job that was queued again start soon: Slurm would wait two minutes.

    Two seconds are left to it, because Slurm takes a job that starts in the second in which it ended for the ended one
    ("Job credential revoked"), and the job fails.
    """
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "PENDING", 60)
    slurm.wait_for(lambda: not slurm.ask("squeue", "--noheader", "--states=COMPLETING"), 60)
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] != "PENDING", 180)


def script_of(given: Job, **programs: str) -> str:
    """The script of a job that finds these programs, bash by their names, in place of the real ones."""
    for name, text in programs.items():
        (given.project / name).write_text(text)
        (given.project / name).chmod(0o755)
    before, found, after = given.render("slurm").partition("run=(")
    assert found
    return f'{before}PATH={given.project}:"$PATH"\n{found}{after}'


INTERRUPTIONS = {
    "before the time limit": ("scancel", "--signal=TERM", "--batch"),  # as --signal=B:TERM@120 does
    "by hand": ("scancel", "--signal=TERM"),
    "preempted": ("scontrol", "requeue"),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_an_interrupted_job_is_queued_again_and_resumes(cluster: None, tmp_path: Path, how: str):
    """The run gets one SIGTERM, has time to save its step, and the same job starts again and ends well."""
    number, log = submitted(script_of(job(tmp_path, cores=1), kedro=RUN), tmp_path), tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and "started" in log.read_text(), 60)
    slurm.ask(*INTERRUPTIONS[how], number)
    run_again(number)
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "COMPLETED", 60)
    assert slurm.fields(number)["Restarts"] == "1" and slurm.fields(number)["ExitCode"] == "0:0"
    text = log.read_text()
    assert text.count("got TERM") == text.count("saved") == text.count("resumed") == 1
    assert text.count("started with run --env local --pipeline full --params data_root=/disk/results\n") == 2


def test_a_cancelled_job_stays_cancelled(cluster: None, tmp_path: Path):
    """`scancel` ends a job although its run exits with the code of an interruption."""
    number, log = submitted(script_of(job(tmp_path, cores=1), kedro=RUN), tmp_path), tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and "started" in log.read_text(), 60)
    slurm.ask("scancel", number)
    slurm.wait_for(lambda: "saved" in log.read_text() and not slurm.ask("squeue", "--noheader"), 60)
    assert (slurm.fields(number)["JobState"], slurm.fields(number)["Restarts"]) == ("CANCELLED", "0")


def test_one_element_of_an_array_is_queued_again_by_itself(cluster: None, tmp_path: Path):
    """Each seed has a data root of its own; an interruption of the last one leaves the first one alone."""
    number = submitted(script_of(job(tmp_path, cores=1, num_seeds=2), kedro=RUN), tmp_path)
    log = tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and log.read_text().count("started") == 2, 60)
    text = log.read_text()
    assert all(f"--params seed={seed},data_root=/disk/results/seed-{seed}\n" in text for seed in (0, 1))
    slurm.ask("scancel", "--signal=TERM", "--batch", f"{number}_1")
    run_again(f"{number}_1")
    slurm.wait_for(lambda: "resumed" in log.read_text(), 60)
    assert slurm.fields(f"{number}_0")["JobState"] == "RUNNING" and slurm.fields(f"{number}_0")["Restarts"] == "0"
    slurm.ask("scancel", number)


# As `ups agent` does: it ends with the run, which the first node tells it by a file; interrupted, both end with 75.
AGENT = """#!/bin/bash
trap 'echo "agent got TERM"; exit 75' TERM
echo "agent on $SLURMD_NODENAME $*"
until [ -e "$3/ended" ]; do sleep 0.2; done
"""


def test_several_nodes_are_interrupted_and_resume_together(cluster: None, tmp_path: Path):
    """The run is on the first node, an agent on the second; both get one SIGTERM, and are started again."""
    root, log = tmp_path / "results", tmp_path / "log.txt"
    given = replace(job(tmp_path, cores=1, nodes=2), data_root=root)
    run = RUN.replace("exit 0", f"touch {root}/ended; exit 0")
    number = submitted(script_of(given, kedro=run, ups=AGENT), tmp_path)
    slurm.wait_for(lambda: log.is_file() and "agent on" in log.read_text() and "started" in log.read_text(), 60)
    slurm.ask("scancel", "--signal=TERM", "--batch", number)
    run_again(number)
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "COMPLETED", 60)
    text = log.read_text()
    assert text.count(f"agent on node2 agent --data-root {root}\n") == 2
    assert text.count("agent got TERM") == text.count("saved") == text.count("resumed") == 1
    assert "launch.num_nodes=2,launch.rendezvous=node1:" in text and slurm.fields(number)["ExitCode"] == "0:0"


@pytest.mark.slow
def test_the_time_limit_is_an_interruption(cluster: None, tmp_path: Path):
    """Two minutes before its time is over a job gets the signal, saves its step and is queued again."""
    number = submitted(script_of(job(tmp_path, cores=1, hours=0.05), kedro=RUN), tmp_path)
    log = tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and "saved" in log.read_text(), 240)
    run_again(number)
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "COMPLETED", 60)
    assert slurm.fields(number)["Restarts"] == "1" and log.read_text().count("got TERM") == 1


@pytest.mark.slow
def test_a_preempted_training_ends_like_an_undisturbed_one(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole smoke pipeline, requeued while the operator is trained, has the weights of a run without a break."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "src"))
    roots = [tmp_path / name for name in ("preempted", "undisturbed")]
    params = "operator.steps=60,submit.cores=1,submit.memory_gigabytes=4,launch.device=cpu,data_root="
    for root in roots:
        root.mkdir()
    jobs = [replace(job_of(PROJECT, "smoke", "full", f"{params}{root}"), data_root=root) for root in roots]
    numbers = [submitted(one.render("slurm"), root) for one, root in zip(jobs, roots, strict=True)]
    slurm.wait_for(lambda: list(roots[0].glob("06_models/operator/*/checkpoints/*.json")) != [], 300)
    slurm.ask("scontrol", "requeue", numbers[0])
    run_again(numbers[0])
    slurm.wait_for(lambda: {slurm.fields(number)["JobState"] for number in numbers} == {"COMPLETED"}, 900)
    assert [slurm.fields(number)["Restarts"] for number in numbers] == ["1", "0"]
    text = (roots[0] / "log.txt").read_text()
    assert "FAULT 75 preempted: operator" in text and "operator: goes on at step" in text
    for stage in ("operator", "diffusion", "steady"):
        first, second = (read_json(root / "06_models" / f"{stage}.json")["weights"] for root in roots)
        assert first == second, stage
