"""Axes of arrays in files: their names, without which x and y might be exchanged, and their coordinates."""

from collections.abc import Callable, Mapping
from pathlib import Path

import h5py
import numpy as np

from ups.data.families import Family
from ups.data.hdf5 import corruption_faults, file_fault

TIMES = {"time", "t"}
TOLERANCE = 1e-3  # deviation from a uniform step, relative to the step
MAX_ROUNDING = 0.1  # of coordinates in float32, relative to the step: it is large far from 0


def axes_of(dataset: h5py.Dataset) -> tuple[str, ...] | None:
    """Labels of the axes of a dataset, or names of their scales, as NetCDF 4 has them; an axis without one has ""."""
    with corruption_faults(dataset, "has damaged names of axes"):
        names = [""] * dataset.ndim
        if _is_list(dataset, "DIMENSION_LIST"):
            names = [_base_name(dim[0].name) if len(dim) else "" for dim in dataset.dims]
        if _is_list(dataset, "DIMENSION_LABELS"):
            names = [dim.label or name for dim, name in zip(dataset.dims, names, strict=True)]
        return tuple(names) if any(names) else None


def _is_list(dataset: h5py.Dataset, attribute: str) -> bool:
    """Whether an attribute has texts or references of any length for each axis; HDF5 crashes on others of its name."""
    if attribute not in dataset.attrs:
        return False
    stored = dataset.attrs.get_id(attribute)
    if stored.shape != (dataset.ndim,):
        return False
    if attribute == "DIMENSION_LABELS":
        text = h5py.check_string_dtype(stored.dtype)
        return text is not None and text.length is None
    references = h5py.check_vlen_dtype(stored.dtype)
    return isinstance(references, np.dtype) and h5py.check_ref_dtype(references) is not None


def _base_name(path: str | None) -> str:
    return (path or "").rpartition("/")[2]


def expect_order(path: Path | str, name: str, axes: tuple[str, ...] | None, family: Family) -> None:
    """Refuse axes of an array in PDEBench's layouts whose names are those of the family, in another order."""
    space = family.axes[::-1] if family.stored_yx else family.axes
    position = dict.fromkeys(TIMES, -1) | {axis: place for place, axis in enumerate(space)}
    found = [axis for axis in axes or () if axis in position]
    if found != (ordered := sorted(found, key=position.__getitem__)):
        raise file_fault(path, f"{name!r} has the axes {', '.join(axes or ())}", f"arrange {', '.join(ordered)} so")


def expect_grid_last(path: Path, name: str, axes: tuple[str, ...] | None, family: Family) -> None:
    """Refuse axes of an array of trajectories with names of the family, unless time and then its grid come last."""
    lead, last = (axes or ())[: -len(family.axes)], (axes or ())[-len(family.axes) :]
    if set(axes or ()) & set(family.axes) and (last != family.axes or TIMES & {*lead[:1], *lead[:-1]}):
        expected = ", ".join(("trajectory", "time", *family.axes))
        raise file_fault(path, f"{name!r} has the axes {', '.join(axes or ())}", f"arrange them as {expected}")


def expect_uniform(path: Path, family: Family, read: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Refuse coordinates of a grid, `read` by name of the array, that do not increase in equal steps.

    Equal ones are no coordinates: NetCDF has them for a dimension without.
    """
    for axis in family.axes:
        values = next((read[name]() for name in (axis, f"{axis}-coordinate") if name in read), np.empty(0))
        if values.ndim == 1 and len(values) > 1 and np.ptp(values) > 0 and not is_uniform(values):
            raise file_fault(path, f"{axis!r} does not increase in equal steps", "sort the data, or interpolate")


def is_uniform(values: np.ndarray) -> bool:
    """Whether the steps of times or coordinates are positive and equal, but for their rounding to float32."""
    return has_step(values, np.diff(values).mean())


def has_step(values: np.ndarray, step: float) -> bool:
    """Whether neighbours of times or coordinates are a positive `step` apart, but for their rounding to float32."""
    rounding = min(2 * np.finfo(np.float32).eps * abs(values).max(), MAX_ROUNDING * step)
    return bool(step > 0 and (abs(np.diff(values) - step) <= TOLERANCE * step + rounding).all())
