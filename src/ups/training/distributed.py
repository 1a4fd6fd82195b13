"""Ranks: who takes part, which share of a batch is mine, what all of them agree on."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux), so that no worker outlives its launcher."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(9)


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` processes."""

    rank: int
    world_size: int
    device: "torch.device"

    @classmethod
    def join(cls, device: str, timeout_seconds: int) -> "Ranks":
        """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs."""
        import torch
        import torch.distributed as dist

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(place)
        if world_size > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        return cls(rank, world_size, place)

    def share(self, size: int) -> slice:
        """This rank's contiguous share of a global batch of `size` samples."""
        return slice(self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size)

    def total(self, value: "torch.Tensor") -> "torch.Tensor":
        """The sum of `value` over all ranks."""
        if self.world_size > 1:
            import torch.distributed as dist

            value = value.clone()
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


class Draw:
    """Random numbers of one step: drawn for the global batch from (seed, step), of which each rank keeps its share.

    So a sample meets the same noise whatever the number of processes.
    """

    def __init__(self, seed: tuple[int, ...], size: int, share: slice, device: "torch.device") -> None:
        import numpy as np
        import torch

        state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
        self.generator = torch.Generator(device).manual_seed(state)
        self.size, self.share, self.device = size, share, device

    def normal(self, *shape: int) -> "torch.Tensor":
        """Unit normal numbers (B, *shape) for this rank's B samples."""
        import torch

        return torch.randn(self.size, *shape, generator=self.generator, device=self.device)[self.share]

    def integers(self, high: int) -> "torch.Tensor":
        """Uniform integers in [1, high], one for each of this rank's samples."""
        import torch

        return torch.randint(1, high + 1, (self.size,), generator=self.generator, device=self.device)[self.share]
