"""Endless training batches in which every choice is a function of (seed, step): same data for any number of ranks."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ups.data.dataset import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
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
    condition is (B, K). In a steady family z_next is the solution and z is empty, (B, N, 0). Where several steps are
    asked for, `window` (B, H + 1, N, D) has consecutive states: number `offset` (B,) is z, the next one z_next.
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


class BatchSampler:
    """Which samples make batch `step`: one key per batch, chosen with probability ~ (its number of samples)^balance.

    A key is a family, or a field group of the codec. Between balance 0 (all keys alike, small sets are learned by
    heart) and 1 (all samples alike, small sets are never seen). Samples are drawn with replacement.
    """

    def __init__(self, num_samples: dict[str, int], batch_sizes: dict[str, int], balance: float, seed: int) -> None:
        self.num_samples, self.batch_sizes, self.seed = num_samples, batch_sizes, seed
        self.keys = sorted(num_samples)
        weights = np.array([num_samples[key] for key in self.keys], dtype=float) ** balance
        self.probabilities = weights / weights.sum()

    def draw(self, step: int) -> tuple[str, np.ndarray]:
        """Key and sample indices (B,) of batch `step`."""
        rng = np.random.default_rng((self.seed, step))
        key = self.keys[rng.choice(len(self.keys), p=self.probabilities)]
        return key, rng.integers(self.num_samples[key], size=self.batch_sizes[key])


def fixed_batches(num_samples: dict[str, int], batch_sizes: dict[str, int]) -> Iterable[tuple[str, np.ndarray]]:
    """One batch per key, spread evenly over its samples: for validation."""
    for key in sorted(num_samples):
        size = min(batch_sizes[key], num_samples[key])
        yield key, np.linspace(0, num_samples[key] - 1, size).round().astype(int)


def batch_size(batch_tokens: int, num_tokens: int, multiple: int) -> int:
    """Snapshots per batch: the multiple of `multiple`, at least one, nearest to `batch_tokens` tokens."""
    return multiple * max(1, round(batch_tokens / (num_tokens * multiple)))


@dataclass(frozen=True)
class _Run:
    """Samples `first`, `first` + 1, ... are the snapshots or steps of one trajectory."""

    first: int
    dataset: str
    trajectory: int


class _Index:
    """Maps a sample's number to (dataset, trajectory, time)."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.firsts: list[int] = []
        self.total = 0

    def add(self, dataset: str, trajectory: int, length: int) -> None:
        self.runs.append(_Run(self.total, dataset, trajectory))
        self.firsts.append(self.total)
        self.total += length

    def find(self, sample: int) -> tuple[str, int, int]:
        run = self.runs[bisect_right(self.firsts, sample) - 1]
        return run.dataset, run.trajectory, int(sample) - run.first


class FieldSamples:
    """Single snapshots of the raw files, for the codec; keys are the codec's group names."""

    def __init__(self, raw: Path, datasets: dict[str, Dataset], splits: dict, split: str) -> None:
        from ups.data.trajectories import TrajectoryReader  # only the codec reads HDF5

        self._index: dict[str, _Index] = {}
        self._readers = {name: TrajectoryReader(raw, dataset) for name, dataset in datasets.items()}
        for name, dataset in datasets.items():
            for trajectory in splits[name][split]:
                self._add(f"{dataset.family}/fields", name, trajectory, len(dataset.times))
                if FAMILIES[dataset.family].coefficients:
                    self._add(f"{dataset.family}/coefficients", name, trajectory, 1)

    def _add(self, key: str, name: str, trajectory: int, length: int) -> None:
        self._index.setdefault(key, _Index()).add(name, trajectory, length)

    @property
    def num_samples(self) -> dict[str, int]:
        return {key: index.total for key, index in self._index.items()}

    def dataset(self, key: str, sample: int) -> str:
        """The dataset that a sample is from."""
        return self._index[key].find(sample)[0]

    def load(self, key: str, samples: np.ndarray) -> FieldBatch:
        snapshots = []
        for name, trajectory, time in map(self._index[key].find, samples):
            reader = self._readers[name]
            is_field = key.endswith("/fields")
            snapshots.append(
                reader.read(trajectory, time, time + 1)[0] if is_field else reader.read_coefficients(trajectory)
            )
        return FieldBatch(key, torch.from_numpy(np.stack(snapshots)))


class LatentSamples:
    """Steps z -> z_next of the cache (or steady solutions) in windows of up to `horizon` steps; keys are families.

    All windows of a family have as many steps: those of its shortest trajectories if these have fewer.
    """

    def __init__(self, cache: LatentCache, split: str, *, steady: bool, horizon: int = 1) -> None:
        self.cache = cache
        self._index: dict[str, _Index] = {}
        self._num_steps: dict[str, int] = {}
        for name, entry in cache.datasets.items():
            family = FAMILIES[entry["dataset"]["family"]]
            if family.steady == steady:
                index = self._index.setdefault(family.name, _Index())
                num_snapshots = entry["arrays"]["fields"]["shape"][1]
                shortest = self._num_steps.get(family.name, horizon)
                self._num_steps[family.name] = min(shortest, num_snapshots - 1)
                for trajectory in entry["split"][split]:
                    index.add(name, trajectory, 1 if steady else num_snapshots - 1)
        self._domains = domains(cache)
        self.families = sorted(self._index)

    @property
    def num_samples(self) -> dict[str, int]:
        return {family: index.total for family, index in self._index.items()}

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens per snapshot of each family."""
        return {name: math.prod(self._domains[name].grid) for name in self.families}

    def only(self, family: str) -> "LatentSamples":
        """The samples of one family."""
        chosen = copy(self)
        chosen._index, chosen.families = {family: self._index[family]}, [family]
        return chosen

    def find(self, family: str, sample: int) -> tuple[str, int, int]:
        """Dataset, trajectory and time of a sample."""
        return self._index[family].find(sample)

    def dataset(self, family: str, sample: int) -> str:
        """The dataset that a sample is from."""
        return self.find(family, sample)[0]

    def load(self, family: str, samples: np.ndarray) -> LatentBatch:
        num_steps = self._num_steps[family]
        windows, offsets, conditions, coefficients = [], [], [], []
        for name, trajectory, time in map(self._index[family].find, samples):
            z = self.cache.read(name, "fields", trajectory)
            first = min(time, len(z) - 1 - num_steps)
            windows.append(z[first : first + num_steps + 1])
            offsets.append(time - first)
            conditions.append(self.cache.datasets[name]["condition"])
            has_coefficients = "coefficients" in self.cache.datasets[name]["arrays"]
            coefficients.append(
                self.cache.read(name, "coefficients", trajectory)[0] if has_coefficients else z[0, :, :0]
            )
        window = torch.from_numpy(np.stack(windows).astype(np.float32))
        batch = LatentBatch(
            domain=self._domains[family],
            z=window[:, 0] if num_steps else window[:, 0, :, :0],
            z_next=window[:, -1],
            coefficients=torch.from_numpy(np.stack(coefficients).astype(np.float32)),
            condition=torch.tensor(conditions),
        )
        if num_steps < 2:
            return batch
        offset, samples = torch.tensor(offsets), torch.arange(len(window))
        z, z_next = window[samples, offset], window[samples, offset + 1]
        return replace(batch, z=z, z_next=z_next, window=window, offset=offset)


def domains(cache: LatentCache) -> dict[str, Domain]:
    """The token grid of every family in the cache; a family's index is its place in the registry.

    An axis is periodic for the mixer only where it is so in all of the family's datasets.
    """
    order = list(FAMILIES)
    result: dict[str, Domain] = {}
    for entry in cache.datasets.values():
        family, boundary = entry["dataset"]["family"], entry["dataset"]["boundary"]
        periodic = tuple(b == "periodic" for b in boundary)
        if family in result:
            periodic = tuple(a and b for a, b in zip(periodic, result[family].periodic, strict=True))
        result[family] = Domain(order.index(family), tuple(entry["token_grid"]), periodic)
    return result
