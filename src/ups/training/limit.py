"""Running out of memory early: what is free, and a limit below it at which allocations fail."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Memory that this process could still get if it were alone: on its GPU, or on the machine and in its container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = psutil.virtual_memory().available
    limit, used = (CGROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


@contextmanager
def at_most(num_bytes: int, device: torch.device) -> Iterator[None]:
    """Within it an allocation fails, as one does where there is no memory, once `num_bytes` more are in use.

    On a CPU the limit is that on private writable memory (RLIMIT_DATA): a failed allocation is an error that can be
    caught, the kernel's choice of a process to kill is not.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        used = torch.cuda.memory_allocated(device)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (used + num_bytes) / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """Private writable memory of this process, in use or not, as the kernel counts it for RLIMIT_DATA (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
