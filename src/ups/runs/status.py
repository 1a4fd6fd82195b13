"""Why a job has ended, and `status.json`: state, fault, restarts and checkpoints of a run folder.

Separate from `ups.runs.run`, which training imports: a change there trains every stage again.
"""

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from ups.errors import KINDS, Fault, LostWorker, OutOfMemory
from ups.files import read_json, write_json
from ups.runs.run import ALIVE, CHECKPOINTS, FAULTS, LOG, STARTED, STATUS

# A line of the summary that torchrun prints for each failed worker.
SUMMARY = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)")
WARNING = re.compile(r"^\S+ \S+ rank \d+ WARNING (.*)$", re.MULTILINE)  # in the format of `ups.training.process`
LOST_PEER = "LostPeer"
CONSEQUENCES = {"Fault": 1, "Preempted": 2}  # kinds of reports that count only if no rank has reported a known cause


@dataclass(frozen=True)
class Details:
    """What a fault has beside its message."""

    tokens: int = 0


@dataclass(frozen=True)
class Report:
    """Contents of the fault file of a rank."""

    kind: str
    what: str
    rank: int
    time: float
    details: Details = field(default_factory=Details)

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, LOST_PEER):
            raise ValueError("unknown kind of fault")


@dataclass(frozen=True)
class Started:
    """Contents of `started.json`: how the last training process of rank 0 began."""

    step: int = 0
    refused: list[str] = field(default_factory=list)
    eager_because: str | None = None


def warnings_in(log: Path, log_start: int) -> list[str]:
    """The warnings of a job's processes, whose output begins at an offset in bytes in the log; each of them once."""
    output = log.read_bytes()[log_start:].decode(errors="replace")
    return list(dict.fromkeys(WARNING.findall(output)))


def find_fault(folder: Path, world_size: int, returncode: int, log_start: int) -> Fault:
    """The fault that ended a job: one that a rank has reported, else a killed rank, else an unexplained loss.

    Of several reports the earliest with a known cause counts, else the earliest internal error, else a rank that got
    SIGTERM; a lost connection to another rank is never the cause. `log_start` is the offset in bytes at
    which the job's output begins in the log.
    """
    stage = folder.parent.name
    reports: list[Report] = sorted(
        (read_json(path, Report) for path in folder.glob(FAULTS)), key=lambda report: report.time
    )
    causes = [report for report in reports if report.kind != LOST_PEER]
    if causes:
        first = min(causes, key=lambda report: CONSEQUENCES.get(report.kind, 0))  # of equal kinds the earliest
        fault = KINDS[first.kind](first.what)
        fault.rank = first.rank
        if isinstance(fault, OutOfMemory):
            fault.tokens = first.details.tokens
        return fault
    output = (folder / LOG).read_bytes()[log_start:].decode(errors="replace")
    if not any(folder.glob(ALIVE)):
        if "RendezvousTimeoutError" in output or "RendezvousConnectionError" in output:
            return LostWorker(f"{stage}: the nodes did not find each other at launch.rendezvous; see {folder / LOG}")
        return Fault(f"{stage}: no training process could start (torchrun: {returncode}); see {folder / LOG}")
    exit_codes = {int(rank): int(code) for rank, code in SUMMARY.findall(output)}
    without_report = sorted(set(range(world_size)) - {report.rank for report in reports})
    if without_report and (reports or any(code < 0 for code in exit_codes.values())):
        return _killed(stage, folder, without_report, exit_codes)
    lost_peer = reports[0].what.partition("\n")[0] if reports else ""
    return LostWorker(
        f"{stage}: the job ended without a fault report (torchrun: {returncode}) {lost_peer}; its output is in "
        f"{folder / LOG}, the same command resumes from the last checkpoint"
    )


def _killed(stage: str, folder: Path, without_report: list[int], exit_codes: dict[int, int]) -> LostWorker:
    """The fault of a rank that a signal has ended: only that leaves no report; SIGKILL before any other signal."""
    killed = (rank for rank in without_report if exit_codes.get(rank, 0) == -signal.SIGKILL)
    rank = next(killed, without_report[0])
    name = signal.Signals(-exit_codes[rank]).name if exit_codes.get(rank, 0) < 0 else None
    hint = " (maybe by the kernel, for want of memory)" if name == "SIGKILL" else ""
    fault = LostWorker(
        f"{stage}: rank {rank} was killed by {name or 'an unknown signal'}{hint}; its output is in {folder / LOG}, the "
        "same command resumes from the last checkpoint"
    )
    fault.rank, fault.signal = rank, name
    return fault


def write_status(folder: Path, state: str, fault: Fault | None, restarts: list[str], tracking: str) -> None:
    """Write `status.json`.

    Args:
        folder: The run folder.
        state: running, finished, failed or preempted.
        fault: What ended the job, or the job before this restart.
        restarts: One line per restart: the fault before it.
        tracking: ok, degraded or off, see `ups.runs.tracking.StageRun`.
    """
    started: Started = read_json(folder / STARTED, Started) if (folder / STARTED).is_file() else Started()
    content = {
        "stage": folder.parent.name,
        "state": state,
        "code": fault.exit_code if fault else 0,
        "kind": fault.kind if fault else "ok",
        "what": str(fault) if fault else "",
        "rank": fault.rank if fault else None,
        "signal": fault.signal if fault else None,
        "resumed_at_step": started.step,
        "refused_checkpoints": started.refused,
        "eager_because": started.eager_because,
        "checkpoints": sorted(path.name for path in (folder / CHECKPOINTS).glob("step_*.pt")),
        "restarts": restarts,
        "tracking": tracking,
    }
    write_json(folder / STATUS, content)
