"""Train, valid and test trajectories of every dataset, with no initial condition in two of them."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ups.data.dataset import Dataset
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, DataFault

SPLITS = ("train", "valid", "test")
# PDEBench draws 1D compressible flow in blocks of 1,000 with consecutive seeds for density, pressure and velocity: the
# pressure of one block is the density of the next, times ten.
BLOCKS = {"compressible_ns_1d": 1000}

Trajectory = tuple[str, int]


def split(
    folder: Path, datasets: dict[str, Dataset], seed: int, valid_fraction: float, test_fraction: float
) -> dict[str, dict[str, list[int]]]:
    """Positions of the trajectories of each split, `{dataset: {"train": [...], "valid": [...], "test": [...]}}`.

    Trajectories that start from the same state, in whatever file or family, form a group and stay together. Groups
    that occur in the same datasets are shuffled and divided by the fractions.
    """
    if not (valid_fraction > 0 and test_fraction > 0 and valid_fraction + test_fraction < 1):
        raise ConfigFault(f"fractions valid {valid_fraction}, test {test_fraction}: make them > 0 with a sum below 1")
    groups = group_by_initial_condition(folder, datasets)
    strata = defaultdict(list)
    for group in groups:
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
    """Connected components of the trajectories that share a clue to the same initial state, in a fixed order."""
    trajectories = [(name, index) for name in sorted(datasets) for index in range(datasets[name].num_trajectories)]
    parent = {trajectory: trajectory for trajectory in trajectories}

    def find(trajectory: Trajectory) -> Trajectory:
        while parent[trajectory] != trajectory:
            parent[trajectory] = trajectory = parent[parent[trajectory]]
        return trajectory

    first_with: dict[tuple, Trajectory] = {}
    for name in sorted(datasets):
        with TrajectoryReader(folder, datasets[name]) as reader:
            for index in range(datasets[name].num_trajectories):
                for clue in _clues(reader, index):
                    parent[find((name, index))] = find(first_with.setdefault(clue, (name, index)))
    groups = defaultdict(list)
    for trajectory in trajectories:
        groups[find(trajectory)].append(trajectory)
    return list(groups.values())


def _clues(reader: TrajectoryReader, index: int) -> Iterator[tuple]:
    """Keys that trajectories with the same initial state have in common.

    PDEBench repeats its random streams for every parameter, so in most families equal positions start alike, be it
    after a rescaling that no hash can see. The files of one batch dataset are drawn one after another instead.
    """
    family = reader.family
    if family.layout != "batch":
        yield family.initial_conditions or family.name, reader.origin(index) % BLOCKS.get(family.name, 2**63)
    fields = reader.read_coefficients(index) if family.steady else reader.read(index, 0, 1)[0]
    fields = fields + np.float32(0)  # -0 and 0 are the same state
    for field in fields:
        if field.min() != field.max():  # a constant says nothing: density and pressure of turbulence start as one
            yield ("field", hashlib.sha256(field.tobytes()).digest())
    yield "state", reader.dataset.name, hashlib.sha256(fields.tobytes()).digest()


def _divide(
    groups: list[list[Trajectory]], seed: int, valid_fraction: float, test_fraction: float
) -> dict[str, list[list[Trajectory]]]:
    """Shuffled groups by split: at least one for valid and test, or all for train if there are fewer than three."""
    if len(groups) < len(SPLITS):
        return {"train": groups}
    num_valid, num_test = (max(1, round(fraction * len(groups))) for fraction in (valid_fraction, test_fraction))
    while num_valid + num_test >= len(groups):
        num_valid, num_test = (num_valid - 1, num_test) if num_valid > num_test else (num_valid, num_test - 1)
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = [groups[i] for i in order]
    return {
        "valid": shuffled[:num_valid],
        "test": shuffled[num_valid : num_valid + num_test],
        "train": shuffled[num_valid + num_test :],
    }


def _fill_empty(assigned: dict[str, list[list[Trajectory]]], datasets: dict[str, Dataset]) -> None:
    """Move groups out of train until every dataset has one in each split."""
    num_groups = {kind: Counter(name for group in assigned[kind] for name in _members(group)) for kind in SPLITS}
    for name in sorted(datasets):
        for kind in ("valid", "test"):
            if num_groups[kind][name] > 0:
                continue
            group = next((group for group in assigned["train"] if _is_spare(group, name, num_groups["train"])), None)
            if group is None:
                distinct = sum(counts[name] for counts in num_groups.values())
                what = f"needs at least 3 trajectories with distinct initial conditions, has {distinct}"
                raise DataFault(f"{', '.join(datasets[name].files)}: {what}; add trajectories or leave the dataset out")
            assigned["train"].remove(group)
            assigned[kind].append(group)
            num_groups["train"].subtract(_members(group))
            num_groups[kind].update(_members(group))


def _is_spare(group: list[Trajectory], name: str, num_train: Counter[str]) -> bool:
    """Whether the group has a dataset's trajectories and none of its datasets would vanish from train without it."""
    members = _members(group)
    return name in members and all(num_train[member] > 1 for member in members)


def _members(group: list[Trajectory]) -> set[str]:
    return {name for name, _ in group}
