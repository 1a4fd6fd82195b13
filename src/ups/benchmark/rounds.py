"""Worker of `kedro run --pipeline benchmark`: two contenders take turns, several rounds long, in one process group."""

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import gc
from contextlib import ExitStack
from typing import Any

import torch

from ups.benchmark.contender import Contender, Variant
from ups.config import TrainingSection
from ups.files import read_json, write_json
from ups.jobs import ANSWER, QUESTION
from ups.run import Run
from ups.training.distributed import Ranks
from ups.training.stage import Stage
from ups.training.train import main

SIDES = ("value", "baseline")
Rounds = list[dict[str, float]]


def take_turns(_: Stage, __: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Answer, for every pair of the question, what each round of both sides took; rank 0 holds the watch.

    Every contender builds the stage anew.
    """
    question = read_json(run.folder / QUESTION)
    answer = {}
    for name, pair in question["pairs"].items():
        variants = [Variant(**pair[side] | {"families": tuple(pair[side]["families"])}) for side in SIDES]
        answer[name] = _duel(variants, question, run, ranks)
    if ranks.rank == 0:
        write_json(run.folder / ANSWER, answer)
    ranks.barrier()


def _duel(variants: list[Variant], question: dict[str, Any], run: Run, ranks: Ranks) -> dict[str, Any]:
    """Both sides in turns, the order reversed from round to round; each takes the same number of steps."""
    sides = [Contender(variant, run, ranks) if ranks.rank == 0 or not variant.alone else None for variant in variants]
    rounds: list[Rounds] = [[], []]
    with ExitStack() as prefetching:
        for side in filter(None, sides):
            prefetching.enter_context(side.batches.from_step(0))
        num_steps = 1
        for side in sides:
            run.alive(ranks.rank).touch()
            seconds = side.warm_up() if side else 0.0
            num_steps = ranks.from_first(max(1, round(question["seconds"] / max(seconds, 1e-6))))
        gc.collect()
        gc.freeze()
        for number in range(question["rounds"]):
            for position in (0, 1) if number % 2 == 0 else (1, 0):
                run.alive(ranks.rank).touch()
                ranks.barrier()
                side = sides[position]
                if side is not None:
                    rounds[position].append(side.round(num_steps))
        peaks = [side.peak_bytes() if side and side.variant.is_weighed else None for side in sides]
    gc.unfreeze()
    if any(side and side.update.eager_because is None for side in sides):
        torch.compiler.reset()  # what was compiled for one model must not count against the next
    return {
        name: {"rounds": rounds[position], "peak_bytes": peaks[position], "eager_because": _eager(sides[position])}
        for position, name in enumerate(SIDES)
    }


def _eager(side: Contender | None) -> str | None:
    return side.update.eager_because if side else None


if __name__ == "__main__":
    main(take_turns)
