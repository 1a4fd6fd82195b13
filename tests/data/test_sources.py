import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contents import expect_one_line
from ups.data import published, sources
from ups.data.published import read_published_files
from ups.data.simulated import simulate_files
from ups.data.sources import ChecksumCache, list_files
from ups.errors import DataFault
from ups.files import NAME as PLAIN
from ups.files import digest_of, read_json

NAME = "1D_Advection_Sols_beta0.4.hdf5"
RECIPE: dict[str, Any] = {
    "family": "advection_1d",
    "parameters": {"beta": 0.4},
    "num_trajectories": 3,
    "resolution": 8,
    "num_snapshots": 3,
    "duration": 0.5,
    "seed": 0,
}


def simulated(folder: Path, recipe: dict[str, Any], identity: str = "solvers 1") -> dict[str, Any]:
    """The entry of the one file that the recipe describes, as simulated in `folder`."""
    return simulate_files(folder, [recipe], identity, lambda count: None)[NAME]


def test_a_file_that_changes_while_its_sum_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sum of what was there before must not count for what is there now."""
    simulated(tmp_path / "raw", RECIPE)

    def grow(path: Path) -> str:
        before = digest_of(path, "md5")
        with path.open("ab") as file:
            file.write(b"more")
        return before

    monkeypatch.setattr(sources, "md5_of", grow)
    with pytest.raises(DataFault, match="it changes while it is read; wait until it is complete"):
        list_files(tmp_path / "raw", tmp_path / "checksums.json")
    assert not (tmp_path / "checksums.json").exists()


def test_an_outdated_file_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file with the MD5 of an outdated version is not listed, whatever its name."""
    md5 = simulated(tmp_path / "raw", RECIPE)["md5"]
    monkeypatch.setattr(published, "_read_outdated", lambda: {md5: "1D_Burgers_Sols_Nu0.01.hdf5"})
    with pytest.raises(DataFault, match=f"{NAME} is an outdated version of burgers_1d"):
        list_files(tmp_path / "raw", tmp_path / "sums.json")


def test_sums_of_a_folder_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file whose size and time of change are known is not read a second time."""
    simulated(tmp_path / "raw", RECIPE)
    first = list_files(tmp_path / "raw", tmp_path / "sums.json")
    monkeypatch.setattr(sources, "digest_of", lambda path, algorithm: pytest.fail("read again"))
    assert list_files(tmp_path / "raw", tmp_path / "sums.json") == first


@pytest.mark.parametrize("keep_time", [True, False], ids=["other size", "other time"])
def test_sums_of_changed_files_are_taken_anew(tmp_path: Path, keep_time: bool):
    """A file with another size, or with another time of change, is read again."""
    path = tmp_path / "raw" / NAME
    simulated(tmp_path / "raw", RECIPE)
    list_files(tmp_path / "raw", tmp_path / "sums.json")
    time = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes() + b"0" * keep_time)
    content[-100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(time, time if keep_time else time + 1))
    assert list_files(tmp_path / "raw", tmp_path / "sums.json")[NAME]["md5"] == digest_of(path, "md5")


def test_sums_of_two_processes_are_merged(tmp_path: Path):
    """What one process has stored is kept when another, which started earlier, stores the sum of another file."""
    first, second = (ChecksumCache(tmp_path / "sums.json") for _ in range(2))
    for cache, name in ((first, "a"), (second, "b"), (first, "c")):
        (tmp_path / name).write_bytes(b"")
        cache.add(tmp_path / name, name)
    cache = ChecksumCache(tmp_path / "sums.json")
    assert [cache.find(tmp_path / name) for name in "abc"] == ["a", "b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "sums.json"]


ADD_SUMS = """
import sys
from pathlib import Path
from ups.data.sources import ChecksumCache
folder, name = Path(sys.argv[1]), sys.argv[2]
cache = ChecksumCache(folder / "sums.json")
for i in range(30):
    (folder / f"{name}{i}").write_bytes(b"")
    cache.add(folder / f"{name}{i}", name)
"""


def test_sums_that_processes_store_at_once_are_kept(tmp_path: Path):
    """Processes that store sums at the same time lose none."""
    running = [subprocess.Popen([sys.executable, "-c", ADD_SUMS, str(tmp_path), name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(read_json(tmp_path / "sums.json")) == 60


def test_wrong_sums_are_one_line(tmp_path: Path):
    """Whatever stands in `checksums.json`, its reader says what is wrong in one line and keeps the file."""
    simulated(tmp_path / "raw", RECIPE)
    list_files(tmp_path / "raw", tmp_path / "sums.json")
    read = partial(list_files, tmp_path / "raw", tmp_path / "sums.json")
    expect_one_line(tmp_path / "sums.json", read, ("stamp", "md5"), of_each_file=True)


def test_empty_folder_is_refused(tmp_path: Path):
    """A folder without PDEBench files is a fault that names it."""
    with pytest.raises(DataFault, match=f"{tmp_path}: holds no"):
        list_files(tmp_path, tmp_path / "sums.json")


def test_published_names_are_plain():
    """Every published file has a name that is read."""
    assert all(PLAIN.fullmatch(name) for name in read_published_files())


@pytest.mark.parametrize(
    "name", ["1D_Advection_\x1b]0;x\x07.hdf5", "1D_Advection_a b.hdf5", "1D_Advection_\n.h5", "-r.h5"]
)
def test_files_with_other_names_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str):
    """A name with other characters is refused in one line without control characters; the others are read."""
    caplog.set_level(logging.WARNING, "ups")
    simulated(tmp_path / "raw", RECIPE)
    (tmp_path / "raw" / name).write_bytes(b"")
    assert list(list_files(tmp_path / "raw", tmp_path / "sums.json")) == [NAME]
    assert "is left out: rename it" in caplog.messages[0] and caplog.messages[0].isprintable()


def test_pipes_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A pipe with the name of a PDEBench file is not waited for; the others are read."""
    caplog.set_level(logging.WARNING, "ups")
    simulated(tmp_path / "raw", RECIPE)
    os.mkfifo(tmp_path / "raw" / "1D_Advection_pipe.hdf5")
    assert list(list_files(tmp_path / "raw", tmp_path / "sums.json")) == [NAME]
    assert "1D_Advection_pipe.hdf5 is left out: it is no file" in caplog.text


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("a.HDF5", r"\.hdf5"), ("a.he5", r"\.hdf5"), ("a.nc4", r"\.nc"), ("a.npy", "write it anew")],
)
def test_files_with_other_spellings_of_a_suffix_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, remedy: str
):
    """A file that is left out for its suffix is a warning with the remedy; hidden files and other formats are not."""
    caplog.set_level(logging.WARNING, "ups")
    simulated(tmp_path / "raw", RECIPE)
    for other in (name, f".{name}", f"~{name}", "README.md"):
        (tmp_path / "raw" / other).touch()
    assert list(list_files(tmp_path / "raw", tmp_path / "sums.json")) == [NAME]
    (message,) = caplog.messages
    assert re.search(rf"/{name} is left out for its suffix: .*{remedy}", message)
