"""Data of one's own: `write_dataset` writes arrays as a file for `source: folder`."""

import json
import math
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.data.arrays import HDF5_SUFFIXES, blocks_of
from ups.data.families import Family
from ups.data.layouts import inspect_file
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.files import NAME, publish


def write_dataset(
    path: Path | str,
    family: Family | str,
    arrays: dict[str, Any],
    *,
    parameters: dict[str, float],
    coordinates: dict[str, Any] | None = None,
    **steps: float,
) -> Path:
    """Write the trajectories of one set of parameters as HDF5; `family` is a definition or the name of a known one.

    `arrays` has fields (N, T, *grid) and coefficients (N, *grid) by name; an HDF5 dataset or memory map may be larger
    than the memory. `coordinates` has cell centres of the axes and times `t`, in uniform steps; or `steps` has `dx`,
    `dy`, `dz`, `dt`. The file holds the definition of the family, and appears when it is complete and checked.

    Raises:
        ConfigFault: a name, shape, type or value is wrong, or a coordinate or parameter is missing.
    """
    path, family = Path(path), family if isinstance(family, Family) else _known_family(family)
    if path.suffix not in HDF5_SUFFIXES or not NAME.fullmatch(path.name):
        raise ConfigFault(f"{path}: call the file NAME.hdf5, of letters, digits and . _ + - alone")
    _expect_names(f"{path}: arrays", arrays, (*family.fields, *family.coefficients))
    _expect_names(f"{path}: parameters", parameters, family.parameters)
    values = {name: _as_array(path, family, name, array) for name, array in arrays.items()}
    axes = family.axes if family.steady else (*family.axes, "t")
    points = {name: np.asarray(each, np.float64) for name, each in (coordinates or {}).items()}
    _expect_names(f"{path}: coordinates and steps", [*points, *(name.removeprefix("d") for name in steps)], axes)
    numbers = {name: _as_number(path, name, number) for name, number in (parameters | steps).items()}
    with publish(path) as temporary:
        with h5py.File(temporary, "w") as file:
            file.attrs.update(numbers | {"family": json.dumps(family.definition)})
            for name, array in points.items():
                file[name] = array
            for name, array in values.items():
                _write(path, family, file.create_dataset(name, array.shape, np.float32), array)
        _check(path, family, temporary)
    return path


def _known_family(name: str) -> Family:
    if name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, 1, cutoff=0.0)[0]
        raise ConfigFault(f"no family is called {name!r}, did you mean {near}? A new one is ups.Family({name!r}, ...)")
    return FAMILIES[name]


def _expect_names(what: str, found: Any, expected: tuple[str, ...]) -> None:
    """Refuse names other than the expected ones."""
    wrong = [f"{name!r} is missing" for name in expected if name not in found]
    wrong += [f"{name!r} is unknown" for name in found if name not in expected]
    if wrong:
        raise ConfigFault(f"{what}: {', '.join(wrong)}; expected {', '.join(expected) or 'none'}")


def _as_number(path: Path, name: str, number: Any) -> float:
    if not isinstance(number, int | float | np.number) or not math.isfinite(number):
        raise ConfigFault(f"{path}: {name} = {number!r}, expected one finite number")
    return float(number)


def _as_array(path: Path, family: Family, name: str, array: Any) -> Any:
    """The array, of numbers, with the axes that the family has."""
    try:
        array = array if isinstance(array, h5py.Dataset) else np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigFault(f"{path}: {name!r} is no array of numbers ({error})") from None
    if array.dtype.kind not in "fiu":
        raise ConfigFault(f"{path}: {name!r} has dtype {array.dtype}, expected real numbers")
    axes = ("trajectory", *(() if name in family.coefficients else ("snapshot",)), *family.axes)
    if len(array.shape) != len(axes) or 0 in array.shape:
        raise ConfigFault(f"{path}: {name!r} has shape {array.shape}, expected the axes ({', '.join(axes)})")
    return array


def _write(path: Path, family: Family, dataset: h5py.Dataset, array: Any) -> None:
    """Write an array block by block, and check every value."""
    name = dataset.name.removeprefix("/")
    is_positive = name in family.positive or name in family.positive_coefficients
    for index in blocks_of(array.shape, np.dtype(np.float64)):
        with np.errstate(over="ignore"):
            values = np.asarray(array[index]).astype(np.float32)
        bad = ~np.isfinite(values) | (values <= 0 if is_positive else False)
        if bad.any():
            what = "not finite" if not np.isfinite(values[bad][0]) else "not positive"
            raise ConfigFault(f"{path}: {name!r} has a value that is {what}; correct it or leave the trajectory out")
        dataset[index] = values


def _check(path: Path, family: Family, temporary: Path) -> None:
    """The checks of every file, whose faults name the file by its final name."""
    with h5py.File(temporary) as file:
        try:
            inspect_file(file, family)
        except DataFault as fault:
            what = str(fault).replace(str(temporary), str(path)).partition("; download")[0]
            raise ConfigFault(what) from None
