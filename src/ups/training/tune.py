"""Worker of `kedro run --pipeline tune`: the largest micro-batch with which a training step fits into memory."""

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import itertools
import logging
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from torch import Tensor

from ups.config import TrainingSection
from ups.errors import OutOfMemory
from ups.files import write_json
from ups.jobs import ANSWER
from ups.run import Run
from ups.training.batches import Batches, Share
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.limit import at_most, free_bytes
from ups.training.memory import is_out_of_memory
from ups.training.stage import Stage
from ups.training.train import main
from ups.training.update import Update

log = logging.getLogger(__name__)


def tune(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Answer {"key", "tokens", "whole", "limit_bytes"}: the smallest over ranks of what fits, in tokens per pass.

    `tokens` is None where a rank's whole share of the batch, `whole` tokens, fits. `key` has the largest share. Ranks
    on one machine share what is free there. Each tries alone, without the exchange of gradients: one that fails in a
    backward pass would leave the others waiting. Under `fsdp` it so holds the whole model, and errs on the safe side.

    Raises:
        OutOfMemory: not even a single snapshot fits.
    """
    key = largest_share(stage, config)
    alone = Ranks(ranks.rank, 1, ranks.device)
    update = Update(stage, config, run, alone, Injection.read(run.folder, ranks.rank))
    sharing = run.launch.num_processes if ranks.device.type == "cpu" else 1
    free = min(ranks.gather(free_bytes(ranks.device)))
    limit = int(run.launch.memory_fraction * free / sharing)
    whole = stage.batch_sizes(config)[key] // ranks.world_size * stage.num_tokens[key]
    largest = 0
    with at_most(limit, ranks.device):
        for share in shares(key, stage, config, run, ranks):
            run.alive(ranks.rank).touch()
            if not fits(update, share, config):
                break
            largest = share.tokens
    log.info("%d of %d tokens of %s fit into %d MiB", largest, whole, key, limit >> 20)
    smallest = min(ranks.gather(largest))
    if smallest == 0:
        raise OutOfMemory(
            f"{run.stage}: not even one snapshot of {key} fits into {limit >> 20} MiB on every rank: take a smaller "
            "model, launch.activation_checkpointing, or a larger launch.memory_fraction"
        )
    if ranks.rank == 0:
        answer = {"key": key, "tokens": None if smallest == whole else smallest, "whole": whole, "limit_bytes": limit}
        write_json(run.folder / ANSWER, answer)
    ranks.barrier()


def largest_share(stage: Stage, config: TrainingSection) -> str:
    """The key whose batches hold the most numbers."""
    sizes = stage.batch_sizes(config)

    def numbers(key: str) -> int:
        snapshot = stage.train.load(key, np.zeros(1, int))
        tensors = [getattr(snapshot, field.name) for field in fields(snapshot)]
        return sizes[key] * sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))

    return max(sizes, key=numbers)


def shares(key: str, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> Iterator[Share]:
    """This rank's share of one batch of `key` in micro-batches of 1, 2, 4, ... snapshots, and in one.

    Of several micro-batches the first two: from the second on a pass meets the gradients of those before it. They are
    taken as the last step, on which the operator is unrolled furthest.
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
    """Whether one training step has the memory it needs."""
    try:
        return update(share, config.learning_rate, stop=False, save=False).loss is not None
    except OutOfMemory:
        return False
    except RuntimeError as error:  # in the optimizer
        if not is_out_of_memory(error):
            raise
        return False


if __name__ == "__main__":
    main(tune)
