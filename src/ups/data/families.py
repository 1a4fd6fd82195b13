r"""The records `Family` (PDE, file layout), `Subsample` (part of its data), `Dataset`, and the condition features.

To use a dataset of your own, add one entry to `FAMILIES` in `ups.data.pdebench` and write one HDF5 file per set of PDE
parameters. An example with one field `u` on one axis:

    Family("wave_1d", "u_tt = beta^2 u_xx", "tensor", r"Wave_.*\.hdf5", ("u",), ("x",), "periodic", {"beta": "beta"})

    with h5py.File("Wave_beta0.5.hdf5", "w") as file:
        file["tensor"] = u                # float (N, T, X): trajectories, snapshots, grid points; in 2D (N, T, X, Y)
        file["x-coordinate"] = x          # (X,) cell centres; `y-coordinate`, `z-coordinate` for more axes
        file["t-coordinate"] = t          # (T,) uniform times
        file.attrs["beta"] = 0.5          # one number per parameter; or in the file name: beta0.5

- Several fields: the layout `fields` has one HDF5 dataset (N, T, *grid) per field name instead of `tensor`.
- Steady PDE: `steady=True`, T = 1, and the input fields as `coefficients`, one HDF5 dataset (N, *grid) each.
- Grid: the same in all files of a family.
- Initial conditions: if trajectory `i` starts from the same state in several files, give `initial_conditions` a name;
  all copies of a state then go to the same split.
- Parameters and boundary conditions are condition features of the models. Their names must be in `PARAMETERS` and
  `BOUNDARIES`; a name added there widens the models' input, so that trained models no longer fit.

Then run `kedro run --params source=folder,raw_root=DIR`.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Layout = Literal["tensor", "fields", "groups", "batch"]

BOUNDARIES = ("periodic", "outflow", "zero_flux", "dirichlet", "cauchy", "wall")
PARAMETERS = ("beta", "nu", "rho", "eta", "zeta", "mach")
MAX_DIMS = 3
SMALLEST_PARAMETER = 1e-12  # smaller magnitudes have the same features
# Length K of `condition_features`: time step, resolution, two per parameter, existence and boundary per axis.
NUM_CONDITIONS = 2 + 2 * len(PARAMETERS) + MAX_DIMS * (1 + len(BOUNDARIES))


@dataclass(frozen=True)
class Family:
    """One family of PDEs, such as those of PDEBench (arXiv:2210.07182), and the layout of its HDF5 files.

    - `file_pattern`: regular expression that the names of the family's files match in full;
    - `fields`, `axes`: names in the order of the channel axis C and of `*grid`;
    - `boundary`: condition on every axis, except in files with another one in their name (`trans` in compressible 1D:
      outflow); `boundary_names`: boundary condition to its name in the names of files;
    - `attributes`: name of each parameter (one of `PARAMETERS`) to its name in HDF5 attributes and file names;
    - `positive`: fields > 0, encoded by their logarithm; `non_negative`: fields >= 0;
    - `coefficients`: given fields, constant in time: the permeability of Darcy flow, the forcing of incompressible
      Navier-Stokes; `positive_coefficients`: coefficients > 0, normalized after taking the logarithm;
    - `steady`: the data are solutions of a PDE without time;
    - `initial_conditions`: name of the random stream of initial states; files and families with the same name start
      trajectory `i` from the same state;
    - `initial_condition_block`: trajectories whose positions differ by a multiple of it share random numbers;
    - `conserved`: fields whose integral over the domain is constant in time under `boundary`;
    - `isotropic`: the equation stays the same when an axis is mirrored and, on a domain with equal axes, when two axes
      are swapped; `vectors`: groups of fields that are components of a vector, one per axis, and transform with them;
    - `divergence_free`: the components of a velocity without divergence;
    - `stored_yx`: arrays on disk are (T, Y, X, C) instead of (T, X, Y, C);
    - `file_name`: template of PDEBench's file names, needed to simulate the family;
    - `pdebench_batch_size`: batch size of PDEBench's own training, on which two of its metrics depend;
    - `formulas` (LaTeX that Matplotlib and Markdown both read, or plain text) replace `equation` on data cards,
      `meanings` explain the fields there.

    An unknown layout, boundary, parameter or combination of axes raises a `ValueError`.
    """

    name: str
    equation: str = field(repr=False)
    layout: Layout
    file_pattern: str
    fields: tuple[str, ...]
    axes: tuple[str, ...]
    boundary: str
    attributes: dict[str, str]
    positive: tuple[str, ...] = ()
    non_negative: tuple[str, ...] = ()
    coefficients: tuple[str, ...] = ()
    steady: bool = False
    initial_conditions: str | None = None
    conserved: tuple[str, ...] = ()
    isotropic: bool = False
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

    def __post_init__(self) -> None:
        expected = {
            "layout": (self.layout, get_args(Layout)),
            "boundary": (self.boundary, BOUNDARIES),
            "axes": (self.axes, (("x",), ("x", "y"), ("x", "y", "z"))),
        } | {f"parameter {number}": (name, PARAMETERS) for number, name in enumerate(self.attributes)}
        for what, (value, known) in expected.items():
            if value not in known:
                raise ValueError(f"family {self.name}: {what} is {value!r}, expected one of {known}")
        if self.layout == "tensor" and len(self.fields) != 1:
            raise ValueError(f"family {self.name}: layout 'tensor' has one field, not {self.fields}; use 'fields'")

    @property
    def digest(self) -> str:
        """SHA-256 over all attributes but those with `repr=False`, which are only displayed; 16 digits.

        The fingerprint of a pipeline step contains the digests of its families instead of the code of `FAMILIES`, so
        that a new family leaves the finished steps of all others up to date.
        """
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the scalars in the equation."""
        return tuple(self.attributes)

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
    """

    def __missing__(self, name: str) -> Family:
        base = base_of(name)
        if base not in self or base == name:
            raise KeyError(name)
        return replace(self[base], name=name)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """These names, each once, in the order of the families."""
        order = list(self)
        return sorted(set(names), key=lambda name: (order.index(base_of(name)), name))


def base_of(name: str) -> str:
    """The family of a variant; of a family its own name."""
    return name.partition("-")[0]


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
    - per name in `PARAMETERS`: log10(|value|) / 2 and the sign of the value, or 0 and 0 where the PDE does not have it;
    - for each of three axes: 1 if the grid has it, then its boundary condition one-hot over `BOUNDARIES`.
    """
    dt = dataset.times[1] - dataset.times[0] if len(dataset.times) > 1 else 1.0
    features = [math.log10(dt), math.log2(max(dataset.grid)) / 4 - 1.5]
    for name in PARAMETERS:
        value = dataset.parameters.get(name)
        size = math.log10(max(abs(value or 0.0), SMALLEST_PARAMETER))
        features += [0.0, 0.0] if value is None else [0.5 * size, math.copysign(1.0, value)]
    for axis in range(MAX_DIMS):
        boundary = dataset.boundary[axis] if axis < len(dataset.boundary) else None
        features += [float(boundary is not None), *(float(boundary == name) for name in BOUNDARIES)]
    return features


def parameter_feature(name: str) -> int:
    """Index in `condition_features` of the size of a parameter; its sign follows."""
    return 2 + 2 * PARAMETERS.index(name)


def boundary_feature(axis: int, boundary: str) -> int:
    """Index in `condition_features` of the entry that is 1 where an axis has this boundary condition."""
    return 2 + 2 * len(PARAMETERS) + axis * (1 + len(BOUNDARIES)) + 1 + BOUNDARIES.index(boundary)
