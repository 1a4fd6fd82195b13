"""A few trajectories of new data in memory: read, normalized, encoded, mirrored, and cut into training batches."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ups.data.encoding import statistics_of
from ups.data.families import Dataset, Family, condition_features
from ups.data.latent_cache import summarize
from ups.data.normalization import STD_FLOOR, is_log
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch, random_steps
from ups.data.trajectories import TrajectoryReader
from ups.errors import DataFault
from ups.models.codec import Codec, FieldGroup, choose_patch, group_name
from ups.models.sizes import Domain
from ups.models.state_statistics import StateStatistics
from ups.training.inputs import set_statistics_of
from ups.training.symmetry import axis_transforms

MAX_IMAGE_BYTES = 2**30
COPIES = 6  # of the trajectories, as fields and latents, that an adaptation holds at once


@dataclass(frozen=True)
class Trajectories:
    """B trajectories of a dataset: fields u (B, T, C, *grid) and coefficient fields (B, C_c, *grid), C_c may be 0."""

    dataset: Dataset
    u: Tensor
    coefficients: Tensor

    @property
    def family(self) -> Family:
        """The family of the dataset."""
        return FAMILIES[self.dataset.family]

    def of(self, rows: slice | Tensor) -> "Trajectories":
        """Some of the trajectories."""
        return replace(self, u=self.u[rows], coefficients=self.coefficients[rows])

    def mirrored(self) -> "Trajectories":
        """These, then their images under the symmetries of the PDE, as many as `MAX_IMAGE_BYTES` hold."""
        dataset, family = self.dataset, self.family
        cubic = all(len(set(axes)) == 1 for axes in (dataset.grid, dataset.lengths, dataset.boundary))
        count = max(1, MAX_IMAGE_BYTES // self.u.nbytes)
        transforms = axis_transforms(family, cubic=cubic)[:count]  # the first leaves all as it is
        u, shape = self.u.flatten(0, 1), self.u.shape[:2]
        images = [transform(u, family.fields, family).unflatten(0, shape) for transform in transforms]
        given = [transform(self.coefficients, family.coefficients, family) for transform in transforms]
        return replace(self, u=torch.cat(images), coefficients=torch.cat(given))


def expect_memory(dataset: Dataset, count: int, num_bytes: int) -> None:
    """Refuse a number of trajectories that an adaptation cannot hold in `num_bytes`.

    Raises:
        DataFault: they need more.
    """
    family = FAMILIES[dataset.family]
    channels = len(family.fields) * len(dataset.times) + len(family.coefficients)
    needed = COPIES * 4 * count * channels * math.prod(dataset.grid)
    if needed > num_bytes:
        what = f"{dataset.name}: {count} trajectories need {needed / 2**30:.1f} GiB of memory"
        raise DataFault(f"{what}, {num_bytes / 2**30:.1f} GiB are allowed: lower adapt.sizes, or set `subsample`")


def read_trajectories(folder: Path, dataset: Dataset, indices: Sequence[int], device: str) -> Trajectories:
    """Read trajectories of a dataset in `folder`; they are kept and learned from on `device`."""
    with TrajectoryReader(folder, dataset) as reader:
        u = np.stack([reader.read(index) for index in indices])
        given = u[:, 0, :0]
        if FAMILIES[dataset.family].coefficients:
            given = np.stack([reader.read_coefficients(index) for index in indices])
    return Trajectories(dataset, torch.from_numpy(u).to(device), torch.from_numpy(given).to(device))


@dataclass(frozen=True)
class Examples:
    """Latents z (B, T, N, D) of trajectories, their coefficients (B, N, D_c) and the condition (K,) of all of them.

    A steady family has T = 1, the solution. With `history` batches have the snapshot before each state, too.
    """

    domain: Domain
    z: Tensor
    coefficients: Tensor
    condition: Tensor
    history: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether there is nothing but solutions."""
        return FAMILIES[self.domain.family].steady

    @property
    def num_steps(self) -> int:
        """Time steps of a trajectory; the solution of a steady family is one."""
        return 1 if self.is_steady else self.z.shape[1] - 1

    def draw(self, size: int, horizon: int, rng: np.random.Generator) -> LatentBatch:
        """A batch of random steps; early ones are more probable, see `random_steps`."""
        trajectories = rng.integers(len(self.z), size=size)
        return self._batch(trajectories, random_steps(np.full(size, self.num_steps), rng), horizon)

    def spread(self, at_most: int, batch_size: int) -> Iterator[LatentBatch]:
        """Batches of up to `at_most` steps together, spread evenly over all."""
        total = len(self.z) * self.num_steps
        chosen = np.linspace(0, total - 1, min(at_most, total)).round().astype(int)
        for first in range(0, len(chosen), batch_size):
            steps = chosen[first : first + batch_size]
            yield self._batch(steps // self.num_steps, steps % self.num_steps, 1)

    def _batch(self, trajectories: np.ndarray, times: np.ndarray, horizon: int) -> LatentBatch:
        rows, condition = torch.from_numpy(trajectories), self.condition.expand(len(trajectories), -1)
        known = (self.coefficients[rows], condition)
        if self.is_steady:
            solution = self.z[rows, 0]
            return LatentBatch(self.domain, torch.zeros_like(solution), solution, *known)
        horizon, time = min(horizon, self.num_steps), torch.from_numpy(times)
        first = time.clamp(max=self.num_steps - horizon)
        earlier, pair = int(self.history), (self.z[rows, time], self.z[rows, time + 1])
        window = self.z[rows[:, None], (first[:, None] + torch.arange(-earlier, horizon + 1)).clamp(min=0)]
        before = self.z[rows, (time - 1).clamp(min=0)] if earlier else None
        return LatentBatch(self.domain, *pair, *known, window=window, offset=time - first + earlier, before=before)


@torch.no_grad()
def encode(codec: Codec, trajectories: Trajectories) -> Examples:
    """The latents of trajectories, whose grid must be a multiple of the codec's patch."""
    dataset, name = trajectories.dataset, trajectories.family.name
    codec, fields = codec.on_grid(name, dataset.grid), group_name(name, "fields")
    z = codec.encode(trajectories.u.flatten(0, 1), fields).unflatten(0, trajectories.u.shape[:2])
    coefficients = z.new_zeros(len(z), z.shape[2], 0)
    if trajectories.family.coefficients:
        coefficients = codec.encode(trajectories.coefficients, group_name(name, "coefficients"))
    periodic = tuple(boundary == "periodic" for boundary in dataset.boundary)
    domain = Domain(name, codec.groups[fields].token_grid, periodic)
    return Examples(domain, z, coefficients, torch.tensor(condition_features(dataset), device=z.device))


def fit_codec(trajectories: Trajectories, *, patch_size: int, components: int) -> Codec:
    """A codec of one family, normalized by these trajectories.

    The patch is the smallest one of at least `patch_size` points that divides the grid; its basis are the lowest cosine
    modes, with which the training of a codec starts.
    """
    family, grid = trajectories.family, trajectories.dataset.grid
    patch = choose_patch(grid, patch_size, max_tokens=2**62)
    kept = min(patch ** len(grid), components)
    groups = {}
    for kind, names in (("fields", family.fields), ("coefficients", family.coefficients)):
        if names:
            groups[group_name(family.name, kind)] = FieldGroup(grid, patch, kept, *_normalization(trajectories, kind))
    return Codec(groups).to(trajectories.u.device).requires_grad_(False).eval()


def renormalized(codec: Codec, trajectories: Trajectories) -> Codec:
    """The same codec with mean and standard deviation of the fields of these trajectories."""
    name = group_name(trajectories.family.name, "fields")
    _, mean, std = _normalization(trajectories, "fields")
    changed = copy.copy(codec)
    changed.groups = codec.groups | {name: replace(codec.groups[name], mean=mean, std=std)}
    return changed


def _normalization(
    trajectories: Trajectories, kind: Literal["fields", "coefficients"]
) -> tuple[tuple[bool, ...], tuple[float, ...], tuple[float, ...]]:
    """For each field or coefficient: whether its logarithm is normalized, mean and standard deviation."""
    family, is_fields = trajectories.family, kind == "fields"
    names = family.fields if is_fields else family.coefficients
    values = trajectories.u.flatten(0, 1) if is_fields else trajectories.coefficients
    log, mean, std = [is_log(family, name) for name in names], [], []
    for u, is_logarithm in zip(values.double().unbind(1), log, strict=True):
        u = u.log() if is_logarithm else u
        mean.append(u.mean().item())
        # Bounded as by `fit_normalization`.
        std.append(max(u.std(correction=0).item(), STD_FLOOR * u.abs().max().item()) or 1.0)
    return tuple(log), tuple(mean), tuple(std)


def measure_statistics(statistics: StateStatistics, examples: Examples) -> None:
    """Fill in the statistics of the family of the examples."""
    family = FAMILIES[examples.domain.family]
    found = statistics_of(examples.z, examples.z[:, :1], len(family.fields)).cpu().numpy()
    set_statistics_of(statistics, family.name, summarize(lambda: iter(found)), examples.z.shape[-1])
