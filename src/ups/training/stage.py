"""What distinguishes one training stage from another: a model, a loss and its samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ups.config import TrainingSection
from ups.data.loader import Samples, batch_size
from ups.data.pdebench import FAMILIES
from ups.training.distributed import Draw

Loss = Callable[[nn.Module, Any, Draw], Tensor]


@dataclass(frozen=True)
class Stage:
    """One stage, ready to be trained.

    `loss(model, batch, draw)` gives one value per sample, (B,), and touches the model only by calling it. `settings`
    are the model's constructor arguments, `num_tokens` the tokens of one snapshot of each key. In `terms` a loss
    that has further terms leaves the latest value of each, 0-d tensors, for the metrics. `validated` gets the model and
    the loss of each key after every validation; what it keeps is in buffers of the model, so that a resumed run has it.
    """

    model: nn.Module
    settings: dict[str, Any]
    loss: Loss
    train: Samples
    valid: Samples
    num_tokens: dict[str, int]
    terms: dict[str, Tensor] | None = None
    validated: Callable[[nn.Module, dict[str, float]], None] | None = None

    def batch_sizes(self, config: TrainingSection) -> dict[str, int]:
        """Snapshots per global batch of each key."""
        return batch_sizes(self.num_tokens, config)

    def weights(self, config: TrainingSection) -> dict[str, float]:
        """How often each key is drawn, relative to the others."""
        axes = {key: len(FAMILIES[key.partition("/")[0]].axes) for key in self.num_tokens}
        return {key: n**config.balance * config.draws[axes[key] - 1] for key, n in self.train.num_samples.items()}


def batch_sizes(num_tokens: dict[str, int], config: TrainingSection) -> dict[str, int]:
    """Snapshots per global batch for keys whose snapshots have so many tokens."""
    return {key: batch_size(config.batch_tokens, tokens, config.batch_multiple) for key, tokens in num_tokens.items()}
