"""Ranks of a job: process group, share of a batch, collectives; random numbers independent of the number of ranks."""

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ups.errors import Unsynchronised
from ups.files import read_json
from ups.runs.processes import GIGABYTE, matmul_rate, memory_bytes, now
from ups.runs.run import RANK_STORE, STARTED, Run

log = logging.getLogger(__name__)

MESSAGE_BYTES = (2**12, 2**18, 2**24)
SLOW_FACTOR = 3
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Ranks:
    """This process among the `world_size` processes of a job.

    `control` is a gloo group: flags that ranks exchange in every step must not wait for a GPU. `store` is where ranks
    meet.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @classmethod
    def join(cls, device: str, timeout_seconds: int) -> "Ranks":
        """Join the process group that torchrun describes in the environment: NCCL for tensors on GPUs, else gloo."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(place)
        if world_size == 1:
            return cls(rank, world_size, place)
        timeout, backend = timedelta(seconds=timeout_seconds), "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = _store(rank, world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout) if device == "cuda" else dist.group.WORLD
        return cls(rank, world_size, place, control, store)

    def share(self, size: int) -> slice:
        """This rank's contiguous share of `size` samples."""
        return slice(self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size)

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks, on every rank."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any rank has set it; the same on every rank."""
        if self.world_size == 1:
            return flags
        highest = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.control)
        return tuple(map(bool, highest))

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks (plain Python objects), on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 (a plain Python object), on every rank."""
        return self.all_gather(value)[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def wait_for_all(self, beat: Callable[[], object]) -> None:
        """Wait until every rank has called this, once in a job, however long it takes: a barrier has a time limit.

        `beat` is called all the while, to show that this rank has not hung.
        """
        if self.store is not None:
            names = [f"done.{rank}" for rank in range(self.world_size)]
            self.store.set(names[self.rank], "")
            while not self.store.check(names):
                beat()
                time.sleep(POLL_SECONDS)
            self.barrier()  # rank 0 has the store, and must not end while others still ask it


def with_agreed_memory(run: Run, ranks: Ranks) -> Run:
    """`run` with a `launch.memory_gigabytes` that is the same on all ranks, so that they cut batches alike.

    Where none is set it is the least of what the ranks may use now. A job that resumes on the same processes, with the
    same `launch.memory_fraction`, keeps that of its first start: other micro-batches would change its results by
    rounding.
    """
    launch, place = run.launch, memory_place(run, ranks)
    if launch.memory_gigabytes is not None:
        return run
    started = read_json(run.folder / STARTED) if (run.folder / STARTED).is_file() else {}
    sharing = 1 if run.device == "cuda" else launch.num_processes
    if place.items() <= started.items():
        own = started["memory_gigabytes"]
    else:
        own = memory_bytes(launch, ranks.device) * sharing / GIGABYTE
    return replace(run, launch=launch.model_copy(update={"memory_gigabytes": min(ranks.all_gather(own))}))


def memory_place(run: Run, ranks: Ranks) -> dict[str, Any]:
    """What the memory depends on that a job may use, as `started.json` has it."""
    return {"world_size": ranks.world_size, "device": run.device, "memory_fraction": run.launch.memory_fraction}


def check_ranks(ranks: Ranks, precision: str) -> dict[str, Any]:
    """Check sums over all ranks, and measure how fast they compute and exchange; takes a fraction of a second.

    Returns:
        {"matmul_rates": operations per second of every rank in a matrix product, "all_reduce_gigabytes_per_second":
        {bytes: rate of the slowest rank}}; a rank of less than the median rate by SLOW_FACTOR is named in the log.

    Raises:
        Unsynchronised: a sum over all ranks is wrong on some of them.
    """
    rates = ranks.all_gather(matmul_rate(ranks.device, precision))
    slow = [f"rank {rank}" for rank, rate in enumerate(rates) if rate * SLOW_FACTOR < median(rates)]
    if slow and ranks.rank == 0:
        log.warning("%s computes less than 1/%d of the median of all ranks", ", ".join(slow), SLOW_FACTOR)
    bandwidths = {}
    for size in MESSAGE_BYTES if ranks.world_size > 1 else ():
        value = torch.full((size // 4,), float(ranks.rank + 1), device=ranks.device)
        ranks.all_reduce(value)  # connects the ranks
        ranks.barrier()
        started = now(ranks.device)
        total = ranks.all_reduce(value)
        seconds = now(ranks.device) - started
        expected = ranks.world_size * (ranks.world_size + 1) / 2
        found = ranks.all_gather((seconds, bool((total == expected).all())))
        if wrong := [str(rank) for rank, (_, right) in enumerate(found) if not right]:
            raise Unsynchronised(
                f"a sum of {size} bytes over {ranks.world_size} ranks is wrong on rank {', '.join(wrong)}"
            )
        bandwidths[size] = size / 1e9 / max(seconds for seconds, _ in found)
    return {"matmul_rates": rates, "all_reduce_gigabytes_per_second": bandwidths}


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Where ranks exchange the addresses of their connections: a file on a single node, rank 0's port on several.

    The default of torch listens on all addresses; here rank 0 listens on the one that torchrun has given it.
    """
    if RANK_STORE in os.environ:
        store = dist.FileStore(os.environ[RANK_STORE], world_size)
        store.set_timeout(timeout)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        return dist.TCPStore(address, port, world_size, timeout=timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family).detach()
    return dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended or is silent; gloo shows this in its message only."""
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "Socket")
    is_gloo = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_gloo or isinstance(error, dist.DistError)


def seed_of(parts: tuple[int, ...]) -> int:
    """One seed for torch from several numbers, hashed: neighbouring numbers give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


class Draw:
    """Random numbers of one step, generated for the global batch; each rank keeps those of its share.

    So a sample gets the same noise for any number of processes. `seed` holds the seed, the purpose and the step,
    `size` is the number of samples B of the global batch, `share` this rank's; `step` is None in validation.
    """

    def __init__(
        self, seed: tuple[int, ...], size: int, share: slice, device: torch.device, step: int | None = None
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed_of(seed))
        self.seed, self.size, self.share, self.device, self.step = seed, size, share, device, step

    def one_of(self, count: int) -> int:
        """A uniform integer in [0, count), the same for all samples on all ranks; made by NumPy, without a GPU sync."""
        return int(np.random.default_rng(self.seed).integers(count))

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (B, *shape) for this rank's B samples."""
        return torch.randn(self.size, *shape, generator=self.generator, device=self.device)[self.share]

    def keep(self, drop_path: float, num_blocks: int) -> Tensor:
        """Factors of stochastic depth, (B, num_blocks): 0 with probability `drop_path`, else 1 / (1 - drop_path)."""
        uniform = torch.rand(self.size, num_blocks, generator=self.generator, device=self.device)[self.share]
        return (uniform >= drop_path) / (1 - drop_path)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform integers in [1, high], (B, *shape) for this rank's B samples."""
        return torch.randint(1, high + 1, (self.size, *shape), generator=self.generator, device=self.device)[self.share]
