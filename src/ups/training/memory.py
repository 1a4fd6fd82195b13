"""What it means to be out of memory, on a GPU or a CPU."""

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: `torch.OutOfMemoryError`, or the CPU allocator's plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
