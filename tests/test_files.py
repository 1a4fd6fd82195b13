"""Files that are whole or absent."""

import hashlib
import math
import os
import resource
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ups import files
from ups.errors import DataFault, StorageFault
from ups.files import (
    allow_open_files,
    digest_of,
    from_here,
    place_of,
    plain,
    private_lock,
    publish,
    read_json,
    read_manifest,
    write_json,
)
from ups.models.weights import load


def test_published_file_replaces_the_old_one(tmp_path: Path):
    """What was written under the temporary name becomes the file, and folders are made as needed."""
    path = tmp_path / "a" / "b" / "result.txt"
    for content in ("old", "new"):
        with publish(path) as temporary:
            temporary.write_text(content)
            assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failure_leaves_the_old_file(tmp_path: Path, error: type[BaseException]):
    """A write that fails half way leaves the old content and no temporary file."""
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(error), publish(path) as temporary:
        temporary.write_text("hal")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_appears_before_the_end(tmp_path: Path):
    """Readers never see a file that is still being written."""
    path = tmp_path / "result.txt"
    with publish(path) as temporary:
        temporary.write_text("hal")
        assert not path.exists()
    assert path.exists()


def test_json_round_trip(tmp_path: Path):
    """What is written is what is read, to the last digit."""
    content = {"a": [1, 0.1 + 0.2, None, True], "µ": {"b": "ü"}, "tiny": 5e-324}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_write_json_refuses_what_json_lacks(tmp_path: Path, value: float):
    """NaN and infinity are refused and the old file stays."""
    path = tmp_path / "a.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": [value]})
    assert read_json(path) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", '{"a": 1', "{'a': 1}", '{"a": 1} }', "\xff"])
def test_read_json_names_the_damaged_file(tmp_path: Path, text: str):
    """A file that is not JSON is a data fault with its path and the remedy."""
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFault, match=r"broken\.json is not valid JSON .*delete it and run again"):
        read_json(path)


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
@pytest.mark.parametrize("size", [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 2**20])
def test_digest_of(tmp_path: Path, algorithm: str, size: int):
    """The digest is that of the whole content, whether it fills its last block or not."""
    path, content = tmp_path / "data.bin", bytes(range(256)) * (size // 256) + bytes(size % 256)
    path.write_bytes(content)
    assert digest_of(path, algorithm) == hashlib.new(algorithm, content).hexdigest()


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even a link under the right temporary name ends in a fault, and what it points to is unchanged."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0")
    (tmp_path / ".a.json.0.tmp").symlink_to(victim)
    with pytest.raises(StorageFault):
        write_json(tmp_path / "a.json", 1)
    assert victim.read_text() == "mine"


def test_temporary_names_cannot_be_foreseen(tmp_path: Path):
    """Two writes of one process to one file have different temporary names."""
    with publish(tmp_path / "a") as first, publish(tmp_path / "a") as second:
        assert first != second


def test_modes_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file is the user's alone while it is written, then it has the mode that the umask gives."""
    monkeypatch.setattr(files, "UMASK", 0o027)
    with publish(tmp_path / "a") as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def make_fifo(path: Path) -> None:
    """A pipe: to open it for reading would wait for a writer."""
    os.mkfifo(path)


def link_to_null(path: Path) -> None:
    """A device behind a link."""
    path.symlink_to("/dev/zero")


SPECIAL = pytest.mark.parametrize("make", [make_fifo, link_to_null, Path.mkdir])


@SPECIAL
@pytest.mark.parametrize("read", [read_json, digest_of, load])
def test_only_plain_files_are_read(tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path], object]):
    """A pipe, device or folder in the place of a file is a fault at once."""
    make(tmp_path / "x")
    with pytest.raises(DataFault, match="x is not a plain file but a link, pipe, device or folder"):
        read(tmp_path / "x")


@SPECIAL
def test_only_plain_files_are_written(tmp_path: Path, make: Callable[[Path], None]):
    """Neither a log nor a lock is opened where a pipe, device or folder is."""
    make(tmp_path / "x")
    with pytest.raises(StorageFault, match="not a plain file"):
        os.close(plain(tmp_path / "x", os.O_WRONLY | os.O_CREAT))
    with pytest.raises(StorageFault, match="not a plain file"):
        private_lock(tmp_path / "x")


def test_links_are_followed_only_to_read(tmp_path: Path):
    """A link to a data file serves a reader; nothing is written through it."""
    write_json(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    assert read_json(tmp_path / "link") == 1
    with pytest.raises(StorageFault, match="not a plain file"):
        os.close(plain(tmp_path / "link", os.O_WRONLY | os.O_TRUNC))
    assert read_json(tmp_path / "real") == 1


def test_deeply_nested_json_is_damaged(tmp_path: Path):
    """JSON that would exhaust the stack is a fault that names the file."""
    (tmp_path / "x").write_text("[" * 100_000)
    with pytest.raises(DataFault, match="is not valid JSON"):
        read_json(tmp_path / "x")


HOSTILE_PATHS = (3, "..", "/etc", "../x", "a/../../x", "-a", "a\x1b")
HOSTILE_RECEIPTS = [None, [], {}, *({"path": path} for path in HOSTILE_PATHS)]


@pytest.mark.parametrize("receipt", HOSTILE_RECEIPTS, ids=repr)
def test_receipts_lead_nowhere_else(tmp_path: Path, receipt: object):
    """A receipt without a path of plain names below the root is a fault."""
    with pytest.raises(DataFault, match="delete its JSON file and run again"):
        place_of(tmp_path, receipt)


def test_receipts_do_not_lead_out_by_a_link(tmp_path: Path):
    """A link out of the root is a fault, one within it is not."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "within").symlink_to("a")
    (tmp_path / "root" / "out").symlink_to("..")
    assert place_of(tmp_path / "root", {"path": "within"}) == tmp_path / "root" / "within"
    with pytest.raises(DataFault, match="leads out of"):
        place_of(tmp_path / "root", {"path": "out/x"})


@pytest.mark.parametrize("content", [None, [], {}, {"sha256": "0" * 64}, {"sha256": "0" * 63, "bytes": 1}])
def test_manifests_are_checked(tmp_path: Path, content: object):
    """JSON that is not a manifest is a fault that names the file."""
    write_json(tmp_path / "weights.pt.json", content)
    with pytest.raises(DataFault, match="is not the manifest of weights.pt; delete it and run again"):
        read_manifest(tmp_path / "weights.pt")


def test_paths_are_shown_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path below it is short; any other is whole."""
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "data" / "report.html") == Path("data/report.html")
    assert from_here(tmp_path.parent / "report.html") == tmp_path.parent / "report.html"


def test_a_place_on_s3_survives_a_move(tmp_path: Path):
    """A place on S3 is the same from every folder; one on a disk is found from its folder."""
    for place in (Path("s3://bucket/raw"), tmp_path / "raw"):
        assert files.resolved(files.relative(place, tmp_path / "a/b"), tmp_path / "a/b") == place
    assert files.relative(tmp_path / "raw", tmp_path / "a") == "../raw"


def test_a_process_may_open_many_files():
    """The usual limit of 1024 is raised as far as the system allows, and a higher one is left alone."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_open_files()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert allowed == (8192 if hard == resource.RLIM_INFINITY else min(hard, 8192))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == max(soft, allowed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
