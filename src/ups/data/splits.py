"""Train, valid and test split of every dataset, such that no initial condition is in two splits."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ups.data.families import Dataset, base_of
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, DataFault

SPLITS = ("train", "valid", "test")
FEWEST = 3  # initial states in valid and in test, where that leaves half for training: a score of one is chance

Trajectory = tuple[str, int]
Key = tuple[Any, ...]


def split(
    folder: Path, datasets: dict[str, Dataset], seed: int, valid_fraction: float, test_fraction: float
) -> dict[str, dict[str, list[int]]]:
    """Indices of the trajectories of each split, `{dataset: {"train": [...], "valid": [...], "test": [...]}}`.

    Trajectories with the same initial state, in any file or family, form a group that stays in one split. Groups that
    occur in the same datasets are shuffled by `seed` and divided by the fractions; valid and test have at least
    `FEWEST` groups each, or a quarter if that is less.

    Raises:
        ConfigFault: a fraction is not positive, or their sum is not below 1.
        DataFault: a dataset has fewer than three distinct initial states.
    """
    if not (valid_fraction > 0 and test_fraction > 0 and valid_fraction + test_fraction < 1):
        raise ConfigFault(f"fractions valid {valid_fraction}, test {test_fraction}: make them > 0 with a sum below 1")
    strata = defaultdict(list)
    for group in group_by_initial_condition(folder, datasets):
        strata[tuple(sorted(_members(group)))].append(group)
    assigned: dict[str, list[list[Trajectory]]] = {name: [] for name in SPLITS}
    for members in sorted(strata):
        for name, chosen in _divide(strata[members], seed, valid_fraction, test_fraction).items():
            assigned[name] += chosen
    _fill_empty(assigned, datasets)
    result: dict[str, dict[str, list[int]]] = {name: {kind: [] for kind in SPLITS} for name in datasets}
    for kind, chosen in assigned.items():
        for name, index in sorted(trajectory for group in chosen for trajectory in group):
            result[name][kind].append(index)
    return result


def group_by_initial_condition(folder: Path, datasets: dict[str, Dataset]) -> list[list[Trajectory]]:
    """Connected components of the trajectories that share a key of their initial states, in a fixed order."""
    trajectories: list[Trajectory] = []
    parents: list[int] = []  # a forest with a tree for each component; the parent of a root is the root
    first_with: dict[tuple, int] = {}
    for name in sorted(datasets):
        for index, keys in enumerate(_keys_of(folder, datasets[name])):
            number = len(trajectories)
            parents.append(number)
            for key in keys:
                parents[_root(parents, first_with.setdefault(key, number))] = _root(parents, number)
            trajectories.append((name, index))
    groups = defaultdict(list)
    for number, trajectory in enumerate(trajectories):
        groups[_root(parents, number)].append(trajectory)
    return list(groups.values())


def _root(parents: list[int], number: int) -> int:
    """The root of a tree; the path to it is halved, so that trees stay low."""
    while parents[number] != number:
        parents[number] = number = parents[parents[number]]
    return number


def _keys_of(folder: Path, dataset: Dataset) -> list[list[Key]]:
    """Keys of each trajectory; those with the same initial state have at least one in common."""
    with TrajectoryReader(folder, dataset) as reader:
        indices = range(dataset.num_trajectories)
        states, fields = (list(keys) for keys in zip(*(_state_and_fields(reader, i) for i in indices), strict=True))
        keys = [[state, *_position(reader, i)] for i, state in zip(indices, states, strict=True)]
    for field in zip(*fields, strict=True):
        given = [key for key in field if key is not None]
        # A field that most trajectories share, a background or a geometry, identifies no state.
        if 2 * len(set(given)) >= len(given):
            for own, key in zip(keys, field, strict=True):
                own += [key] if key is not None else []
    return keys


def _state_and_fields(reader: TrajectoryReader, index: int) -> tuple[Key, list[Key | None]]:
    """The key of an initial state, and those of its fields, None where it is constant.

    A constant identifies no state: turbulence starts with density = pressure = 1.
    """
    family = reader.family
    fields = reader.read_coefficients(index) if family.steady else reader.read(index, 0, 1)[0]
    fields = fields + np.float32(0)  # -0 and 0 are the same state
    state = ("state", family.initial_conditions or family.name, reader.dataset.grid, _sha256(fields))
    return state, [("field", _sha256(field)) if field.min() != field.max() else None for field in fields]


def _position(reader: TrajectoryReader, index: int) -> Iterator[Key]:
    """A key that trajectories at equal positions of PDEBench's files share.

    PDEBench restarts its random stream for every parameter value: in most families equal positions in two files have
    the same initial state, possibly rescaled, which a hash cannot detect. Layout `batch` is the exception: its files
    continue one random stream.
    """
    family = reader.family
    if base_of(family.name) in FAMILIES.table and family.layout != "batch":
        stream = family.initial_conditions or family.name
        yield stream, reader.published_position(index) % (family.initial_condition_block or 2**63)


def _sha256(values: np.ndarray) -> bytes:
    return hashlib.sha256(values.tobytes()).digest()


def _divide(
    groups: list[list[Trajectory]], seed: int, valid_fraction: float, test_fraction: float
) -> dict[str, list[list[Trajectory]]]:
    """Shuffled groups by split: at least one in valid and test each, or all in train if there are fewer than three."""
    if len(groups) < len(SPLITS):
        return {"train": groups}
    fewest = max(1, min(FEWEST, len(groups) // 4))
    num_valid, num_test = (max(fewest, round(fraction * len(groups))) for fraction in (valid_fraction, test_fraction))
    while num_valid + num_test >= len(groups):
        num_valid, num_test = (num_valid - 1, num_test) if num_valid > num_test else (num_valid, num_test - 1)
    shuffled = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    valid, rest = shuffled[:num_valid], shuffled[num_valid:]
    return {"valid": valid, "test": rest[:num_test], "train": rest[num_test:]}


def _fill_empty(assigned: dict[str, list[list[Trajectory]]], datasets: dict[str, Dataset]) -> None:
    """Move groups from train to the other splits until every dataset has one in each."""
    num_groups = {kind: Counter(name for group in assigned[kind] for name in _members(group)) for kind in SPLITS}
    for name in sorted(datasets):
        for kind in ("valid", "test"):
            if num_groups[kind][name] > 0:
                continue
            movable = (group for group in assigned["train"] if _can_leave_train(group, name, num_groups["train"]))
            group = next(movable, None)
            if group is None:
                distinct = sum(counts[name] for counts in num_groups.values())
                what = f"needs at least 3 trajectories with distinct initial conditions, has {distinct}"
                raise DataFault(f"{', '.join(datasets[name].files)}: {what}; add trajectories or leave the dataset out")
            assigned["train"].remove(group)
            assigned[kind].append(group)
            num_groups["train"].subtract(_members(group))
            num_groups[kind].update(_members(group))


def _can_leave_train(group: list[Trajectory], name: str, num_train: Counter[str]) -> bool:
    """Whether the group has trajectories of dataset `name`, and train keeps some of each of its datasets without it."""
    members = _members(group)
    return name in members and all(num_train[member] > 1 for member in members)


def _members(group: list[Trajectory]) -> set[str]:
    return {name for name, _ in group}
