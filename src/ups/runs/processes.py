"""A process of a job: it ends when its parent ends, and may use a part of the memory; clock and speed of its device.

Workers import this module before torch, so it imports little.
"""

import ctypes
import math
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

    from ups.config import LaunchConfig

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # of version 2
GIGABYTE = 10**9
OUT_OF_MEMORY_MESSAGES = (
    "OutOfMemoryError",
    "out of memory",
    "DefaultCPUAllocator",
    "could not create a primitive",  # of oneDNN
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)
MATMUL_SIZE, MATMUL_REPEATS = {"cpu": 512, "cuda": 8192}, 5  # milliseconds, yet near the peak of the device


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux): a killed launcher leaves no worker training."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    # The parent may have ended before the request was made: then no signal would ever come.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(9)


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, on top of what the next step may use."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python, in torch on a CPU or GPU, or in a library that torch calls."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    return any(message in f"{type(error).__name__}: {error}" for message in OUT_OF_MEMORY_MESSAGES)


def use_whole_float32() -> None:
    """Have convolutions on a GPU multiply in float32: by default torch rounds their operands to 11 bits (TF32).

    Products of matrices are not rounded by default, so that models of different layers would be compared in different
    precision.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False


def memory_bytes(launch: "LaunchConfig", device: "torch.device") -> int:
    """Bytes that this process may use: `launch.memory_gigabytes`, or else `launch.memory_fraction` of what is free.

    On a CPU the processes of a node share the memory evenly; on CUDA each has that of its GPU.
    """
    sharing = 1 if device.type == "cuda" else launch.num_processes
    if launch.memory_gigabytes is not None:
        return int(launch.memory_gigabytes * GIGABYTE / sharing)
    return int(launch.memory_fraction * free_memory_bytes(device) / sharing)


def free_memory_bytes(device: "torch.device") -> int:
    """Free memory of this process's GPU, or of the machine and the cgroups that limit this process, in bytes."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return max(0, min([psutil.virtual_memory().available, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    """Free bytes of each cgroup with a limit that holds this process: that of its container, of its Slurm job.

    Files in the page cache are counted as used, but the kernel drops them when memory is needed.
    """
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []
    own = CGROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        limit = group / "memory.max"
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(counts["active_file"]) + int(counts["inactive_file"])
            yield int(most) - int((group / "memory.current").read_text()) + cached


def now(device: "torch.device") -> float:
    """Seconds of a monotonic clock, after all work queued on the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul_rate(device: "torch.device", precision: str) -> float:
    """Floating-point operations per second of a large square matrix product, the best of MATMUL_REPEATS.

    `precision` is `float32`, else that of bfloat16. No model computes faster on this device, except in float8.
    """
    import torch

    size = MATMUL_SIZE[device.type]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)  # not the one that training draws from
    square = torch.randn(size, size, dtype=dtype, device=device, generator=generator)  # equal numbers would be faster
    best = math.inf
    for _ in range(1 + MATMUL_REPEATS):  # the first one also loads the library
        started = now(device)
        square @ square
        best = min(best, now(device) - started)
    del square
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best


def peak_memory_gigabytes(device: "torch.device") -> float:
    """Most memory that this process had so far: of tensors on a GPU, all of it on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / GIGABYTE
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIGABYTE


def energy_kilojoules(device: "torch.device") -> float | None:
    """Energy that this process's GPU has used since its driver was loaded.

    None on a CPU, without the package nvidia-ml-py or NVIDIA's library, and for a GPU that does not count it.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e6
    except pynvml.NVMLError:
        return None
