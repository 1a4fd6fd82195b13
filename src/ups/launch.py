"""Train a stage: up to date? otherwise a torchrun job, watched until it has finished, started again if it was lost."""

import json
import logging
import os
import shlex
import shutil
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ups import tuning
from ups.config import LaunchConfig, TrainingSection
from ups.errors import ConfigFault, Fault, LostWorker, OutOfMemory, Preempted
from ups.files import WEIGHTS, digest_of, manifest_of, read_json, remove_leftovers
from ups.fingerprint import fingerprint
from ups.progress import ProgressBar
from ups.receipts import Receipt, once
from ups.run import ALIVE, CHECKPOINTS, Run, metric_lines
from ups.status import fault_of, write_status
from ups.torchrun import WORKER, command, run_job, stop_requested
from ups.tracking import StageRun

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
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
        Fault: what a training process reported, or LostWorker if it died without a word, after `launch.restarts`.
    """
    identity = fingerprint(f"ups.training.{stage}", config, inputs, "ups.training.loop")

    def work(folder: Path) -> Receipt:
        remove_leftovers(folder)
        if not is_finished(folder):
            where = device(launch)
            tuned = tuning.apply(launch, stage, where, data_root)
            section = config.model_dump(mode="json")
            _train(Run(folder, stage, identity, section, inputs, tuned, where, data_root, raw))
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # of a run that was killed after its last word
        return {"stage": stage, "weights": read_json(manifest_of(folder / WEIGHTS))["sha256"]}

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


def limit_threads(launch: LaunchConfig) -> None:
    """Compute in this process with as many threads as in a training process."""
    import torch

    torch.set_num_threads(launch.threads_per_process or os.cpu_count() or 1)


def is_finished(folder: Path) -> bool:
    """Whether the weights are there and what their manifest says."""
    manifest = manifest_of(folder / WEIGHTS)
    return manifest.is_file() and digest_of(folder / WEIGHTS) == read_json(manifest)["sha256"]


def _train(run: Run) -> None:
    """Run the job until it has finished, starting it again after what can be cured."""
    tracked = StageRun(run.stage, run.config, run.fingerprint)
    restarts: list[str] = []
    state = "failed"
    fault: Fault | None = None
    try:
        while True:
            run.write()
            write_status(run.folder, "running", fault, restarts, tracked.state)
            if (fault := _run_once(run, tracked)) is None:
                state = "finished"
                return
            if not _is_curable(fault, run.launch) or len(restarts) == run.launch.restarts:
                raise fault
            restarts.append(str(fault))
            log.warning("%s; started again (%d of %d)", fault, len(restarts), run.launch.restarts)
            if isinstance(fault, OutOfMemory):
                run = _with_smaller_micro_batches(run, fault.tokens)
            time.sleep(PAUSE_SECONDS)
    except Fault as raised:
        state, fault = "preempted" if isinstance(raised, Preempted) else "failed", raised
        raise
    finally:
        for path in run.folder.glob(ALIVE):
            path.unlink()
        tracked.close({"finished": "FINISHED", "preempted": "KILLED"}.get(state, "FAILED"), metric_lines(run.folder))
        write_status(run.folder, state, fault, restarts, tracked.state)


def _run_once(run: Run, tracked: StageRun) -> Fault | None:
    """Run the job; the fault it ended with, if it did not finish."""
    folder, launch = run.folder, run.launch
    if launch.num_nodes > 1:
        others = shlex.join(command(WORKER, folder, launch))
        log.info("%s: waiting for %d other nodes; there, run: %s", run.stage, launch.num_nodes - 1, others)
    with ProgressBar(run.stage, run.config["steps"], "steps") as bar:
        seen = 0

        def tick() -> None:
            nonlocal seen
            lines = metric_lines(folder)
            if lines and len(lines) != seen:
                seen = len(lines)
                tracked.forward(lines)
                bar.reach(json.loads(lines[-1])["step"], _note(lines))

        try:
            ended = run_job(WORKER, folder, launch, tick)
        except LostWorker as lost:
            return lost
    return None if is_finished(folder) else fault_of(folder, launch.world_size, *ended)


def _is_curable(fault: Fault, launch: LaunchConfig) -> bool:
    """After a lost worker, a SIGTERM that was not meant for this command, or while micro-batches can get smaller."""
    if stop_requested.is_set():
        return False
    if isinstance(fault, OutOfMemory):
        return 1 < fault.tokens <= (launch.micro_batch_tokens or fault.tokens)
    return isinstance(fault, LostWorker | Preempted)


def _with_smaller_micro_batches(run: Run, tokens: int) -> Run:
    """Half of what did not fit, for this run and for those that follow."""
    tuning.remember(run.launch, run.stage, run.device, run.data_root, tokens // 2)
    return replace(run, launch=run.launch.model_copy(update={"micro_batch_tokens": tokens // 2}))


def _note(lines: list[str]) -> str:
    """The latest training and validation loss."""
    parts = []
    for key, name in (("loss", "loss"), ("valid_loss", "valid")):
        latest = (metrics[key] for line in reversed(lines) if key in (metrics := json.loads(line)))
        parts += [f"{name} {value:.3g}" for value in islice(latest, 1)]
    return " ".join(parts)
