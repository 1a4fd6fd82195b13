"""Progress of a long step: a bar in a terminal, a line every 15 s in a log file."""

import logging
import time
from threading import Lock
from types import TracebackType

from rich import get_console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


class ProgressBar:
    """Progress of one step towards `total` units; a context manager."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.started, self.last_line = 0, time.monotonic(), time.monotonic()
        self.first: int | None = None  # units done before this process, excluded from the rate
        self._bar: Progress | None = None

    def __enter__(self) -> "ProgressBar":
        if get_console().is_terminal:
            columns = (MofNCompleteColumn(), TextColumn(self.unit), TimeElapsedColumn(), TextColumn("left"))
            text = TextColumn("{task.description:<34}")
            self._bar = Progress(text, BarColumn(), *columns, TimeRemainingColumn(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """`count` more units are done."""
        self.reach(self.done + count)

    def reach(self, done: int, note: str = "") -> None:
        """`done` units are done in all; `note` is shown beside them, for example the loss."""
        if self.first is None:
            self.first, self.started = done, time.monotonic()
        self.done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self.name} {note}".strip())
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            log.info("%s: %d of %d %s, %s left %s", self.name, done, self.total, self.unit, self._left(), note)

    def _left(self) -> str:
        done = self.done - (self.first or 0)
        if done <= 0:
            return "?"
        seconds = (time.monotonic() - self.started) / done * (self.total - self.done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TransferBars:
    """A bar with rate and time left for every file of a download; in a log file one line for all of them every 15 s.

    A context manager; threads may advance different files at once.
    """

    def __init__(self, sizes: dict[str, int | None]) -> None:
        self.sizes = sizes
        self._lock = Lock()
        self._total = ProgressBar("download", sum(size or 0 for size in sizes.values()), "bytes")
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "TransferBars":
        if get_console().is_terminal:
            columns = (DownloadColumn(), TransferSpeedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bars = Progress(TextColumn("{task.description:<60}"), BarColumn(20), *columns, transient=True)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, name: str, count: int) -> None:
        """`count` more bytes of a file have arrived; a negative count where it has to start again."""
        with self._lock:
            if self._bars is None:
                self._total.advance(count)
                return
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=self.sizes[name])
            self._bars.update(self._tasks[name], advance=count)
