"""How a command ends: with the exit code and the line of what went wrong."""

import errno
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kedro.io import DatasetError

from ups.errors import DataFault, Preempted
from ups.hooks import FaultExit, TrackingHooks
from ups.runs import tracking


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """An error as it arrives from a pipeline: raised, for the reason that Kedro has wrapped."""
    try:
        raise error from cause
    except type(error) as arrived:
        return arrived


def end(error: Exception, monkeypatch: pytest.MonkeyPatch) -> FaultExit:
    """How a command ends whose pipeline raised this error; its run is FAILED."""
    closed: list[str] = []
    monkeypatch.setattr(tracking, "close_run", closed.append)
    with pytest.raises(FaultExit) as caught:
        TrackingHooks().on_pipeline_error(error)
    assert closed == ["FAILED"]
    assert caught.value.__cause__ is error
    return caught.value


def test_a_fault_ends_in_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A fault that Kedro has wrapped ends the command with its own exit code, one line and no traceback."""
    ending = end(raised(DatasetError("cannot load"), DataFault("no such\nfolder")), monkeypatch)
    assert (ending.exit_code, ending.message) == (3, "FAULT 3 data: no such folder")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["/full/disk", None])
def test_a_full_disk_is_no_defect(name: str | None, monkeypatch: pytest.MonkeyPatch):
    """A disk that is full or closed ends the command with exit code 6, wherever it was written to."""
    full = OSError(errno.ENOSPC, "full", name)
    for error in (raised(full), raised(DatasetError("cannot save"), full)):
        ending = end(error, monkeypatch)
        assert ending.exit_code == 6
        assert ending.message.startswith(f"FAULT 6 storage: {name or 'a file'}: No space left on device; ")


def refuse(_: int) -> None:
    """Python's own error, which says nothing."""
    raise MemoryError


@pytest.mark.parametrize("allocate", [torch.empty, np.empty, refuse])
def test_memory_run_out_is_no_defect(allocate: Callable[[int], object], monkeypatch: pytest.MonkeyPatch):
    """An evaluation that gets no memory ends the command with exit code 5 and says which parameters to lower."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(1 << 58)
    ending = end(caught.value, monkeypatch)
    assert ending.exit_code == 5
    assert ending.message.startswith("FAULT 5 out of memory: ")
    assert "lower `batch_tokens`" in ending.message


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by\nzero"), FileNotFoundError(errno.ENOENT, "gone"), DatasetError("odd")]
)
def test_a_defect_ends_with_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What nobody but us can have caused ends the command with exit code 70 and one line below the traceback."""
    ending = end(raised(error), monkeypatch)
    assert ending.exit_code == 70
    assert ending.message.startswith(f"FAULT 70 internal: {type(error).__name__}: ")
    assert "(test_hooks.py:" in ending.message and "\n" not in ending.message
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_a_run_that_was_asked_to_stop_is_killed_and_not_failed(monkeypatch: pytest.MonkeyPatch):
    """It ends with exit code 75, and MLflow shows that nothing was wrong with it."""
    closed: list[str] = []
    monkeypatch.setattr(tracking, "close_run", closed.append)
    with pytest.raises(FaultExit) as caught:
        TrackingHooks().on_pipeline_error(raised(Preempted("stopped at step 3")))
    assert closed == ["KILLED"] and caught.value.exit_code == 75
