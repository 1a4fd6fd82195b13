"""Encode trajectories into the latent cache: shards that processes share, with statistics of the latents on the way.

A shard is published when it is whole, so that an interrupted encoding loses the unfinished shard of each process.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ups.data.families import Dataset
from ups.data.latent_shards import (
    CHECKSUM_BYTES,
    MAX_MULTIPLE,
    LatentArray,
    Layout,
    checksum_agrees,
    shard_path,
    with_checksum,
    write_shard,
)
from ups.data.pdebench import FAMILIES
from ups.data.remote import SharedFolder
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, DataFault
from ups.files import publish, remove_leftovers
from ups.models.codec import FieldGroup, group_name

MAX_SLAB_BYTES = 2**22  # of raw values, read and encoded at once; the tensors of larger ones do not fit into caches
SLABS_IN_MEMORY = 16  # a slab is held about so many times: raw, normalized, as latents, with two more read ahead
STATISTICS = ("max_mean", "max_fluctuation", "fluctuation", "change")

Encode = Callable[[Tensor, str, str], Tensor]
"""Snapshots (T, C, *grid) of a family's `fields` or `coefficients` to latents (T, N, D) on the CPU."""


@dataclass(frozen=True)
class Shard:
    """One file to write: part of the array `kind` of a dataset."""

    dataset: str
    kind: str
    row: int
    column: int


class Encoding:
    """The arrays of a latent cache in `folder`: what is to be written, and the writing of one process's share.

    `scales` has what the latents of each family are rounded to multiples of, None: not rounded. Unless `on_disk`, only
    statistics are taken: training encodes when it reads. Shards in `store` are fetched, all others added to it.
    """

    def __init__(
        self,
        folder: Path,
        datasets: dict[str, Dataset],
        groups: dict[str, FieldGroup],
        scales: dict[str, float | None],
        *,
        on_disk: bool = True,
        store: SharedFolder | None = None,
    ) -> None:
        self.folder, self.datasets, self.on_disk, self.store = folder, datasets, on_disk, store
        self.layouts: dict[tuple[str, str], Layout] = {}
        for name, dataset in datasets.items():
            kinds = {"fields": len(dataset.times)}
            kinds |= {"coefficients": 1} if FAMILIES[dataset.family].coefficients else {}
            for kind, num_snapshots in kinds.items():
                group = groups[group_name(dataset.family, kind)]
                shape = (dataset.num_trajectories, num_snapshots, group.num_tokens, group.num_channels)
                self.layouts[name, kind] = Layout(shape, scales[dataset.family], len(dataset.grid))

    @property
    def shards(self) -> list[Shard]:
        """All shards, in a fixed order; those of the fields alone if nothing but statistics is written."""
        needed = {key: layout for key, layout in self.layouts.items() if self.on_disk or key[1] == "fields"}
        places = ((key, layout.num_shards) for key, layout in needed.items())
        return [Shard(*key, row, column) for key, sizes in places for row, column in np.ndindex(sizes)]

    def array(self, name: str, kind: str) -> Path:
        """The folder of an array."""
        return self.folder / f"{name}.zarr" / kind

    def path(self, shard: Shard) -> Path:
        """The file that is there when a shard is done."""
        place = (self.array(shard.dataset, shard.kind), shard.row, shard.column)
        return shard_path(*place) if self.on_disk else self._statistics(shard)

    def files(self, shard: Shard) -> list[Path]:
        """All files of a shard."""
        return sorted({self.path(shard)} | ({self._statistics(shard)} if shard.kind == "fields" else set()))

    def prepare(self) -> None:
        """Write the arrays' metadata; before any process writes its share."""
        from ups.data.zarr_arrays import write_metadata  # imports zarr, which reading does not need

        if self.on_disk:
            for (name, kind), layout in self.layouts.items():
                write_metadata(self.array(name, kind), layout)

    def write_share(
        self,
        raw: Path,
        encode: Encode,
        advance: Callable[[int], None],
        *,
        memory_bytes: int,
        stamps: dict[str, tuple[int, int]] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Write every `world_size`-th shard that is not whole yet; `advance(1)` is called after each.

        Raises:
            DataFault: a latent is not finite, a shard in the store is damaged, or a raw file has another stamp.
            StorageFault: the disk or the store cannot be written to.
            ConfigFault: the scale is too small for float32.
        """
        slab_bytes = min(MAX_SLAB_BYTES, memory_bytes // SLABS_IN_MEMORY)
        for shard in self.shards[rank::world_size]:
            if not self.is_whole(shard):
                if self.on_disk:
                    remove_leftovers(self.path(shard).parent)
                if not self._fetch(shard):
                    with TrajectoryReader(raw, self.datasets[shard.dataset], stamps) as reader:
                        layout = self.layouts[shard.dataset, shard.kind]
                        self._write(_ShardWriter(layout, shard, reader, encode, slab_bytes))
            if self.store is not None:
                self.store.upload(self.files(shard))
            advance(1)

    def _fetch(self, shard: Shard) -> bool:
        """Take a shard from the store; False if it is not there."""
        if self.store is None or not self.store.has(files := self.files(shard)):
            return False
        self.store.fetch(files)
        if not self.is_whole(shard):
            raise self.store.damaged(self.path(shard))
        return True

    def _write(self, writer: "_ShardWriter") -> None:
        shard, path = writer.shard, self.path(writer.shard)
        if self.on_disk:
            write_shard(path, writer.layout, writer.pieces())
        else:
            collections.deque(writer.slabs(), maxlen=0)
        if shard.kind == "fields":
            with publish(self._statistics(shard)) as temporary:
                temporary.write_bytes(with_checksum(writer.statistics.tobytes()))

    def statistics(self, name: str, trajectories: Iterable[int]) -> Iterator[np.ndarray]:
        """For each of these trajectories `STATISTICS` of every snapshot and field (T, 4, C)."""
        layout, num_fields = self.layouts[name, "fields"], len(FAMILIES[self.datasets[name].family].fields)
        loaded: dict[int, np.ndarray] = {}
        for index in trajectories:
            row = index // layout.shard[0]
            if row not in loaded:
                columns = [self._read_statistics(Shard(name, "fields", row, c)) for c in range(layout.num_shards[1])]
                loaded = {row: np.concatenate(columns, 1).reshape(-1, layout.shape[1], len(STATISTICS), num_fields)}
            yield loaded[row][index % layout.shard[0]]

    def _statistics(self, shard: Shard) -> Path:
        return self.folder / "statistics" / f"{shard.dataset}.{shard.row}.{shard.column}"

    def _read_statistics(self, shard: Shard) -> np.ndarray:
        """Values (k, T of the shard, 4 C) for each of its k trajectories."""
        path = self._statistics(shard)
        content = np.fromfile(path, np.uint8) if path.is_file() else np.zeros(0, np.uint8)
        shape = tuple(map(len, self.layouts[shard.dataset, "fields"].spans(shard.row, shard.column)))
        num_values = len(STATISTICS) * len(FAMILIES[self.datasets[shard.dataset].family].fields)
        if len(content) != 8 * math.prod(shape) * num_values + CHECKSUM_BYTES or not checksum_agrees(content):
            raise DataFault(f"latent cache damaged: wrong checksum in {path}; delete {self.folder} and run again")
        return content[:-CHECKSUM_BYTES].view(np.float64).reshape(*shape, num_values)

    def is_whole(self, shard: Shard) -> bool:
        """Whether a shard and its statistics are there with the right checksums."""
        array = LatentArray(self.array(shard.dataset, shard.kind), self.layouts[shard.dataset, shard.kind])
        try:
            if shard.kind == "fields":
                self._read_statistics(shard)
            if self.on_disk:
                array.verify(shard.row, shard.column)
            return True
        except DataFault:
            return False


class _ShardWriter:
    """Reads, encodes and packs the snapshots of one shard; the next slab is read while one is encoded."""

    def __init__(self, layout: Layout, shard: Shard, reader: TrajectoryReader, encode: Encode, slab_bytes: int) -> None:
        self.layout, self.shard, self.reader, self.encode = layout, shard, reader, encode
        self.trajectories, self.snapshots = layout.spans(shard.row, shard.column)
        family = reader.family
        self.num_fields = len(family.fields if shard.kind == "fields" else family.coefficients)
        piece_bytes = 4 * layout.piece * self.num_fields * int(np.prod(reader.dataset.grid))
        self.step = layout.piece * max(1, slab_bytes // piece_bytes)
        self.statistics = np.zeros((len(self.trajectories), len(self.snapshots), len(STATISTICS), self.num_fields))

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and contents of the pieces; `statistics` is complete after the last."""
        for index, start, z in self.slabs():
            column = (start - self.snapshots.start) // self.layout.piece
            for row, trajectory in enumerate(z, index - self.trajectories.start):
                for number, values in enumerate(trajectory.split(self.layout.piece), column):
                    yield row * self.layout.pieces_per_trajectory + number, self.layout.pack(values.numpy())

    def slabs(self) -> Iterator[tuple[int, int, Tensor]]:
        """First trajectory, first snapshot and latents (k, t, N, D) as they will be read, slab by slab."""
        for index, start, u in self._raw_slabs():
            z = self.encode(torch.from_numpy(u).flatten(0, 1), self.reader.family.name, self.shard.kind)
            z = rounded(z, self.layout.scale, self.shard.dataset).unflatten(0, u.shape[:2])
            yield index, start, self._add_statistics(index, start, z) if self.shard.kind == "fields" else z

    def _raw_slabs(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """First trajectory, first snapshot and values (k, t, C, *grid): several whole trajectories or part of one.

        The first slab of a trajectory that began in another shard has one snapshot more, the one before.
        """
        starts = range(self.snapshots.start, self.snapshots.stop, self.step)
        several = max(1, self.step // len(self.snapshots))
        firsts = range(self.trajectories.start, self.trajectories.stop, several)
        places = [(range(i, min(i + several, self.trajectories.stop)), start) for i in firsts for start in starts]
        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(self._read, *places[0])
            for (indices, start), following in zip(places, [*places[1:], None], strict=True):
                u = ahead.result()
                if following:
                    ahead = thread.submit(self._read, *following)
                yield indices.start, start, u

    def _read(self, indices: range, start: int) -> np.ndarray:
        if self.shard.kind == "coefficients":
            return np.stack([self.reader.read_coefficients(index)[None] for index in indices])
        before = 1 if start == self.snapshots.start > 0 else 0
        stop = min(start + self.step, self.snapshots.stop)
        return np.stack([self.reader.read(index, start - before, stop) for index in indices])

    def _add_statistics(self, index: int, start: int, z: Tensor) -> Tensor:
        """Add those of a slab's snapshots; returns the slab without the snapshot before it."""
        row, column = index - self.trajectories.start, start - self.snapshots.start
        if start == self.snapshots.start:
            self._last, z = (z[:, :1], z[:, 1:]) if start else (z[:, :1], z)
        statistics = statistics_of(z, self._last, self.num_fields).numpy()
        if not (finite := np.isfinite(statistics).all((1, 2, 3))).all():
            where = f"latents of {self.shard.dataset}, trajectory {index + int(finite.argmin())}"
            raise DataFault(f"{where}, are not finite: the codec diverged")
        self.statistics[row : row + len(z), column : column + z.shape[1]] = statistics
        self._last = z[:, -1:]
        return z


def rounded(z: Tensor, scale: float | None, dataset: str) -> Tensor:
    """Latents as they are stored, multiples of the scale; in place.

    Raises:
        ConfigFault: the scale is too small for float32.
    """
    if scale is None:
        return z
    if z.abs().max() >= scale * MAX_MULTIPLE:
        what = f"latents of {dataset} exceed {scale * MAX_MULTIPLE:.3g}"
        raise ConfigFault(f"latents.tolerance is too small for float32: {what}; raise it, or set it to null")
    return z.div_(scale).round_().mul_(scale)


class EncodedArray:
    """Latents of a dataset that are not on disk: read from the raw files and encoded each time."""

    def __init__(self, reader: TrajectoryReader, kind: str, layout: Layout, encode: Encode) -> None:
        self.reader, self.kind, self.layout, self.encode = reader, kind, layout, encode

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Snapshots `start` to `stop` of a trajectory, float32 (t, N, D), as `LatentArray` would read them."""
        reader, dataset = self.reader, self.reader.dataset
        u = reader.read(index, start, stop) if self.kind == "fields" else reader.read_coefficients(index)[None]
        z = self.encode(torch.from_numpy(u), dataset.family, self.kind)
        return rounded(z, self.layout.scale, dataset.name).numpy()


def statistics_of(z: Tensor, before: Tensor, num_fields: int) -> Tensor:
    """`STATISTICS` of snapshots z (k, t, N, D), which follow the snapshots `before` (k, 1, N, D): (k, t, 4, C).

    The fluctuation of a snapshot is z minus its mean over tokens. Largest magnitudes of the mean and of the
    fluctuation; mean squares of the fluctuation and of the change since the snapshot before.
    """
    fields = z.unflatten(3, (num_fields, -1))  # (k, t, N, C, components)
    mean = fields.mean(2, keepdim=True)
    change = torch.cat([before, z[:, :-1]], 1).sub_(z).unflatten(3, (num_fields, -1))
    fluctuation = fields - mean
    peaks = [mean.abs().amax((2, 4)), torch.maximum(fluctuation.amax((2, 4)), -fluctuation.amin((2, 4)))]
    squares = [part.square_().mean((2, 4)) for part in (fluctuation, change)]
    return torch.stack([*peaks, *squares], 2).double()
