"""What a training stage is: a model, a loss and samples; and the sizes of its batches."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from ups.config.training import TrainingSection
from ups.data.pdebench import FAMILIES
from ups.data.samples import Batch
from ups.training.distributed import Draw


class Samples(Protocol):
    """A source of batches: numbered samples per key; keys are families, or field groups of the codec."""

    @property
    def num_samples(self) -> dict[str, int]: ...
    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray: ...
    def dataset(self, key: str, sample: int) -> str: ...
    def load(self, key: str, samples: np.ndarray) -> Batch: ...


def fixed_batches(num_samples: dict[str, int], batch_sizes: dict[str, int]) -> Iterable[tuple[str, np.ndarray]]:
    """One batch per key, spread evenly over its samples: for validation."""
    for key in sorted(num_samples):
        size = min(batch_sizes[key], num_samples[key])
        yield key, np.linspace(0, num_samples[key] - 1, size).round().astype(int)


def batch_size(batch_tokens: int, num_tokens: int, multiple: int) -> int:
    """Snapshots per batch: the multiple of `multiple`, at least one, nearest to `batch_tokens` tokens."""
    return multiple * max(1, round(batch_tokens / (num_tokens * multiple)))


Loss = Callable[[nn.Module, Any, Draw], Tensor]


@dataclass(frozen=True)
class Stage:
    """A training stage, ready for the training loop.

    `loss(model, batch, draw)` returns one value per sample, (B,), and uses the model only by calling it. `settings` are
    the model's constructor arguments as plain values, `num_tokens` the tokens of one snapshot of each key,
    `sample_bytes` an estimate of the memory of forward and backward pass for one sample of each key, from which the
    sizes of micro-batches are derived. A loss with further terms keeps the latest value of each in `terms` (0-d
    tensors) for logging. `phase` of a step tells which operations its loss has (unrolled time steps, terms); None:
    always the same. `after_validation` gets the model and the validation loss of each key; it may only change buffers
    of the model, which checkpoints contain.
    """

    model: nn.Module
    settings: dict[str, Any]
    loss: Loss
    train: Samples
    valid: Samples
    num_tokens: dict[str, int]
    sample_bytes: dict[str, int]
    terms: dict[str, Tensor] | None = None
    phase: Callable[[int], Hashable] | None = None
    after_validation: Callable[[nn.Module, dict[str, float]], None] | None = None

    def batch_sizes(self, config: TrainingSection) -> dict[str, int]:
        """Snapshots per global batch of each key."""
        tokens, multiple = config.batch_tokens, config.batch_multiple
        return {key: batch_size(tokens, num_tokens, multiple) for key, num_tokens in self.num_tokens.items()}

    def weights(self, config: TrainingSection) -> dict[str, float]:
        """Sampling weights of the keys, see `ups.config.Recipe`."""
        axes = {key: len(FAMILIES[key.partition("/")[0]].axes) for key in self.num_tokens}
        factors = {key: config.family_weights_by_dimension[num_axes - 1] for key, num_axes in axes.items()}
        return {key: n**config.balance * factors[key] for key, n in self.train.num_samples.items()}
