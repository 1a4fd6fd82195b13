"""Training batches of one rank: which samples, read ahead by a thread, cut into micro-batches."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch.profiler import record_function

from ups.config.training import TrainingSection
from ups.data.samples import Batch
from ups.errors import ConfigFault, LostWorker, OutOfMemory
from ups.runs.run import Run
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Samples, Stage

NUM_READ_AHEAD = 2


class BatchSampler:
    """The samples of batch `step`: one key per batch, sampled in proportion to `weights`; samples with replacement.

    Everything is a function of (seed, step), so that it is the same for any number of ranks and after a restart.
    """

    def __init__(self, samples: Samples, batch_sizes: dict[str, int], weights: dict[str, float], seed: int) -> None:
        self.samples, self.batch_sizes, self.seed = samples, batch_sizes, seed
        self.keys = sorted(samples.num_samples)
        total = sum(weights[key] for key in self.keys)
        self.probabilities = np.array([weights[key] / total for key in self.keys])

    def draw(self, step: int) -> tuple[str, np.ndarray]:
        """Key and sample indices (B,) of batch `step`."""
        rng = np.random.default_rng((self.seed, step))
        key = self.keys[rng.choice(len(self.keys), p=self.probabilities)]
        return key, self.samples.draw(key, self.batch_sizes[key], rng)


@dataclass(frozen=True)
class MicroBatch:
    """The batch of one forward and backward pass, and its slice of the samples of the global batch."""

    place: slice
    batch: Batch


@dataclass(frozen=True)
class Share:
    """This rank's share of the global batch of `size` samples in step `step`.

    `tokens` counts the tokens of the largest micro-batch, `seen` the samples per dataset.
    """

    step: int
    key: str
    size: int
    tokens: int
    micro_batches: list[MicroBatch]
    seen: Counter[str]

    def too_large(self, problem: str) -> OutOfMemory:
        """The fault of a share that does not fit into memory; from its `tokens` the launcher derives smaller ones."""
        fault = OutOfMemory(f"{problem}; set launch.micro_batch_tokens below that")
        fault.tokens = self.tokens
        return fault


class Batches:
    """One rank's shares, read ahead by a thread; raises `ConfigFault` if processes cannot share a batch equally."""

    def __init__(self, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks, inject: Injection) -> None:
        self.stage, self.run, self.ranks, self.inject = stage, run, ranks, inject
        sizes = stage.batch_sizes(config)
        for key, size in sizes.items():
            if size % ranks.world_size:
                raise ConfigFault(
                    f"a batch of {size} snapshots of {key} cannot be shared equally by {ranks.world_size} processes: "
                    f"make batch_multiple a multiple of {ranks.world_size}, or choose launch.num_processes to divide it"
                )
        self.sampler = BatchSampler(stage.train, sizes, stage.weights(config), config.seed)
        self.next_step, self.last_step = 0, config.steps
        self._reader = ThreadPoolExecutor(1)
        self._ahead: deque[Future[Share]] = deque()

    @contextmanager
    def from_step(self, first: int) -> Iterator[None]:
        """Within this context `next` returns the shares of steps `first`, `first` + 1, ..."""
        self.next_step = first
        for _ in range(NUM_READ_AHEAD):
            self._read_ahead()
        try:
            yield
        finally:
            self._reader.shutdown(wait=False, cancel_futures=True)

    @record_function("data")
    def next(self) -> Share:
        """The next share; `LostWorker` after half of `launch.timeout_seconds`, before the launcher ends the job."""
        seconds = self.run.launch.timeout_seconds / 2
        try:
            share = self._ahead.popleft().result(seconds)
        except TimeoutError:
            raise LostWorker(
                f"no data for {seconds:.0f} s: check the disk of {self.run.data_root}, then run the same command again"
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
        loaded = [self.stage.train.load(key, samples[place]) for place in places]
        if self.ranks.device.type == "cuda":
            loaded = [batch.pinned() for batch in loaded]
        seen = Counter(self.stage.train.dataset(key, sample) for sample in samples[mine])
        return Share(step, key, len(samples), tokens, list(map(MicroBatch, places, loaded)), seen)

    def first_of_each_key(self, start: int) -> list[int]:
        """For each key the first step at or after `start` in which it is sampled."""
        first: dict[str, int] = {}
        for step in itertools.takewhile(lambda _: len(first) < len(self.sampler.keys), itertools.count(start)):
            first.setdefault(self.sampler.draw(step)[0], step)
        return list(first.values())

    def _read_ahead(self) -> None:
        if self.next_step < self.last_step:
            self._ahead.append(self._reader.submit(self.read, self.next_step))
            self.next_step += 1

    def _places(self, key: str, mine: slice) -> list[slice]:
        size, limit = mine.stop - mine.start, self.run.launch.micro_batch_tokens
        largest = size if limit is None else max(1, limit // self.stage.num_tokens[key])
        count = math.ceil(size / largest)
        edges = [mine.start + part * size // count for part in range(count + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]
