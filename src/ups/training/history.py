"""History of a training run: steps, losses, samples seen, best weights; and the wall-clock time of its steps."""

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config.training import TrainingSection
from ups.errors import Diverged
from ups.runs.processes import energy_kilojoules, now, peak_memory_gigabytes
from ups.training.batches import Share
from ups.training.distributed import Ranks
from ups.training.parallel import full_state
from ups.training.update import StepResult, Update

MAX_SKIPPED_FOR_MEMORY = 3
SAME_ON_ALL_RANKS = ("step", "num_skipped_for_memory", "validations", "best")


class TrainingHistory:
    """What a rank records while it trains; part of every checkpoint.

    `step` is the number of finished steps. `loss_sum` over `num_losses` applied steps since the last log line is this
    rank's part of the global loss; `seen` counts the samples of each dataset on this rank, but
    not those of steps that lacked memory. All else is the same on all ranks: validation losses by key, and the weights
    `best` with the lowest mean of them.
    """

    def __init__(self, stage: str, device: torch.device) -> None:
        self.stage, self.step, self.num_skipped_for_memory = stage, 0, 0
        baseline = "baselines.learning_rate, or the model's rate in baselines.chosen"
        self.remedy = f"lower {baseline if stage == 'baseline' else f'{stage}.learning_rate'}"
        self.loss_sum, self.num_losses = torch.zeros(2, device=device)
        self.seen: Counter[str] = Counter()
        self.validations: list[dict[str, float]] = []
        self.best: dict[str, Tensor] | None = None

    def add(self, outcome: StepResult, share: Share) -> None:
        """Record a step, without loss if all ranks skipped it for lack of memory; the fourth raises `OutOfMemory`."""
        self.step = share.step + 1
        if outcome.loss is not None:
            self.seen += share.seen
            self.loss_sum, self.num_losses = self.loss_sum + outcome.loss, self.num_losses + outcome.taken
            return
        self.num_skipped_for_memory += 1
        if self.num_skipped_for_memory > MAX_SKIPPED_FOR_MEMORY:
            raise share.too_large(
                f"{self.stage}: {self.num_skipped_for_memory} steps did not fit into memory, the last with "
                f"{share.tokens} tokens of {share.key}"
            )

    def metrics(self, update: Update, config: TrainingSection, ranks: Ranks) -> dict[str, float]:
        """Mean loss over all ranks and the steps since the last call, mean gradient norm, number of skipped steps.

        There is no loss if all those steps were skipped. Raises `Diverged` if a loss is not finite, or if more than
        `config.max_skipped_steps` steps had unusable gradients.
        """
        loss = (ranks.all_reduce(self.loss_sum) / self.num_losses).item()
        norm, _, num_skipped, first_skipped = (value.item() for value in update.norms())
        finite = {"loss": loss, "gradient_norm": norm} if self.num_losses > 0 else {"gradient_norm": norm}
        if num_skipped > config.max_skipped_steps or not all(map(math.isfinite, finite.values())):
            since = f", unusable gradients since step {first_skipped:.0f}" if num_skipped else ""
            raise Diverged(f"{self.stage}: loss {loss} at step {self.step}{since}; {self.remedy}")
        self.loss_sum, self.num_losses = torch.zeros(2, device=self.loss_sum.device)
        return finite | {"skipped_steps": num_skipped + self.num_skipped_for_memory}

    @property
    def valid_losses(self) -> list[float]:
        """The mean over keys of each validation."""
        return [fmean(losses.values()) for losses in self.validations]

    def add_validation(self, losses: dict[str, float], update: Update, *, keep_best: bool) -> None:
        """Record validation losses, with `keep_best` the weights of the lowest mean; `Diverged` if not finite."""
        loss = fmean(losses.values())
        if not math.isfinite(loss):
            raise Diverged(f"{self.stage}: validation loss {loss} at step {self.step}; {self.remedy}")
        if keep_best and loss < min(self.valid_losses, default=math.inf):
            self.best = full_state(update.average)
        self.validations.append(losses)

    def is_exhausted(self, patience: int | None) -> bool:
        """Whether the last `patience` validations brought no new best loss; never if `patience` is None."""
        if patience is None or not self.valid_losses:
            return False
        return len(self.valid_losses) - 1 - self.valid_losses.index(min(self.valid_losses)) >= patience

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """The history of all ranks as plain values and tensors, for a checkpoint (collective)."""
        own = {"loss_sum": self.loss_sum.item(), "seen": dict(self.seen)}
        shared = {name: getattr(self, name) for name in SAME_ON_ALL_RANKS}
        return shared | {"num_losses": self.num_losses.item(), "ranks": ranks.all_gather(own)}

    def restore(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Restore what `state` returned; rank 0 gets the sums over all former ranks if their number has changed."""
        for name in SAME_ON_ALL_RANKS:
            setattr(self, name, state[name])
        former = state["ranks"] if ranks.rank == 0 else []
        if len(state["ranks"]) == ranks.world_size:
            former = [state["ranks"][ranks.rank]]
        self.num_losses.fill_(state["num_losses"])
        self.loss_sum.fill_(sum(own["loss_sum"] for own in former))
        self.seen = sum((Counter(own["seen"]) for own in former), Counter())


class StepTimer:
    """Time and operations of steps, and waiting for data, since the last `restart`; time since the last checkpoint.

    The first step of a key, and of each phase of the loss, is left out where there are others: it may compile the
    model, and its operations are counted by a pass of their own. `peak_rate`: operations per second that this rank's
    device reaches in a matrix product.
    """

    def __init__(self, checkpoint_minutes: float, device: torch.device, peak_rate: float) -> None:
        self.checkpoint_seconds, self.saved_at = 60 * checkpoint_minutes, time.monotonic()
        self.device, self.peak_rate = device, peak_rate
        self.flops_per_sample: dict[tuple[str, Hashable], float] = {}
        self.energy_started = energy_kilojoules(device)
        self.restart()

    def restart(self) -> None:
        """Set all counters to zero."""
        self.waited, self.num_steps, self.flops = 0.0, 0, 0.0
        self.first_began: np.ndarray | None = None
        self.started, self.left_out = self._counters(), np.zeros(4)

    def wait_for(self, get: Callable[[], Share]) -> Share:
        """Call `get` at the start of a step and return its result; its time counts as waiting for data."""
        self._end_first_step()
        begin = time.monotonic()
        share = get()
        self.waited += time.monotonic() - begin
        return share

    def count(self, share: Share, update: Update, world_size: int) -> None:
        """Add a step of this rank and its floating-point operations.

        They are counted for one sample when a key first appears, and anew in every phase of the loss.
        """
        kind = share.key, update.stage.phase and update.stage.phase(share.step)
        if kind not in self.flops_per_sample:
            self.first_began = self._counters()
            self.flops_per_sample[kind] = update.flops_per_sample(share)
        self.num_steps += 1
        self.flops += self.flops_per_sample[kind] * share.size / world_size

    def metrics(self) -> dict[str, float]:
        """What rank 0 did since the last `restart`, then restarts.

        Steps per second, share of time spent waiting for data, busy cores, floating-point operations per second and
        their share of what a matrix product reaches on this device, peak memory, energy of its GPU since the start.
        """
        self._end_first_step()
        passed = self._counters() - self.started
        if passed[0] > self.left_out[0]:
            passed -= self.left_out
        num_steps, seconds, cpu_seconds, flops = passed.tolist()
        measured = {"steps_per_second": num_steps / seconds, "data_wait_fraction": self.waited / seconds}
        measured["cpu_cores"] = cpu_seconds / seconds
        measured["flops_per_second"] = flops / seconds
        measured["flops_utilization"] = flops / seconds / self.peak_rate
        measured["peak_memory_gigabytes"] = peak_memory_gigabytes(self.device)
        energy = energy_kilojoules(self.device)
        if energy is not None and self.energy_started is not None:
            measured["energy_kilojoules"] = energy - self.energy_started
        self.restart()
        return measured

    def _counters(self) -> np.ndarray:
        """Steps, seconds on the clock and of the CPU, floating-point operations."""
        return np.array([self.num_steps, now(self.device), time.process_time(), self.flops])

    def _end_first_step(self) -> None:
        if self.first_began is not None:
            self.left_out += self._counters() - self.first_began
            self.first_began = None

    def save_is_due(self) -> bool:
        """Whether the last checkpoint is older than `checkpoint_minutes`."""
        return time.monotonic() - self.saved_at > self.checkpoint_seconds

    def saved(self) -> None:
        """Restart the time since the last checkpoint."""
        self.saved_at = time.monotonic()
