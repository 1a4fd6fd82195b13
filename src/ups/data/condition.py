"""What an operator is told about a dataset besides its state: time step, PDE parameters, boundaries, resolution."""

import math

from ups.data.dataset import Dataset
from ups.data.pdebench import BOUNDARIES, PARAMETERS

MAX_DIMS = 3
NUM_CONDITIONS = 2 + 2 * len(PARAMETERS) + MAX_DIMS * (1 + len(BOUNDARIES))


def condition_features(dataset: Dataset) -> list[float]:
    """A vector of length `NUM_CONDITIONS` with entries of order one.

    log10 of the time step (0 where there is none), log2 of the finest axis, per parameter its log10 and its sign (0
    and 0 where the PDE has none), per axis whether it exists and its boundary condition (one of `BOUNDARIES`).
    """
    dt = dataset.times[1] - dataset.times[0] if len(dataset.times) > 1 else 1.0
    features = [math.log10(dt), math.log2(max(dataset.grid)) / 4 - 1.5]
    for name in PARAMETERS:
        known = name in dataset.parameters
        value = dataset.parameters.get(name, 0.0)
        features += [0.5 * _log10(value), math.copysign(1.0, value)] if known else [0.0, 0.0]
    for axis in range(MAX_DIMS):
        boundary = dataset.boundary[axis] if axis < len(dataset.boundary) else None
        features += [float(boundary is not None), *(float(boundary == name) for name in BOUNDARIES)]
    return features


def boundary_feature(axis: int, boundary: str) -> int:
    """The place in `condition_features` of whether an axis has this boundary condition."""
    return 2 + 2 * len(PARAMETERS) + axis * (1 + len(BOUNDARIES)) + 1 + BOUNDARIES.index(boundary)


def _log10(value: float) -> float:
    return math.log10(max(abs(value), 1e-12))
