"""Entry point of every training process: `torchrun ... -m ups.training.worker RUN_DIR`."""

import gc

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    gc.disable()  # until the first step: imports make half a million objects, none of which can be freed

from collections.abc import Callable

import torch

from ups.config.training import TrainingSection
from ups.runs.run import Run
from ups.training.distributed import Ranks
from ups.training.loop import train
from ups.training.process import run_rank
from ups.training.stage import Stage
from ups.training.stages import STAGES


def main(work: Callable[[Stage, TrainingSection, Run, Ranks], object]) -> None:
    """Call `work` with the stage that `RUN_DIR/run.json` describes, on every rank, and exit; never returns."""

    def build(run: Run, ranks: Ranks) -> None:
        entry = STAGES[run.stage]
        config = entry.config(**run.config)
        torch.manual_seed(config.seed)
        work(entry.build(config, run), config, run, ranks)

    run_rank(build)


if __name__ == "__main__":
    main(train)
