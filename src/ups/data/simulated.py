"""Simulated files: which there are, by what they were made, and the processes that make those that are missing."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from math import prod
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from threading import Thread
from typing import Any

from ups.data.http import Advance
from ups.data.pdebench import FAMILIES
from ups.data.sources import Files, entry_of
from ups.errors import ConfigFault, DataFault, LostWorker
from ups.files import digest_of, num_cores, only_writer, read_json, write_json

SIMULATED = "simulated.json"
FEW_VALUES = 2**20  # numbers per field of files that one process simulates about as soon as others have started
SECONDS = 0.2  # between two looks at how far the processes are

_solved: "Synchronized[int] | None" = None  # snapshots that all processes have solved, in each of them


@dataclass(frozen=True)
class Simulated:
    """A file in `simulated.json`; `made_by` has recipe, identity of the solvers and digest of the family.

    `made_by` is empty while it is simulated.
    """

    made_by: dict[str, Any]
    bytes: int
    md5: str


def simulate_files(folder: Path, recipes: list[dict[str, Any]], identity: str, advance: Advance) -> Files:
    """Simulate the files that `folder` lacks; a recipe has the arguments of `simulate`, `identity` names the solvers.

    `simulated.json` in `folder` records recipe and identity of each file: a file with another record is simulated anew.

    Raises:
        DataFault: `folder` has a file of this name without record, which somebody else has put there.
        Locked: another process simulates files into this folder.
        LostWorker: one of several processes was killed.
    """
    from ups.data.simulate import files_of

    calls = [call for recipe in recipes for call in files_of(recipe).items()]
    names = [name for name, _ in calls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigFault(f"simulate.datasets names {', '.join(twice)} twice: give each dataset its own parameters")
    families = {name: recipe["family"] for name, recipe in calls}
    made_by = {
        name: {"recipe": recipe, "identity": identity, "family": FAMILIES[recipe["family"]].digest}
        for name, recipe in calls
    }
    known = _simulated(folder)
    if _missing(folder, made_by, known):
        with only_writer(folder / SIMULATED):
            known = _simulated(folder)  # another process may have ended just now
            missing = {folder / name: made_by[name]["recipe"] for name in _missing(folder, made_by, known)}
            _refuse_foreign(folder, [path.name for path in missing if path.exists() and path.name not in known])
            # A process that is killed when it has replaced a file must not leave the record of the former one.
            known |= {path.name: Simulated({}, 0, "") for path in missing}
            _record(folder, known)
            for path in _simulate_each(missing, advance):
                known[path.name] = Simulated(made_by[path.name], path.stat().st_size, digest_of(path, "md5"))
                _record(folder, known)
    return {name: entry_of(known[name].bytes, known[name].md5, families[name]) for name in names}


def _simulated(folder: Path) -> dict[str, Simulated]:
    return read_json(folder / SIMULATED, dict[str, Simulated]) if (folder / SIMULATED).is_file() else {}


def _record(folder: Path, known: dict[str, Simulated]) -> None:
    write_json(folder / SIMULATED, {name: asdict(record) for name, record in sorted(known.items())})


def _refuse_foreign(folder: Path, names: list[str]) -> None:
    """Refuse to replace files that were not simulated here: they may be downloaded ones, which have the same names."""
    if names:
        what = f"{names[0]} is there and was not simulated" + f", nor were {len(names) - 1} others" * (len(names) > 1)
        remedy = "set source=folder to learn from files, or another data_root or raw_root to simulate"
        raise DataFault(f"{folder}: {what}; {remedy}")


def _missing(folder: Path, made_by: dict[str, dict[str, Any]], known: dict[str, Simulated]) -> list[str]:
    """Names of the files that are not there, or were made by something else."""
    present = {name: folder / name for name, record in known.items() if record.made_by == made_by.get(name)}
    whole = {name for name, path in present.items() if path.is_file() and path.stat().st_size == known[name].bytes}
    return [name for name in made_by if name not in whole]


def _simulate_each(recipes: dict[Path, dict[str, Any]], advance: Advance) -> Iterator[Path]:
    """Simulate files by their recipes, as many at a time as there are cores; gives the path of each when it is there.

    The number of processes changes no value: each file is solved in one thread.
    """
    values = {path: _num_values(recipe) for path, recipe in recipes.items()}
    num_processes = min(len(recipes), num_cores())
    if num_processes > 1 and sum(values.values()) > FEW_VALUES:
        largest_first = dict(sorted(recipes.items(), key=lambda item: -values[item[0]]))
        yield from _in_processes(largest_first, num_processes, advance)
        return
    from ups.data.simulate import simulate

    for path, recipe in recipes.items():
        simulate(path, **recipe, advance=advance)
        yield path


def _num_values(recipe: dict[str, Any]) -> int:
    """Numbers per field in a file."""
    grid = (recipe["resolution"],) * len(FAMILIES[recipe["family"]].axes)
    return recipe["num_trajectories"] * recipe["num_snapshots"] * prod(grid)


def _in_processes(recipes: dict[Path, dict[str, Any]], num_processes: int, advance: Advance) -> Iterator[Path]:
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch may hang
    solved, counted = context.Value("q", 0), 0
    pool = ProcessPoolExecutor(num_processes, context, _begin, (solved,))
    try:
        running = {pool.submit(_simulate, path, recipe): path for path, recipe in recipes.items()}
        while running:
            done, _ = wait(running, SECONDS, FIRST_COMPLETED)
            before, counted = counted, solved.value
            advance(counted - before)
            for future in done:
                future.result()
                yield running.pop(future)
    except BrokenProcessPool:
        names = ", ".join(path.name for path in running.values())
        what = f"one of {num_processes} processes that simulate was killed, perhaps for lack of memory"
        raise LostWorker(f"{what}; the same command goes on with {names}") from None
    finally:  # after Ctrl-C or a fault nothing is worth waiting for
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _begin(solved: "Synchronized[int]") -> None:
    """Prepare one of the processes: Ctrl-C is its parent's affair, and it ends with its parent."""
    global _solved
    _solved = solved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _simulate(path: Path, recipe: dict[str, Any]) -> None:
    from ups.data.simulate import simulate

    simulate(path, **recipe, advance=_advance)


def _advance(count: int) -> None:
    assert _solved is not None
    with _solved.get_lock():
        _solved.value += count
