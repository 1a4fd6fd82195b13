"""One optimizer step: forward and backward passes of micro-batches, gradient exchange, clipping, update, averaging."""

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from ups.config.training import FLOAT8_MULTIPLE, TrainingSection
from ups.errors import ConfigFault, OutOfMemory
from ups.models.blocks import Blocks
from ups.runs.processes import is_out_of_memory
from ups.runs.run import Run
from ups.training import parallel
from ups.training.batches import MicroBatch, Share
from ups.training.distributed import Draw, Ranks, seed_of
from ups.training.injection import Injection
from ups.training.optimizers import make_optimizer
from ups.training.stage import Stage

log = logging.getLogger(__name__)

MAX_COMPILED_SHAPES = 64  # of a block: one graph per batch shape and set of boundaries
CHECKED_STEPS = 3  # in which gradients are compared between ranks: a wrong exchange shows in the first steps
SETTLED_STEPS = 100  # over which the gradient norm is averaged before a spike can be recognized


def compile_blocks(model: nn.Module, mode: str | None = None) -> None:
    """Compile every block of `model` in place; `mode` is one of `torch.compile`.

    All blocks share one graph per batch shape and set of boundaries, whatever the family, so that few graphs are
    compiled, each at the first batch of its shape. Names in `state_dict` and copies of the model are unaffected.
    """
    limits = torch._dynamo.config  # of a function in one process: all models share those of a block
    limits.recompile_limit += MAX_COMPILED_SHAPES
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)
    for blocks in (module for module in model.modules() if isinstance(module, Blocks)):
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False, mode=mode)


def convert_to_float8(model: nn.Module, device: torch.device) -> None:
    """Have the linear layers of the blocks multiply matrices in float8, in place, by torchao; a CPU emulates it.

    Operands are scaled by their largest value at each product. Weights keep their names and precision. Left out are
    layers with an edge that is no multiple of 16, as products in float8 demand, and `modulation`, which acts once on a
    sample and not on each token.

    Raises:
        ConfigFault: torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigFault(f"precision: float8 needs the extra: pip install -e '.[float8]' ({error})") from error

    def is_converted(layer: nn.Module, name: str) -> bool:
        return name != "modulation" and all(size % FLOAT8_MULTIPLE == 0 for size in layer.weight.shape)

    # Products for gradients of weights run over the tokens, of which there is any number: padding.
    how = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    blocks = [block for stack in model.modules() if isinstance(stack, Blocks) for block in stack]
    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=is_converted, config=how)


@cache  # a process may have many models, and each probe is another graph of one function, of which torch allows few
def why_not_compiled(device: torch.device) -> str | None:
    """The reason why `torch.compile` does not work on this machine (no C++ compiler, for example), or None."""
    from torch._dynamo.exc import ShortenTraceback

    now = time.time_ns()  # makes the function new: a cached one would hide that the compiler is missing
    probe = torch.compile(lambda x: x + now, fullgraph=True, dynamic=False)
    try:
        probe(torch.zeros(64, device=device))
    except ShortenTraceback as error:  # of the compiler, or of Triton itself
        reason = getattr(error, "inner_exception", error)
        return f"{type(reason).__name__}: {reason}".splitlines()[0]
    return None


@dataclass(frozen=True)
class StepResult:
    """Result of a step: this rank's part of the mean loss, whether the step was applied (1 or 0), `stop` and `save`.

    `loss` and `taken` are 0-d tensors on the device. If the gradient is not finite or a spike all ranks skip the step
    and both are 0; if some rank runs out of memory all ranks skip it and both are None.
    """

    loss: Tensor | None
    taken: Tensor | None
    stop: bool
    save: bool


class Update:
    """A stage's model, the moving average of its weights and its optimizer; calling it takes one optimizer step.

    Parameters without gradient (of families that are not in the batch) keep their value, moments and average. A step
    moves the average of the others to them by 1 - min(ema_decay, (1 + n) / (10 + n)) of the distance, where n, of
    `num_updates`, counts the earlier steps with a gradient of that parameter: those of a family in few batches are few.
    A step that is skipped counts too, and moves the average towards weights that stay as they are.
    `mean_norm` (running mean of the gradient norm over `num_norms` steps), `num_skipped` (number of skipped steps) and
    `first_skipped` (the first of them) are 0-d tensors on the device, so that no step waits for the device.
    """

    def __init__(self, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks, inject: Injection) -> None:
        self.stage, self.config, self.run, self.ranks, self.inject = stage, config, run, ranks, inject
        self.model = stage.model.to(ranks.device)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        if config.precision == "float8":  # the average, which is validated and saved, keeps its plain layers
            convert_to_float8(self.model, ranks.device)
        stacks = [module for module in self.model.modules() if isinstance(module, Blocks)]
        self.dropping = [blocks for blocks in stacks if blocks.drop_path > 0]
        for blocks in stacks:
            blocks.recompute = run.launch.activation_checkpointing
        self.eager_because = (
            _compile(self.model, ranks, run.launch.compile) if run.launch.compile else "launch.compile is off"
        )
        for model in (self.model, self.average):
            parallel.parallelize(model, ranks, run.launch.sharding)
        self.exchange = getattr(torch, run.launch.exchange_precision)
        self.optimizer = make_optimizer(self.model, config)
        self.weights = list(zip(self.model.parameters(), self.average.parameters(), strict=True))
        self.num_updates = [0] * len(self.weights)
        self.mean_norm, self.num_norms, self.num_skipped = torch.zeros(3, device=ranks.device)
        self.first_skipped = torch.tensor(-1.0, device=ranks.device)
        self.checked = 0

    def __call__(self, share: Share, learning_rate: float, *, stop: bool, save: bool) -> StepResult:
        """Take the step of `share`; `stop` and `save` are requests of this rank; one rank's request holds for all."""
        if self.run.launch.compile == "reduce-overhead":
            # Graphs may overwrite the results of the last step, which have no reader any more. Not those of the last
            # micro-batch: gradients are added up in the memory of the graphs that have computed the first ones.
            torch.compiler.cudagraph_mark_step_begin()
        loss = torch.zeros((), device=self.ranks.device)
        last, bucket_megabytes = len(share.micro_batches) - 1, self.run.launch.bucket_megabytes
        for position, micro in enumerate(share.micro_batches):
            with parallel.gradient_sync(self.model, self.ranks, position == last, bucket_megabytes, self.exchange):
                values = self._forward(share, micro, position)
                if position == last or values is None:
                    with record_function("exchange"):
                        no_memory, stop, save = self.ranks.any_rank(values is None, stop, save)
                    if no_memory:
                        parallel.discard_step(self.model)
                        return StepResult(None, None, stop, save)
                assert values is not None
                with record_function("backward"), self._memory_faults(share, "backward"):
                    # The mean over the global batch: gradients are averaged over ranks.
                    (values.sum() * (self.ranks.world_size / share.size)).backward()
                loss += values.detach().sum() / share.size
        taken = self._apply(share.step, learning_rate)
        return StepResult(torch.where(taken > 0, loss, 0.0), taken, stop, save)

    def flops_per_sample(self, share: Share) -> float:
        """Floating-point operations of forward and backward pass of one sample of `share.key` in step `share.step`.

        Counts matrix products, convolutions and, on GPUs, attention, as done without compilation; 0 if one sample does
        not fit into memory. Under `fsdp` it is collective, and raises `OutOfMemory`.
        """
        load = partial(self.stage.train.load, share.key, np.zeros(1, dtype=np.int64))
        one = replace(share, size=1)
        try:
            with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
                self._loss(one, MicroBatch(slice(0, 1), load), position=0).sum().backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.run.launch.sharding != "ddp":
                raise replace(share, tokens=0).too_large(
                    f"one sample of {share.key} does not fit into memory"
                ) from None
            return 0.0
        finally:
            self.model.zero_grad(set_to_none=True)
        return float(counter.get_total_flops())

    def state(self) -> dict[str, Any]:
        """The state that the next step depends on, unsharded and on the CPU, independent of the number of processes."""
        return {
            "model": parallel.full_state(self.model),
            "average": parallel.full_state(self.average),
            "optimizer": {
                name: parallel.full_optimizer_state(self.model, part) for name, part in self.optimizer.parts.items()
            },
            "norms": [float(value) for value in self.norms()],
            "num_updates": list(self.num_updates),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        parallel.load_full_state(self.model, state["model"])
        parallel.load_full_state(self.average, state["average"])
        for name, part in self.optimizer.parts.items():
            parallel.load_full_optimizer_state(self.model, part, state["optimizer"][name])
        for tensor, value in zip(self.norms(), state["norms"], strict=True):
            tensor.fill_(value)
        self.num_updates = list(state["num_updates"])

    def norms(self) -> tuple[Tensor, ...]:
        """Mean gradient norm, number of steps in it, number of skipped steps, first skipped step or -1."""
        return self.mean_norm, self.num_norms, self.num_skipped, self.first_skipped

    def _loss(self, share: Share, micro: MicroBatch, position: int) -> Tensor:
        seed = (self.config.seed, 2, share.step)
        torch.manual_seed(seed_of((*seed, position, self.ranks.rank)))
        batch = micro.load().to(self.ranks.device)
        draw = Draw(seed, share.size, micro.place, self.ranks.device, share.step)
        if self.dropping:  # stochastic depth: each sample skips the same blocks on any number of ranks
            kept = Draw((self.config.seed, 4, share.step), share.size, micro.place, self.ranks.device)
            for blocks in self.dropping:
                blocks.keep = kept.keep(blocks.drop_path, len(blocks))
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.config.precision != "float32"):
            return self.stage.loss(self.model, batch, draw)

    def _forward(self, share: Share, micro: MicroBatch, position: int) -> Tensor | None:
        """One loss per sample (B,); None if memory runs out, so that all ranks can skip the step together.

        Under FSDP the forward pass is collective and cannot be skipped by one rank: an OutOfMemory fault ends the job.
        """
        try:
            with record_function("forward"), self._memory_faults(share, "forward"):
                values = self._loss(share, micro, position)
        except OutOfMemory:
            if self.run.launch.sharding != "ddp":
                raise
            return None
        kind = self.inject.at("loss", share.step)
        return values * {"nan": torch.nan, "spike": 1e6}[kind] if kind else values

    @contextmanager
    def _memory_faults(self, share: Share, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """Turn a failed allocation in the forward or backward pass of `share` into an `OutOfMemory` fault."""
        try:
            self.inject.at(phase, share.step)
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            what = f"{self.run.stage}: {share.tokens} tokens of {share.key} do not fit into the memory of rank"
            raise share.too_large(f"{what} {self.ranks.rank} in the {phase} pass") from None

    @record_function("update")
    def _apply(self, step: int, learning_rate: float) -> Tensor:
        used = ((i, p, mean) for i, (p, mean) in enumerate(self.weights) if p.grad is not None)
        places, parameters, averages = zip(*used, strict=True)
        if self.inject.at("gradient", step):
            parameters[0].grad.add_(1.0)
        if self.checked < CHECKED_STEPS:
            parallel.check_gradients_agree(self.model, self.ranks)
            self.checked += 1
        skip = self._is_bad(parallel.clip_gradients(parameters, self.config.clip_norm).to(self.ranks.device), step)
        self.optimizer.step(learning_rate, skip.to(parameters[0].device))  # the CPU's, where shards are kept there
        self.optimizer.zero_grad()
        fractions = [max(1 - self.config.ema_decay, 9 / (10 + self.num_updates[i])) for i in places]
        with torch.no_grad():
            torch._foreach_lerp_(parallel.local_shards(averages), parallel.local_shards(parameters), fractions)
        for i in places:
            self.num_updates[i] += 1
        return 1 - skip

    def _is_bad(self, norm: Tensor, step: int) -> Tensor:
        """1.0 if the gradient is not finite or a spike, else 0.0; a 0-d tensor on the device."""
        is_spike = (self.num_norms >= SETTLED_STEPS) & (norm > self.config.spike_factor * self.mean_norm)
        good = norm.isfinite() & ~is_spike
        weight = good / (self.num_norms + 1).clamp(max=SETTLED_STEPS)
        self.mean_norm.add_(torch.where(good, norm - self.mean_norm, 0.0) * weight)
        self.num_norms.add_(good)
        self.first_skipped.copy_(torch.where(~good & (self.first_skipped < 0), step, self.first_skipped))
        self.num_skipped.add_(~good)
        return (~good).float()


def _compile(model: nn.Module, ranks: Ranks, how: Literal[True, "reduce-overhead"]) -> str | None:
    """Compile the model's blocks on all ranks or on none; returns and logs the reason if they are not compiled."""
    reason = next(filter(None, ranks.all_gather(why_not_compiled(ranks.device))), None)
    if reason is None:
        compile_blocks(model, None if how is True else how)
    else:
        log.warning("torch.compile does not work here, training runs without it: %s", reason)
    return reason
