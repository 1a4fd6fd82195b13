"""The three sources of raw files: simulated, found in a folder, downloaded; each gives names, sizes and MD5 sums."""

from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

from ups.data.checksums import md5_of
from ups.data.download import download_file
from ups.data.partial import fetch_trajectories
from ups.data.plan import Plan, PlannedFile
from ups.data.registry import refuse_outdated_md5
from ups.data.trajectories import find_files
from ups.errors import ConfigFault
from ups.files import read_json, write_json

Files = dict[str, dict[str, Any]]
"""File name relative to the raw folder -> {"bytes", "md5"}."""

SIMULATED = "simulated.json"
CHECKSUMS = "checksums.json"


def simulate_files(
    folder: Path, recipes: list[dict[str, Any]], identity: str, advance: Callable[[int], object]
) -> Files:
    """Simulate what `folder` does not hold yet; `recipes` are the arguments of `simulate`.

    `simulated.json` remembers with which recipe, and which solvers (`identity`), each file was made.
    """
    from ups.data.simulate import files_of, simulate

    calls = [call for recipe in recipes for call in files_of(recipe).items()]
    names = [name for name, _ in calls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigFault(f"simulate.datasets names {', '.join(twice)} twice: give each dataset its own parameters")
    ledger = read_json(folder / SIMULATED) if (folder / SIMULATED).is_file() else {}
    for name, recipe in calls:
        made_by = {"recipe": recipe, "identity": identity}
        known = ledger.get(name, {})
        if known.get("made_by") != made_by or not _has_size(folder / name, known["bytes"]):
            simulate(folder / name, **recipe, advance=advance)
            ledger[name] = {"made_by": made_by, **_file_entry(folder / name)}
            write_json(folder / SIMULATED, ledger)
    return {name: {key: ledger[name][key] for key in ("bytes", "md5")} for name in names}


def download_files(plan: Plan, advance: Callable[[str, int], object], *, base_url: str | None, parallel: int) -> Files:
    """Fetch what is missing, `parallel` files at a time; the first failure ends all, the same call goes on.

    `advance` takes the name of a file and the bytes of it that arrived. Sums of files that were there already are taken
    once and remembered in `checksums.json`: an outdated version may have the size of the current one.
    """
    ledger = Ledger(plan.folder / CHECKSUMS)
    stop = Event()

    def fetch(planned: PlannedFile) -> str:
        def progress(count: int) -> None:
            if stop.is_set():
                raise CancelledError
            advance(planned.name, count)

        return _fetch(plan.folder / planned.name, planned, ledger, base_url, progress)

    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(fetch, planned): plan.folder / planned.name for planned in plan.files}
        try:
            for future in as_completed(running):
                ledger.add(running[future], future.result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return {path.name: {"bytes": path.stat().st_size, "md5": future.result()} for future, path in running.items()}


def _fetch(
    path: Path, planned: PlannedFile, ledger: "Ledger", base_url: str | None, advance: Callable[[int], object]
) -> str:
    """Have a file, and return its MD5."""
    file, known = planned.file, ledger.find(path)
    if planned.trajectories is not None:
        fetch_trajectories(file, path, range(planned.trajectories), base_url=base_url, advance=advance)
        return known or md5_of(path)
    if known == file.md5:
        advance(planned.arrived)
    else:
        download_file(file.address(base_url), file.md5, path, advance, num_bytes=file.bytes)
    return file.md5


class Ledger:
    """MD5 sums of files by path, size and time of change, remembered in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_json(path) if path.is_file() else {}

    def find(self, path: Path) -> str | None:
        """The sum of a file, if it has not changed since."""
        entry = self._entries.get(str(path))
        return entry["md5"] if entry and path.is_file() and entry["stamp"] == _stamp(path) else None

    def add(self, path: Path, md5: str) -> None:
        """Remember the sum of a file."""
        self._entries[str(path)] = {"stamp": _stamp(path), "md5": md5}
        write_json(self.path, self._entries)


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def list_files(folder: Path, ledger_path: Path) -> Files:
    """All PDEBench files of a folder; sums are remembered in `ledger_path` by path, size and time of change."""
    ledger = Ledger(ledger_path)
    files: Files = {}
    for name in find_files(folder):
        path = folder / name
        md5 = ledger.find(path)
        if md5 is None:
            md5 = md5_of(path)
            ledger.add(path, md5)
        refuse_outdated_md5(path, md5)
        files[name] = {"bytes": path.stat().st_size, "md5": md5}
    return files


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "md5": md5_of(path)}


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
