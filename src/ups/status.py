"""How a job ended: what its ranks said, who said nothing, and `status.json`, which is the truth about a run folder."""

import re
import signal
from pathlib import Path
from typing import Any

from ups import errors
from ups.errors import Fault, LostWorker
from ups.files import read_json, write_json
from ups.run import ALIVE, CHECKPOINTS, FAULTS, LOG, STARTED, STATUS

SUMMARY = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)")


def fault_of(folder: Path, world_size: int, returncode: int, log_start: int) -> Fault:
    """Why a job has ended: a fault that a rank reported, else the ranks that were killed, else what went wrong inside.

    `log_start` is where the job's output begins in the log.
    """
    stage = folder.parent.name
    reports = sorted((read_json(path) for path in folder.glob(FAULTS)), key=lambda report: report["time"])
    known = [report for report in reports if report["kind"] not in ("LostPeer", "Fault", "Preempted")]
    internal = [report for report in reports if report["kind"] == "Fault"]
    preempted = [report for report in reports if report["kind"] == "Preempted"]
    for report in (known or internal or preempted)[:1]:
        fault: Fault = getattr(errors, report["kind"])(report["what"])
        fault.rank = report["rank"]
        vars(fault).update(report.get("details", {}))
        return fault
    output = (folder / LOG).read_bytes()[log_start:].decode(errors="replace")
    if not any(folder.glob(ALIVE)):
        if "RendezvousTimeoutError" in output or "RendezvousConnectionError" in output:
            return LostWorker(f"{stage}: the nodes did not meet at launch.rendezvous; see {folder / LOG}")
        return Fault(f"{stage}: no training process could start (torchrun: {returncode}); see {folder / LOG}")
    codes = {int(rank): int(code) for rank, code in SUMMARY.findall(output)}
    silent = sorted(set(range(world_size)) - {report["rank"] for report in reports})
    if not silent or not (reports or any(code < 0 for code in codes.values())):
        said = "; ".join(report["what"].splitlines()[0] for report in reports[:1])
        return LostWorker(
            f"{stage}: the job ended without a word (torchrun: {returncode}) {said}; its output is in {folder / LOG}, "
            "the same command goes on from the last checkpoint"
        )
    return _killed(stage, folder, silent, codes)


def _killed(stage: str, folder: Path, silent: list[int], codes: dict[int, int]) -> LostWorker:
    rank = next((rank for rank in silent if codes.get(rank, 0) == -signal.SIGKILL), silent[0])
    name = signal.Signals(-codes[rank]).name if codes.get(rank, 0) < 0 else None
    hint = " (maybe by the kernel, for want of memory)" if name == "SIGKILL" else ""
    fault = LostWorker(
        f"{stage}: rank {rank} was killed by {name or 'something unknown'}{hint}; its output is in {folder / LOG}, the "
        "same command goes on from the last checkpoint"
    )
    fault.rank, fault.signal = rank, name
    return fault


def write_status(folder: Path, state: str, fault: Fault | None, restarts: list[str], tracking: str) -> None:
    """Write `status.json`: state (running, finished, failed, preempted), fault, restarts, checkpoints, tracking."""
    started: dict[str, Any] = read_json(folder / STARTED) if (folder / STARTED).is_file() else {}
    checkpoints = sorted(path.name for path in (folder / CHECKPOINTS).glob("step_*.pt"))
    content = {
        "stage": folder.parent.name,
        "state": state,
        "code": fault.exit_code if fault else 0,
        "kind": fault.kind if fault else "ok",
        "what": str(fault) if fault else "",
        "rank": fault.rank if fault else None,
        "signal": fault.signal if fault else None,
        "resumed_at_step": started.get("step", 0),
        "refused_checkpoints": started.get("refused", []),
        "eager_because": started.get("eager_because"),
        "checkpoints": checkpoints,
        "restarts": restarts,
        "tracking": tracking,
    }
    write_json(folder / STATUS, content)
