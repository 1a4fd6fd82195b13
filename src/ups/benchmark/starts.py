"""How long a training job takes to its first step: from nothing, and from a checkpoint."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ups.errors import LostWorker
from ups.files import remove_leftovers
from ups.run import Run, metric_lines
from ups.torchrun import WORKER, run_job

FOREVER = {"steps": 10**6, "log_every": 1, "validate_every": 10**6, "patience": None, "schedule": "constant"}


class _Seen(Exception):  # noqa: N818
    """The step that was waited for is done."""


def import_seconds() -> float:
    """Seconds that Python takes to start, import torch and end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def start_seconds(run: Run) -> tuple[float, float]:
    """Seconds from the launch to the end of the first step; then the same of the job that resumes it.

    The job is asked to stop as soon as its step is done; it saves it and the second job goes on from there.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    run.write()
    return _seconds_to_next_step(run), _seconds_to_next_step(run)


def _seconds_to_next_step(run: Run) -> float:
    remove_leftovers(run.folder)
    started = time.time()

    def tick() -> None:
        if _later(run.folder, started):
            raise _Seen

    try:
        run_job(WORKER, run.folder, run.launch, tick)
    except _Seen:
        return _later(run.folder, started)[0]["time"] - started
    raise LostWorker(f"a start of {run.stage} ended before its first step; its output is in {run.folder}")


def _later(folder: Path, started: float) -> list[dict[str, Any]]:
    """Metrics of the steps done since then."""
    return [metrics for metrics in map(json.loads, metric_lines(folder)) if metrics["time"] > started]
