"""The training loop, once, for all stages: a stage is a model, a loss and its samples."""

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ups.config import TrainingSection
from ups.data.loader import BatchSampler, fixed_batches
from ups.errors import ConfigFault, Diverged
from ups.models.weights import WEIGHTS, load, save
from ups.training.distributed import Draw, Ranks
from ups.training.run import METRICS, STATE, Run, append_metrics


class Samples(Protocol):
    """Where batches come from: the number of samples per key, and any of them on request."""

    @property
    def num_samples(self) -> dict[str, int]: ...

    def load(self, key: str, samples: np.ndarray, device: torch.device) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """What distinguishes one stage from another.

    `loss(model, batch, draw)` gives one value per sample, (B,), and touches the model only by calling it. `settings`
    are the model's constructor arguments.
    """

    model: nn.Module
    settings: dict[str, Any]
    loss: Callable[[nn.Module, Any, Draw], Tensor]
    train: Samples
    valid: Samples
    batch_sizes: dict[str, int]


def train(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Train until `config.steps`, from the last checkpoint if there is one, and write the averaged weights.

    Raises:
        Diverged: the loss or the gradient became NaN or infinite.
    """
    sampler = BatchSampler(stage.train.num_samples, stage.batch_sizes, config.seed)
    _check_shares(stage.batch_sizes, ranks)
    model = stage.model.to(ranks.device)
    average = copy.deepcopy(model).requires_grad_(False)
    parallel = DistributedDataParallel(model) if ranks.world_size > 1 else model
    optimizer = _optimizer(model, config)

    def losses(step: int) -> tuple[Tensor, int]:
        key, samples = sampler.draw(step)
        share = ranks.share(len(samples))
        draw = Draw((config.seed, 2, step), len(samples), share, ranks.device)
        return stage.loss(parallel, stage.train.load(key, samples[share], ranks.device), draw), len(samples)

    _settle_buckets(parallel, losses, ranks)
    first = _restore(load(run.folder / STATE), model, average, optimizer) if (run.folder / STATE).is_file() else 0
    if ranks.rank == 0:
        _forget_after(run, first)
    loss_sum, since, started = torch.zeros((), device=ranks.device), 0, time.perf_counter()

    for step in range(first, config.steps):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(config, step)
        values, global_size = losses(step)
        # The mean over the global batch: DDP averages gradients over ranks, whose shares may differ by one sample.
        (values.sum() * (ranks.world_size / global_size)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _update_average(average, model, min(config.ema_decay, (1 + step) / (10 + step)))
        loss_sum, since = loss_sum + values.detach().sum() / global_size, since + 1

        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            loss = (ranks.total(loss_sum) / since).item()
            _check_finite(run, done, loss=loss, gradient_norm=norm.item())
            speed = since / (time.perf_counter() - started)
            metrics = {"loss": loss, "gradient_norm": norm.item(), "learning_rate": learning_rate(config, step)}
            _record(run, ranks, done, metrics | {"steps_per_second": speed})
            loss_sum, since, started = torch.zeros_like(loss_sum), 0, time.perf_counter()
        if done % config.validate_every == 0 or done == config.steps:
            _record(run, ranks, done, validate(stage, average, config, ranks))
            started = time.perf_counter()
        if done % config.checkpoint_every == 0 and ranks.rank == 0:
            _check_finite(run, done, gradient_norm=norm.item())
            save(run.folder / STATE, _state(done, model, average, optimizer))

    if ranks.rank == 0:
        save(run.folder / WEIGHTS, {"settings": stage.settings, "weights": average.state_dict()})
        (run.folder / STATE).unlink(missing_ok=True)
    ranks.barrier()


def _check_finite(run: Run, step: int, **values: float) -> None:
    if not all(map(math.isfinite, values.values())):
        told = ", ".join(f"{name} {value}" for name, value in values.items())
        raise Diverged(f"{run.stage}: {told} at step {step}; lower {run.stage}.learning_rate")


def learning_rate(config: TrainingSection, step: int) -> float:
    """Linear warm-up, then a cosine to one hundredth of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(stage: Stage, model: nn.Module, config: TrainingSection, ranks: Ranks) -> dict[str, float]:
    """Mean loss over one fixed batch per key of the validation split, and over the keys."""
    metrics = {}
    for position, (key, samples) in enumerate(fixed_batches(stage.valid.num_samples, stage.batch_sizes)):
        share = ranks.share(len(samples))
        draw = Draw((config.seed, 3, position), len(samples), share, ranks.device)
        total = torch.zeros((), device=ranks.device)
        if share.start < share.stop:
            total = stage.loss(model, stage.valid.load(key, samples[share], ranks.device), draw).sum()
        metrics[f"valid_loss/{key}"] = ranks.total(total).item() / len(samples)
    return {"valid_loss": sum(metrics.values()) / len(metrics), **metrics}


def _check_shares(batch_sizes: dict[str, int], ranks: Ranks) -> None:
    key = min(batch_sizes, key=batch_sizes.__getitem__)
    if batch_sizes[key] < ranks.world_size:
        raise ConfigFault(
            f"a batch of {batch_sizes[key]} snapshots of {key} cannot be shared by {ranks.world_size} processes: "
            "raise batch_tokens or lower launch.num_processes"
        )


def _optimizer(model: nn.Module, config: TrainingSection) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def _settle_buckets(parallel: nn.Module, losses: Callable[[int], tuple[Tensor, int]], ranks: Ranks) -> None:
    """Two backward passes that are thrown away: DDP orders its buckets anew after the first.

    Without them the first step after a resume would add up gradients in another order than the step it repeats.
    """
    for step in range(2 if ranks.world_size > 1 else 0):
        losses(step)[0].sum().backward()
        parallel.zero_grad(set_to_none=True)


@torch.no_grad()
def _update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def _state(step: int, model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = {"model": model, "average": average, "optimizer": optimizer}
    return {"step": step, **{name: part.state_dict() for name, part in parts.items()}}


def _restore(state: dict[str, Any], model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    for name, part in (("model", model), ("average", average), ("optimizer", optimizer)):
        part.load_state_dict(state[name])
    return state["step"]


def _record(run: Run, ranks: Ranks, step: int, metrics: dict[str, float]) -> None:
    if ranks.rank == 0:
        append_metrics(run.folder, step, metrics)


def _forget_after(run: Run, step: int) -> None:
    """Drop the metrics of steps that will be repeated, and a line that a kill cut short."""
    path = run.folder / METRICS
    if path.is_file():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        kept = [line for line in kept if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
