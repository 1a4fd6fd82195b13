"""Sizes of datasets, their latents and snapshots, known before any value is read; refusal of what cannot fit."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ups.data.families import Dataset, Family, Subsample
from ups.data.layouts import Contents
from ups.data.pdebench import FAMILIES
from ups.data.plan import DownloadPlan, free_disk_bytes
from ups.data.trajectories import describe_file, join_files, take_first, thin
from ups.errors import OutOfMemory, StorageFault

VALUE_BYTES = 4  # float32, as PDEBench stores fields and the codec computes
EXTRA_BITS = 2.5  # beyond the entropy of white noise, per value that is compressed, measured


@dataclass(frozen=True)
class Size:
    """A dataset as it is used, and bytes: of its values before `subsample`, of its latents, of one snapshot in memory.

    `missing_bytes` of the values are still to be simulated or fetched.
    """

    name: str
    family: str
    num_trajectories: int
    num_snapshots: int
    grid: tuple[int, ...]
    raw_bytes: int
    missing_bytes: int
    latent_bytes: int
    snapshot_bytes: int


@dataclass(frozen=True)
class Tokens:
    """What the size of latents depends on: options of the codec's patches, bytes of a stored value by family."""

    patch_size: tuple[int, int, int]
    max_tokens: tuple[int, int, int]
    components: int
    value_bytes: dict[str, float]


def files_to_simulate(folder: Path, recipes: Iterable[dict[str, Any]]) -> dict[str, Dataset]:
    """The datasets that `simulate_files` will write into `folder`, from its recipes."""
    from ups.data.simulate import files_of

    calls = [call for recipe in recipes for call in files_of(recipe).items()]
    return join_files(folder, [_file_to_simulate(folder / name, call) for name, call in calls])


def _file_to_simulate(path: Path, call: dict[str, Any]) -> Dataset:
    family = FAMILIES[call["family"]]
    times = np.linspace(0, call["duration"], call["num_snapshots"]).tolist()
    grid = (call["resolution"],) * len(family.axes)
    return _expected(path, family, call["num_trajectories"], times, grid)


def files_to_fetch(plan: DownloadPlan) -> tuple[dict[str, Dataset], list[str]]:
    """The datasets of a download by the table of published files, and the names of files whose sizes it lacks."""
    expected, unknown = [], []
    for planned in plan.files:
        file, count = planned.file, planned.trajectories or planned.file.num_trajectories
        if file.grid is None or count is None or file.num_snapshots is None:
            unknown.append(planned.name)
            continue
        times = [float(k) for k in range(file.num_snapshots)]
        expected.append(_expected(plan.folder / planned.name, FAMILIES[file.family], count, times, file.grid))
    return join_files(plan.folder, expected), unknown


def _expected(path: Path, family: Family, count: int, times: list[float], grid: tuple[int, ...]) -> Dataset:
    contents = Contents(count, tuple(times), grid, (1.0,) * len(grid))
    return describe_file(path, family, contents, dict.fromkeys(family.parameters, 1.0))


def sizes_of(
    folder: Path,
    datasets: dict[str, Dataset],
    subsample: dict[str, dict[str, Any]],
    tokens: Tokens,
    missing: frozenset[str],
) -> list[Size]:
    """The sizes of whole datasets and of what `subsample` leaves of them; `missing` files are not in `folder` yet.

    Raises:
        ConfigFault: `subsample` does not suit a file.
    """
    sizes = []
    for whole in datasets.values():
        options = Subsample(**subsample[whole.family])
        raw = raw_bytes(whole)
        lacking = sum(count for name, count in zip(whole.files, whole.counts, strict=True) if name in missing)
        sizes.append(
            replace(
                size_of(thin(folder, take_first(whole, options), options), tokens),
                raw_bytes=raw,
                missing_bytes=raw * lacking // whole.num_trajectories,
            )
        )
    return sizes


def size_of(dataset: Dataset, tokens: Tokens) -> Size:
    """The size of a dataset as it is described, all of which is stored."""
    return Size(
        name=dataset.name,
        family=dataset.family,
        num_trajectories=dataset.num_trajectories,
        num_snapshots=len(dataset.times),
        grid=dataset.grid,
        raw_bytes=raw_bytes(dataset),
        missing_bytes=0,
        latent_bytes=latent_bytes(dataset, tokens),
        snapshot_bytes=snapshot_bytes(dataset, tokens),
    )


def raw_bytes(dataset: Dataset) -> int:
    """Bytes of all fields and coefficients, not compressed."""
    family = FAMILIES[dataset.family]
    arrays = len(dataset.times) * len(family.fields) + len(family.coefficients)
    return VALUE_BYTES * dataset.num_trajectories * arrays * math.prod(dataset.grid)


def latent_bytes(dataset: Dataset, tokens: Tokens) -> int:
    """Bytes of the dataset's latents on disk, of fields and coefficients."""
    family = FAMILIES[dataset.family]
    arrays = len(dataset.times) * len(family.fields) + len(family.coefficients)
    value_bytes = tokens.value_bytes[family.name]
    return int(value_bytes * dataset.num_trajectories * arrays * _values_per_field(dataset.grid, tokens))


def bytes_per_value(tolerance: float | None) -> float:
    """Estimate of what a latent takes on disk: about the most where latents have at most unit variance, as fields do.

    Of all distributions the Gaussian has the largest entropy, log2(sqrt(2 pi e) std / scale) bits once rounded. The
    compression needs up to `EXTRA_BITS` more.
    """
    from ups.data.latent_shards import scale_of  # imports google_crc32c: not at the start of every command

    scale = scale_of(tolerance)
    if scale is None:
        return 4.0
    return min(4.0, (max(0.0, math.log2(math.sqrt(2 * math.pi * math.e) / scale)) + EXTRA_BITS) / 8)


def snapshot_bytes(dataset: Dataset, tokens: Tokens) -> int:
    """Memory that one snapshot needs to be read and encoded: as stored, its kept points twice, and its latents."""
    num_fields, k = len(FAMILIES[dataset.family].fields), dataset.subsample.every_point
    kept = math.prod(dataset.grid)
    stored = kept * k ** len(dataset.grid) if k > 1 else 0
    return VALUE_BYTES * num_fields * (stored + 2 * kept + _values_per_field(dataset.grid, tokens))


def _values_per_field(grid: tuple[int, ...], tokens: Tokens) -> int:
    """Tokens times components."""
    from ups.models.codec import choose_patch

    axis = len(grid) - 1
    patch = choose_patch(grid, tokens.patch_size[axis], tokens.max_tokens[axis])
    return math.prod(n // patch for n in grid) * min(patch ** len(grid), tokens.components)


def expect_room(folder: Path, sizes: list[Size], present_bytes: int, memory_bytes: int) -> int:
    """Free bytes of the disk below `folder`, which must hold all that is still to be written there.

    `present_bytes` of latents are there already; `memory_bytes` is the budget of one process.

    Raises:
        OutOfMemory: a single snapshot does not fit into the budget.
        StorageFault: raw files and latents do not fit onto the disk.
    """
    largest = max(sizes, key=lambda size: size.snapshot_bytes)
    if largest.snapshot_bytes > memory_bytes:
        what = f"{largest.name}: one snapshot needs {readable(largest.snapshot_bytes)} of memory, a process may use"
        remedy = "raise launch.memory_gigabytes, or leave the dataset out"
        raise OutOfMemory(f"{what} {readable(memory_bytes)}; {remedy}")
    raw, latents = sum(size.missing_bytes for size in sizes), sum(size.latent_bytes for size in sizes)
    free, needed = free_disk_bytes(folder), raw + max(0, latents - present_bytes)
    if needed > free:
        what = f"{readable(latents)} of latents and {readable(raw)} of raw files" if raw else "the latent cache"
        what = f"{folder}: {what} need {readable(needed)}, {readable(free)} are free"
        raise StorageFault(f"{what}; free space, choose another data_root, or use less data (section subsample)")
    return free


def readable(size: float) -> str:
    """Bytes with a decimal unit, three significant digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
