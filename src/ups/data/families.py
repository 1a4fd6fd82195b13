r"""The records `Family` (PDE, fields, parameters), `Subsample` (part of its data), `Dataset`, and condition features.

A family of one's own needs no change of this package. Either `conf/<env>/families.yml` defines it,

    kdv_1d: {equation: u_t + u u_x + delta^2 u_xxx = 0, fields: [u], axes: [x], boundary: periodic, parameters: [delta]}

or Python, `ups.Family("kdv_1d", "u_t + ...", ["u"], ["x"], "periodic", ["delta"])`, and `ups.write_dataset` stores the
definition with the data. All further options of `Family` may be there too.

Data: HDF5, NetCDF, npz or zarr, one file per set of parameters, with

- an array (N, T, *grid) per field, by its name: trajectories, snapshots, grid points; a single field may be `tensor`;
- `x`, `y`, `z` (or `x-coordinate`, ...), the cell centres of each axis, and `t`, the times; or the numbers `dx`, `dt`;
- a number per parameter, and the text `family`, as attributes or arrays without axes; or in the name of the file, which
  then begins with the family's: `kdv_1d_delta0.022.npz`;
- steady PDE (`steady: true`): T = 1, and the inputs as `coefficients`, an array (N, *grid) each.

`ups check FILE` says what is understood of a file and what it lacks; `kedro run --params source=folder,raw_root=DIR`
then does all the rest.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ups.data.definitions import (
    BOUNDARIES,
    MAX_DIMS,
    MAX_OTHER_PARAMETERS,
    NUM_PARAMETERS,
    PARAMETERS,
    Layout,
    as_tuple,
    base_of,
    problems_of,
    validated,
)
from ups.data.definitions import NUM_CONDITIONS as NUM_CONDITIONS
from ups.errors import ConfigFault
from ups.files import only_writer, read_json, write_json

FAMILIES_FILE = "04_feature/families.json"
SMALLEST_PARAMETER = 1e-12  # smaller magnitudes have the same features


@dataclass(frozen=True)
class Family:
    """One family of PDEs, such as those of PDEBench (arXiv:2210.07182).

    - `fields`, `axes`: names in the order of the channel axis C and of `*grid`;
    - `boundary`: condition on every axis or one per axis, each one of `BOUNDARIES`, except in files with another one
      in their name (`trans` in compressible 1D: outflow); `boundary_names`: boundary condition to its name there;
    - `parameters`: names of the scalars in the equation, of which at most six are not in `PARAMETERS`; `attributes`:
      those that have another name in HDF5 attributes and file names, with that name;
    - `layout`, see `ups.data.layouts`; `file_pattern`: regular expression that the names of the family's files match in
      full, None where they begin with the family's name or the files themselves name it;
    - `positive`: fields > 0, encoded by their logarithm; `non_negative`: fields >= 0;
    - `coefficients`: given fields, constant in time: the permeability of Darcy flow, the forcing of incompressible
      Navier-Stokes; `positive_coefficients`: coefficients > 0, normalized after taking the logarithm;
    - `initial_conditions`: name of the random stream of initial states; files and families with the same name start
      trajectory `i` from the same state;
    - `initial_condition_block`: trajectories whose positions differ by a multiple of it share random numbers;
    - `steady`: a PDE without time; `conserved`: fields whose integral is constant in time under `boundary`;
    - `isotropic`: the equation stays the same when an axis is mirrored and, on a domain with equal axes, when two axes
      are swapped; `split_axes`: but not its data, because their scheme steps along one axis after the other; `vectors`:
      groups of fields that are components of a vector, one per axis, and transform with them;
    - `divergence_free`: the components of a velocity without divergence; `stored_yx`: arrays on disk are (T, Y, X, C);
    - `file_name`: template of PDEBench's file names, needed to simulate the family;
    - `pdebench_batch_size`: batch size of PDEBench's own training, on which two of its metrics depend;
    - `formulas` (LaTeX that Matplotlib and Markdown both read, or plain text) replace `equation` on data cards;
      `meanings` explain fields, coefficients and parameters, `units` are theirs and those of the axes and of `t`.

    Lists count as tuples. A definition that contradicts itself, or has an unknown value, raises a `ConfigFault`.
    """

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # where a definition is read from a file

    name: str
    equation: str = field(repr=False)
    fields: tuple[str, ...]
    axes: tuple[str, ...]
    boundary: str | tuple[str, ...]
    parameters: tuple[str, ...]
    layout: Layout = "fields"
    file_pattern: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    non_negative: tuple[str, ...] = ()
    coefficients: tuple[str, ...] = ()
    steady: bool = False
    initial_conditions: str | None = None
    conserved: tuple[str, ...] = ()
    isotropic: bool = False
    split_axes: bool = False
    vectors: tuple[tuple[str, ...], ...] = ()
    divergence_free: tuple[str, ...] = ()
    positive_coefficients: tuple[str, ...] = ()
    stored_yx: bool = False
    file_name: str | None = None
    boundary_names: dict[str, str] = field(default_factory=dict)
    initial_condition_block: int | None = None
    pdebench_batch_size: int = 50
    formulas: tuple[str, ...] = field(default=(), repr=False)
    meanings: dict[str, str] = field(default_factory=dict, repr=False)
    units: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, as_tuple(getattr(self, entry.name)))
        if problems := dict.fromkeys(problems_of(self)):
            raise ConfigFault(f"family {self.name}: {'; '.join(problems)}")

    @classmethod
    def from_json(cls, text: str, place: str) -> "Family":
        """The family that a JSON object defines; a `ConfigFault` names `place`, and every wrong key or value there."""
        return validated(cls, text, place)

    @property
    def digest(self) -> str:
        """SHA-256 over all attributes but those with `repr=False`, which are only displayed; 16 digits.

        The fingerprint of a pipeline step contains the digests of its families instead of the code of `FAMILIES`, so
        that a new family leaves the finished steps of all others up to date.
        """
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def definition(self) -> dict[str, Any]:
        """The arguments that define the family, without those that have their default."""
        defaults = {e.name: e.default_factory() if e.default is MISSING else e.default for e in fields(self)[6:]}
        return {name: value for name, value in asdict(self).items() if name not in defaults or value != defaults[name]}

    def label(self, name: str) -> str:
        """A name with its unit, if it has one."""
        return f"{name} [{self.units[name]}]" if name in self.units else name

    @property
    def boundaries(self) -> tuple[str, ...]:
        """Boundary condition of each axis."""
        return (self.boundary,) * len(self.axes) if isinstance(self.boundary, str) else self.boundary

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that hold the fields in the layouts `tensor` and `fields`."""
        return ("tensor",) if self.layout == "tensor" else self.fields


@dataclass(frozen=True)
class Subsample:
    """The part of a dataset that is used: every k-th point and snapshot, a range of snapshots, the first trajectories.

    - `every_point`: the points 0, k, 2k, ... of each axis;
    - `every_snapshot`, `first_snapshot`, `last_snapshot`: every k-th snapshot from the first to the last one, which
      itself counts; None: to the end. Steady families, which have no snapshots in time, ignore all three;
    - `first_trajectories`: at most so many trajectories of each dataset, in the order of its files; None: all.
    """

    every_point: int = field(default=1, metadata={"ge": 1})
    every_snapshot: int = field(default=1, metadata={"ge": 1})
    first_snapshot: int = field(default=0, metadata={"ge": 0})
    last_snapshot: int | None = field(default=None, metadata={"ge": 1})
    first_trajectories: int | None = field(default=None, metadata={"ge": 3})

    def __post_init__(self) -> None:
        if self.last_snapshot is not None and self.last_snapshot < self.first_snapshot + self.every_snapshot:
            what = f"first_snapshot = {self.first_snapshot}, last_snapshot = {self.last_snapshot}"
            what = f"{what}, every_snapshot = {self.every_snapshot} leave fewer than 2 snapshots"
            raise ValueError(f"{what}: raise last_snapshot to {self.first_snapshot + self.every_snapshot} or more")


class Families(dict[str, Family]):
    """Families by name, and their variants: datasets of one grid or boundary where a family has several.

    `compressible_ns_2d-512x512` is `compressible_ns_2d` with that name. Models treat variants as families of their own.
    Families that `define` adds to those of the `table` are kept in the data root, where later commands find them.
    """

    def __init__(self, table: Iterable[Family]) -> None:
        super().__init__((family.name, family) for family in table)
        self.table, self._stored = dict(self), set[str]()

    def define(self, *families: Family) -> None:
        """Add families, or replace what they were; a family of the table with another definition is a `ConfigFault`."""
        for family in families:
            self._stored.discard(family.name)
            if family.name not in self.table:
                self[family.name] = family
            elif self.table[family.name].digest != family.digest:
                what = f"family {family.name}: PDEBench has a family of this name with another definition"
                raise ConfigFault(f"{what}; choose another name")

    @property
    def defined(self) -> list[Family]:
        """The families that are not in the table."""
        return [family for name, family in self.items() if name not in self.table]

    @property
    def given(self) -> list[Family]:
        """The families that are neither in the table nor known from a data root alone."""
        return [family for family in self.defined if family.name not in self._stored]

    def read(self, data_root: Path) -> None:
        """Define the families that `write` has stored in a data root; one that is given stays as it is."""
        if (data_root / FAMILIES_FILE).is_file():
            given = {family.name for family in self.given}
            stored = [each for each in read_json(data_root / FAMILIES_FILE, list[Family]) if each.name not in given]
            self.define(*stored)
            self._stored |= {family.name for family in stored}

    def write(self, data_root: Path) -> None:
        """Store the given families, if there are any, beside those that other processes have stored meanwhile."""
        if self.given:
            with only_writer(data_root / FAMILIES_FILE, poll_seconds=0.1):
                stored = Families(self.table.values())
                stored.read(data_root)
                stored.define(*self.given)
                write_json(data_root / FAMILIES_FILE, [family.definition for family in stored.defined])

    def __missing__(self, name: str) -> Family:
        base = base_of(name)
        if base not in self or base == name:
            raise KeyError(name)
        return replace(self[base], name=name)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """These names, each once, in the order of the families."""
        order = list(self)
        return sorted(set(names), key=lambda name: (order.index(base_of(name)), name))


@dataclass(frozen=True)
class Dataset:
    """All trajectories of one family with one set of parameters, in one or several files of a folder.

    `files` are names relative to the folder, `counts` the numbers of trajectories in each. `times` has one entry per
    snapshot (T, in units of the PDE); steady families have the single time 0. `grid` (points), `lengths` (units of the
    PDE) and `boundary` have one entry per axis. All describe the data that remain of the files after `subsample`.
    """

    name: str
    family: str
    files: tuple[str, ...]
    counts: tuple[int, ...]
    times: tuple[float, ...]
    grid: tuple[int, ...]
    lengths: tuple[float, ...]
    boundary: tuple[str, ...]
    parameters: dict[str, float]
    subsample: Subsample = Subsample()

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Dataset":
        """The dataset of an entry that `dataclasses.asdict` and JSON wrote: lists become tuples again."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
        return cls(**values | {"subsample": Subsample(**entry["subsample"])})

    @property
    def num_trajectories(self) -> int:
        return sum(self.counts)

    @property
    def stored_snapshots(self) -> range:
        """Positions of the snapshots in the files."""
        step, first = self.subsample.every_snapshot, self.subsample.first_snapshot
        return range(first, first + step * len(self.times), step)


def condition_features(dataset: Dataset) -> list[float]:
    """The condition of the models: model inputs besides the state, K = `NUM_CONDITIONS` numbers of order one.

    - log10 dt, 0 for a steady PDE; log2(n) / 4 - 1.5 for n points along the finest axis;
    - per name in `PARAMETERS`, then per other parameter of the dataset in its order, which is that of the family, up to
      six: log10(|value|) / 2 and the sign of the value, or 0 and 0 where the PDE does not have it;
    - for each of three axes: 1 if the grid has it, then its boundary condition one-hot over `BOUNDARIES`.
    """
    dt = dataset.times[1] - dataset.times[0] if len(dataset.times) > 1 else 1.0
    features = [math.log10(dt), math.log2(max(dataset.grid)) / 4 - 1.5]
    others = [name for name in dataset.parameters if name not in PARAMETERS]
    for name in (*PARAMETERS, *others, *[None] * (MAX_OTHER_PARAMETERS - len(others))):
        value = dataset.parameters.get(name)
        size = math.log10(max(abs(value or 0.0), SMALLEST_PARAMETER))
        features += [0.0, 0.0] if value is None else [0.5 * size, math.copysign(1.0, value)]
    for axis in range(MAX_DIMS):
        boundary = dataset.boundary[axis] if axis < len(dataset.boundary) else None
        features += [float(boundary is not None), *(float(boundary == name) for name in BOUNDARIES)]
    return features


def parameter_feature(name: str, parameters: Iterable[str]) -> int:
    """Index in `condition_features` of the size of one of a dataset's `parameters`; its sign follows."""
    others = [other for other in parameters if other not in PARAMETERS]
    return 2 + 2 * (*PARAMETERS, *others).index(name)


def boundary_feature(axis: int, boundary: str) -> int:
    """Index in `condition_features` of the entry that is 1 where an axis has this boundary condition."""
    return 2 + 2 * NUM_PARAMETERS + axis * (1 + len(BOUNDARIES)) + 1 + BOUNDARIES.index(boundary)
