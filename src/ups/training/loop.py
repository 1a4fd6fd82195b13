"""The training loop, once, for all stages: a stage is a model, a loss and its samples."""

import gc
import json
import logging
import signal
from statistics import mean

import torch
from torch import Tensor

from ups.config import TrainingSection
from ups.data.loader import fixed_batches
from ups.errors import Preempted
from ups.files import WEIGHTS, publish, write_json
from ups.run import CHECKPOINTS, METRICS, SAMPLING, STARTED, Run, append_metrics, metric_lines
from ups.training.batches import Batches
from ups.training.checkpoints import Checkpoints, publish_tensors
from ups.training.distributed import Draw, Ranks
from ups.training.injection import Injection
from ups.training.optimizers import learning_rate
from ups.training.parallel import full_state
from ups.training.progress import Clock, Progress
from ups.training.stage import Stage
from ups.training.update import Update

log = logging.getLogger(__name__)


def train(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Train until `config.steps`, or until validation stops improving, from the last checkpoint if there is one.

    Raises:
        Diverged: a loss is not finite, or too many gradients were not.
        OutOfMemory: micro-batches do not fit.
        Preempted: a SIGTERM came; the step it came in is saved.
    """
    inject = Injection.read(run.folder, ranks.rank)
    update = Update(stage, config, run, ranks, inject)
    batches = Batches(stage, config, run, ranks, inject)
    checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.launch.keep_checkpoints, inject.at)
    progress = _resume(update, checkpoints, run, ranks)
    stop, clock = StopRequest(), Clock(run.launch.checkpoint_minutes)
    half_patience = max(1, (config.patience or 0) // 2)
    gc.freeze()
    gc.enable()

    with batches.from_step(progress.step):
        while progress.step < config.steps and not progress.is_over(config.patience):
            run.alive(ranks.rank).touch()
            inject.at("step", progress.step)
            share = clock.wait_for(batches.next)
            rate = learning_rate(config, progress.step, progress.valid_losses, half_patience)
            save = checkpoints.failed() or (ranks.rank == 0 and clock.save_is_due())
            outcome = update(share, rate, stop=stop.asked, save=save)
            progress.add(outcome, share)

            done = progress.step
            if done % config.log_every == 0 or done == config.steps:
                metrics = progress.metrics(update, config, ranks) | {"learning_rate": rate} | clock.metrics()
                _record(run, ranks, done, metrics)
            if stage.terms is not None and (done == 1 or done % config.log_every == 0 or done == config.steps):
                _record(run, ranks, done, _term_metrics(stage.terms, ranks))
            if done % config.validate_every == 0 or done == config.steps:
                losses = validate(stage, update.average, config, run, ranks)
                valid_loss = sum(losses.values()) / len(losses)
                by_key = {f"valid_loss/{key}": loss for key, loss in losses.items()}
                _record(run, ranks, done, {"valid_loss": valid_loss, **by_key})
                if stage.validated is not None:
                    for model in (update.model, update.average):
                        stage.validated(model, losses)
                progress.add_validation(valid_loss, update, keep_best=config.patience is not None)
                clock.restart()
            if done == config.steps:
                break
            if done % run.launch.checkpoint_steps == 0 or outcome.save or outcome.stop:
                _save(update, progress, checkpoints, ranks)
                clock.saved()
            if outcome.stop:
                checkpoints.wait()
                raise Preempted(f"{run.stage} was asked to stop and saved step {done}; the same command goes on")

    _finish(stage, update, progress, checkpoints, run, ranks)


class StopRequest:
    """Whether this process got a SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


@torch.no_grad()
def validate(stage: Stage, model: torch.nn.Module, config: TrainingSection, run: Run, ranks: Ranks) -> dict[str, float]:
    """Mean loss over one fixed batch per key of the validation split."""
    losses = {}
    for position, (key, samples) in enumerate(fixed_batches(stage.valid.num_samples, stage.batch_sizes(config))):
        run.alive(ranks.rank).touch()
        share = ranks.share(len(samples))
        # A rank without a sample computes one that does not count: shards of the model are gathered by all ranks.
        place = share if share.start < share.stop else slice(0, 1)
        batch = stage.valid.load(key, samples[place]).to(ranks.device)
        draw = Draw((config.seed, 3, position), len(samples), place, ranks.device)
        total = stage.loss(model, batch, draw).sum() * (share.start < share.stop)
        losses[key] = ranks.total(total).item() / len(samples)
    return losses


def _resume(update: Update, checkpoints: Checkpoints, run: Run, ranks: Ranks) -> Progress:
    """Progress of the newest intact checkpoint, restored; all ranks take the one that rank 0 finds."""
    progress = Progress(run.stage, ranks.device)
    if ranks.rank == 0:
        checkpoints.clean()
    found = checkpoints.newest() if ranks.rank == 0 else None
    step = ranks.from_first(found[0] if found else None)
    if step is not None:
        state = found[1] if found else checkpoints.read(step)
        if len(state["progress"]["ranks"]) != ranks.world_size and ranks.rank == 0:
            before = len(state["progress"]["ranks"])
            log.warning("resumed on %d processes instead of %d: not bit for bit", ranks.world_size, before)
        update.restore(state["update"])
        progress.restore(state["progress"], ranks)
        log.info("resumed at step %d", step)
    if ranks.rank == 0:
        _forget_after(run, progress.step)
        start = {"step": progress.step, "refused": checkpoints.refused, "eager_because": update.eager_because}
        write_json(run.folder / STARTED, start)
    return progress


def _save(update: Update, progress: Progress, checkpoints: Checkpoints, ranks: Ranks) -> None:
    state = {"update": update.state(), "progress": progress.state(ranks)}
    if ranks.rank == 0:
        checkpoints.save(progress.step, state)


def _finish(stage: Stage, update: Update, progress: Progress, checkpoints: Checkpoints, run: Run, ranks: Ranks) -> None:
    """Write the averaged weights and what each rank has seen; then the checkpoints are no longer needed."""
    weights = progress.best or full_state(update.average)
    seen = ranks.gather(dict(sorted(progress.seen.items())))
    if ranks.rank == 0:
        write_json(run.folder / SAMPLING, {"samples_per_rank": seen})
        publish_tensors(run.folder / WEIGHTS, {"settings": stage.settings, "weights": weights})
        checkpoints.remove()
    ranks.barrier()


def _term_metrics(terms: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """The latest value of each further term of the loss, mean over the ranks that have one."""
    found = ranks.gather({name: value.item() for name, value in terms.items()})
    names = sorted({name for values in found for name in values})
    return {f"term/{name}": mean(values[name] for values in found if name in values) for name in names}


def _record(run: Run, ranks: Ranks, step: int, metrics: dict[str, float]) -> None:
    if ranks.rank == 0:
        append_metrics(run.folder, step, metrics)


def _forget_after(run: Run, step: int) -> None:
    """Drop the metrics of steps that will be repeated, and a line that a kill cut short."""
    lines = metric_lines(run.folder)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    if (run.folder / METRICS).is_file():
        with publish(run.folder / METRICS) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
