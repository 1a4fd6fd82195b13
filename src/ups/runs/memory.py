"""The memory that a process may use, from which readers, models and metrics derive how much they hold at once."""

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ups.config import LaunchConfig

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
GIGABYTE = 10**9


def memory_bytes(launch: LaunchConfig, device: "torch.device") -> int:
    """Bytes that this process may use: `launch.memory_gigabytes`, or else `launch.memory_fraction` of what is free.

    On a CPU the processes of a node share the memory evenly; on CUDA each has that of its GPU.
    """
    sharing = 1 if device.type == "cuda" else launch.num_processes
    if launch.memory_gigabytes is not None:
        return int(launch.memory_gigabytes * GIGABYTE / sharing)
    return int(launch.memory_fraction * free_memory_bytes(device) / sharing)


def free_memory_bytes(device: "torch.device") -> int:
    """Free memory of this process's GPU, or of the machine and its container (cgroup), in bytes."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = psutil.virtual_memory().available
    limit, used = (CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free
