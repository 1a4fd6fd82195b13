"""Ranks: who takes part, which share of a batch is mine, what all of them agree on."""

import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` processes."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def join(cls, device: str, timeout_seconds: int) -> "Ranks":
        """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs."""
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

    def total(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()


class Draw:
    """Random numbers of one step: drawn for the global batch from (seed, step), of which each rank keeps its share.

    So a sample meets the same noise whatever the number of processes.
    """

    def __init__(self, seed: tuple[int, ...], size: int, share: slice, device: torch.device) -> None:
        state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
        self.generator = torch.Generator(device).manual_seed(state)
        self.size, self.share, self.device = size, share, device

    def normal(self, *shape: int) -> Tensor:
        """Unit normal numbers (B, *shape) for this rank's B samples."""
        return torch.randn(self.size, *shape, generator=self.generator, device=self.device)[self.share]

    def integers(self, high: int) -> Tensor:
        """Uniform integers in [1, high], one for each of this rank's samples."""
        return torch.randint(1, high + 1, (self.size,), generator=self.generator, device=self.device)[self.share]
