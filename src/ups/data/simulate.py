"""Simulated trajectories in PDEBench's file layouts and under its file names: read like downloaded files."""

import re
from collections.abc import Callable, Iterator
from math import inf, isfinite
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from ups.data.pdebench import FAMILIES
from ups.data.simulated_layouts import Plan, create, write_given, write_snapshot
from ups.errors import ConfigFault, DataFault
from ups.files import publish
from ups.solvers import evolve, sample_initial_states
from ups.solvers.families import problem_of
from ups.solvers.solution import one_thread

BATCH_VALUES = 2**15  # numbers in the states of one batch, whose trajectories are advanced together
FILE_TRAJECTORIES = 4  # in each file of incompressible Navier-Stokes, as in PDEBench


def file_name(
    family: str,
    parameters: dict[str, float],
    resolution: int = 0,
    *,
    number: int = 0,
    start: str = "Rand",
    boundary: str | None = None,
) -> str:
    """PDEBench's name for a file of a family, from its template `Family.file_name`."""
    _check_parameters(family, parameters)
    values = {name: str(float(value)) for name, value in parameters.items()}
    if family == "compressible_ns_1d":  # 1.e-8 in one dimension, 1e-08 in two and three
        values = {name: re.sub(r"^(\d+)e-0?", r"\1.e-", value) for name, value in values.items()}
    words = {"resolution": resolution, "number": number, "start": start}
    words["boundary"] = FAMILIES[family].boundary_names.get(boundary or "periodic")
    return FAMILIES[family].file_name.format(**values, **words)


def files_of(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of `simulate` for each file of a recipe, by file name; only layout `batch` has several files."""
    family, count = recipe["family"], recipe["num_trajectories"]
    choices = {name: recipe[name] for name in ("start", "boundary") if name in recipe}
    problem_of(family)
    size = FILE_TRAJECTORIES if FAMILIES[family].layout == "batch" else max(1, count)
    files = {}
    for number, first in enumerate(range(0, max(1, count), size)):
        name = file_name(family, recipe["parameters"], recipe["resolution"], number=number, **choices)
        files[name] = recipe | {"num_trajectories": min(size, count - first), "first": first}
    return files


@one_thread()
def simulate(
    path: Path,
    *,
    family: str,
    parameters: dict[str, float],
    num_trajectories: int,
    resolution: int,
    num_snapshots: int,
    duration: float,
    seed: int,
    first: int = 0,
    start: str = "Rand",
    boundary: str | None = None,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Write one file of trajectories first..first+num_trajectories-1; the same arguments give the same bytes.

    `resolution` counts points per axis and `duration` ends at the last snapshot; a steady family has one snapshot and
    no duration. Compressible flow also has a `start` (Rand, Shock or Turb) and a `boundary` (periodic or outflow).
    `advance(n)` is called when `n` more snapshots are solved, num_trajectories * num_snapshots in total. The file
    appears under its name when it is complete.
    """
    _check_parameters(family, parameters)
    _check_times(family, num_snapshots, duration)
    sizes = {"num_trajectories": num_trajectories, "resolution": resolution, "seed": seed, "first": first}
    for name, smallest in {"num_trajectories": 1, "resolution": 4, "seed": 0, "first": 0}.items():
        if sizes[name] < smallest:
            raise ConfigFault(f"{family} needs {name} >= {smallest}, got {sizes[name]}")
    problem = problem_of(family)
    indices = range(first, first + num_trajectories)
    grid = (resolution,) * problem.num_axes
    plan = Plan(FAMILIES[family], problem, parameters, indices, grid, num_snapshots, duration)
    for left_by_killed_process in path.parent.glob(f".{path.name}.*.tmp"):
        left_by_killed_process.unlink()
    with publish(path) as temporary, h5py.File(temporary, "w") as file:
        _write(file, plan, seed, start, boundary, advance)


def _write(
    file: h5py.File, plan: Plan, seed: int, start: str, boundary: str | None, advance: Callable[[int], object] | None
) -> None:
    name = plan.family.name
    create(file, plan, seed)
    for indices in _batches(plan):
        u_0, sampled = sample_initial_states(name, indices, plan.grid, seed, plan.parameters, start=start)
        write_given(file, plan, indices, sampled)
        for time, u in enumerate(evolve(name, u_0, {**plan.parameters, **sampled}, plan.times, boundary=boundary)):
            if not torch.isfinite(u).all():
                where = f"snapshot {time} of the trajectories {indices[0]}..{indices[-1]}"
                raise DataFault(f"{name}: {where} is not finite; check the parameters {plan.parameters}")
            write_snapshot(file, plan, indices, time, u)
            if advance:
                advance(len(u))


def _batches(plan: Plan) -> Iterator[range]:
    size = max(1, BATCH_VALUES // (plan.problem.num_fields * int(np.prod(plan.grid))))
    for start in range(0, len(plan.indices), size):
        yield plan.indices[start : start + size]


def _check_parameters(family: str, parameters: dict[str, float]) -> None:
    problem_of(family)
    expected = FAMILIES[family].parameters
    if set(parameters) != set(expected):
        raise ConfigFault(f"{family} has the parameters {list(expected)}, got {list(parameters)}")
    for name, value in parameters.items():
        if not isfinite(value) or (name != "beta" and value < 0) or (name == "mach" and value == 0):
            raise ConfigFault(f"{family}: {name} must be finite, not negative (except beta), not 0 (mach); got {value}")


def _check_times(family: str, num_snapshots: int, duration: float) -> None:
    if FAMILIES[family].steady:
        if num_snapshots != 1:
            raise ConfigFault(f"{family} is steady: num_snapshots must be 1, got {num_snapshots}")
    elif num_snapshots < 2 or not 0 < duration < inf:
        raise ConfigFault(f"{family} needs num_snapshots >= 2 and duration > 0, got {num_snapshots} and {duration}")
