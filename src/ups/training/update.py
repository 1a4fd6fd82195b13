"""One optimizer step: micro-batches forward and backward, gradients exchanged once, clipped, applied, averaged."""

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ups.config import TrainingSection
from ups.errors import OutOfMemory
from ups.models.blocks import Blocks
from ups.run import Run
from ups.training.batches import MicroBatch, Share
from ups.training.distributed import Draw, Ranks, seed_of
from ups.training.injection import Injection
from ups.training.memory import is_out_of_memory
from ups.training.optimizers import make_optimizer
from ups.training.parallel import (
    abandon,
    check_gradients_agree,
    clip_gradients,
    exchanging,
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    local,
    parallelize,
)
from ups.training.stage import Stage

log = logging.getLogger(__name__)

CHECKED_STEPS = 3
SETTLED_STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """What a step did: this rank's part of the mean loss, whether it was taken (1 or 0), what all ranks agreed on.

    A step for which some rank had no memory has no loss: nobody took it. One whose gradient was not fit to use has
    loss 0. Both are 0-d tensors on the device.
    """

    loss: Tensor | None
    taken: Tensor | None
    stop: bool
    save: bool


class Update:
    """A stage's model, its moving average and its optimizer, and the step that moves them.

    Parameters that a batch does not use rest: neither they nor their moments and averages move.

    `mean_norm`, `num_norms`, `num_skipped` and `first_skipped` are 0-d tensors on the device, so that no step waits
    for it: the running mean of the gradient norm, over how many steps, how many steps were skipped, the first of them.
    """

    def __init__(self, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks, inject: Injection) -> None:
        self.stage, self.config, self.run, self.ranks, self.inject = stage, config, run, ranks, inject
        self.model = stage.model.to(ranks.device)
        average = copy.deepcopy(self.model).requires_grad_(False)
        stacks = [module for module in self.model.modules() if isinstance(module, Blocks)]
        self.dropping = [blocks for blocks in stacks if blocks.drop_path > 0]
        for blocks in stacks:
            blocks.recompute = run.launch.activation_checkpointing
        self.eager_because = _compile(self.model, ranks) if run.launch.compile else "launch.compile is off"
        self.average = average
        for model in (self.model, average):
            parallelize(model, ranks, run.launch.sharding)
        self.optimizer = make_optimizer(self.model, config)
        self.mean_norm, self.num_norms, self.num_skipped = torch.zeros(3, device=ranks.device)
        self.first_skipped = torch.tensor(-1.0, device=ranks.device)
        self.checked = 0

    def __call__(self, share: Share, learning_rate: float, *, stop: bool, save: bool) -> Outcome:
        """Take the step of `share`; this rank wishes to stop or save after it."""
        loss = torch.zeros((), device=self.ranks.device)
        last = len(share.micro_batches) - 1
        for position, micro in enumerate(share.micro_batches):
            with exchanging(self.model, self.ranks, position == last, self.run.launch.bucket_megabytes):
                values = self._forward(share, micro, position)
                if position == last or values is None:
                    with record_function("exchange"):
                        no_memory, stop, save = self.ranks.agree(values is None, stop, save)
                    if no_memory:
                        abandon(self.model)
                        return Outcome(None, None, stop, save)
                assert values is not None
                self._backward(values, share)
                loss += values.detach().sum() / share.size
        taken = self._apply(share.step, learning_rate)
        return Outcome(torch.where(taken > 0, loss, 0.0), taken, stop, save)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, whole and on the CPU; the same whatever the number of processes."""
        return {
            "model": full_state(self.model),
            "average": full_state(self.average),
            "optimizer": {name: full_optimizer_state(self.model, part) for name, part in self.optimizer.parts.items()},
            "norms": [float(value) for value in self.norms()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        load_full_state(self.model, state["model"])
        load_full_state(self.average, state["average"])
        for name, part in self.optimizer.parts.items():
            load_full_optimizer_state(self.model, part, state["optimizer"][name])
        for tensor, value in zip(self.norms(), state["norms"], strict=True):
            tensor.fill_(value)

    def norms(self) -> tuple[Tensor, ...]:
        """Running mean of the gradient norm, over how many steps, steps skipped, the first of them or -1."""
        return self.mean_norm, self.num_norms, self.num_skipped, self.first_skipped

    def _loss(self, share: Share, micro: MicroBatch, position: int) -> Tensor:
        seed = (self.config.seed, 2, share.step)
        torch.manual_seed(seed_of((*seed, position, self.ranks.rank)))
        batch = micro.batch.to(self.ranks.device)
        draw = Draw(seed, share.size, micro.place, self.ranks.device, share.step)
        if self.dropping:
            self._drop_blocks(share, micro)
        precision = torch.bfloat16 if self.config.precision == "bfloat16" else None
        with torch.autocast(self.ranks.device.type, precision, enabled=precision is not None):
            return self.stage.loss(self.model, batch, draw)

    def _drop_blocks(self, share: Share, micro: MicroBatch) -> None:
        """Choose which blocks each sample skips in this step, the same on any number of ranks."""
        draw = Draw((self.config.seed, 4, share.step), share.size, micro.place, self.ranks.device)
        for blocks in self.dropping:
            blocks.keep = draw.keep(blocks.drop_path, len(blocks))

    def _forward(self, share: Share, micro: MicroBatch, position: int) -> Tensor | None:
        """One loss per sample; None where there is no memory for it and the other ranks can be told."""
        try:
            self.inject.at("forward", share.step)
            with record_function("forward"):
                values = self._loss(share, micro, position)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.run.launch.sharding == "fsdp":
                raise self._too_large(share, "the forward pass") from None
            return None
        spoilt = {"nan": torch.nan, "spike": 1e6}.get(self.inject.at("loss", share.step) or "", 1.0)
        return values * spoilt if spoilt != 1.0 else values

    def _backward(self, values: Tensor, share: Share) -> None:
        try:
            self.inject.at("backward", share.step)
            with record_function("backward"):
                # The mean over the global batch: gradients are averaged over ranks.
                (values.sum() * (self.ranks.world_size / share.size)).backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_large(share, "the backward pass") from None

    def _too_large(self, share: Share, where: str) -> OutOfMemory:
        fault = OutOfMemory(
            f"{self.run.stage}: {share.tokens} tokens of {share.key} do not fit into the memory of rank "
            f"{self.ranks.rank} in {where}; set launch.micro_batch_tokens below that"
        )
        fault.tokens = share.tokens
        return fault

    @record_function("update")
    def _apply(self, step: int, learning_rate: float) -> Tensor:
        pairs = zip(self.model.parameters(), self.average.parameters(), strict=True)
        parameters, averages = zip(*((p, average) for p, average in pairs if p.grad is not None), strict=True)
        if self.inject.at("gradient", step):
            parameters[0].grad.add_(1.0)
        if self.checked < CHECKED_STEPS:
            check_gradients_agree(self.model, self.ranks)
            self.checked += 1
        skip = self._is_bad(clip_gradients(parameters, self.config.clip_norm), step)
        self.optimizer.step(learning_rate, skip)
        self.optimizer.zero_grad()
        decay = min(self.config.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(local(averages), local(parameters), 1 - decay)
        return 1 - skip

    def _is_bad(self, norm: Tensor, step: int) -> Tensor:
        """1 where this gradient must not be applied, else 0; on the device."""
        is_spike = (self.num_norms >= SETTLED_STEPS) & (norm > self.config.spike_factor * self.mean_norm)
        bad = ~norm.isfinite() | is_spike
        good = ~bad
        weight = good / (self.num_norms + 1).clamp(max=SETTLED_STEPS)
        self.mean_norm.add_(torch.where(good, norm - self.mean_norm, 0.0) * weight)
        self.num_norms.add_(good)
        self.first_skipped.copy_(torch.where(bad & (self.first_skipped < 0), step, self.first_skipped))
        self.num_skipped.add_(bad)
        return bad.float()


def _compile(model: nn.Module, ranks: Ranks) -> str | None:
    """Compile the model's blocks on all ranks or on none; the reason for none, which is also told in the log."""
    from ups.training.compiling import compile_blocks, why_not_compiled

    reason = next(filter(None, ranks.gather(why_not_compiled(ranks.device))), None)
    if reason is None:
        compile_blocks(model)
    else:
        log.warning("not compiled, this run is slower: %s", reason)
    return reason
