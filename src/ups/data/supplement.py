"""Small training splits filled up with simulated trajectories: the same PDE, grid and times, PDEBench's initial states.

Validation and test have the given trajectories only.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.data.families import Dataset, Subsample, base_of
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.simulated import simulate_files
from ups.data.sources import Files
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, DataFault
from ups.files import is_remote, relative
from ups.metrics.errors import EPS
from ups.solvers import solve
from ups.solvers.families import PROBLEMS

log = logging.getLogger(__name__)

SEED_OFFSET = 10**6  # the given files may have been simulated with the seed of the run: others are needed
LARGEST_MISFIT = 0.02  # of a solver that adds trajectories
TOLERANCE = 1e-4  # of times and lengths, relative: files store them in float32

Splits = dict[str, list[int]]
Recipe = dict[str, Any]


def recipes_like(
    raw: Path, datasets: dict[str, Dataset], splits: dict[str, Splits], fill_below: int, fill_to: int, seed: int
) -> dict[str, Recipe]:
    """The arguments of `simulate` by dataset, which fill training splits of fewer than `fill_below` trajectories.

    They make as many as the split has less than `fill_to`.

    A dataset is left as it is, and the log says why, where the solvers cannot continue it: it has other settings than
    they have, or they do not follow a given trajectory closely, see `misfit`.

    Raises:
        ConfigFault: the files in `raw` are remote.
    """
    if is_remote(raw):
        raise ConfigFault(f"simulate.fill_below needs files on disk, not at {raw}: download them, or set it to 0")
    recipes = {}
    for name, dataset in datasets.items():
        given = splits[name]["train"]
        if len(given) >= fill_below:
            continue
        if obstacle := _obstacle(dataset) or _difference(raw, dataset, given[0]):
            log.warning("%s: no trajectories are simulated for its small training split: %s", name, obstacle)
            continue
        recipes[name] = _recipe(dataset, fill_to - len(given), seed + SEED_OFFSET)
    return recipes


def _obstacle(dataset: Dataset) -> str | None:
    """Why the solvers cannot simulate more trajectories of a dataset, None if they can."""
    family = base_of(dataset.family)
    if family not in PROBLEMS:
        return f"there is no solver for {family}"
    if (subsample := dataset.subsample) != replace(Subsample(), first_trajectories=subsample.first_trajectories):
        return "only a part of its points or snapshots is used"
    problem, grid = PROBLEMS[family], dataset.grid
    if len(set(grid)) > 1:
        return f"its grid {' x '.join(map(str, grid))} has different numbers of points along its axes"
    length = problem.high - problem.low
    if not np.allclose(dataset.lengths, length, rtol=TOLERANCE):
        return f"its domain has the lengths {dataset.lengths}, PDEBench's has {length:g}"
    if len(set(dataset.boundary)) > 1:
        return f"its axes have different boundary conditions: {', '.join(dataset.boundary)}"
    times = np.linspace(0.0, dataset.times[-1], len(dataset.times))
    if not np.allclose(dataset.times, times, rtol=0, atol=TOLERANCE * max(times[-1], 1e-9)):
        return f"its times are not 0, dt, 2 dt, ...: {', '.join(f'{time:g}' for time in dataset.times[:3])}, ..."
    return None


def _difference(raw: Path, dataset: Dataset, index: int) -> str | None:
    """How the solver differs from the trajectory `index`, None if by little."""
    found = misfit(raw, dataset, index)
    if found <= LARGEST_MISFIT:
        return None
    return (
        f"the solver's error on its trajectory {index} is {found:.1%} of the change there, above {LARGEST_MISFIT:.0%}"
    )


def misfit(raw: Path, dataset: Dataset, index: int) -> float:
    """RMS of solver minus trajectory over RMS of trajectory minus initial state (steady: minus 0), mean over fields.

    The solver starts from the given initial state.
    """
    family = FAMILIES[base_of(dataset.family)]
    with TrajectoryReader(raw, dataset) as reader:
        u = torch.from_numpy(reader.read(index))
        given = dict(zip(family.coefficients, torch.from_numpy(reader.read_coefficients(index)), strict=True))
    u_0 = None if family.steady else u[:1]
    boundary = dataset.boundary[0] if PROBLEMS[family.name].boundaries else None
    solution = solve(family.name, u_0, {**dataset.parameters, **given}, dataset.times, boundary=boundary)[0]
    change = u if u_0 is None else u - u_0
    errors, changes = ((x.square().transpose(0, 1).flatten(1).mean(1)).sqrt() for x in (solution - u, change))
    return (errors / changes.clamp_min(EPS)).mean().item()


def _recipe(dataset: Dataset, count: int, seed: int) -> Recipe:
    family = base_of(dataset.family)
    problem = PROBLEMS[family]
    starts = (start for start in problem.initial_states if f"_{start}_" in dataset.name)
    return {
        "family": family,
        "parameters": dataset.parameters,
        "num_trajectories": count,
        "resolution": dataset.grid[0],
        "num_snapshots": len(dataset.times),
        "duration": 1.0 if problem.steady else dataset.times[-1],
        "seed": seed,
        "start": next(starts, next(iter(problem.initial_states))),
        "boundary": dataset.boundary[0] if problem.boundaries else None,
    }


def fill_up(
    described: dict[str, Any],
    raw: Path,
    folder: Path,
    recipes: dict[str, Recipe],
    identity: str,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """The receipt `described` of all datasets, with the trajectories of `recipes` in training splits.

    They are simulated into a folder per dataset below `folder`, unless they are there, with `identity` as in
    `simulate_files`.

    Raises:
        DataFault: what was simulated has another grid, boundary or other times than the dataset.
    """
    datasets, splits, sources = dict(described["datasets"]), dict(described["splits"]), dict(described["sources"])
    for name, recipe in recipes.items():
        files = simulate_files(folder / name, [recipe], identity, advance)
        dataset = _continued(Dataset.from_json(datasets[name]), raw, folder / name, files)
        first, last = sum(datasets[name]["counts"]), dataset.num_trajectories
        datasets[name] = asdict(dataset)
        splits[name] = splits[name] | {"train": [*splits[name]["train"], *range(first, last)]}
        sources |= {relative(folder / name / file, raw): entry for file, entry in files.items()}
        log.info("%s: %d simulated trajectories in its training split", name, last - first)
    return described | {"datasets": datasets, "splits": splits, "sources": sources}


def _continued(dataset: Dataset, raw: Path, folder: Path, files: Files) -> Dataset:
    """The dataset with the trajectories of further files, in `folder`, behind its own."""
    whole = {base_of(dataset.family): asdict(Subsample())}
    (entry,) = inspect("find", folder=folder, names=list(files), subsample=whole).values()
    new = Dataset.from_json(entry)
    same = new.grid == dataset.grid and new.boundary == dataset.boundary and len(new.times) == len(dataset.times)
    if not same or not np.allclose(new.times, dataset.times, atol=TOLERANCE * max(dataset.times[-1], 1e-9)):
        what = f"simulated trajectories do not continue {dataset.name}; set simulate.fill_below to 0"
        raise DataFault(f"{folder}: {what}")
    places = tuple(relative(folder / name, raw) for name in new.files)
    return replace(dataset, files=dataset.files + places, counts=dataset.counts + new.counts)
