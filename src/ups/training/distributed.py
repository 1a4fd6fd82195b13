"""Ranks: who takes part, which share of a batch is mine, what all of them agree on."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` processes.

    `control` is a group on the CPU: what ranks agree on in every step never waits for a GPU.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: str, timeout_seconds: int) -> "Ranks":
        """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(place)
        if world_size == 1:
            return cls(rank, world_size, place)
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout) if device == "cuda" else dist.group.WORLD
        return cls(rank, world_size, place, control)

    def share(self, size: int) -> slice:
        """This rank's contiguous share of `size` samples."""
        return slice(self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size)

    def total(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def agree(self, *wishes: bool) -> tuple[bool, ...]:
        """Each wish as all ranks will act on it: granted if any rank has it."""
        if self.world_size == 1:
            return wishes
        flags = torch.tensor(wishes, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return tuple(bool(flag) for flag in flags)

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """The plain value of rank 0, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(group=self.control)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange failed because another rank is gone or does not answer; gloo says so in words alone."""
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "Socket")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def seed_of(parts: tuple[int, ...]) -> int:
    """One seed for torch from several numbers, as different as can be for neighbouring ones."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


class Draw:
    """Random numbers of one step: drawn for the global batch from (seed, step), of which each rank keeps its share.

    So a sample meets the same noise whatever the number of processes. `step` is the training step, None in validation.
    """

    def __init__(
        self, seed: tuple[int, ...], size: int, share: slice, device: torch.device, step: int | None = None
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed_of(seed))
        self.seed, self.size, self.share, self.device, self.step = seed, size, share, device, step

    def one_of(self, count: int) -> int:
        """A number below `count`, the same for all samples on all ranks, and no device is asked for it."""
        return int(np.random.default_rng(self.seed).integers(count))

    def normal(self, *shape: int) -> Tensor:
        """Unit normal numbers (B, *shape) for this rank's B samples."""
        return torch.randn(self.size, *shape, generator=self.generator, device=self.device)[self.share]

    def keep(self, drop_path: float, num_blocks: int) -> Tensor:
        """Per sample and block (B, num_blocks): 0 with probability `drop_path`, else 1 / (1 - drop_path)."""
        uniform = torch.rand(self.size, num_blocks, generator=self.generator, device=self.device)[self.share]
        return (uniform >= drop_path) / (1 - drop_path)

    def points(self, num_points: int, size: int) -> Tensor:
        """Numbers of `size` of `num_points` points, with repetition, for each of this rank's samples, (B, size)."""
        drawn = torch.randint(num_points, (self.size, size), generator=self.generator, device=self.device)
        return drawn[self.share]

    def integers(self, high: int) -> Tensor:
        """Uniform integers in [1, high], one for each of this rank's samples."""
        return torch.randint(1, high + 1, (self.size,), generator=self.generator, device=self.device)[self.share]
