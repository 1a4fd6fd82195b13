"""Steps that are done once, resumed when interrupted and never worked on twice at a time."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ups.errors import DataFault, Locked, StorageFault
from ups.runs.stage_cache import RECEIPT, Receipt, cached_step, trained_receipts, untrained_receipt

IDENTITY = "0123456789abcdef"


class Work:
    """A step that writes `result.bin`, counts its calls and notes which files it found."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.found: list[set[str]] = []
        self.error = error

    def __call__(self, folder: Path) -> Receipt:
        self.found.append({path.name for path in folder.iterdir()} - {".lock"})
        (folder / "parts").mkdir(exist_ok=True)
        (folder / "parts" / "part.bin").write_bytes(b"half")
        if self.error is not None:
            raise self.error
        (folder / "result.bin").write_bytes(b"whole")
        return {"shape": (1, 2)}


def do(work: Work, root: Path, identity: str = IDENTITY, force: bool = False) -> Receipt:
    """Do the step `toy` below `root`."""
    return cached_step("toy", root / "steps", identity, work, root=root, force=force)


def test_receipt_describes_the_step(tmp_path: Path):
    """The receipt says step, fingerprint, relative path and result; the stored one has the size of every file too."""
    receipt = do(Work(), tmp_path)
    path = "steps/0123456789ab"
    sizes = {"parts/part.bin": 4, "result.bin": 5}
    assert receipt == {"step": "toy", "fingerprint": IDENTITY, "path": path, "shape": [1, 2]}
    assert json.loads((tmp_path / path / RECEIPT).read_text()) == receipt | {"files": sizes}


def test_second_call_does_no_work(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A finished step gives the same receipt without work, and says so."""
    caplog.set_level(logging.INFO, "ups")
    work = Work()
    assert do(work, tmp_path) == do(work, tmp_path)
    assert len(work.found) == 1
    assert "toy: up to date (0123456789ab)" in caplog.messages


def test_receipts_can_move(tmp_path: Path):
    """Nothing in a receipt depends on where the data are, so a moved root is still up to date."""
    receipt, work = do(Work(), tmp_path / "old"), Work()
    (tmp_path / "old").rename(tmp_path / "new")
    assert do(work, tmp_path / "new") == receipt
    assert work.found == []


def test_other_identity_is_other_folder(tmp_path: Path):
    """A changed step is done anew beside the old one, which is found again when the change is undone."""
    work = Work()
    old, new = do(work, tmp_path), do(work, tmp_path, "f" * 16)
    assert old["path"] != new["path"]
    assert do(work, tmp_path) == old
    assert work.found == [set(), set()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failed_work_leaves_no_receipt(tmp_path: Path, error: type[BaseException]):
    """A step that fails or is interrupted passes its error on and is not finished."""
    with pytest.raises(error):
        do(Work(error), tmp_path)
    assert not list(tmp_path.rglob(RECEIPT))


@pytest.mark.parametrize("force", [False, True])
def test_interrupted_work_goes_on(tmp_path: Path, force: bool):
    """The next call finds what the interrupted one left: the same command resumes, also one that does it again."""
    if force:
        do(Work(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        do(Work(KeyboardInterrupt), tmp_path, force=force)
    work = Work()
    do(work, tmp_path, force=force)
    assert work.found == [{"parts"}]


@pytest.mark.parametrize("name", ["result.bin", "parts/part.bin"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(b"x"), lambda path: path.open("ab").write(b"x")]
)
def test_damaged_artefact_is_done_again(tmp_path: Path, name: str, damage):
    """A lost, truncated or grown file makes the step start over in an empty folder."""
    work = Work()
    receipt = do(work, tmp_path)
    damage(tmp_path / receipt["path"] / name)
    assert do(work, tmp_path) == receipt
    assert work.found == [set(), set()]
    assert (tmp_path / receipt["path"] / name).read_bytes() == {"result.bin": b"whole", "parts/part.bin": b"half"}[name]


def test_force_does_it_again(tmp_path: Path):
    """A forced step starts over in an empty folder although it was finished."""
    work = Work()
    do(work, tmp_path)
    do(work, tmp_path, force=True)
    assert work.found == [set(), set()]


def test_folder_of_a_failed_work_is_free(tmp_path: Path):
    """The lock is released when the work fails, so the same process may try again."""
    with pytest.raises(ValueError):
        do(Work(ValueError), tmp_path)
    assert do(Work(), tmp_path)["fingerprint"] == IDENTITY


HOLDER = """
import sys
from pathlib import Path
from ups.runs.stage_cache import cached_step

def work(folder):
    sys.stdout.write("locked\\n")
    sys.stdout.flush()
    sys.stdin.readline()
    return {"by": "holder"}

root = Path(sys.argv[1])
cached_step("toy", root / "steps", sys.argv[2], work, root=root)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process in the middle of the same step; it finishes when it reads a line."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), IDENTITY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_two_processes_never_share_a_folder(tmp_path: Path, holder: subprocess.Popen):
    """A step that another process works on is refused at once, and the refusal names that process and the folder."""
    with pytest.raises(Locked, match=rf"toy: process {holder.pid} works in .*0123456789ab"):
        do(Work(), tmp_path)
    assert do(Work(), tmp_path, "f" * 16)["shape"] == [1, 2]


def test_finished_holder_leaves_its_receipt(tmp_path: Path, holder: subprocess.Popen):
    """Once the other process has finished, its receipt serves everybody."""
    holder.communicate("go on\n")
    work = Work()
    assert do(work, tmp_path)["by"] == "holder"
    assert work.found == []


def test_killed_holder_leaves_no_lock(tmp_path: Path, holder: subprocess.Popen):
    """A process that was killed does not lock the folder for ever."""
    holder.kill()
    holder.wait()
    assert do(Work(), tmp_path)["shape"] == [1, 2]


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_planted_lock_is_refused(tmp_path: Path, planted: str):
    """A link or pipe in the place of the lock ends in one line, and what it points to is unchanged."""
    victim, lock = tmp_path / "victim", tmp_path / "steps" / IDENTITY[:12] / ".lock"
    victim.write_text("mine")
    lock.parent.mkdir(parents=True)
    lock.symlink_to(victim) if planted == "link" else os.mkfifo(lock)
    with pytest.raises(StorageFault, match="lock is not a plain file .*; delete it and run again"):
        do(Work(), tmp_path)
    assert victim.read_text() == "mine"


WRONG_RECEIPTS = [
    {"step": "other"},
    {"fingerprint": "f" * 16},
    {"path": "../.."},
    {"path": 3},
    {"files": None},
    {"files": []},
]


@pytest.mark.parametrize("change", WRONG_RECEIPTS, ids=repr)
def test_a_receipt_of_something_else_is_refused(tmp_path: Path, change: Receipt):
    """A receipt with another step, key or path, or without sizes, ends in one line."""
    path = tmp_path / do(Work(), tmp_path)["path"] / RECEIPT
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataFault, match="is not the receipt of this step; delete .* and run again"):
        do(Work(), tmp_path)


def test_links_are_not_files_of_a_step(tmp_path: Path):
    """A step whose file has been replaced by a link is done again, and what the link points to stays."""
    path = tmp_path / do(Work(), tmp_path)["path"]
    (tmp_path / "victim").write_bytes(b"whole")
    (path / "result.bin").unlink()
    (path / "result.bin").symlink_to(tmp_path / "victim")
    (path / "folder").symlink_to(tmp_path)
    do(work := Work(), tmp_path)
    assert len(work.found) == 1 and (tmp_path / "victim").exists()


def test_a_finished_step_is_kept_unless_forced(tmp_path: Path):
    """Nobody has to say that a step should not be done again."""
    work = Work()
    for _ in range(2):
        cached_step("toy", tmp_path / "steps", IDENTITY, work, root=tmp_path)
    assert len(work.found) == 1


def test_a_step_tells_its_begin_and_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The log names step, folder and seconds."""
    caplog.set_level(logging.INFO, "ups")
    do(Work(), tmp_path)
    assert caplog.messages == ["toy: running (0123456789ab)", "toy: done in 0 s"]


def test_lost_files_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The log names the folder and the first three of the lost files."""

    def work(folder: Path) -> Receipt:
        for name in "abcd":
            (folder / name).write_text(name)
        return {}

    folder = tmp_path / "steps" / "0123456789ab"
    for _ in range(2):
        cached_step("toy", tmp_path / "steps", IDENTITY, work, root=tmp_path)
        for name in "abcd":
            (folder / name).unlink()
    assert f"{folder}: missing or of another size: a, b, c; the step is done again" in caplog.messages


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk is a fault that names the step's folder."""

    def full(path: Path, **how: bool) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageFault, match=f"^{tmp_path}/steps/0123456789ab: No space left on device"):
        do(Work(), tmp_path)


def test_untrained_stages_are_left_out():
    """A stage without datasets says which kind it lacks, and is not among the trained ones."""
    untrained, trained = untrained_receipt("steady", "there is no steady dataset"), {"stage": "operator"}
    assert untrained == {"stage": "steady", "untrained": "there is no steady dataset"}
    assert trained_receipts({"steady": untrained, "operator": trained}) == {"operator": trained}
