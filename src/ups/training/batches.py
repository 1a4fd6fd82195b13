"""Batches of one rank, read ahead by a thread: which samples, cut into micro-batches, never later than the step."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch.profiler import record_function

from ups.config import TrainingSection
from ups.data.loader import Batch, BatchSampler
from ups.errors import ConfigFault, LostWorker
from ups.run import Run
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage

AHEAD = 2


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass sees: a batch and its place among the samples of the global batch."""

    place: slice
    batch: Batch


@dataclass(frozen=True)
class Share:
    """This rank's share of the global batch of `size` samples of step `step`.

    `tokens` are those of the largest micro-batch; `seen` counts samples per dataset.
    """

    step: int
    key: str
    size: int
    tokens: int
    micro_batches: list[MicroBatch]
    seen: Counter[str]


class Batches:
    """The shares of one rank, step after step.

    Raises:
        ConfigFault: a global batch cannot be shared equally by all processes.
    """

    def __init__(self, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks, inject: Injection) -> None:
        self.stage, self.run, self.ranks, self.inject = stage, run, ranks, inject
        sizes = stage.batch_sizes(config)
        _check_shares(sizes, ranks.world_size)
        self.sampler = BatchSampler(stage.train, sizes, stage.weights(config), config.seed)
        self.next_step, self.last_step = 0, config.steps
        self._reader = ThreadPoolExecutor(1)
        self._ahead: deque[Future[Share]] = deque()

    @contextmanager
    def from_step(self, first: int) -> Iterator[None]:
        """Within it, `next` returns the shares of steps `first`, `first` + 1, ..."""
        self.next_step = first
        for _ in range(AHEAD):
            self._read_ahead()
        try:
            yield
        finally:
            self._reader.shutdown(wait=False, cancel_futures=True)

    @record_function("data")
    def next(self) -> Share:
        """The share of the next step.

        Raises:
            LostWorker: the files did not answer in half of `launch.timeout_seconds`, before somebody wonders.
        """
        seconds = self.run.launch.timeout_seconds / 2
        try:
            share = self._ahead.popleft().result(seconds)
        except TimeoutError:
            raise LostWorker(
                f"no data for {seconds:.0f} s: does the disk of {self.run.data_root} answer? the same command goes on"
            ) from None
        self._read_ahead()
        return share

    def read(self, step: int) -> Share:
        """Read the share of one step."""
        self.inject.at("data", step)
        key, samples = self.sampler.draw(step)
        mine = self.ranks.share(len(samples))
        places = self._places(key, mine)
        tokens = self.stage.num_tokens[key] * max(place.stop - place.start for place in places)
        micro_batches = [MicroBatch(place, self._load(key, samples[place])) for place in places]
        seen = Counter(self.stage.train.dataset(key, sample) for sample in samples[mine])
        return Share(step, key, len(samples), tokens, micro_batches, seen)

    def first_of_each_key(self, start: int) -> list[int]:
        """The steps in which a key comes for the first time, from step `start` on."""
        first: dict[str, int] = {}
        for step in itertools.count(start):
            first.setdefault(self.sampler.draw(step)[0], step)
            if len(first) == len(self.sampler.keys):
                break
        return list(first.values())

    def _read_ahead(self) -> None:
        if self.next_step < self.last_step:
            self._ahead.append(self._reader.submit(self.read, self.next_step))
            self.next_step += 1

    def _load(self, key: str, samples: np.ndarray) -> Batch:
        batch = self.stage.train.load(key, samples)
        return batch.pinned() if self.ranks.device.type == "cuda" else batch

    def _places(self, key: str, mine: slice) -> list[slice]:
        size, limit = mine.stop - mine.start, self.run.launch.micro_batch_tokens
        largest = size if limit is None else max(1, limit // self.stage.num_tokens[key])
        count = math.ceil(size / largest)
        edges = [mine.start + part * size // count for part in range(count + 1)]
        return [slice(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


def _check_shares(batch_sizes: dict[str, int], world_size: int) -> None:
    for key, size in batch_sizes.items():
        if size % world_size:
            raise ConfigFault(
                f"a batch of {size} snapshots of {key} cannot be shared equally by {world_size} processes: "
                f"make batch_multiple a multiple of {world_size}, or choose launch.num_processes to divide it"
            )
