"""Injected faults, for tests: `UPS_FAULT=<kind>:rank<r>:step<s>`, several separated by commas.

Without `UPS_TESTING=1` nothing is ever injected. A fault happens once: a marker file in the run folder keeps it from
happening again in the restarted job.
"""

import errno
import logging
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

KINDS = {
    "step": ("sigkill", "sigterm", "sigstop", "raise", "slow"),
    "loss": ("nan", "spike"),
    "gradient": ("desync",),
    "forward": ("oom-forward",),
    "backward": ("oom-backward",),
    "data": ("stall-data",),
    "write": ("full-disk", "kill-before-write"),
    "written": ("kill-before-rename",),
    "renamed": ("kill-after-rename",),
    "committed": ("kill-before-purge",),
}
"""Point, the argument of `Injection.at` -> kinds of faults that happen there."""


@dataclass(frozen=True)
class Injection:
    """The faults of one rank, as pairs of kind and step."""

    folder: Path
    rank: int
    faults: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, folder: Path, rank: int) -> "Injection":
        """The faults that the environment asks for; none unless `UPS_TESTING=1`."""
        text = os.environ.get("UPS_FAULT", "") if os.environ.get("UPS_TESTING") == "1" else ""
        found = []
        for word in filter(None, text.split(",")):
            match = re.fullmatch(r"([a-z-]+):rank(\d+|\*):step(\d+)", word)
            assert match is not None and any(match[1] in kinds for kinds in KINDS.values()), word
            if match[2] in ("*", str(rank)):
                found.append((match[1], int(match[3])))
        return cls(folder, rank, tuple(found))

    def at(self, point: str, step: int) -> str | None:
        """Cause the fault due at `point` in `step`; returns its kind: nan, spike and desync are left to the caller."""
        for kind, when in self.faults:
            marker = self.folder / f"injected.{kind}.rank{self.rank}.step{when}"
            if kind in KINDS[point] and step >= when and not marker.exists():
                marker.touch()
                log.warning("injected %s on rank %d in step %d", kind, self.rank, step)
                return _cause(kind)
        return None


def _cause(kind: str) -> str:
    if kind.startswith(("sig", "kill-")):
        os.kill(os.getpid(), signal.SIGKILL if kind.startswith("kill-") else signal.Signals[kind.upper()])
    if kind.startswith("oom-"):
        raise torch.OutOfMemoryError("injected: tried to allocate more than there is")
    if kind == "full-disk":
        raise OSError(errno.ENOSPC, "No space left on device (injected)")
    if kind == "raise":
        raise RuntimeError("injected error")
    if kind in ("slow", "stall-data"):
        time.sleep(3.0 if kind == "slow" else 3600.0)
    return kind
