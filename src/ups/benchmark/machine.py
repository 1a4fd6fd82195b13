"""The machine that was measured, and what was measured on it."""

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

GIBIBYTE = 2**30


def describe_machine(device: str, threads: int, seed: int) -> dict[str, Any]:
    """CPU, cores, memory, GPU, versions, threads of a process, date, seed and the commit of the source."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / GIBIBYTE, 1),
        "gpu": _gpu() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "git": _commit(),
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _commit() -> str | None:
    """The commit that the source lies in, `-dirty` if it was changed; None outside a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None
