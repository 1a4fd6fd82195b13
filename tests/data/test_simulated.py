"""Simulated files are described, reused, made again where their recipe changes, by one process or by several."""

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.contents import expect_one_line
from tests.data.test_sources import NAME, RECIPE, simulated
from tests.training.jobs import wait_until
from ups.data import simulated as module
from ups.data.simulated import simulate_files
from ups.errors import ConfigFault, DataFault, Locked
from ups.files import digest_of, only_writer


def inode(path: Path) -> int:
    """What changes when a file is made again and renamed over the old one."""
    return path.stat().st_ino


def test_simulated_file_is_described(tmp_path: Path):
    """The entry of a simulated file has its true size and MD5 sum."""
    entry = simulated(tmp_path, RECIPE)
    expected = {"bytes": (tmp_path / NAME).stat().st_size, "md5": digest_of(tmp_path / NAME, "md5")}
    assert entry == expected | {"family": "advection_1d"}


def test_simulated_file_is_reused(tmp_path: Path):
    """The same recipe simulates nothing the second time and gives the same entry."""
    entry, first = simulated(tmp_path, RECIPE), inode(tmp_path / NAME)
    assert simulated(tmp_path, RECIPE) == entry
    assert inode(tmp_path / NAME) == first


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_trajectories": 4}, {"duration": 1.0}])
def test_changed_recipe_simulates_again(tmp_path: Path, change: dict[str, Any]):
    """A file made with another recipe is made again under its name."""
    entry = simulated(tmp_path, RECIPE)
    again = simulated(tmp_path, RECIPE | change)
    assert again["md5"] != entry["md5"]
    assert again["md5"] == digest_of(tmp_path / NAME, "md5")


def test_changed_solvers_simulate_again(tmp_path: Path):
    """A file made by other solvers is made again."""
    simulated(tmp_path, RECIPE)
    first = inode(tmp_path / NAME)
    simulated(tmp_path, RECIPE, "solvers 2")
    assert inode(tmp_path / NAME) != first


def test_lost_file_is_simulated_again(tmp_path: Path):
    """A file that was deleted comes back with the same content."""
    entry = simulated(tmp_path, RECIPE)
    (tmp_path / NAME).unlink()
    assert simulated(tmp_path, RECIPE) == entry
    assert digest_of(tmp_path / NAME, "md5") == entry["md5"]


def test_a_killed_process_leaves_no_record_of_a_file_that_it_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run whose file was replaced makes it again, although the other file has the same size."""
    entry = simulated(tmp_path, RECIPE)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(module, "digest_of", Mock(side_effect=KeyboardInterrupt))
        simulated(tmp_path, RECIPE | {"seed": 1})
    assert digest_of(tmp_path / NAME, "md5") != entry["md5"]
    assert simulated(tmp_path, RECIPE)["md5"] == entry["md5"] == digest_of(tmp_path / NAME, "md5")


def test_only_one_process_simulates_into_a_folder(tmp_path: Path):
    """Another one is refused in one line while files are missing, and needs no lock once they are there."""
    with only_writer(tmp_path / "simulated.json"):
        with pytest.raises(Locked, match="another process writes .*simulated.json; wait for it or stop it"):
            simulated(tmp_path, RECIPE)
        assert not (tmp_path / NAME).exists()
    entry = simulated(tmp_path, RECIPE)
    with only_writer(tmp_path / "simulated.json"):
        assert simulated(tmp_path, RECIPE) == entry


def test_files_of_somebody_else_are_not_replaced(tmp_path: Path):
    """Downloaded files have the names of simulated ones."""
    (tmp_path / NAME).write_bytes(b"downloaded")
    with pytest.raises(DataFault, match=f"{NAME} is there and was not simulated; set source=folder"):
        simulated(tmp_path, RECIPE)
    assert (tmp_path / NAME).read_bytes() == b"downloaded"


def test_a_process_that_is_killed_before_it_records_a_new_file_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is its own, although nothing says how it was made."""
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(module, "digest_of", Mock(side_effect=KeyboardInterrupt))
        simulated(tmp_path, RECIPE)
    assert (tmp_path / NAME).is_file()
    assert simulated(tmp_path, RECIPE)["md5"] == digest_of(tmp_path / NAME, "md5")


def test_duplicates_are_refused(tmp_path: Path):
    """Two datasets with one file name are refused before anything is simulated."""
    with pytest.raises(ConfigFault, match=f"{NAME} twice"):
        simulate_files(tmp_path, [RECIPE, RECIPE | {"seed": 1}], "solvers 1", lambda count: None)
    assert not list(tmp_path.iterdir())


def test_wrong_records_are_one_line(tmp_path: Path):
    """Whatever stands in `simulated.json`, its reader says what is wrong in one line and simulates nothing."""
    simulated(tmp_path, RECIPE)
    read = partial(simulated, tmp_path, RECIPE)
    expect_one_line(tmp_path / "simulated.json", read, ("made_by", "bytes", "md5"), of_each_file=True)


SLOW = RECIPE | {"family": "incompressible_ns_2d", "parameters": {}, "num_trajectories": 8, "resolution": 32}
COMMAND = f"""
from pathlib import Path
from ups.data import simulated
if __name__ == "__main__":
    simulated.FEW_VALUES = 0
    recipe = {SLOW | {"num_snapshots": 1001, "duration": 5000.0}}
    simulated.simulate_files(Path("raw"), [recipe], "solvers 1", lambda count: None)
"""


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few values there are, two processes simulate."""
    monkeypatch.setattr(module, "FEW_VALUES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


@contextmanager
def command(folder: Path) -> Iterator[psutil.Popen]:
    """A command that simulates two files in two processes for minutes, once both have begun."""
    (folder / "command.py").write_text(COMMAND)
    with psutil.Popen([sys.executable, "command.py"], cwd=folder, stderr=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert wait_until(lambda: len(list((folder / "raw").glob(".*.h5*"))) == 2)
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_the_number_of_processes_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bytes are those of one process, and so is the number of snapshots that are reported as solved."""
    recipes = [RECIPE | {"parameters": {"beta": beta}} for beta in (0.1, 0.2, 0.4)]
    entries, counts = [], []
    for few in (2**20, 0):
        monkeypatch.setattr(module, "FEW_VALUES", few)
        solved: list[int] = []
        entries.append(simulate_files(tmp_path / str(few), recipes, "solvers 1", solved.append))
        counts.append(sum(solved))
    assert entries[0] == entries[1]
    assert counts == [27, 27]


@pytest.mark.usefixtures("two_processes")
def test_a_fault_in_a_process_is_that_of_the_command(tmp_path: Path):
    """With its kind and message; the other processes end."""
    good, bad = (RECIPE | {"parameters": {"beta": beta}} for beta in (0.1, float("nan")))
    with pytest.raises(ConfigFault, match="beta must be finite"):
        simulate_files(tmp_path, [good, bad], "solvers 1", lambda count: None)
    assert wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.faults
def test_a_killed_process_is_a_fault(tmp_path: Path):
    """The command does not wait for it forever, and names what is still missing."""
    with command(tmp_path) as process:
        worker = next(each for each in process.children() if "spawn_main" in " ".join(each.cmdline()))
        worker.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "LostWorker: one of 2 processes that simulate was killed" in errors
    assert "ns_incom_inhom_2d_32-1.h5" in errors


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_their_command(tmp_path: Path, number: signal.Signals):
    """Within seconds, however it ends."""
    with command(tmp_path) as process:
        children = process.children()
        process.send_signal(number)
        process.communicate(timeout=60)
        assert len(children) > 2
        assert not psutil.wait_procs(children, timeout=30)[1]
