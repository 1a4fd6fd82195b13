"""Mean and standard deviation of every field over the train split, and a check of every value of all splits."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ups.data.families import Dataset, Family
from ups.data.hdf5 import file_fault
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.errors import DataFault

STD_FLOOR = 1e-6  # relative to the largest magnitude
SLAB_ELEMENTS = 2**24  # read at once, which bounds the memory
# Magnitudes of fields: scores sum the squares of errors, which may be a millionth as large, in float32.
SMALLEST, LARGEST = 1e-12, 1e15


class Moments:
    """Mean and variance of values that are read slab by slab, merged in float64 (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.M2, self.max_magnitude = 0, 0.0, 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        """Merge a slab of float64: delta = mean_b - mean_a, M2 = M2_a + M2_b + delta^2 n_a n_b / n."""
        mean, count = values.mean(), self.count + values.size
        delta = mean - self.mean
        self.M2 += float(((values - mean) ** 2).sum() + delta**2 * self.count * values.size / count)
        self.mean += float(delta * values.size / count)
        self.max_magnitude = max(self.max_magnitude, float(abs(values).max()))
        self.count = count

    @property
    def std(self) -> float:
        """Standard deviation, at least `STD_FLOOR` times the largest magnitude; 1 for a field that is zero."""
        return max((self.M2 / self.count) ** 0.5, STD_FLOOR * self.max_magnitude) or 1.0


def fit_normalization(
    folder: Path, datasets: dict[str, Dataset], splits: dict[str, dict[str, list[int]]], advance: Callable[[int], None]
) -> dict:
    """Statistics `{family: {"fields" | "coefficients": {name: {"log", "mean", "std"}}}}`; with "log" those of log(u).

    They come from the train split only. `advance(1)` is called after each trajectory.

    Raises:
        DataFault: a value of any split is not finite, above LARGEST, or not positive in a field of `Family.positive`;
            or a field is smaller than SMALLEST everywhere in the train split.
    """
    moments: defaultdict[tuple[str, str, str], Moments] = defaultdict(Moments)  # by family, kind and name of the field
    for name, dataset in datasets.items():
        train = set(splits[name]["train"])
        with TrajectoryReader(folder, dataset) as reader:
            for index in sorted(index for indices in splits[name].values() for index in indices):
                _scan(reader, index, moments if index in train else None)
                advance(1)
    statistics: dict = {dataset.family: {"fields": {}, "coefficients": {}} for dataset in datasets.values()}
    for (family, kind, name), found in moments.items():
        log = is_log(FAMILIES[family], name)
        size = math.exp(found.mean) if log else found.max_magnitude
        if kind == "fields" and 0 < size < SMALLEST:
            what = f"{name!r} of {family} is at most {size:.2g}, below {SMALLEST:g}"
            raise DataFault(f"{folder}: {what}: choose other units, because scores square its errors in float32")
        statistics[family][kind][name] = {"log": log, "mean": found.mean, "std": found.std}
    return statistics


def check_values(folder: Path, dataset: Dataset, advance: Callable[[int], None]) -> None:
    """Refuse a dataset with values that are not finite, above LARGEST, or not positive in `Family.positive` fields."""
    with TrajectoryReader(folder, dataset) as reader:
        for index in range(dataset.num_trajectories):
            check_trajectory(reader, index)
            advance(1)


def check_trajectory(reader: TrajectoryReader, index: int) -> None:
    """Refuse a trajectory with values that `check_values` refuses."""
    _scan(reader, index, None)


def is_log(family: Family, name: str) -> bool:
    """Whether a field or coefficient is normalized after taking its logarithm."""
    return name in family.positive or name in family.positive_coefficients


def _scan(reader: TrajectoryReader, index: int, moments: dict[tuple[str, str, str], Moments] | None) -> None:
    """Check a trajectory and its coefficients, and merge them into `moments` unless that is None."""
    family = reader.family
    for kind, names, start, values in read_slabs(reader, index):
        check_slab(reader, index, names, values, start)
        for channel, name in enumerate(names):
            if moments is not None:
                u = values[:, channel].astype(np.float64)
                moments[family.name, kind, name].update(np.log(u) if is_log(family, name) else u)


def read_slabs(reader: TrajectoryReader, index: int) -> Iterator[tuple[str, tuple[str, ...], int, np.ndarray]]:
    """Kind, names, first snapshot and values (T, C, *grid) of pieces of a trajectory, at most `SLAB_ELEMENTS` large."""
    family, dataset = reader.family, reader.dataset
    num_snapshots = max(1, SLAB_ELEMENTS // (len(family.fields) * int(np.prod(dataset.grid))))
    for start in range(0, len(dataset.times), num_snapshots):
        yield "fields", family.fields, start, reader.read(index, start, start + num_snapshots)
    if family.coefficients:
        yield "coefficients", family.coefficients, 0, reader.read_coefficients(index)[None]


def check_slab(reader: TrajectoryReader, index: int, names: tuple[str, ...], values: np.ndarray, start: int) -> None:
    """Refuse values (T, C, *grid) from snapshot `start` on that are not finite, or not positive where they must be."""
    for channel, name in enumerate(names):
        _check(reader, index, name, values[:, channel], start)


def _check(reader: TrajectoryReader, index: int, name: str, values: np.ndarray, start: int) -> None:
    bad, what = ~np.isfinite(values), "NaN or infinite"
    if not bad.any():
        bad, what = abs(values) > LARGEST, f"above {LARGEST:g}: choose other units, because float32 ends at 1e38"
    if is_log(reader.family, name) and not bad.any():
        bad, what = values <= 0, "not positive"
    if not bad.any():
        return
    file, position = reader.locate(index)
    snapshot = reader.dataset.stored_snapshots[start + int(np.argwhere(bad)[0][0])]
    where = f"field {name!r} of trajectory {position}, snapshot {snapshot}, is {what}"
    raise file_fault(reader.folder / file, where, "repair the file or leave it out")
