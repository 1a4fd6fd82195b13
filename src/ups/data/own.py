"""Data of one's own: `write_dataset` writes arrays as a file for `source: folder`, `examine` says what a file lacks."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from ups.data.arrays import HDF5_SUFFIXES, blocks_of, open_data
from ups.data.definitions import AXES
from ups.data.families import Dataset, Family
from ups.data.hdf5 import MAX_LABEL_LENGTH, file_fault, kind_of, list_names, read_label
from ups.data.hdf5_output import create_file
from ups.data.layouts import find_length, find_shape, find_times, inspect_file
from ups.data.normalization import LARGEST, check_slab, read_slabs
from ups.data.pdebench import FAMILIES
from ups.data.recognition import family_of
from ups.data.trajectories import TrajectoryReader, describe_file, read_parameter
from ups.errors import ConfigFault, DataFault, nearest
from ups.files import NAME, only_writer, publish, remove_leftovers

T = TypeVar("T")
MAX_LISTED = 20
POLL_SECONDS = 0.5  # while another process writes the same file
STEPS = {f"d{axis}": axis for axis in (*AXES, "t")}


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
    if family.layout not in ("tensor", "fields"):
        raise ConfigFault(f"{path}: {family.name} has a layout of PDEBench's own, write its files as PDEBench does")
    if not isinstance(arrays, dict):
        raise ConfigFault(f"{path}: arrays is a {type(arrays).__name__}, expected arrays by name: {{'u': u}}")
    definition = json.dumps(family.definition)
    Family.from_json(definition, str(path))  # refuses what could not be read again, such as the name of a variant
    if FAMILIES.table.get(family.name, family).digest != family.digest:
        what = f"{path}: PDEBench has a family {family.name} with another definition"
        raise ConfigFault(f"{what}; choose another name, or write {family.name!r} for PDEBench's")
    if len(definition) > MAX_LABEL_LENGTH:
        raise ConfigFault(f"{path}: the definition of {family.name} is too long: shorten its formulas and meanings")
    points = {name: _as_numbers(path, name, each) for name, each in (coordinates or {}).items()}
    _expect_names(f"{path}: arrays", arrays, (*family.fields, *family.coefficients))
    _expect_names(f"{path}: parameters", parameters, family.parameters)
    axes = family.axes if family.steady else (*family.axes, "t")
    _expect_names(f"{path}: coordinates and steps", [*points, *(STEPS.get(name, name) for name in steps)], axes)
    values = {name: _as_array(path, family, name, array) for name, array in arrays.items()}
    numbers = steps | {family.attributes.get(name, name): number for name, number in parameters.items()}
    attributes = {name: _as_number(path, name, number) for name, number in numbers.items()}
    with _published_alone(path) as temporary:
        with create_file(temporary) as file:
            # Of PDEBench's families the name is enough.
            file.attrs["family"] = family.name if family.name in FAMILIES.table else definition
            file.attrs.update(attributes)
            for name, array in points.items():
                file[name] = array[()]
            for name, array in values.items():
                _write(path, family, file.create_dataset(name, array.shape, np.float32), array)
        _check(path, family, temporary)
    return path


@contextmanager
def _published_alone(path: Path) -> Iterator[Path]:
    """As `publish`, after other processes that write the same file; what killed ones have left is removed."""
    with only_writer(path, POLL_SECONDS):
        remove_leftovers(path.parent, path.name)
        with publish(path) as temporary:
            yield temporary


def _known_family(name: str) -> Family:
    if name not in FAMILIES:
        remedy = f"{nearest(name, FAMILIES)} (a new one is ups.Family({name!r}, ...))"
        raise ConfigFault(f"no family is called {name!r}{remedy}")
    return FAMILIES[name]


def _expect_names(what: str, found: Any, expected: tuple[str, ...]) -> None:
    """Refuse names other than the expected ones."""
    wrong = [f"{name!r} is missing" for name in expected if name not in found]
    wrong += [f"{name!r} is unknown" for name in found if name not in expected]
    wrong += [f"{name!r} is there twice" for name in expected if list(found).count(name) > 1]
    if wrong:
        raise ConfigFault(f"{what}: {', '.join(wrong)}; expected {', '.join(expected) or 'none'}")


def _as_number(path: Path, name: str, number: Any) -> float:
    if not isinstance(number, int | float | np.number) or not math.isfinite(number):
        raise ConfigFault(f"{path}: {name} = {number!r}, expected one finite number")
    return float(number)


def _as_numbers(path: Path, name: str, array: Any) -> Any:
    """The array, of real numbers; values of an HDF5 dataset are not read."""
    try:
        array = array if isinstance(array, h5py.Dataset) else np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigFault(f"{path}: {name!r} is no array of numbers ({error})") from None
    if array.dtype.kind not in "fiu":
        raise ConfigFault(f"{path}: {name!r} has dtype {array.dtype}, expected real numbers")
    return array


def _as_array(path: Path, family: Family, name: str, array: Any) -> Any:
    """The array, of real numbers, with the axes that the family has."""
    array = _as_numbers(path, name, array)
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
        bad = np.argwhere(~(abs(values) <= LARGEST) | (values <= 0 if is_positive else False))
        if len(bad):
            is_number = abs(values[tuple(bad[0])]) <= LARGEST
            what = "not positive" if is_number else f"NaN or too large, above {LARGEST:g}"
            trajectory = index[0] if isinstance(index[0], int) else bad[0][0]
            raise ConfigFault(f"{path}: {name!r} of trajectory {trajectory} is {what}; correct it or leave it out")
        dataset[index] = values


def _check(path: Path, family: Family, temporary: Path) -> None:
    """The checks of every file, whose faults name the file by its final name."""
    with h5py.File(temporary) as file:
        try:
            inspect_file(file, family)
        except DataFault as fault:
            what = str(fault).replace(str(temporary), str(path)).partition("; download")[0]
            raise ConfigFault(what) from None


def examine(path: Path, name: str | None) -> tuple[dict[str, str], list[str]]:
    """What is understood of a file, as words by topic, and every fault with its remedy; `name` of its family if known.

    Called by `ups.data.inspection`, because the file may be damaged.
    """
    facts: dict[str, str] = {}
    problems: list[str] = []

    def attempt(work: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return work(*arguments)
        except (DataFault, ConfigFault) as fault:
            problems.append(str(fault))
            return None

    with open_data(path) as file:
        family = attempt(family_of, file, path)
        family = attempt(_known_family, name) if name is not None else family
        if family is None:
            datasets = [name for name in list_names(file)[:MAX_LISTED] if kind_of(file, name) is h5py.Dataset]
            shapes = [f"{name} {file[name].shape}" for name in datasets]
            return {"arrays": ", ".join(shapes) or "none"}, problems
        facts |= _describe_family(family)
        parameters = {name: attempt(read_parameter, file, path, family, name) for name in family.parameters}
        words = {name: "missing" if value is None else f"{value:g}" for name, value in parameters.items()}
        facts["parameters"] = ", ".join(f"{name} = {word}" for name, word in words.items()) or "none"
        if family.layout in ("tensor", "fields") and (shape := attempt(find_shape, file, family)):
            facts["trajectories"], facts["snapshots"] = map(str, shape[:2])
            if not family.steady:
                attempt(find_times, file, shape[1])
            for axis, n in zip(family.axes, shape[2:], strict=True):
                attempt(find_length, file, axis, n)
        contents = None if problems else attempt(inspect_file, file, family)
        label = attempt(read_label, file, "family")
    if contents is not None:
        dataset = describe_file(path, family, contents, parameters, label)
        facts |= _describe_contents(family, dataset)
        attempt(_examine_values, path, dataset, facts)
    return facts, problems


def _describe_family(family: Family) -> dict[str, str]:
    facts = {"family": family.name, "equation": family.equation}
    for kind, names in (("fields", family.fields), ("coefficients", family.coefficients)):
        words = [f"{family.label(name)} {family.meanings.get(name, '')}".strip() for name in names]
        facts |= {kind: ", ".join(words)} if words else {}
    return facts


def _describe_contents(family: Family, dataset: Dataset) -> dict[str, str]:
    facts = {"trajectories": str(dataset.num_trajectories), "snapshots": str(len(dataset.times))}
    facts["grid"] = " x ".join(map(str, dataset.grid))
    if not family.steady:
        facts["dt"] = f"{dataset.times[1] - dataset.times[0]:.6g}"
    for axis, length, boundary in zip(family.axes, dataset.lengths, dataset.boundary, strict=True):
        facts[f"axis {axis}"] = f"length {length:.6g}, {boundary}"
    return facts


def _examine_values(path: Path, dataset: Dataset, facts: dict[str, str]) -> None:
    """Add the range of each field to `facts`; refuse values that are not finite, and a periodic point that is twice."""
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    twice = set(range(len(dataset.grid)))
    with TrajectoryReader(path.parent, dataset) as reader:
        for index in range(dataset.num_trajectories):
            for kind, names, start, values in read_slabs(reader, index):
                check_slab(reader, index, names, values, start)
                twice = {axis for axis in twice if kind != "fields" or _is_repeated(values, axis)}
                for name, u in zip(names, values.swapaxes(0, 1), strict=True):
                    lowest[name] = min(lowest.get(name, math.inf), float(u.min()))
                    highest[name] = max(highest.get(name, -math.inf), float(u.max()))
    facts |= {f"values of {name}": f"{lowest[name]:.4g} to {highest[name]:.4g}, all finite" for name in lowest}
    for axis in sorted(twice):
        if dataset.boundary[axis] == "periodic":
            what = f"the first and the last point of the periodic axis {reader.family.axes[axis]} have the same values"
            raise file_fault(path, what, "leave one of the two out: u[..., :-1] and x[:-1]")


def _is_repeated(values: np.ndarray, axis: int) -> bool:
    """Whether the last point along an axis has the values of the first one, but the second has not."""
    first, second, last = (values.take(place, axis=axis + 2) for place in (0, 1, -1))
    tolerance = 1e-5 * abs(values).max()
    return bool(np.allclose(first, last, rtol=0.0, atol=tolerance)) and abs(second - first).max() > tolerance
