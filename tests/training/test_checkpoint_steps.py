"""Saves that fail, steps of many digits, and files that somebody has deleted or altered."""

import logging
import threading
from pathlib import Path

import pytest

from ups.errors import StorageFault
from ups.training.checkpoints import Checkpoints


def test_failure_is_known_before_it_is_raised(tmp_path: Path):
    """A save has not failed before it has begun, nor when it succeeds; one that fails has, until `wait` tells why."""

    def full(point: str, step: int) -> None:
        if (point, step) == ("write", 8):
            raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, 2, full)
    found = [checkpoints.failed()]
    for step in (4, 8):
        checkpoints.save(step, {"step": step})
        checkpoints._pending.exception()  # waits
        found.append(checkpoints.failed())
    with pytest.raises(StorageFault):
        checkpoints.wait()
    assert [*found, checkpoints.failed()] == [False, False, True, False]


def test_a_running_save_has_not_failed(tmp_path: Path):
    """Whether a save fails is not waited for."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(point: str, step: int) -> None:
        begun.set()
        assert go_on.wait(60)

    checkpoints = Checkpoints(tmp_path, 2, hold)
    checkpoints.save(4, {"step": 4})
    assert begun.wait(60) and not checkpoints.failed()
    go_on.set()
    checkpoints.wait()


def test_steps_of_eight_digits(tmp_path: Path):
    """Names hold all digits of a step."""
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(12_345_678, {"step": 12_345_678})
    checkpoints.wait()
    assert checkpoints.steps() == [12_345_678]


def test_a_deleted_state_can_be_removed(tmp_path: Path):
    """An old manifest whose state somebody has deleted goes like others."""
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(4, {"step": 4})
    checkpoints.wait()
    (tmp_path / "step_00000004.pt").unlink()
    checkpoints.save(8, {"step": 8})
    checkpoints.wait()
    assert checkpoints.steps() == [8]


def test_refusals_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The log names the altered checkpoint and what is wrong with it."""
    caplog.set_level(logging.WARNING, "ups")
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (4, 8):
        checkpoints.save(step, {"step": step})
    checkpoints.wait()
    path = tmp_path / "step_00000008.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert checkpoints.newest()[0] == 4
    assert caplog.messages == [
        f"checkpoint refused: {path} was altered: its SHA-256 is not that of its manifest",
    ]
