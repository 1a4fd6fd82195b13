"""Entry point of every training process: `torchrun ... -m ups.training.train RUN_DIR`."""

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import os
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ups.config import CodecConfig, ConsistencyConfig, DiffusionConfig, OperatorConfig, SteadyConfig
from ups.errors import Fault
from ups.files import write_json
from ups.training import codec, consistency, diffusion, operator, steady
from ups.training.distributed import Ranks
from ups.training.loop import train
from ups.training.run import Run

STAGES = {
    "codec": (CodecConfig, codec.build),
    "operator": (OperatorConfig, operator.build),
    "diffusion": (DiffusionConfig, diffusion.build),
    "consistency": (ConsistencyConfig, consistency.build),
    "steady": (SteadyConfig, steady.build),
}


@record
def main(folder: Path) -> None:
    """Train the stage that `folder/run.json` describes."""
    run = Run.read(folder)
    ranks = Ranks.join(run.launch["device"], run.launch["timeout_seconds"])
    config_class, build = STAGES[run.stage]
    config = config_class(**run.config)
    torch.manual_seed(config.seed)
    try:
        train(build(config, run), config, run, ranks)
    except Fault as fault:
        what = {"kind": type(fault).__name__, "what": str(fault), "rank": ranks.rank}
        write_json(folder / f"fault.rank{ranks.rank}.json", what)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown may abort in native threads after the work is done, and would report a good run as failed.
    os._exit(0)
