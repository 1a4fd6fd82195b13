"""Worker of `kedro run --pipeline tune`: the largest micro-batch of a stage that fits into memory."""

from ups.runs.processes import die_with_parent, is_out_of_memory, memory_bytes

if __name__ == "__main__":
    die_with_parent()

import itertools
import logging
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ups.config.training import TrainingSection
from ups.errors import OutOfMemory
from ups.files import write_json
from ups.runs.run import RESULT, Run
from ups.training.batches import Batches, Share
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.update import Update
from ups.training.worker import main

log = logging.getLogger(__name__)


@contextmanager
def memory_limit(num_bytes: int, device: torch.device) -> Iterator[None]:
    """A context in which allocations beyond `num_bytes` more than now fail.

    On a CPU the limit is RLIMIT_DATA, on private writable memory: an allocation beyond it raises an error, while
    without the limit Linux would kill some process of the machine. An allocation that fails within oneDNN leaves an
    error behind, and every later primitive of this process fails too: tuning has a process of its own.
    """
    with ExitStack() as at_end:
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            used = torch.cuda.memory_allocated(device)
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, (used + num_bytes) / total), device)
            at_end.callback(torch.cuda.set_per_process_memory_fraction, 1.0, device)
        else:
            before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + num_bytes, before[1]))
            at_end.callback(resource.setrlimit, resource.RLIMIT_DATA, before)
        yield


def _data_bytes() -> int:
    """Private writable memory of this process, in use or not, as the kernel counts it for RLIMIT_DATA (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def tune(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Write the result {"key", "tokens", "whole", "limit_bytes"}.

    `key` (family, or field group of the codec) has the largest batches. `tokens` per forward and backward pass fit on
    every rank; None if a rank's whole share of the batch, `whole` tokens, fits. Ranks of one machine share its memory
    evenly. Every rank tries without gradient exchange, in which ranks would wait for one that failed in its backward
    pass. With `launch.sharding=fsdp` every rank then holds the whole model, so that the result is too small rather
    than too large.

    Raises:
        OutOfMemory: not even a single snapshot fits.
    """
    key = key_of_largest_batches(stage, config)
    alone = Ranks(ranks.rank, 1, ranks.device)
    update = Update(stage, config, run, alone, Injection.read(run.folder, ranks.rank))
    limit = min(ranks.all_gather(memory_bytes(run.launch, ranks.device)))
    whole = stage.batch_sizes(config)[key] // ranks.world_size * stage.num_tokens[key]
    largest = 0
    with memory_limit(limit, ranks.device):  # sizes increase, so that the first failure ends the search
        for share in shares(key, stage, config, run, ranks):
            run.alive(ranks.rank).touch()
            if not fits(update, share, config):
                break
            largest = share.tokens
    log.info("%d of %d tokens of %s fit into %d MiB", largest, whole, key, limit >> 20)
    smallest = min(ranks.all_gather(largest))
    if smallest == 0:
        raise OutOfMemory(
            f"{run.stage}: not even one snapshot of {key} fits into {limit >> 20} MiB on every rank: use a smaller "
            "model, launch.activation_checkpointing=true, or a larger launch.memory_gigabytes"
        )
    if ranks.rank == 0:
        result = {"key": key, "tokens": None if smallest == whole else smallest, "whole": whole, "limit_bytes": limit}
        write_json(run.folder / RESULT, result)
    ranks.barrier()


def key_of_largest_batches(stage: Stage, config: TrainingSection) -> str:
    """The key whose batches have the most elements."""
    sizes = stage.batch_sizes(config)

    def num_elements(key: str) -> int:
        snapshot = stage.train.load(key, np.zeros(1, int))
        tensors = [getattr(snapshot, field.name) for field in fields(snapshot)]
        return sizes[key] * sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))

    return max(sizes, key=num_elements)


def shares(key: str, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> Iterator[Share]:
    """This rank's share of one batch of `key` in micro-batches of 1, 2, 4, ... snapshots, and undivided.

    Of several micro-batches the first two are enough: from the second one on, gradients are in memory already. The step
    number is that of the last step, on which the operator is unrolled furthest.
    """
    size, tokens = stage.batch_sizes(config)[key] // ranks.world_size, stage.num_tokens[key]
    doubled = itertools.takewhile(lambda count: count < size, (2**power for power in itertools.count()))
    for count in (*doubled, size):
        launch = run.launch.model_copy(update={"micro_batch_tokens": count * tokens})
        batches = Batches(stage, config, replace(run, launch=launch), ranks, Injection(run.folder, ranks.rank))
        step = next(step for step in itertools.count() if batches.sampler.draw(step)[0] == key)
        share = batches.read(step)
        yield replace(share, step=config.steps - 1, micro_batches=share.micro_batches[:2])


def fits(update: Update, share: Share, config: TrainingSection) -> bool:
    """Whether one training step fits into memory."""
    try:
        return update(share, config.learning_rate, stop=False, save=False).loss is not None
    except (
        OutOfMemory,
        RuntimeError,
    ) as error:  # `Update` does not translate a RuntimeError of the optimizer
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        return False


if __name__ == "__main__":
    main(tune)
