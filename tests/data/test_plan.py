"""What a download tells before it starts, and how many files at once it fetches."""

import hashlib
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest

from ups.config import DownloadConfig
from ups.data import plan as planning
from ups.data.download import lock
from ups.data.normalization import fit_normalization
from ups.data.plan import log_plan, make_plan, partial_name
from ups.data.published import PublishedFile, find_file
from ups.data.sources import CHECKSUMS, download_files, list_files
from ups.data.splits import split
from ups.data.trajectories import find_datasets
from ups.errors import ConfigFault, DataFault, StorageFault
from ups.pipelines.data import download_pdebench

BETAS = (0.1, 0.2, 0.4, 1.0)


def names() -> list[str]:
    """Names of four published files."""
    return [f"1D_Advection_Sols_beta{beta}.hdf5" for beta in BETAS]


@pytest.fixture
def published(write, tmp_path: Path) -> list[PublishedFile]:
    """Records of four small files in the test's folder, in place of the published ones."""
    files = []
    for name in names():
        content = write("advection_1d", name, count=6).read_bytes()
        md5 = hashlib.md5(content).hexdigest()
        files.append(replace(find_file(name), md5=md5, bytes=len(content), num_trajectories=6))
    return files


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder that files go to."""
    return tmp_path / "local"


def fetch(files: list[PublishedFile], local: Path, url: str, parallel: int = 2) -> dict[str, Any]:
    """Plan and download whole files."""
    return download_files(make_plan(local, files, None), lambda name, count: None, base_url=url, parallel=parallel)


def test_plan_counts_what_is_missing(published, local, tmp_path):
    """Files that are there and bytes that have arrived are not fetched again."""
    local.mkdir()
    (local / names()[0]).write_bytes((tmp_path / names()[0]).read_bytes())
    (local / f"{names()[1]}.part").write_bytes(b"0" * 100)
    plan = make_plan(local, published, None)
    assert [file.is_complete for file in plan.files] == [True, False, False, False]
    assert sum(file.bytes for file in plan.files) == sum(file.bytes for file in published)
    assert plan.missing == sum(file.bytes for file in published) - published[0].bytes - 100


def test_plan_is_told(published, local, caplog):
    """Number, size and place of the files, each by name, and the free disk; test files are pointed out."""
    with caplog.at_level(logging.INFO, planning.__name__):
        log_plan(make_plan(local, [*published, find_file("Sod1.hdf5")], None))
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "5 files" in text and f"and 1 files of unknown size, to {local}" in text
    assert all(name in text for name in names())
    assert "free" in text and "Sod1.hdf5" in text and "no stage trains on them" in text


def test_long_plan_is_cut(published, local, caplog):
    """Of many files the first are listed."""
    with caplog.at_level(logging.INFO, planning.__name__):
        log_plan(make_plan(local, published * 30, None))
    assert any("... and 80 more" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) < 50


def test_small_disk_is_refused(published, local, monkeypatch):
    """A plan that does not fit on the disk is refused with both numbers, before anything is made."""
    monkeypatch.setattr(planning, "free_disk_bytes", lambda folder: 10)
    with pytest.raises(StorageFault, match="to fetch, 1e-08 GB free; free space") as caught:
        log_plan(make_plan(local, published, None))
    assert caught.value.exit_code == 6
    assert not local.exists()


def test_wrong_file_is_refused_first(published, local):
    """A file of another size under a published name stops the plan."""
    local.mkdir()
    (local / names()[0]).write_bytes(b"other")
    with pytest.raises(DataFault, match="has 5 bytes, expected .*; delete it"):
        make_plan(local, published, None)


def test_empty_plan_is_refused(local):
    """`source: pdebench` without files says what to name."""
    with pytest.raises(ConfigFault, match="download.families or download.files"):
        make_plan(local, [], None)


@pytest.mark.parametrize("parallel", [1, 4])
def test_files_arrive(published, local, serve, tmp_path, parallel):
    """Every file is there, in order, with the published sum; each reports its bytes."""
    server, arrived, plan = serve(tmp_path), Counter(), make_plan(local, published, None)
    files = download_files(
        plan, lambda name, count: arrived.update({name: count}), base_url=server.url, parallel=parallel
    )
    assert list(files) == names()
    assert [entry["md5"] for entry in files.values()] == [file.md5 for file in published]
    assert arrived == {file.name: file.bytes for file in published}
    assert {name: entry["md5"] for name, entry in list_files(local, tmp_path / "sums.json").items()} == {
        file.name: file.md5 for file in published
    }


def test_partial_files_arrive(published, local, serve, tmp_path):
    """With `trajectories` the first of each file; a file that has no more comes whole."""
    published[0] = replace(published[0], num_trajectories=3)
    plan = make_plan(local, published, 3)
    server = serve(tmp_path)
    files = download_files(plan, lambda name, count: None, base_url=server.url, parallel=2)
    assert list(files) == [names()[0], *(name.replace(".hdf5", "_first3.hdf5") for name in names()[1:])]
    assert sorted(path.name for path in local.iterdir()) == sorted([*files, CHECKSUMS])


def damage(path: Path, moved: Path) -> None:
    """Change one byte of the last trajectory."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path, moved: Path) -> None:
    """Put another sound file with the same origin in its place."""
    with h5py.File(path, "r+") as file:
        file["tensor"][0] = 0.0


def move_and_damage(path: Path, moved: Path) -> None:
    """Move the folder, then damage the file in its new place."""
    path.parent.rename(moved)
    damage(moved / path.name, moved)


@pytest.mark.parametrize("harm", [damage, swap, move_and_damage])
def test_a_damaged_partial_file_is_noticed(published, local, serve, tmp_path, harm):
    """A partial file, whose MD5 nobody publishes, is the one that was fetched, or one line tells which is not."""
    server, moved = serve(tmp_path), tmp_path / "moved"

    def fetch_again(folder: Path) -> None:
        plan = make_plan(folder, published[:1], 3)
        download_files(plan, lambda name, count: None, base_url=server.url, parallel=1)

    fetch_again(local)
    fetch_again(local)
    harm(local / partial_name(published[0].name, 3), moved)
    folder = moved if moved.exists() else local
    with pytest.raises(DataFault, match=r"_first3.hdf5: MD5 is \w+, was \w+ when it was fetched; delete it"):
        fetch_again(folder)
    (folder / partial_name(published[0].name, 3)).unlink()
    fetch_again(folder)


def test_first_failure_ends_all(published, local, serve, tmp_path):
    """One missing file stops the download; what has arrived stays, and the next call fetches the rest."""
    server = serve(tmp_path)
    hidden = tmp_path / names()[0]
    hidden.rename(tmp_path / "hidden")
    with pytest.raises(DataFault, match=f"{names()[0]}: HTTP 404"):
        download_files(make_plan(local, published, None), lambda name, count: None, base_url=server.url, parallel=2)
    assert not (local / names()[0]).exists()
    (tmp_path / "hidden").rename(hidden)
    download_files(make_plan(local, published, None), lambda name, count: None, base_url=server.url, parallel=2)
    assert sorted(path.name for path in local.iterdir()) == [*names(), CHECKSUMS]


def test_files_that_were_there_are_checked_once(published, local, serve, tmp_path, monkeypatch):
    """A file of the right size with other bytes is refused; a good one is hashed the first time only."""
    local.mkdir()
    content = (tmp_path / names()[0]).read_bytes()
    (local / names()[0]).write_bytes(content[:-1] + b"x")
    with pytest.raises(DataFault, match=f"{names()[0]}: MD5 is .*delete it"):
        fetch(published[:1], local, serve(tmp_path).url)
    (local / names()[0]).write_bytes(content)
    fetch(published[:1], local, serve(tmp_path).url)
    monkeypatch.setattr("ups.data.download.digest_of", lambda path, algorithm: pytest.fail("hashed again"))
    assert fetch(published[:1], local, serve(tmp_path).url)[names()[0]]["md5"] == published[0].md5


def test_waiting_for_another_run_can_be_interrupted(published, local, serve, tmp_path):
    """A download that waits for the lock of another one ends when its caller wants to."""

    def interrupt(name: str, count: int) -> None:
        raise ZeroDivisionError

    with lock(local / names()[0], lambda count: None), pytest.raises(ZeroDivisionError):
        plan = make_plan(local, published[:1], None)
        download_files(plan, interrupt, base_url=serve(tmp_path).url, parallel=1)


def test_fetched_files_are_not_asked_for_again(published, local, serve, tmp_path):
    """A second download asks the server nothing."""
    server = serve(tmp_path)
    for _ in range(2):
        files = make_plan(local, published, None)
        download_files(files, lambda name, count: None, base_url=server.url, parallel=2)
    assert len(server.requests) == len(published)


CONFIG: dict[str, Any] = {
    "families": ["advection1d"],
    "files": [],
    "parameters": {"beta": [0.1, 0.4]},
    "kind": "train",
    "resolution": None,
    "files_per_family": None,
    "max_gigabytes": None,
    "trajectories": 4,
    "base_url": None,
    "parallel": 2,
}


def test_node_follows_its_configuration(published, local, serve, tmp_path, monkeypatch, caplog):
    """The node selects, tells the plan, fetches the first trajectories from the mirror; they split and normalize."""
    monkeypatch.setattr("ups.data.published.read_published_files", lambda: {file.name: file for file in published})
    config = DownloadConfig(**CONFIG | {"base_url": serve(tmp_path).url})
    with caplog.at_level(logging.INFO, planning.__name__):
        files = download_pdebench("pdebench", config, local)
    assert list(files) == [f"1D_Advection_Sols_beta{beta}_first4.hdf5" for beta in (0.1, 0.4)]
    assert "download plan: 2 files" in caplog.text
    datasets = find_datasets(local, list(files))
    splits = split(local, datasets, 0, 0.2, 0.2)
    assert all(len(indices) for kinds in splits.values() for indices in kinds.values())
    assert fit_normalization(local, datasets, splits, lambda count: None)["advection_1d"]["fields"]["u"]["std"] > 0


def test_other_sources_download_nothing(local):
    """The node does its work only for `source: pdebench`."""
    assert download_pdebench("simulate", DownloadConfig(**CONFIG), local) == {}
