"""Datasets of a folder of PDEBench files, and a reader of their trajectories (T, C, *grid) in every layout."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import h5py
import numpy as np

from ups.data import layouts
from ups.data.arrays import Stamps, changed, expect_stamps, open_data
from ups.data.families import Dataset, Family, Subsample, base_of
from ups.data.hdf5 import file_fault, open_dataset, read_label, read_number
from ups.data.pdebench import FAMILIES
from ups.data.recognition import family_of
from ups.errors import ConfigFault
from ups.files import allow_open_files

NUMBER_PATTERN = r"(-?\d+\.?\d*(?:e[-+]?\d+)?)"
MAX_OPEN_DATASETS = 8  # of a file; to find and check one takes longer than to read a small trajectory


def find_datasets(folder: Path, names: list[str]) -> dict[str, Dataset]:
    """Datasets by name, sorted. Files are checked but for their values; numbered files of layout `batch` are joined."""
    return join_files(folder, map(inspect_file, (folder / name for name in sorted(set(names), key=_natural_order))))


def join_files(folder: Path, files: Iterable[Dataset]) -> dict[str, Dataset]:
    """Datasets by name, sorted, from those of single files; two of one name are a `DataFault` but in layout `batch`."""
    datasets: dict[str, Dataset] = {}
    for new in files:
        datasets[new.name] = _join(folder, datasets[new.name], new) if new.name in datasets else new
    return dict(sorted(datasets.items()))


def take_first(dataset: Dataset, subsample: Subsample) -> Dataset:
    """The dataset with at most its `first_trajectories`, and only the files that hold them."""
    remaining = dataset.num_trajectories if subsample.first_trajectories is None else subsample.first_trajectories
    before = accumulate(dataset.counts, initial=0)
    counts = [min(count, remaining - start) for count, start in zip(dataset.counts, before, strict=False)]
    kept = [(name, count) for name, count in zip(dataset.files, counts, strict=True) if count > 0]
    return replace(dataset, files=tuple(name for name, _ in kept), counts=tuple(count for _, count in kept))


def thin(folder: Path, dataset: Dataset, subsample: Subsample) -> Dataset:
    """The dataset with every k-th point and snapshot.

    With points k dx apart a domain of N' points is N' k dx long: on a periodic axis the same as before, for which k
    must divide the number of points. On other axes points are the centres of cells k dx wide, so that the ends of
    the domain move by up to (k - 1) dx, and what is kept is the exact spacing.

    Raises:
        ConfigFault: fewer than two snapshots of a transient family or points of an axis remain, the last snapshot is
            not in the file, or the points do not divide a periodic axis.
    """
    k, family, path = subsample.every_point, FAMILIES[dataset.family], folder / dataset.files[0]
    if family.steady:
        subsample = replace(subsample, every_snapshot=1, first_snapshot=0, last_snapshot=None)
    else:
        _expect_snapshots(path, dataset, subsample)
    last = len(dataset.times) - 1 if subsample.last_snapshot is None else subsample.last_snapshot
    grid = tuple(-(-n // k) for n in dataset.grid)
    for axis, n, kept, boundary in zip(family.axes, dataset.grid, grid, dataset.boundary, strict=True):
        if kept < 2 or (n % k and boundary == "periodic"):
            what = "leaves fewer than 2 of" if kept < 2 else "does not divide"
            what = f"subsample, {family.name}: every_point = {k} {what} the {n} points of the {boundary} axis {axis}"
            raise ConfigFault(f"{what} in {path}; choose a divisor of {n} below it")
    return replace(
        dataset,
        times=dataset.times[subsample.first_snapshot : last + 1 : subsample.every_snapshot],
        grid=grid,
        lengths=tuple(L * (m * k / n) for L, m, n in zip(dataset.lengths, grid, dataset.grid, strict=True)),
        subsample=subsample,
    )


def _expect_snapshots(path: Path, dataset: Dataset, subsample: Subsample) -> None:
    final = len(dataset.times) - 1
    needed = max(subsample.first_snapshot + subsample.every_snapshot, subsample.last_snapshot or 0)
    if needed > final:
        names = ("first_snapshot", "last_snapshot", "every_snapshot")
        options = ", ".join(f"{name} = {getattr(subsample, name)}" for name in names if getattr(subsample, name))
        what = f"subsample, {dataset.family}: {options} need snapshot {needed} of {path}, whose last one is {final}"
        raise ConfigFault(f"{what}; lower them")


def name_variants(datasets: dict[str, Dataset]) -> dict[str, Dataset]:
    """The datasets with names of variants as their families, where one family has several grids or boundaries."""
    grids, boundaries = defaultdict(set), defaultdict(set)
    for dataset in datasets.values():
        grids[dataset.family].add(dataset.grid)
        boundaries[dataset.family].add(dataset.boundary)

    def variant(dataset: Dataset) -> str:
        parts = [dataset.family]
        parts += ["x".join(map(str, dataset.grid))] if len(grids[dataset.family]) > 1 else []
        parts += dict.fromkeys(dataset.boundary) if len(boundaries[dataset.family]) > 1 else []
        return "-".join(parts)

    return {name: replace(dataset, family=variant(dataset)) for name, dataset in datasets.items()}


def _expect_one_grid(folder: Path, first: Dataset, other: Dataset) -> None:
    if other.grid != first.grid:
        found = (f"{dataset.files[0]} has {' x '.join(map(str, dataset.grid))}" for dataset in (first, other))
        what = f"clashing resolutions of {other.family}: {', '.join(found)} points"
        raise file_fault(folder / other.files[0], what, "select files of one resolution")


def inspect_file(path: Path, family_name: str | None = None) -> Dataset:
    """The dataset of one file, checked but for its values; the file tells the family, unless that is given."""
    if family_name is not None and base_of(family_name) not in FAMILIES:
        raise ConfigFault(f"there is no family {family_name!r}: choose one of {', '.join(FAMILIES)}")
    with open_data(path) as file:
        family = family_of(file, path) if family_name is None else FAMILIES[family_name]
        contents = layouts.inspect_file(file, family)
        parameters = read_parameters(file, path, family)
        label = read_label(file, "family")
    return describe_file(path, family, contents, parameters, label)


def describe_file(
    path: Path, family: Family, contents: layouts.Contents, parameters: dict[str, float], label: str | None = None
) -> Dataset:
    """The dataset of a file with these contents.

    Boundary conditions follow from its name, or from its text `family`, the `label`, if that is a variant's name.
    """
    words = [] if label is None or label.startswith("{") else label.split("-")[1:]
    names = family.boundary_names.items()
    named = (boundary for boundary, word in names if f"_{word}_" in path.name or boundary in words)
    return Dataset(
        name=re.sub(r"-\d+$", "", path.stem) if family.layout == "batch" else path.stem,
        family=family.name,
        files=(path.name,),
        counts=(contents.count,),
        times=contents.times,
        grid=contents.grid,
        lengths=contents.lengths,
        boundary=(other,) * len(family.axes) if (other := next(named, None)) else family.boundaries,
        parameters=parameters,
    )


def _join(folder: Path, dataset: Dataset, new: Dataset) -> Dataset:
    """The dataset with the trajectories of one more batch file appended."""
    if FAMILIES[new.family].layout != "batch":
        raise file_fault(folder / new.files[0], f"is a second file of dataset {new.name}", "keep one of the two")
    _expect_one_grid(folder, dataset, new)
    if len(new.times) != len(dataset.times) or not np.allclose(new.times, dataset.times, rtol=1e-4):
        raise file_fault(folder / new.files[0], f"has other times than {dataset.files[0]}", "select one of the two")
    return replace(dataset, files=dataset.files + new.files, counts=dataset.counts + new.counts)


def read_parameters(file: h5py.File, path: Path, family: Family) -> dict[str, float]:
    """The parameters of the equation, in the order of the family."""
    return {name: read_parameter(file, path, family, name) for name in family.parameters}


def read_parameter(file: h5py.File, path: Path, family: Family, name: str) -> float:
    """A parameter, from the attribute, the number or the file name: `Nu0.01`, `Eta1.e-8`, `_M0.1_`."""
    attribute = family.attributes.get(name, name)
    value = read_number(file, attribute)
    if value is not None:
        return value
    if (value := parameter_in_name(path, attribute)) is None:
        what = f"parameter {attribute!r} is neither an attribute or number in the file nor in its name"
        raise file_fault(path, what, f"add it, or write {attribute}<value> into the name")
    return value


def parameter_in_name(path: Path, attribute: str) -> float | None:
    """The value of a parameter that the name of a file states, `Nu0.01` or `_M0.1_`; None if it does not."""
    pattern = rf"(?<![A-Za-z]){re.escape(attribute)}{NUMBER_PATTERN}(?=_|$)"
    match = re.search(pattern, path.stem) or re.search(pattern, path.stem, re.IGNORECASE)
    return None if match is None else float(match[1])


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key with numbers by value: `-2` comes before `-10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


class OpenFile(NamedTuple):
    """A file, the identifiers of its trajectories, the names of its fields' arrays, and its datasets by name."""

    file: h5py.File
    trajectories: list[str] | range
    arrays: tuple[str, ...]
    opener: layouts.Opener


class TrajectoryReader:
    """Reads trajectories of one dataset by their index over all its files, each opened at its first read.

    An open HDF5 file cannot be used after a fork: create one reader per process. A file that has another stamp than in
    `stamps` when it has been opened is refused; one that is replaced later is read as it was.
    """

    def __init__(self, folder: Path, dataset: Dataset, stamps: Stamps | None = None) -> None:
        self.folder, self.stamps = folder, stamps or {}
        self.dataset = dataset
        self.family = FAMILIES[dataset.family]
        self._ends = list(accumulate(dataset.counts))
        self._open: dict[str, OpenFile] = {}
        self._positions: dict[str, np.ndarray | range] = {}
        allow_open_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close every file; a later read opens it again."""
        for opened in self._open.values():
            opened.file.close()
        self._open.clear()

    def locate(self, index: int) -> tuple[str, int]:
        """File name of a trajectory and its position in that file."""
        if not 0 <= index < self.dataset.num_trajectories:
            raise IndexError(f"trajectory {index} of {self.dataset.name}, which has {self.dataset.num_trajectories}")
        number = bisect_right(self._ends, index)
        return self.dataset.files[number], index - self._ends[number] + self.dataset.counts[number]

    def published_position(self, index: int) -> int:
        """Position of a trajectory in the published file; in a partial file it is not the position in the file."""
        if self.family.layout in ("groups", "batch"):
            return index
        name, position = self.locate(index)
        if name not in self._positions:
            self._find(index)
            opened = self._open[name]
            self._positions[name] = layouts.read_positions(opened.file, len(opened.trajectories))
        return int(self._positions[name][position])

    def read(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Snapshots `start` to `stop` of a trajectory, float32 (T, C, *grid)."""
        start, stop, _ = slice(start, stop).indices(len(self.dataset.times))
        opened, trajectory = self._find(index)
        snapshots, every_point = self.dataset.stored_snapshots[start:stop], self.dataset.subsample.every_point
        u = layouts.read_snapshots(opened.arrays, opened.opener, self.family, trajectory, snapshots, every_point)
        return self._expect(index, u, (stop - start, len(self.family.fields), *self.dataset.grid))

    def read_coefficients(self, index: int) -> np.ndarray:
        """Coefficient fields of a trajectory, float32 (C, *grid), with C = 0 where the family has none."""
        shape = (len(self.family.coefficients), *self.dataset.grid)
        if not self.family.coefficients:
            return np.empty(shape, np.float32)
        opened, trajectory = self._find(index)
        every_point = self.dataset.subsample.every_point
        return self._expect(
            index, layouts.read_coefficients(opened.opener, self.family, trajectory, every_point), shape
        )

    def _find(self, index: int) -> tuple[OpenFile, int | str]:
        name, position = self.locate(index)
        if name not in self._open:
            file = open_data(self.folder / name)
            if name in self.stamps:
                expect_stamps(self.folder, {name: self.stamps[name]})
            opener = lru_cache(MAX_OPEN_DATASETS)(partial(open_dataset, file))
            trajectories, arrays = layouts.list_trajectories(file, self.family), layouts.arrays_of(file, self.family)
            self._open[name] = OpenFile(file, trajectories, arrays, opener)
        opened = self._open[name]
        if position >= len(opened.trajectories):
            raise changed(self.folder / name)
        return opened, opened.trajectories[position]

    def _expect(self, index: int, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if values.shape != shape:
            path = self.folder / self.locate(index)[0]
            raise changed(path, f"has changed: shape {values.shape}, not {shape}")
        return values
