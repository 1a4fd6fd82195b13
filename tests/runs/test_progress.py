"""What a person sees while files arrive."""

import io
import logging

import pytest
from rich.console import Console

from ups.errors import Preempted
from ups.runs import progress
from ups.runs.progress import ProgressBar, TransferBars, stop_requested


def test_bars_in_a_terminal(monkeypatch: pytest.MonkeyPatch):
    """A bar per file with what has arrived, rate and time left."""
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr(progress, "get_console", lambda: screen)
    monkeypatch.setattr("rich.progress.get_console", lambda: screen)
    with TransferBars({"a.hdf5": 10_000_000, "b.hdf5": None}) as bars:
        bars.advance("a.hdf5", 5_000_000)
        bars.advance("b.hdf5", 1_000)
    shown = screen.file.getvalue()
    assert "a.hdf5" in shown and "b.hdf5" in shown and "5.0/10.0 MB" in shown


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Without a terminal a line now and then says how much of all files has arrived."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    with caplog.at_level(logging.INFO, progress.__name__), TransferBars({"a.hdf5": 100, "b.hdf5": 300}) as bars:
        bars.advance("a.hdf5", 100)
        bars.advance("b.hdf5", 100)
    assert "download: 200 of 400 bytes" in caplog.text


def test_time_left_follows_cost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """After nine cheap ones of ten trajectories 99 of 100 tokens are left: 198 seconds at half a token per second."""
    clock = [0.0]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    bar = progress.ProgressBar("evaluate", 10, "trajectories", cost=100.0)
    bar._bar.get_time = lambda: clock[0]
    bar._bar.reset(bar._bar.tasks[0].id)
    with caplog.at_level(logging.INFO, progress.__name__), bar:
        for count, cost, clock[0] in ((4, 0.5, 1.0), (5, 0.5, 2.0)):
            bar.advance(count, cost)
    assert "evaluate: 9 of 10 trajectories, 03:18 left" in caplog.text


@pytest.mark.parametrize("terminal", [False, True])
def test_an_interrupted_step_ends_at_its_next_advance(monkeypatch: pytest.MonkeyPatch, terminal: bool):
    """A step that runs in a thread receives no signal: it ends where it would show its progress."""
    screen = Console(file=io.StringIO(), force_terminal=terminal)
    monkeypatch.setattr(progress, "get_console", lambda: screen)
    with ProgressBar("report", 2, "datasets") as bar, TransferBars({"a.hdf5": 100}) as bars:
        bar.advance(1)
        bars.advance("a.hdf5", 50)
        stop_requested.set()
        try:
            with pytest.raises(Preempted, match="interrupted"):
                bar.advance(1)
            with pytest.raises(Preempted, match="interrupted"):
                bars.advance("a.hdf5", 50)
        finally:
            stop_requested.clear()
    assert bar.done == 1
