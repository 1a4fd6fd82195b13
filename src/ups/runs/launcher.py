"""Train a stage as a torchrun job: skip a finished stage, resume an unfinished one, restart after a fault."""

import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

from ups.config import LaunchConfig
from ups.config.training import TrainingSection
from ups.data.arrays import expect_stamps
from ups.data.sources import Files, sources_of, stamps_of
from ups.errors import Fault, LostWorker, OutOfMemory, Preempted
from ups.files import WEIGHTS, digest_of, manifest_of, place_of, read_manifest, remove_leftovers
from ups.runs import machine
from ups.runs.progress import ProgressBar, stop_requested
from ups.runs.run import ALIVE, CHECKPOINTS, Run, metric_lines
from ups.runs.stage_cache import Receipt, cached_step, fingerprint
from ups.runs.status import find_fault, write_status
from ups.runs.torchrun import WORKER, run_job
from ups.runs.tracking import StageRun

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # before a restart


def train_stage(
    stage: str,
    config: TrainingSection,
    inputs: dict[str, Receipt],
    launch: LaunchConfig,
    data_root: Path,
    raw: Path | None = None,
) -> Receipt:
    """Train `stage` unless its section, inputs and code are unchanged; resume it from its last checkpoint.

    Raw files that it reads, of the codec in `raw`, must be the described ones, before and at the end.

    Returns:
        The receipt: stage, path relative to `data_root`, fingerprint, SHA-256 of the weights.

    Raises:
        Fault: from a training process, or LostWorker if one was killed or hung; after `launch.restarts` restarts.
    """
    key = fingerprint(f"ups.training.stages.{stage}", config, inputs, "ups.training.loop")

    def work(folder: Path) -> Receipt:
        remove_leftovers(folder)
        if not is_finished(folder):
            kind = machine.training_device(launch, stage, config.precision)
            section = config.model_dump(mode="json")
            tuned = machine.with_tuned_micro_batch(launch, stage, section, kind, data_root)
            place, sources = _raw_files(inputs, raw, data_root)
            stamps = stamps_of(place, sources, data_root) if sources else {}
            _train(Run(folder, stage, key, section, inputs, tuned, kind, data_root, raw, stamps))
            expect_stamps(place, stamps)
        # A worker that is killed right after it has saved the weights leaves its checkpoints.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        return {"stage": stage, "weights": read_manifest(folder / WEIGHTS)["sha256"]}

    return cached_step(stage, data_root / "06_models" / stage, key, work, root=data_root, force=launch.force)


def _raw_files(inputs: dict[str, Receipt], raw: Path | None, data_root: Path) -> tuple[Path, Files]:
    """The raw files that a stage reads, and their folder: of datasets, or of latents that are not on disk, or none."""
    if raw is not None:
        return raw, inputs["datasets"]["sources"]
    if (receipt := inputs.get("latent_cache")) is not None:
        from ups.data.latent_cache import LatentCache  # imports torch

        cache = LatentCache.open(place_of(data_root, receipt), receipt["key"])
        if not cache.on_disk:
            return cache.raw, sources_of(receipt)
    return data_root, {}


def is_finished(folder: Path) -> bool:
    """Whether the final weights exist and have the SHA-256 of their manifest."""
    weights, manifest = folder / WEIGHTS, manifest_of(folder / WEIGHTS)
    return weights.is_file() and manifest.is_file() and digest_of(weights) == read_manifest(weights)["sha256"]


def _train(run: Run) -> None:
    """Run the job until the stage is trained; restart it after a fault that a restart can cure."""
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
            log.warning("%s; restart %d of %d", fault, len(restarts), run.launch.restarts)
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
    """Run one job; None if the stage is then trained, else the fault that ended the job."""
    folder, launch = run.folder, run.launch
    if step := newest_checkpoint(folder):
        log.info("%s: goes on at step %d of %d", run.stage, step, run.config["steps"])
    with ProgressBar(run.stage, run.config["steps"], "steps") as bar:
        num_lines = 0

        def forward_metrics() -> None:
            nonlocal num_lines
            lines = metric_lines(folder)
            if lines and len(lines) != num_lines:
                num_lines = len(lines)
                tracked.forward(lines)
                bar.reach(json.loads(lines[-1])["step"], _latest_losses(lines))

        try:
            ended = run_job(WORKER, run, forward_metrics)
        except LostWorker as lost:
            return lost
    return None if is_finished(folder) else find_fault(folder, launch.world_size, *ended)


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest complete checkpoint of a run folder; 0 if there is none."""
    names = (path.name for path in (folder / CHECKPOINTS).glob("step_*.pt.json"))
    return max((int(name.removeprefix("step_").removesuffix(".pt.json")) for name in names), default=0)


def _is_curable(fault: Fault, launch: LaunchConfig) -> bool:
    """Whether a restart can help.

    It can after a lost worker, after a SIGTERM that torchrun alone has received (this command was not asked to stop),
    and after a lack of memory as long as micro-batches can be halved.
    """
    if stop_requested.is_set():
        return False
    if isinstance(fault, OutOfMemory):
        return 1 < fault.tokens <= (launch.micro_batch_tokens or fault.tokens)
    return isinstance(fault, LostWorker | Preempted)


def _with_smaller_micro_batches(run: Run, tokens: int) -> Run:
    """`run` with half the `tokens` that did not fit into memory, which is saved for later runs as well."""
    machine.save_micro_batch(run.launch, run.stage, run.config, run.device, run.data_root, tokens // 2)
    return replace(run, launch=run.launch.model_copy(update={"micro_batch_tokens": tokens // 2}))


def _latest_losses(lines: list[str]) -> str:
    """The latest training and validation loss, for the progress bar."""
    latest = {key: value for line in lines for key, value in json.loads(line).items()}
    names = {"loss": "loss", "valid_loss": "valid"}
    return " ".join(f"{name} {latest[key]:.3g}" for key, name in names.items() if key in latest)
