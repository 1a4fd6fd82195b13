"""Worker of `kedro run --pipeline benchmark`: times two setups of a stage alternately in one process group."""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import gc
from contextlib import ExitStack
from typing import Any

import torch

from ups.config.training import TrainingSection
from ups.files import read_json, write_json
from ups.performance.timed_training import Setup, TimedTraining
from ups.runs.run import REQUEST, RESULT, Run
from ups.training.distributed import Ranks
from ups.training.stage import Stage
from ups.training.worker import main

SIDES = ("value", "baseline")


def time_comparisons(_: Stage, __: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Write the result {comparison: {"value" or "baseline": {"rounds", "peak_bytes", "eager_because"}}} of rank 0.

    The request is {"comparisons": {name: {"value", "baseline": arguments of `Setup`}}, "rounds", "seconds_per_round"}.
    The stage that `main` has built is not used: every setup builds its own.
    """
    request = read_json(run.folder / REQUEST)
    result = {}
    for name, comparison in request["comparisons"].items():
        result[name] = _time_both([Setup(**comparison[side]) for side in SIDES], request, run, ranks)
    if ranks.rank == 0:
        write_json(run.folder / RESULT, result)
    ranks.barrier()


def _time_both(setups: list[Setup], request: dict[str, Any], run: Run, ranks: Ranks) -> dict[str, Any]:
    """Rounds of both setups with the same number of steps; their order alternates between rounds."""
    trainings = [None if setup.rank_0_only and ranks.rank else TimedTraining(setup, run, ranks) for setup in setups]
    rounds: list[list[dict[str, float]]] = [[], []]
    with ExitStack() as prefetching:
        for training in filter(None, trainings):
            prefetching.enter_context(training.batches.from_step(0))
        num_steps = 1
        for training in trainings:
            run.alive(ranks.rank).touch()
            seconds = training.warm_up() if training else 0.0
            # The number for the baseline, which comes last, is used for both.
            num_steps = ranks.broadcast(max(1, round(request["seconds_per_round"] / max(seconds, 1e-6))))
        # A collection of garbage during one of the rounds would count against its setup.
        gc.collect()
        gc.freeze()
        for number in range(request["rounds"]):
            for position in (0, 1) if number % 2 == 0 else (1, 0):
                run.alive(ranks.rank).touch()
                ranks.barrier()
                training = trainings[position]
                if training is not None:
                    rounds[position].append(training.round(num_steps))
        peaks = [each.peak_bytes() if each and each.setup.measure_memory else None for each in trainings]
    gc.unfreeze()
    if any(training and training.update.eager_because is None for training in trainings):
        torch.compiler.reset()  # graphs of this comparison must not count towards the recompile limit of the next
    reasons = [training.update.eager_because if training else None for training in trainings]
    measured = zip(SIDES, rounds, peaks, reasons, strict=True)
    return {side: {"rounds": taken, "peak_bytes": peak, "eager_because": why} for side, taken, peak, why in measured}


if __name__ == "__main__":
    main(time_comparisons)
