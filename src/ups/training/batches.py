"""Training batches of one rank: which samples, read ahead by a thread, cut into micro-batches."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from ups.config.training import TrainingSection
from ups.data.samples import Batch
from ups.errors import ConfigFault, LostWorker, OutOfMemory
from ups.runs.processes import memory_bytes
from ups.runs.run import Run
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Samples, Stage

Result = TypeVar("Result")
NUM_READ_AHEAD = 2
SMALLEST_LOSS = 1e-12  # of a key, in its difficulty
MICRO_BATCH_SHARE, DATA_SHARE = 1 / 2, 1 / 4  # of the memory of a process; the rest is for model and optimizer


def micro_batch_size(stage: Stage, key: str, run: Run) -> int:
    """The most samples in one forward pass: `launch.micro_batch_tokens`, or what is estimated to fit into memory."""
    limit = run.launch.micro_batch_tokens
    if limit is not None:
        return max(1, limit // stage.num_tokens[key])
    allowed = MICRO_BATCH_SHARE * memory_bytes(run.launch, torch.device(run.device))
    return max(1, int(allowed) // stage.sample_bytes[key])


def cut(place: slice, count: int) -> list[slice]:
    """`count` slices of nearly equal lengths, one after the other."""
    edges = [place.start + part * (place.stop - place.start) // count for part in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


class BatchSampler:
    """The samples of batch `step`: one key per batch, sampled in proportion to its weight; samples with replacement.

    Everything is a function of (seed, step, validation losses before the batch was read), so that it is the same for
    any number of ranks and after a restart. `validations`, the losses by key of each validation so far, is the list
    that `TrainingHistory` extends and checkpoints.
    """

    def __init__(
        self,
        samples: Samples,
        batch_sizes: dict[str, int],
        weights: dict[str, float],
        config: TrainingSection,
        validations: Sequence[dict[str, float]] = (),
    ) -> None:
        self.samples, self.batch_sizes, self.config, self.validations = samples, batch_sizes, config, validations
        self.keys = sorted(samples.num_samples)
        self.weights = np.array([weights[key] for key in self.keys])

    def draw(self, step: int) -> tuple[str, np.ndarray]:
        """Key and sample indices (B,) of batch `step`."""
        rng = np.random.default_rng((self.config.seed, step))
        key = self.keys[rng.choice(len(self.keys), p=self.probabilities(step))]
        return key, self.samples.draw(key, self.batch_sizes[key], rng)

    def probabilities(self, step: int) -> np.ndarray:
        """Of each key, to be that of batch `step`."""
        weights = self.weights * self.difficulties(step)
        return weights / weights.sum()

    def difficulties(self, step: int) -> np.ndarray:
        """Each key's validation loss over the geometric mean of all, clipped to [1 / m, m], m = `max_difficulty`.

        All are 1 before the first validation. Batches are read ahead, by `NUM_READ_AHEAD` and in Lightning by one more:
        a validation counts that many steps later.
        """
        known = self.validations[: max(0, step - NUM_READ_AHEAD - 1) // self.config.validate_every]
        if self.config.max_difficulty == 1 or not known:
            return np.ones(len(self.keys))
        logs = np.log([max(known[-1][key], SMALLEST_LOSS) for key in self.keys])
        limit = math.log(self.config.max_difficulty)
        return np.exp(np.clip(logs - logs.mean(), -limit, limit))


@dataclass(frozen=True)
class MicroBatch:
    """The batch of one forward and backward pass, read by `load`, and its slice of the samples of the global batch."""

    place: slice
    load: Callable[[], Batch]


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
    """One rank's shares, read ahead by a thread; raises `ConfigFault` if processes cannot share a batch equally.

    Of shares that are large for the memory only the first micro-batch is read ahead; while one is used, the next is
    read.
    """

    def __init__(
        self,
        stage: Stage,
        config: TrainingSection,
        run: Run,
        ranks: Ranks,
        inject: Injection,
        validations: Sequence[dict[str, float]] = (),
    ) -> None:
        self.stage, self.run, self.ranks, self.inject = stage, run, ranks, inject
        sizes = stage.batch_sizes(config)
        for key, size in sizes.items():
            if size % ranks.world_size:
                raise ConfigFault(
                    f"a batch of {size} snapshots of {key} cannot be shared equally by {ranks.world_size} processes: "
                    f"make batch_multiple a multiple of {ranks.world_size}, or choose launch.num_processes to divide it"
                )
        self.sampler = BatchSampler(stage.train, sizes, stage.weights(config), config, validations)
        self.largest = {key: micro_batch_size(stage, key, run) for key in sizes}
        self.data_bytes = DATA_SHARE * memory_bytes(run.launch, ranks.device)
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
        share = self._wait(self._ahead.popleft())
        self._read_ahead()
        return share

    def read(self, step: int) -> Share:
        """Read the share of one step."""
        self.inject.at("data", step)
        key, samples = self.sampler.draw(step)
        mine = self.ranks.share(len(samples))
        places = self._places(key, mine)
        tokens = self.stage.num_tokens[key] * max(place.stop - place.start for place in places)
        loads = self._loads(key, [samples[place] for place in places])
        seen = Counter(self.stage.train.dataset(key, sample) for sample in samples[mine])
        return Share(step, key, len(samples), tokens, list(map(MicroBatch, places, loads)), seen)

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
        return cut(mine, math.ceil((mine.stop - mine.start) / self.largest[key]))

    def _loads(self, key: str, parts: list[np.ndarray]) -> list[Callable[[], Batch]]:
        """For each part a function that returns its batch: read already, or if all are too large one before its use."""
        first = self._read_part(key, parts[0])
        if _num_bytes(first) * len(parts) * (1 + NUM_READ_AHEAD) <= self.data_bytes:
            batches = [first, *(self._read_part(key, part) for part in parts[1:])]
            return [partial(_itself, batch) for batch in batches]
        reading: dict[int, Future[Batch]] = {0: Future()}
        reading[0].set_result(first)

        def load(number: int) -> Batch:
            if number + 1 < len(parts):
                reading[number + 1] = self._reader.submit(self._read_part, key, parts[number + 1])
            return self._wait(reading.pop(number))

        return [partial(load, number) for number in range(len(parts))]

    def _read_part(self, key: str, samples: np.ndarray) -> Batch:
        batch = self.stage.train.load(key, samples)
        return batch.pinned() if self.ranks.device.type == "cuda" else batch

    def _wait(self, reading: Future[Result]) -> Result:
        seconds = self.run.launch.timeout_seconds / 2
        try:
            return reading.result(seconds)
        except TimeoutError:
            raise LostWorker(
                f"no data for {seconds:.0f} s: check the disk of {self.run.data_root}, then run the same command again"
            ) from None


def _itself(batch: Batch) -> Batch:
    return batch


def _num_bytes(batch: Batch) -> int:
    values = [getattr(batch, field.name) for field in fields(batch)]  # type: ignore[arg-type]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
