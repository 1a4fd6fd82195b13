"""The training loop of all stages; what differs between stages is in `Stage`: a model, a loss and samples."""

import gc
import json
import logging
import math
import signal
from statistics import fmean, mean
from typing import Any

import torch
from torch import Tensor

from ups.config.training import TrainingSection
from ups.errors import Preempted
from ups.files import WEIGHTS, publish, write_json
from ups.runs.run import CHECKPOINTS, METRICS, SAMPLING, STARTED, Run, append_metrics, metric_lines
from ups.training.batches import Batches, cut, micro_batch_size
from ups.training.checkpoints import Checkpoints, publish_tensors
from ups.training.distributed import Draw, Ranks, check_ranks, memory_place
from ups.training.history import StepTimer, TrainingHistory
from ups.training.injection import Injection
from ups.training.optimizers import learning_rate
from ups.training.parallel import full_state
from ups.training.stage import Stage, fixed_batches
from ups.training.update import Update

log = logging.getLogger(__name__)


def train(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Train for `config.steps`, or until early stopping (`config.patience`), from the last checkpoint if there is one.

    Raises:
        Diverged: a loss is not finite, or more than `config.max_skipped_steps` steps had unusable gradients.
        OutOfMemory: micro-batches do not fit into memory.
        Preempted: this job received a SIGTERM; a checkpoint of the current step has been written.
    """
    inject = Injection.read(run.folder, ranks.rank)
    update = Update(stage, config, run, ranks, inject)
    checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.launch.keep_checkpoints, inject.at)
    speed = check_ranks(ranks, config.precision)
    history = _resume(update, checkpoints, run, ranks, speed)
    batches = Batches(stage, config, run, ranks, inject, history.validations)
    timer = StepTimer(run.launch.checkpoint_minutes, ranks.device, speed["matmul_rates"][ranks.rank])
    terminations: list[int] = []  # SIGTERMs of this process: batch systems send one before they end a job
    signal.signal(signal.SIGTERM, lambda number, frame: terminations.append(number))
    half_patience = max(1, (config.patience or 0) // 2)
    # The worker has disabled garbage collection for its imports. What exists by now lives as long as the process and
    # need not be searched by every collection.
    gc.freeze()
    gc.enable()

    with batches.from_step(history.step):
        while history.step < config.steps and not history.is_exhausted(config.patience):
            # One step. The launcher ends the job if a rank has not touched its file `alive` for `timeout_seconds`.
            run.alive(ranks.rank).touch()
            inject.at("step", history.step)
            share = timer.wait_for(batches.next)
            rate = learning_rate(config, history.step, history.valid_losses, half_patience)
            # Saving is collective, so `update` lets the ranks agree on it. After a failed save another one is due at
            # once: it waits for the failed one and raises its fault.
            save = checkpoints.failed() or (ranks.rank == 0 and timer.save_is_due())
            timer.count(share, update, ranks.world_size)
            outcome = update(share, rate, stop=bool(terminations), save=save)
            history.add(outcome, share)
            step, is_last = history.step, history.step == config.steps

            # Log. Reading losses waits for the device, hence not in every step.
            if step % config.log_every == 0 or is_last:
                metrics = history.metrics(update, config, ranks) | {"learning_rate": rate} | timer.metrics()
                _record(run, ranks, step, metrics)
            if stage.terms is not None and (step == 1 or step % config.log_every == 0 or is_last):
                _record(run, ranks, step, _mean_terms(stage.terms, ranks))

            # Validate the averaged weights, which are the result of the training.
            if step % config.validate_every == 0 or is_last:
                losses = validate(stage, update.average, config, run, ranks)
                by_key = {f"valid_loss/{key}": loss for key, loss in losses.items()}
                _record(run, ranks, step, {"valid_loss": fmean(losses.values()), **by_key})
                history.add_validation(losses, update, keep_best=config.patience is not None)
                if stage.after_validation is not None and not is_last:  # the result is what was validated
                    for model in (update.model, update.average):
                        stage.after_validation(model, losses)
                timer.restart()

            # Save, and stop if some rank received SIGTERM. After the last step the weights are written instead.
            if is_last:
                break
            if step % run.launch.checkpoint_steps == 0 or outcome.save or outcome.stop:
                _save(update, history, checkpoints, ranks)
                timer.saved()
            if outcome.stop:
                checkpoints.wait()
                raise Preempted(f"{run.stage} was asked to stop and saved step {step}; the same command resumes it")

    # Write the weights (the best with early stopping, else the last) and the samples that each rank has seen.
    weights = history.best or full_state(update.average)
    seen = ranks.all_gather(dict(sorted(history.seen.items())))
    if ranks.rank == 0:
        write_json(run.folder / SAMPLING, {"samples_per_rank": seen})
        publish_tensors(run.folder / WEIGHTS, {"settings": stage.settings, "weights": weights})
        checkpoints.remove()
    ranks.barrier()


@torch.no_grad()
def validate(stage: Stage, model: torch.nn.Module, config: TrainingSection, run: Run, ranks: Ranks) -> dict[str, float]:
    """Mean loss of one fixed batch of the validation split per key, over all ranks."""
    losses = {}
    for position, (key, samples) in enumerate(fixed_batches(stage.valid.num_samples, stage.batch_sizes(config))):
        total = torch.zeros((), device=ranks.device)
        largest_share = math.ceil(len(samples) / ranks.world_size)
        count = math.ceil(largest_share / micro_batch_size(stage, key, run))
        for part in cut(ranks.share(len(samples)), count):
            run.alive(ranks.rank).touch()
            # A rank without a sample computes one with weight 0: forward passes of sharded models are collective.
            place = part if part.start < part.stop else slice(0, 1)
            batch = stage.valid.load(key, samples[place]).to(ranks.device)
            draw = Draw((config.seed, 3, position), len(samples), place, ranks.device)
            total += stage.loss(model, batch, draw).sum() * (part.start < part.stop)
        losses[key] = ranks.all_reduce(total).item() / len(samples)
    return losses


def _resume(update: Update, checkpoints: Checkpoints, run: Run, ranks: Ranks, speed: dict[str, Any]) -> TrainingHistory:
    """Restore the newest intact checkpoint, chosen by rank 0 for all ranks, if there is one; returns its history."""
    history = TrainingHistory(run.stage, ranks.device)
    if ranks.rank == 0:
        checkpoints.clean()
    found = checkpoints.newest() if ranks.rank == 0 else None
    step = ranks.broadcast(found[0] if found else None)
    if step is not None:
        state = found[1] if found else checkpoints.read(step)
        before = len(state["progress"]["ranks"])
        if before != ranks.world_size and ranks.rank == 0:
            log.warning("resumed on %d processes instead of %d: not bit for bit", ranks.world_size, before)
        update.restore(state["update"])
        history.restore(state["progress"], ranks)
        log.info("resumed at step %d", step)
    if ranks.rank == 0:
        _drop_metrics_after(run, history.step)
        start = {"step": history.step, "refused": checkpoints.refused, "eager_because": update.eager_because}
        memory = memory_place(run, ranks) | {"memory_gigabytes": run.launch.memory_gigabytes}
        write_json(run.folder / STARTED, start | memory | speed)
    return history


def _save(update: Update, history: TrainingHistory, checkpoints: Checkpoints, ranks: Ranks) -> None:
    takes_part = ranks.rank == 0 or update.run.launch.sharding != "ddp"  # all ranks gather shards, one copies a replica
    state, progress = update.state() if takes_part else {}, history.state(ranks)
    if ranks.rank == 0:
        checkpoints.save(history.step, {"update": state, "progress": progress})


def _mean_terms(terms: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """The latest value of each term of the loss, mean over the ranks that have computed it."""
    found = ranks.all_gather({name: value.item() for name, value in terms.items()})
    names = sorted({name for values in found for name in values})
    return {f"term/{name}": mean(values[name] for values in found if name in values) for name in names}


def _record(run: Run, ranks: Ranks, step: int, metrics: dict[str, float]) -> None:
    if ranks.rank == 0:
        append_metrics(run.folder, step, metrics)


def _drop_metrics_after(run: Run, step: int) -> None:
    """Drop the metrics of steps that will be repeated, and an incomplete last line of a killed run."""
    kept = (f"{line}\n" for line in metric_lines(run.folder) if json.loads(line)["step"] <= step)
    if (run.folder / METRICS).is_file():
        with publish(run.folder / METRICS) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")
