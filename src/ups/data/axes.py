"""Names of the axes of an array, where a file has them: by position alone, x and y might be exchanged."""

from pathlib import Path

import h5py

from ups.data.families import Family
from ups.data.hdf5 import corruption_faults, file_fault

TIMES = {"time", "t"}


def axes_of(dataset: h5py.Dataset) -> tuple[str, ...] | None:
    """Labels of the axes of a dataset, or names of their scales, as NetCDF 4 has them; an axis without one has ""."""
    with corruption_faults(dataset, "has damaged names of axes"):
        if not ("DIMENSION_LABELS" in dataset.attrs or "DIMENSION_LIST" in dataset.attrs):
            return None
        return tuple(dim.label or (_base_name(dim[0].name) if len(dim) else "") for dim in dataset.dims)


def _base_name(path: str | None) -> str:
    return (path or "").rpartition("/")[2]


def expect_order(path: Path | str, name: str, axes: tuple[str, ...] | None, family: Family) -> None:
    """Refuse axes of an array in PDEBench's layouts whose names are those of the family, in another order."""
    space = family.axes[::-1] if family.stored_yx else family.axes
    position = dict.fromkeys(TIMES, -1) | {axis: place for place, axis in enumerate(space)}
    found = [axis for axis in axes or () if axis in position]
    if found != (ordered := sorted(found, key=position.__getitem__)):
        raise file_fault(path, f"{name!r} has the axes {', '.join(axes or ())}", f"arrange {', '.join(ordered)} so")
