"""Faults: failures that a person, file or machine can cause; each ends `kedro run` with its exit code and one line."""

import difflib
from collections.abc import Iterable

SIMILARITY = 0.6  # of a name that is suggested, from 0 to 1
MAX_NAMES = 30  # in a message


def most_similar(name: str, known: Iterable[str], similarity: float) -> str | None:
    """The known name most like `name`; None where none is as similar to it, from 0 (not at all) to 1 (the same)."""
    return next(iter(difflib.get_close_matches(name, known, 1, similarity)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """How the message on an unknown name ends: with the known name most like it, or with the known ones."""
    known = list(known)
    if (near := most_similar(name, known, SIMILARITY)) is not None:
        return f", did you mean {near}?"
    rest = ["..."] if len(known) > MAX_NAMES else []
    return f"; known: {', '.join([*known[:MAX_NAMES], *rest]) or 'none'}"


def printable(text: str) -> str:
    """Text in which every character that cannot be printed, line breaks too, is replaced by its code."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Fault(Exception):
    """A failure with a known cause; its message is one line with what failed, where, and the remedy.

    Characters that a terminal may obey, such as an escape sequence in the name of a file, are replaced by their codes.
    `rank` is the training process that failed, `signal` the name of the signal that killed it.
    """

    exit_code, kind = 70, "internal"
    rank: int | None = None
    signal: str | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))

    @property
    def line(self) -> str:
        """`FAULT <code> <kind>: <what and remedy>`, with which a command ends."""
        return f"FAULT {self.exit_code} {self.kind}: {' '.join(str(self).split())}"


class ConfigFault(Fault, ValueError):
    """A parameter, option or folder name is wrong."""

    exit_code, kind = 2, "config"


class DataFault(Fault, ValueError):
    """A data file, cache or selection is missing, damaged or inconsistent."""

    exit_code, kind = 3, "data"


class Diverged(Fault):
    """A loss or gradient became NaN or infinite."""

    exit_code, kind = 4, "diverged"


class OutOfMemory(Fault):
    """A micro-batch of `tokens` tokens does not fit into memory."""

    exit_code, kind = 5, "out of memory"
    tokens: int = 0


class StorageFault(Fault):
    """A disk or storage is full or may not be written to."""

    exit_code, kind = 6, "storage"


class GateFailed(Fault):
    """The trained model does not meet its thresholds."""

    exit_code, kind = 7, "gate"


class Locked(Fault):
    """Another run works in the same folder."""

    exit_code, kind = 8, "locked"


class LostWorker(Fault):
    """A training process was killed, hangs, or lost its connection to the others."""

    exit_code, kind = 9, "lost worker"


class Unsynchronised(Fault):
    """Ranks have different gradients after they were averaged: a defect of this program."""

    exit_code, kind = 70, "unsynchronised"


class Preempted(Fault):
    """The run was asked to stop; the same command resumes it."""

    exit_code, kind = 75, "preempted"


KINDS = {kind.__name__: kind for kind in (Fault, *Fault.__subclasses__())}
"""Every kind of fault by the name of its class, under which processes report it to each other."""
