"""Measure what the training split covers and the usual error, for the warning of `ups.surrogate.coverage`."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.errors import DataFault
from ups.evaluation.parts import score_sets
from ups.evaluation.predictions import Compute, plain_method
from ups.evaluation.scores import held_out
from ups.models.codec import FieldGroup, group_name
from ups.runs.progress import ProgressBar
from ups.surrogate.coverage import Coverage, FieldCoverage, band_starts, describe, normalized
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import Trained

# Of each dataset at most so much is described, evenly spaced: more would change its extremes little.
MAX_SNAPSHOTS, MAX_TRAJECTORIES, MIN_TRAJECTORIES = 16, 1000, 16
MAX_VALUES = 2**32
VALUES_AT_ONCE = 2**20  # of snapshots that are described together, at least one
MAX_VALIDATION = 32  # trajectories of each dataset whose error is measured

Features = dict[tuple[str, str], list[Tensor]]
"""(kind, name of field) -> features (8,) of snapshots."""


def measure_coverage(
    folder: Path, trained: Trained, config: EvaluationConfig, launch: LaunchConfig, raw: Path
) -> dict[str, Any]:
    """{"families": {family: `Coverage` as plain values}}; arrays of scored trajectories are written into `folder`."""
    compute, cache = Compute.of(launch), trained.cache()
    surrogate = replace(trained.surrogate(compute.device), denoiser=None, student=None, corrections={})
    datasets: dict[str, list[tuple[Dataset, list[int]]]] = defaultdict(list)
    for _, entry in sorted(cache.datasets.items()):
        dataset = Dataset.from_json(entry["dataset"])
        datasets[dataset.family].append((dataset, chosen_trajectories(dataset, sorted(entry["split"]["train"]))))
    valid = [replace(each, indices=each.indices[:MAX_VALIDATION]) for each in held_out(cache, raw, "valid")]
    errors = usual_errors(score_sets(folder, surrogate, valid, config, compute))
    total = sum(len(indices) for sets in datasets.values() for _, indices in sets)
    with ProgressBar("measure_coverage", total, "trajectories") as bar:
        families = {
            family: asdict(_family_coverage(raw, surrogate, sets, errors[family], bar.advance))
            for family, sets in datasets.items()
        }
    return {"families": families}


def chosen_trajectories(dataset: Dataset, train: list[int]) -> list[int]:
    """At most `MAX_TRAJECTORIES` of the training split, and of large ones as many as have `MAX_VALUES` values."""
    values = len(_times(dataset)) * len(FAMILIES[dataset.family].fields) * math.prod(dataset.grid)
    size = min(MAX_TRAJECTORIES, max(MIN_TRAJECTORIES, MAX_VALUES // values), len(train))
    return [train[place] for place in np.linspace(0, len(train) - 1, size).round().astype(int)]


def usual_errors(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The median nRMSE of rollouts, or of steady solutions, by family, without corrector.

    Raises:
        DataFault: it is not finite.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for record in records:
        family, horizon = record["family"], "one_step" if FAMILIES[record["family"]].steady else "rollout"
        if (record["method"], record["metric"], record["horizon"]) == (plain_method(family), "nRMSE", horizon):
            errors[family] += [math.inf if error is None else error for error in record["trajectories"]]
    found = {family: median(values) for family, values in errors.items()}
    for family, error in found.items():
        if not 0 < error < math.inf:
            raise DataFault(f"the validation error of {family} is {error}: train longer, or inspect its data")
    return found


def _family_coverage(
    raw: Path,
    surrogate: Surrogate,
    sets: list[tuple[Dataset, list[int]]],
    error: float,
    advance: Callable[[int], None],
) -> Coverage:
    datasets = [dataset for dataset, _ in sets]
    family, grid = FAMILIES[datasets[0].family], datasets[0].grid
    groups = {kind: surrogate.codec.groups.get(group_name(family.name, kind)) for kind in ("fields", "coefficients")}
    bands, features = band_starts(grid), defaultdict(list)
    for dataset, indices in sets:
        with TrajectoryReader(raw, dataset) as reader:
            _add_features(reader, indices, groups, bands, features, advance)
    dts = [dataset.times[1] - dataset.times[0] for dataset in datasets if not family.steady]
    covered = {kind: dict(_fitted(getattr(family, kind), kind, group, features)) for kind, group in groups.items()}
    return Coverage(
        parameters={name: _ends(dataset.parameters[name] for dataset in datasets) for name in family.parameters},
        dt=_ends(dts) if dts else None,
        grid=grid,
        bands=bands,
        **covered,
        error=error,
    )


def _add_features(
    reader: TrajectoryReader,
    indices: list[int],
    groups: dict[str, FieldGroup | None],
    bands: tuple[int, ...],
    features: Features,
    advance: Callable[[int], None],
) -> None:
    """Add those of chosen snapshots of these trajectories, `VALUES_AT_ONCE` in memory at a time."""
    for index in indices:
        for kind, values in _snapshots(reader, index):
            group, u = groups[kind], torch.from_numpy(values)
            for channel, name in enumerate(getattr(reader.family, kind)):
                how = {"log": group.log[channel], "mean": group.mean[channel], "std": group.std[channel]}
                features[kind, name] += describe(normalized(u[:, channel], **how), bands)
        advance(1)


def _snapshots(reader: TrajectoryReader, index: int) -> Iterator[tuple[str, np.ndarray]]:
    """Kind and values (S, C, *grid) of the snapshots that are described, and of the coefficients, S = 1."""
    times = _times(reader.dataset)
    count = max(1, VALUES_AT_ONCE // (len(reader.family.fields) * math.prod(reader.dataset.grid)))
    for start in range(0, len(times), count):
        yield "fields", np.concatenate([reader.read(index, t, t + 1) for t in times[start : start + count]])
    if reader.family.coefficients:
        yield "coefficients", reader.read_coefficients(index)[None]


def _times(dataset: Dataset) -> list[int]:
    last = len(dataset.times) - 1
    return sorted({round(place) for place in np.linspace(0, last, min(MAX_SNAPSHOTS, last + 1))})


def _fitted(
    names: tuple[str, ...], kind: str, group: FieldGroup | None, features: Features
) -> Iterator[tuple[str, FieldCoverage]]:
    for channel, name in enumerate(names if group is not None else ()):
        how = {"log": group.log[channel], "mean": group.mean[channel], "std": group.std[channel]}
        yield name, FieldCoverage.fit(torch.stack(features[kind, name]), **how)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)
