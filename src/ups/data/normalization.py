"""Mean and standard deviation of every field from the train split; the same pass checks every value of all splits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ups.data.dataset import Dataset
from ups.data.hdf5 import bad_file
from ups.data.pdebench import FAMILIES, Family
from ups.data.trajectories import TrajectoryReader

POSITIVE_COEFFICIENTS = {"darcy_2d": ("nu",)}
STD_FLOOR = 1e-6  # of the largest magnitude
SLAB_ELEMENTS = 2**24


class Moments:
    """Mean and variance of a stream of values, merged slab by slab in float64 (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.M2, self.max_magnitude = 0, 0.0, 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        """Merge a slab: delta = mean_b - mean_a, M2 = M2_a + M2_b + delta^2 n_a n_b / n."""
        values = values.astype(np.float64)
        count = self.count + values.size
        delta = values.mean() - self.mean
        self.M2 += float(((values - values.mean()) ** 2).sum() + delta**2 * self.count * values.size / count)
        self.mean += float(delta * values.size / count)
        self.max_magnitude = max(self.max_magnitude, float(abs(values).max()))
        self.count = count

    @property
    def std(self) -> float:
        """Standard deviation, at least a millionth of the largest magnitude, 1 for a field that is zero."""
        return max((self.M2 / self.count) ** 0.5, STD_FLOOR * self.max_magnitude) or 1.0


def fit_normalization(
    folder: Path,
    datasets: dict[str, Dataset],
    splits: dict[str, dict[str, list[int]]],
    advance: Callable[[int], None],
) -> dict:
    """Statistics `{family: {"fields" | "coefficients": {name: {"log", "mean", "std"}}}}`; log fields after the log.

    Every value of every split must be finite, and positive where the registry says so; `advance(1)` follows each
    trajectory.
    """
    moments: dict[str, dict[str, dict[str, Moments]]] = {}
    for name, dataset in datasets.items():
        of_family = moments.setdefault(dataset.family, _empty_moments(FAMILIES[dataset.family]))
        train = set(splits[name]["train"])
        with TrajectoryReader(folder, dataset) as reader:
            for index in sorted(index for indices in splits[name].values() for index in indices):
                _scan(reader, index, of_family if index in train else None)
                advance(1)
    return {
        family: {
            kind: {name: _summarize(FAMILIES[family], name, field) for name, field in fields.items()}
            for kind, fields in of_family.items()
        }
        for family, of_family in moments.items()
    }


def check_values(folder: Path, dataset: Dataset, advance: Callable[[int], None]) -> None:
    """Every value of a dataset must be finite, and positive where the registry says so."""
    with TrajectoryReader(folder, dataset) as reader:
        for index in range(dataset.num_trajectories):
            _scan(reader, index, None)
            advance(1)


def is_log(family: Family, name: str) -> bool:
    """Whether a field or coefficient is normalized after taking its logarithm."""
    return name in family.positive or name in POSITIVE_COEFFICIENTS.get(family.name, ())


def _empty_moments(family: Family) -> dict[str, dict[str, Moments]]:
    return {
        "fields": {name: Moments() for name in family.fields},
        "coefficients": {name: Moments() for name in family.coefficients},
    }


def _summarize(family: Family, name: str, moments: Moments) -> dict[str, bool | float]:
    return {"log": is_log(family, name), "mean": moments.mean, "std": moments.std}


def _scan(reader: TrajectoryReader, index: int, moments: dict[str, dict[str, Moments]] | None) -> None:
    """Check a trajectory and its coefficients, and add them to the statistics, if any."""
    family = reader.family
    for kind, names, start, values in _slabs(reader, index):
        for channel, name in enumerate(names):
            _check(reader, index, name, values[:, channel], start)
            if moments is not None:
                u = values[:, channel].astype(np.float64)
                moments[kind][name].update(np.log(u) if is_log(family, name) else u)


def _slabs(reader: TrajectoryReader, index: int) -> Iterator[tuple[str, tuple[str, ...], int, np.ndarray]]:
    """Kind, names, first snapshot and values (T, C, *grid) of bounded pieces of a trajectory."""
    family, dataset = reader.family, reader.dataset
    num_snapshots = max(1, SLAB_ELEMENTS // (len(family.fields) * int(np.prod(dataset.grid))))
    for start in range(0, len(dataset.times), num_snapshots):
        yield "fields", family.fields, start, reader.read(index, start, start + num_snapshots)
    if family.coefficients:
        yield "coefficients", family.coefficients, 0, reader.read_coefficients(index)[None]


def _check(reader: TrajectoryReader, index: int, name: str, values: np.ndarray, start: int) -> None:
    if not np.isfinite(values).all():
        bad, what = ~np.isfinite(values), "NaN or infinite"
    elif is_log(reader.family, name) and values.min() <= 0:
        bad, what = values <= 0, "not positive"
    else:
        return
    file, position = reader.locate(index)
    snapshot = start + int(np.argwhere(bad)[0][0])
    where = f"field {name!r} of trajectory {position}, snapshot {snapshot}, is {what}"
    raise bad_file(reader.folder / file, where, "repair the file or leave it out")
