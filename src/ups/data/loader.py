"""Endless training batches in which every choice is a function of (seed, step): same data for any number of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ups.models.domain import Domain


class Batch:
    """A record of tensors; made on the CPU."""

    def pinned(self) -> Self:
        """A copy from which a GPU can fetch while the CPU goes on."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class FieldBatch(Batch):
    """Physical snapshots u (B, C, *grid) of one field group of the codec."""

    group: str
    u: Tensor


@dataclass(frozen=True)
class LatentBatch(Batch):
    """Latent pairs of one family.

    z and z_next are (B, N, D), coefficients (B, N, D_c) with D_c = 0 where the PDE has no coefficient fields,
    condition is (B, K). In a steady family z is zero and z_next the solution. Where several steps are asked for,
    `window` (B, H + 1, N, D) has consecutive states: number `offset` (B,) is z, the next one z_next.
    """

    domain: Domain
    z: Tensor
    z_next: Tensor
    coefficients: Tensor
    condition: Tensor
    window: Tensor | None = None
    offset: Tensor | None = None

    def states(self, horizon: int) -> tuple[Tensor, ...]:
        """The state z and the h snapshots after it, each (B, N, D); h = `horizon`, or H where that is less.

        Where fewer than h snapshots follow z they begin earlier, with the last state that h snapshots follow.
        """
        if self.window is None or self.offset is None:
            return self.z, self.z_next
        h = min(horizon, self.window.shape[1] - 1)
        first = self.offset.clamp(max=self.window.shape[1] - 1 - h)
        samples, times = (torch.arange(size, device=first.device) for size in (len(first), h + 1))
        return self.window[samples[:, None], first[:, None] + times].unbind(1)


class Samples(Protocol):
    """Where batches come from: samples under numbers, counted per key, a family or a field group of the codec."""

    @property
    def num_samples(self) -> dict[str, int]: ...

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray: ...

    def dataset(self, key: str, sample: int) -> str: ...

    def load(self, key: str, samples: np.ndarray) -> Batch: ...


class BatchSampler:
    """Which samples make batch `step`: one key per batch, chosen in proportion to `weights`.

    Samples are drawn with replacement.
    """

    def __init__(self, samples: Samples, batch_sizes: dict[str, int], weights: dict[str, float], seed: int) -> None:
        self.samples, self.batch_sizes, self.seed = samples, batch_sizes, seed
        self.keys = sorted(samples.num_samples)
        total = sum(weights[key] for key in self.keys)
        self.probabilities = np.array([weights[key] / total for key in self.keys])

    def draw(self, step: int) -> tuple[str, np.ndarray]:
        """Key and sample indices (B,) of batch `step`."""
        rng = np.random.default_rng((self.seed, step))
        key = self.keys[rng.choice(len(self.keys), p=self.probabilities)]
        return key, self.samples.draw(key, self.batch_sizes[key], rng)


def fixed_batches(num_samples: dict[str, int], batch_sizes: dict[str, int]) -> Iterable[tuple[str, np.ndarray]]:
    """One batch per key, spread evenly over its samples: for validation."""
    for key in sorted(num_samples):
        size = min(batch_sizes[key], num_samples[key])
        yield key, np.linspace(0, num_samples[key] - 1, size).round().astype(int)


def batch_size(batch_tokens: int, num_tokens: int, multiple: int) -> int:
    """Snapshots per batch: the multiple of `multiple`, at least one, nearest to `batch_tokens` tokens."""
    return multiple * max(1, round(batch_tokens / (num_tokens * multiple)))
