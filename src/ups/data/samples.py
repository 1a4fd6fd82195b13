"""Samples of raw files and of the latent cache under consecutive numbers, and the token grids they live on."""

import math
from bisect import bisect_right
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ups.data.dataset import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.loader import FieldBatch, LatentBatch
from ups.data.pdebench import FAMILIES
from ups.models.domain import Domain


@dataclass(frozen=True)
class _Run:
    """The `length` samples `first`, `first` + 1, ... are the snapshots or steps of one trajectory."""

    first: int
    length: int
    dataset: str
    trajectory: int


class _Index:
    """Maps a sample's number to (dataset, trajectory, time)."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.firsts: list[int] = []
        self.total = 0

    def add(self, dataset: str, trajectory: int, length: int) -> None:
        self.runs.append(_Run(self.total, length, dataset, trajectory))
        self.firsts.append(self.total)
        self.total += length

    def run(self, sample: int) -> _Run:
        return self.runs[bisect_right(self.firsts, sample) - 1]

    def find(self, sample: int) -> tuple[str, int, int]:
        run = self.run(sample)
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

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Any samples, all equally likely."""
        return rng.integers(self.num_samples[key], size=size)

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
    """Steps z -> z_next of the cache in windows of up to `horizon` steps; keys are families.

    A steady solution is a step from zero. All windows of a family have as many steps: those of its shortest
    trajectories if these have fewer.
    """

    def __init__(self, cache: LatentCache, split: str, *, horizon: int = 1) -> None:
        self.cache = cache
        self._index: dict[str, _Index] = {}
        self._num_steps: dict[str, int] = {}
        for name, entry in cache.datasets.items():
            family = entry["dataset"]["family"]
            index = self._index.setdefault(family, _Index())
            num_snapshots = entry["arrays"]["fields"]["shape"][1]
            self._num_steps[family] = min(self._num_steps.get(family, horizon), num_snapshots - 1)
            for trajectory in entry["split"][split]:
                index.add(name, trajectory, max(1, num_snapshots - 1))
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

    def draw(self, family: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Of two steps of a trajectory at random the earlier one.

        Step t of T comes with probability (2 (T - t) - 1) / T^2, about as the number of frames of a rollout that carry
        on its error.
        """
        index = self._index[family]
        steps = rng.integers(index.total, size=size)
        runs = [index.run(step) for step in steps]
        others = [run.first + rng.integers(run.length) for run in runs]
        return np.minimum(steps, others)

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
            z=window[:, 0] if num_steps else torch.zeros_like(window[:, 0]),
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
