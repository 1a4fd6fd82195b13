"""What it means to be out of memory, on a GPU or a CPU."""

import torch

WORDS = ("DefaultCPUAllocator", "could not create a primitive")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: `torch.OutOfMemoryError`, or the RuntimeError of the CPU allocator or oneDNN."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in WORDS)
