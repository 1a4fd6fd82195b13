"""Start a training stage: up to date? otherwise torchrun as a child process, watched until it has finished."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ups import errors
from ups.config import LaunchConfig, TrainingSection
from ups.errors import ConfigFault, Fault, LostWorker, Preempted
from ups.files import digest_of, read_json, write_json
from ups.fingerprint import fingerprint
from ups.processes import die_with_parent
from ups.progress import ProgressBar
from ups.receipts import Receipt, once
from ups.tracking import StageRun

log = logging.getLogger(__name__)

RUN, METRICS, WEIGHTS, LOG = "run.json", "metrics.jsonl", "weights.pt", "train.log"
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.2

stop_requested = threading.Event()
"""Set when this command was interrupted: a stage may be watched from a thread that no signal reaches."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def refuse_under_torchrun() -> None:
    """The orchestrator is one process and starts torchrun itself; under torchrun every rank would orchestrate.

    Raises:
        ConfigFault: this process was started by torchrun.
    """
    found = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if found:
        raise ConfigFault(
            f"started under torchrun ({', '.join(found)} set): run plain `kedro run`, with "
            "--params launch.num_processes=N for N processes per stage"
        )


def train_stage(
    stage: str,
    config: TrainingSection,
    inputs: dict[str, Receipt],
    launch: LaunchConfig,
    data_root: Path,
    raw: Path | None = None,
) -> Receipt:
    """Train `stage` unless its section, inputs and code are unchanged; resume it where it was interrupted.

    Returns:
        The receipt: stage, path relative to `data_root`, fingerprint, SHA-256 of the weights.

    Raises:
        Fault: what a training process reported, or LostWorker if it died without a word.
    """
    identity = fingerprint(f"ups.training.{stage}", config, inputs)

    def work(folder: Path) -> Receipt:
        places = {"data_root": os.path.relpath(data_root, folder)}
        places |= {"raw": os.path.relpath(raw, folder)} if raw is not None else {}
        settings = launch.model_dump() | {"device": device(launch)}
        content = {"stage": stage, "fingerprint": identity, "config": config.model_dump(mode="json"), "inputs": inputs}
        write_json(folder / RUN, content | {"launch": settings} | places)
        (folder / WEIGHTS).unlink(missing_ok=True)
        _train(stage, config, folder, identity, launch)
        return {"stage": stage, "weights": digest_of(folder / WEIGHTS)}

    folder = data_root / "06_models" / stage
    return once(stage, folder, identity, work, root=data_root, force=launch.force)


def device(launch: LaunchConfig) -> str:
    """`cpu` or `cuda`; a GPU machine never falls back to the CPU by itself.

    Raises:
        ConfigFault: CUDA is asked for and absent, or there are more processes than GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if launch.device == "cpu" or (launch.device == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus < launch.num_processes:
        raise ConfigFault(
            f"launch.num_processes={launch.num_processes} needs as many GPUs, found {num_gpus}: "
            "lower it or set launch.device=cpu"
        )
    return "cuda"


def _train(stage: str, config: TrainingSection, folder: Path, identity: str, launch: LaunchConfig) -> None:
    for path in folder.glob("fault.rank*.json"):
        path.unlink()
    tracked, status = StageRun(stage, config.model_dump(mode="json"), identity), "KILLED"
    try:
        _watch(stage, _start(folder, launch), config.steps, folder, tracked)
        status = "FINISHED"
    except Fault as fault:
        status = "KILLED" if isinstance(fault, Preempted) else "FAILED"
        raise
    finally:
        tracked.close(status, _lines(folder))


def _start(folder: Path, launch: LaunchConfig) -> subprocess.Popen:
    threads = launch.threads_per_process or max(1, (os.cpu_count() or 1) // launch.num_processes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    command += [f"--nproc-per-node={launch.num_processes}", "-m", "ups.training.train", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "HDF5_PLUGIN_PATH": ""}
    with (folder / LOG).open("a", encoding="utf-8") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _watch(stage: str, child: subprocess.Popen, steps: int, folder: Path, tracked: StageRun) -> None:
    """Show progress and forward metrics until the child ends; end it, and all it started, when we are interrupted."""
    try:
        with ProgressBar(stage, steps, "steps") as bar:
            seen = 0
            while child.poll() is None:
                if stop_requested.is_set():
                    raise Preempted(f"{stage} was interrupted; the same command resumes it")
                lines = _lines(folder)
                if lines and len(lines) != seen:
                    seen = len(lines)
                    tracked.forward(lines)
                    bar.reach(json.loads(lines[-1])["step"], _note(lines))
                time.sleep(POLL_SECONDS)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    if not (folder / WEIGHTS).is_file():
        raise _fault(stage, folder, child.returncode)


def _fault(stage: str, folder: Path, returncode: int) -> Fault:
    """What the first rank with something to say reported; the exit code of torchrun says nothing."""
    for path in sorted(folder.glob("fault.rank*.json")):
        report: dict[str, Any] = read_json(path)
        return getattr(errors, report["kind"])(report["what"])
    return LostWorker(
        f"{stage}: a training process ended without a word (torchrun: {returncode}); its output is in {folder / LOG}, "
        "the same command resumes from the last checkpoint"
    )


def _lines(folder: Path) -> list[str]:
    """Complete lines of the metrics file; the last one may still be growing."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.split("\n")[:-1]


def _note(lines: list[str]) -> str:
    """The latest training and validation loss."""
    parts = []
    for key, name in (("loss", "loss"), ("valid_loss", "valid")):
        values = [metrics[key] for line in reversed(lines) if key in (metrics := json.loads(line))]
        if values:
            parts.append(f"{name} {values[0]:.3g}")
    return " ".join(parts)
