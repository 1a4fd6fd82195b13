"""Progress of a long step: a bar in a terminal, a line every 15 s in a log file."""

import logging
import time
from threading import Event, Lock
from typing import Self

from rich import get_console, progress

from ups.errors import Preempted

log = logging.getLogger(__name__)

INTERRUPTED = "interrupted; the same command resumes the step that was interrupted"
SECONDS_BETWEEN_LINES = 15.0
RATE_SECONDS = 3600.0  # over which the rate is averaged: one unit, such as a dataset, may take minutes

stop_requested = Event()
"""Set when this command shall end: by its signal handler or a failed step; threads receive no signals."""


def raise_if_stopped() -> None:
    """End the step that calls this.

    Raises:
        Preempted: the end of this command was requested.
    """
    if stop_requested.is_set():
        raise Preempted(INTERRUPTED)


class ProgressBar:
    """Progress of one step towards `total` units; a context manager.

    The time left follows from the `cost` that is done of all the cost, in any measure of work; None: every unit costs
    the same.
    """

    def __init__(self, name: str, total: int, unit: str, cost: float | None = None) -> None:
        self.name, self.total, self.unit, self.last_line = name, total, unit, time.monotonic()
        self.done = 0
        count = progress.TextColumn("{task.fields[done]}/{task.fields[of]}")
        columns = (count, progress.TextColumn(unit), progress.TimeElapsedColumn())
        self._bar = progress.Progress(
            progress.TextColumn("{task.description:<34}"),
            progress.BarColumn(),
            *(*columns, progress.TextColumn("left"), progress.TimeRemainingColumn()),
            **_in_terminal(),
            speed_estimate_period=RATE_SECONDS,
        )
        self._bar.add_task(name, total=total if cost is None else cost, done=0, of=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int, cost: float | None = None) -> None:
        """`count` more units are done, which were of this cost.

        Raises:
            Preempted: this command was interrupted while the step ran in a thread, which receives no signal.
        """
        raise_if_stopped()
        self._show(self.done + count, self._bar.tasks[0].completed + (count if cost is None else cost), "")

    def reach(self, done: int, note: str = "") -> None:
        """`done` units of equal cost are done in all; `note` is shown beside them, for example the loss."""
        self._show(done, done, note)

    def _show(self, done: int, cost: float, note: str) -> None:
        task, self.done = self._bar.tasks[0], done
        self._bar.update(task.id, completed=cost, done=done, description=f"{self.name} {note}".strip())
        if self._bar.disable and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            left = progress.TimeRemainingColumn(compact=True).render(task)
            log.info("%s: %d of %d %s, %s left%s", self.name, done, self.total, self.unit, left, note and f", {note}")


class TransferBars:
    """A bar with rate and time left for every file of a download; in a log file one line for all of them every 15 s.

    A context manager; threads may advance different files at once.
    """

    def __init__(self, sizes: dict[str, int | None]) -> None:
        self.sizes, self._lock = sizes, Lock()
        self._total = ProgressBar("download", sum(size or 0 for size in sizes.values()), "bytes")
        columns = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TextColumn("left"))
        text, bar = progress.TextColumn("{task.description:<60}"), progress.BarColumn(20)
        self._bars = progress.Progress(text, bar, *columns, progress.TimeRemainingColumn(), **_in_terminal())
        self._tasks: dict[str, progress.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def advance(self, name: str, count: int) -> None:
        """`count` more bytes of a file have arrived; a negative count where it has to start again.

        Raises:
            Preempted: as by `ProgressBar.advance`.
        """
        with self._lock:
            self._total.advance(count)
            if self._bars.disable:
                return
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=self.sizes[name])
            self._bars.update(self._tasks[name], advance=count)


def _in_terminal() -> dict[str, object]:
    """Options of bars that vanish at the end; outside a terminal nothing is shown, only the rate is measured."""
    return {"console": get_console(), "transient": True, "disable": not get_console().is_terminal}
