"""What a run remembers besides weights: its step, its losses, what it saw; and where its time goes."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ups.config import TrainingSection
from ups.errors import Diverged, OutOfMemory
from ups.training.batches import Share
from ups.training.distributed import Ranks
from ups.training.parallel import full_state
from ups.training.update import Outcome, Update

MOST_SKIPPED_FOR_MEMORY = 3
COMMON = ("step", "num_skipped_for_memory", "valid_losses", "best")
Value = TypeVar("Value")


class Progress:
    """How far a rank has come. `loss_sum` and `seen` (samples per dataset) are the rank's own, the rest is common."""

    def __init__(self, stage: str, device: torch.device) -> None:
        self.stage, self.step, self.num_skipped_for_memory = stage, 0, 0
        self.loss_sum, self.num_losses = torch.zeros(2, device=device)
        self.seen: Counter[str] = Counter()
        self.valid_losses: list[float] = []
        self.best: dict[str, Tensor] | None = None

    @property
    def _rate(self) -> str:
        """The parameter that is the stage's learning rate."""
        return "baselines.learning_rates" if self.stage == "baseline" else f"{self.stage}.learning_rate"

    def add(self, outcome: Outcome, share: Share) -> None:
        """Count a step; one without loss was skipped for want of memory.

        Raises:
            OutOfMemory: that happened too often.
        """
        self.step = share.step + 1
        if outcome.loss is None:
            self.num_skipped_for_memory += 1
            if self.num_skipped_for_memory > MOST_SKIPPED_FOR_MEMORY:
                fault = OutOfMemory(
                    f"{self.stage}: {self.num_skipped_for_memory} steps did not fit into memory, the last with "
                    f"{share.tokens} tokens of {share.key}; set launch.micro_batch_tokens below that"
                )
                fault.tokens = share.tokens
                raise fault
            return
        self.seen += share.seen
        self.loss_sum, self.num_losses = self.loss_sum + outcome.loss, self.num_losses + outcome.taken

    def metrics(self, update: Update, config: TrainingSection, ranks: Ranks) -> dict[str, float]:
        """Mean loss since the last call, over all ranks, if any step was taken, and the running norm of the gradient.

        Raises:
            Diverged: a loss is not finite, or more gradients were skipped than `config.max_skipped_steps`.
        """
        loss = (ranks.total(self.loss_sum) / self.num_losses).item()
        norm, _, num_skipped, first_skipped = (value.item() for value in update.norms())
        finite = {"loss": loss, "gradient_norm": norm} if self.num_losses > 0 else {"gradient_norm": norm}
        if num_skipped > config.max_skipped_steps or not all(map(math.isfinite, finite.values())):
            since = f", gradients not fit to use since step {first_skipped:.0f}" if num_skipped else ""
            raise Diverged(
                f"{self.stage}: loss {loss} at step {self.step}{since}; lower {self._rate}, the last checkpoint is good"
            )
        self.loss_sum, self.num_losses = torch.zeros(2, device=self.loss_sum.device)
        return finite | {"skipped_steps": num_skipped + self.num_skipped_for_memory}

    def add_validation(self, loss: float, update: Update, *, keep_best: bool) -> None:
        """Remember a validation loss, and with `keep_best` the averaged weights that gave the best one.

        Raises:
            Diverged: the loss is not finite.
        """
        if not math.isfinite(loss):
            told = f"{self.stage}: validation loss {loss} at step {self.step}"
            raise Diverged(f"{told}; lower {self._rate}, the last checkpoint is good")
        if keep_best and loss < min(self.valid_losses, default=math.inf):
            self.best = full_state(update.average)
        self.valid_losses.append(loss)

    def is_over(self, patience: int | None) -> bool:
        """Whether the best validation loss is `patience` validations old."""
        if patience is None or not self.valid_losses:
            return False
        best = self.valid_losses.index(min(self.valid_losses))
        return len(self.valid_losses) - 1 - best >= patience

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """What a checkpoint keeps of all ranks."""
        own = {"loss_sum": self.loss_sum.item(), "seen": dict(self.seen)}
        common = {name: getattr(self, name) for name in COMMON} | {"num_losses": self.num_losses.item()}
        return common | {"ranks": ranks.gather(own)}

    def restore(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Go on from what `state` returned; with another number of ranks, rank 0 takes over what was the others'."""
        for name in COMMON:
            setattr(self, name, state[name])
        owners = state["ranks"]
        mine = owners[ranks.rank : ranks.rank + 1]
        if len(owners) != ranks.world_size:
            mine = owners if ranks.rank == 0 else []
        self.num_losses.fill_(state["num_losses"])
        self.loss_sum.fill_(sum(own["loss_sum"] for own in mine))
        self.seen = sum((Counter(own["seen"]) for own in mine), Counter())


class Clock:
    """Where the time goes since the last `restart`, and whether a checkpoint is due by the clock."""

    def __init__(self, checkpoint_minutes: float) -> None:
        self.checkpoint_seconds = 60 * checkpoint_minutes
        self.saved_at = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """Count steps and waiting from now on."""
        self.started, self.waited, self.num_steps = time.monotonic(), 0.0, 0

    def wait_for(self, get: Callable[[], Value]) -> Value:
        """What `get` returns; the time until then is waiting for data."""
        begin = time.monotonic()
        value = get()
        self.waited, self.num_steps = self.waited + time.monotonic() - begin, self.num_steps + 1
        return value

    def metrics(self) -> dict[str, float]:
        """Steps per second and the share of time spent waiting for data."""
        seconds = time.monotonic() - self.started
        measured = {"steps_per_second": self.num_steps / seconds, "data_wait_fraction": self.waited / seconds}
        self.restart()
        return measured

    def save_is_due(self) -> bool:
        """Whether the last checkpoint is too old."""
        return time.monotonic() - self.saved_at > self.checkpoint_seconds

    def saved(self) -> None:
        """A checkpoint has just been made."""
        self.saved_at = time.monotonic()
