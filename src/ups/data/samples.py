"""Numbered samples of a split for `ups.training.batches`: snapshots for the codec, latent time steps for the others."""

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.models.sizes import Domain

if TYPE_CHECKING:
    from ups.data.arrays import Stamps  # imports h5py


class Batch:
    """A record of tensors, created on the CPU."""

    def pinned(self) -> Self:
        """A copy in pinned memory, from which the transfer to a GPU is asynchronous."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """A copy on a device; asynchronous for pinned batches."""
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
    """Time steps z -> z_next of one family.

    z and z_next are (B, N, D), coefficients (B, N, D_c) with D_c = 0 where the PDE has no coefficient fields, condition
    is (B, K). In a steady family z is zero and z_next the solution. For training on several steps, `window`
    (B, H + 1, N, D) has H + 1 consecutive snapshots of the trajectory: z is the snapshot `offset` (B,), z_next the one
    after it. Windows end at the last snapshot of a trajectory at the latest, so z is not always the first snapshot.

    Where a model needs it, `before` (B, N, D) is the snapshot before z, or z itself where z is the first of its
    trajectory. Windows then begin with the snapshot before the first of the H + 1.
    """

    domain: Domain
    z: Tensor
    z_next: Tensor
    coefficients: Tensor
    condition: Tensor
    window: Tensor | None = None
    offset: Tensor | None = None
    before: Tensor | None = None

    @property
    def state(self) -> Tensor:
        """What a model advances, see `ups.models.history`: z (B, N, D), with `before` (B, N, 2 D)."""
        return self.z if self.before is None else torch.cat([self.z, self.before], -1)

    def states(self, horizon: int) -> tuple[Tensor, ...]:
        """The `state` to start from and the h snapshots (B, N, D) after it in the window, with h = min(`horizon`, H).

        Samples in which fewer than h snapshots follow z start at an earlier snapshot, so that all have h + 1.
        """
        if self.window is None or self.offset is None:
            return self.state, self.z_next
        earlier = 0 if self.before is None else 1
        h = min(horizon, self.window.shape[1] - 1 - earlier)
        first = self.offset.clamp(max=self.window.shape[1] - 1 - h)
        samples, times = (torch.arange(size, device=first.device) for size in (len(first), h + 1))
        z, *later = self.window[samples[:, None], first[:, None] + times].unbind(1)
        return torch.cat([z, self.window[samples, first - 1]], -1) if earlier else z, *later


class _SampleIndex:
    """Consecutive numbers for the samples of many trajectories: their snapshots or time steps, in order."""

    def __init__(self) -> None:
        self.firsts = [0]  # number of the first sample of every dataset, then the number of all samples
        self._datasets: list[tuple[str, list[int], int]] = []  # name, trajectories, samples of each trajectory

    def add(self, dataset: str, trajectories: list[int], length: int) -> None:
        """Append the samples of a dataset, `length` of each trajectory."""
        self._datasets.append((dataset, trajectories, length))
        self.firsts.append(self.firsts[-1] + len(trajectories) * length)

    def find(self, sample: int) -> tuple[str, int, int]:
        """Dataset, trajectory and time index of a sample."""
        place = bisect_right(self.firsts, sample) - 1
        name, trajectories, length = self._datasets[place]
        number, time = divmod(int(sample) - self.firsts[place], length)
        return name, trajectories[number], time

    def span(self, sample: int) -> tuple[int, int]:
        """Number of the first sample of the same trajectory, and how many samples it has."""
        _, _, time = self.find(sample)
        return int(sample) - time, self._datasets[bisect_right(self.firsts, sample) - 1][2]


class _Samples:
    """Samples of several keys (field groups or families), each identified by its key and number."""

    def __init__(self) -> None:
        self._index: dict[str, _SampleIndex] = {}

    @property
    def num_samples(self) -> dict[str, int]:
        """Number of samples per key."""
        return {key: index.firsts[-1] for key, index in self._index.items()}

    def find(self, key: str, sample: int) -> tuple[str, int, int]:
        """Dataset, trajectory and time index of a sample."""
        return self._index[key].find(sample)

    def dataset(self, key: str, sample: int) -> str:
        """The dataset that a sample is from."""
        return self.find(key, sample)[0]


class FieldSamples(_Samples):
    """Single snapshots of the HDF5 files, to train the codec; keys are the codec's group names.

    A sample of `family/coefficients` is the coefficient fields of one trajectory.
    """

    def __init__(
        self, raw: Path, datasets: dict[str, Dataset], splits: dict, split: str, stamps: "Stamps | None" = None
    ) -> None:
        # Imports h5py, which training on latents does not need: its processes start sooner without.
        from ups.data.trajectories import TrajectoryReader

        super().__init__()
        self._readers = {name: TrajectoryReader(raw, dataset, stamps) for name, dataset in datasets.items()}
        for name, dataset in datasets.items():
            given = {"coefficients": 1} if FAMILIES[dataset.family].coefficients else {}
            for kind, length in ({"fields": len(dataset.times)} | given).items():
                index = self._index.setdefault(f"{dataset.family}/{kind}", _SampleIndex())
                index.add(name, splits[name][split], length)

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Numbers of `size` random samples, uniformly and with replacement."""
        return rng.integers(self.num_samples[key], size=size)

    def load(self, key: str, samples: np.ndarray) -> FieldBatch:
        """Read the samples with these numbers from their files."""
        family, kind = key.split("/")
        grid = self._readers[self.dataset(key, samples[0])].dataset.grid
        u = np.empty((len(samples), len(getattr(FAMILIES[family], kind)), *grid), np.float32)
        for place, (name, trajectory, time) in zip(u, map(self._index[key].find, samples), strict=True):
            reader, is_field = self._readers[name], kind == "fields"
            place[:] = reader.read(trajectory, time, time + 1)[0] if is_field else reader.read_coefficients(trajectory)
        return FieldBatch(key, torch.from_numpy(u))


def random_steps(counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random time step of each of trajectories with `counts` (S,) steps, (S,); early ones are more probable.

    Each is the earliest of n uniform steps, n = 1, 2 or 8 at random: of T steps, t = 0, ..., T - 1 has the probability
    p = (q(1) + q(2) + q(8)) / 3 with q(n) = ((T - t)^n - (T - t - 1)^n) / T^n. q(2) is about proportional to the T - t
    snapshots of a rollout to which the error of a step propagates. q(8) adds samples of the first steps, which have the
    largest errors where trajectories begin with a jump or a constant, and q(1) keeps the last ones from becoming rare.
    """
    uniform = rng.integers(counts, size=(8, len(counts)))
    earliest = np.stack([uniform[:n].min(0) for n in (1, 2, 8)])
    return earliest[rng.integers(3, size=len(counts)), np.arange(len(counts))]


class LatentSamples(_Samples):
    """Time steps z -> z_next of the latent cache, in windows; keys are families.

    A steady solution is a single step from z = 0. All windows of a family have the same number of steps: that in
    `horizons`, 1 for families that are not there, or that of the family's shortest trajectories if these have fewer.
    The samples of the families in `history` have the snapshot before, too.
    """

    def __init__(
        self,
        cache: LatentCache,
        split: str,
        *,
        horizons: Mapping[str, int] = {},
        history: Container[str] = (),
    ) -> None:
        super().__init__()
        self.cache, self.history = cache, history
        self._num_steps: dict[str, int] = {}
        for name, entry in cache.datasets.items():
            family = entry["dataset"]["family"]
            index = self._index.setdefault(family, _SampleIndex())
            num_snapshots = entry["arrays"]["fields"]["shape"][1]
            longest = self._num_steps.get(family, horizons.get(family, 1))
            self._num_steps[family] = min(longest, num_snapshots - 1)
            index.add(name, entry["split"][split], max(1, num_snapshots - 1))
        self._domains = domains(cache)
        self.families = sorted(self._index)

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens per snapshot and family."""
        return {name: math.prod(self._domains[name].grid) for name in self.families}

    def only(self, *families: str) -> "LatentSamples":
        """The samples of these families."""
        chosen = copy(self)
        chosen._index, chosen.families = {family: self._index[family] for family in families}, list(families)
        return chosen

    def reading(self, cache: LatentCache) -> "LatentSamples":
        """The same samples, read from another cache of the same datasets."""
        chosen = copy(self)
        chosen.cache = cache
        return chosen

    def draw(self, family: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Numbers of `size` random samples; of a trajectory, early time steps are more probable, see `random_steps`."""
        index = self._index[family]
        firsts, counts = np.array([index.span(sample) for sample in rng.integers(index.firsts[-1], size=size)]).T
        return firsts + random_steps(counts, rng)

    def load(self, family: str, samples: np.ndarray) -> LatentBatch:
        """Read the samples with these numbers from the cache, in float32."""
        num_steps, earlier = self._num_steps[family], int(family in self.history)
        windows, offsets, conditions, coefficients = [], [], [], []
        for name, trajectory, time in map(self._index[family].find, samples):
            arrays = self.cache.datasets[name]["arrays"]
            first = min(time, arrays["fields"]["shape"][1] - 1 - num_steps)
            window = self.cache.read(name, "fields", trajectory, max(0, first - earlier), first + num_steps + 1)
            if first < earlier:
                window = np.concatenate([window[:1], window])
            windows.append(window)
            offsets.append(time - first + earlier)
            conditions.append(self.cache.datasets[name]["condition"])
            given = "coefficients" in arrays
            coefficients.append(self.cache.read(name, "coefficients", trajectory)[0] if given else window[0, :, :0])
        window = torch.from_numpy(np.stack(windows))
        z = window[:, earlier] if num_steps else torch.zeros_like(window[:, 0])
        batch = LatentBatch(
            domain=self._domains[family],
            z=z,
            z_next=window[:, -1],
            coefficients=torch.from_numpy(np.stack(coefficients)),
            condition=torch.from_numpy(np.array(conditions, np.float32)),
            before=(window[:, 0] if num_steps else z) if earlier else None,
        )
        if num_steps < 2:
            return batch
        offset, samples = torch.tensor(offsets), torch.arange(len(window))
        z, z_next = window[samples, offset], window[samples, offset + 1]
        before = window[samples, offset - 1] if earlier else None
        return replace(batch, z=z, z_next=z_next, before=before, window=window, offset=offset)


def domains(cache: LatentCache) -> dict[str, Domain]:
    """The token grid of every family in the cache, and which of its axes are periodic.

    An axis is periodic only if it is so in all datasets of the family, because one basis of the mixer serves them all.
    """
    result: dict[str, Domain] = {}
    for entry in cache.datasets.values():
        family, boundary = entry["dataset"]["family"], entry["dataset"]["boundary"]
        periodic = tuple(b == "periodic" for b in boundary)
        if family in result:
            periodic = tuple(a and b for a, b in zip(periodic, result[family].periodic, strict=True))
        result[family] = Domain(family, tuple(entry["token_grid"]), periodic)
    return result
