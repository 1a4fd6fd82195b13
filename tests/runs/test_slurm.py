"""Jobs on a real Slurm of one machine: what is interrupted is queued again and resumes, what is cancelled stays so."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import slurm
from tests.runs.test_submission import job
from ups.files import read_json
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
    """Let a job that was queued again start at once: Slurm would wait two minutes."""
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "PENDING", 60)
    slurm.wait_for(lambda: not slurm.ask("squeue", "--noheader", "--states=COMPLETING"), 60)
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now")


@pytest.fixture
def script(tmp_path: Path, cluster: None) -> str:
    """The script of a job with one core whose program is RUN, in place of `kedro`."""
    (tmp_path / "kedro").write_text(RUN)
    (tmp_path / "kedro").chmod(0o755)
    content = job(cores=1, project=tmp_path).render("slurm")
    before, found, after = content.partition("run=(")
    assert found
    return f'{before}PATH={tmp_path}:"$PATH"\n{found}{after}'


INTERRUPTIONS = {
    "before the time limit": ("scancel", "--signal=TERM", "--batch"),  # as --signal=B:TERM@120 does
    "by hand": ("scancel", "--signal=TERM"),
    "preempted": ("scontrol", "requeue"),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_an_interrupted_job_is_queued_again_and_resumes(script: str, tmp_path: Path, how: str):
    """The run gets one SIGTERM, has time to save its step, and the same job starts again and ends well."""
    number, log = submitted(script, tmp_path), tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and "started" in log.read_text(), 60)
    slurm.ask(*INTERRUPTIONS[how], number)
    run_again(number)
    slurm.wait_for(lambda: slurm.fields(number)["JobState"] == "COMPLETED", 60)
    assert slurm.fields(number)["Restarts"] == "1" and slurm.fields(number)["ExitCode"] == "0:0"
    text = log.read_text()
    assert text.count("got TERM") == text.count("saved") == text.count("resumed") == 1
    assert text.count("started with run --env local --pipeline full --params data_root=/disk/results\n") == 2


def test_a_cancelled_job_stays_cancelled(script: str, tmp_path: Path):
    """`scancel` ends a job although its run exits with the code of an interruption."""
    number, log = submitted(script, tmp_path), tmp_path / "log.txt"
    slurm.wait_for(lambda: log.is_file() and "started" in log.read_text(), 60)
    slurm.ask("scancel", number)
    slurm.wait_for(lambda: "saved" in log.read_text() and not slurm.ask("squeue", "--noheader"), 60)
    assert (slurm.fields(number)["JobState"], slurm.fields(number)["Restarts"]) == ("CANCELLED", "0")


def test_one_element_of_an_array_is_queued_again_by_itself(script: str, tmp_path: Path):
    """Each seed has a data root of its own; an interruption of the first one leaves the second one alone."""
    (tmp_path / "seeds").mkdir()
    whole = job(cores=1, num_seeds=2, project=tmp_path).render("slurm")
    before, found, after = whole.partition("run=(")
    number = submitted(f'{before}PATH={tmp_path}:"$PATH"\n{found}{after}', tmp_path / "seeds")
    log = tmp_path / "seeds" / "log.txt"
    slurm.wait_for(lambda: log.is_file() and log.read_text().count("started") == 2, 60)
    text = log.read_text()
    assert all(f"--params seed={seed},data_root=/disk/results/seed-{seed}\n" in text for seed in (0, 1))
    slurm.ask("scancel", "--signal=TERM", "--batch", f"{number}_1")
    run_again(f"{number}_1")
    slurm.wait_for(lambda: "resumed" in log.read_text(), 60)
    assert slurm.fields(f"{number}_0")["JobState"] == "RUNNING" and slurm.fields(f"{number}_0")["Restarts"] == "0"
    slurm.ask("scancel", number)


@pytest.mark.slow
def test_a_preempted_training_ends_like_an_undisturbed_one(cluster: None, tmp_path: Path):
    """The whole smoke pipeline, requeued while the operator is trained, has the weights of a run without a break."""
    os.environ["PYTHONPATH"] = str(PROJECT / "src")
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
