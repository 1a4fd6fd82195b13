"""Faults: failures that a person, file or machine can cause; each ends `kedro run` with its exit code and one line."""


class Fault(Exception):
    """A failure with a known cause; its message is one line with what failed, where, and the remedy.

    `rank` is the training process that failed, `signal` the name of the signal that killed it.
    """

    exit_code = 70
    kind = "internal"
    rank: int | None = None
    signal: str | None = None


class ConfigFault(Fault, ValueError):
    """A parameter, option or folder name is wrong."""

    exit_code = 2
    kind = "config"


class DataFault(Fault, ValueError):
    """A data file, cache or selection is missing, damaged or inconsistent."""

    exit_code = 3
    kind = "data"


class Diverged(Fault):
    """A loss or gradient became NaN or infinite."""

    exit_code = 4
    kind = "diverged"


class OutOfMemory(Fault):
    """A micro-batch of `tokens` tokens does not fit into memory."""

    exit_code = 5
    kind = "out of memory"
    tokens: int = 0


class StorageFault(Fault):
    """A disk is full or may not be written to."""

    exit_code = 6
    kind = "storage"


class GateFailed(Fault):
    """The trained model does not meet its thresholds."""

    exit_code = 7
    kind = "gate"


class Locked(Fault):
    """Another run works in the same folder."""

    exit_code = 8
    kind = "locked"


class LostWorker(Fault):
    """A training process was killed, hangs, or lost its connection to the others."""

    exit_code = 9
    kind = "lost worker"


class Unsynchronised(Fault):
    """Ranks have different gradients after they were averaged: a defect of this program."""

    exit_code = 70
    kind = "unsynchronised"


class Preempted(Fault):
    """The run was asked to stop; the same command resumes it."""

    exit_code = 75
    kind = "preempted"
