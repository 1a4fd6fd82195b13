"""Entry point of every training process: `torchrun ... -m ups.training.train RUN_DIR`."""

import gc

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    gc.disable()  # until the first step: imports make half a million objects, and none of them is garbage

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from ups.config import (
    BaselineConfig,
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    FinetuneConfig,
    OperatorConfig,
    SteadyConfig,
    TrainingSection,
)
from ups.errors import Fault
from ups.files import write_json
from ups.run import Run
from ups.training import baseline, codec, consistency, diffusion, finetune, operator, steady
from ups.training.distributed import Ranks, is_lost_peer
from ups.training.loop import train
from ups.training.stage import Stage

STAGES = {
    "codec": (CodecConfig, codec.build),
    "operator": (OperatorConfig, operator.build),
    "diffusion": (DiffusionConfig, diffusion.build),
    "consistency": (ConsistencyConfig, consistency.build),
    "steady": (SteadyConfig, steady.build),
    "baseline": (BaselineConfig, baseline.build),
    "finetune": (FinetuneConfig, finetune.build),
}

WATCHED_FIRST = 10
"""Seconds by which ranks wait longer for each other than the launcher for any of them: it knows which one hangs."""


def main(work: Callable[[Stage, TrainingSection, Run, Ranks], object]) -> None:
    """Build the stage that `RUN_DIR/run.json` describes on every rank and do `work` with it; never returns.

    The folder is the last argument of the command line. A rank that fails says why in its fault file.
    """
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    sys.excepthook = lambda *error: _end(folder, rank, *error)
    run = Run.read(folder)
    run.alive(rank).write_text(f"{os.uname().nodename} {os.getpid()}", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s")
    ranks = Ranks.join(run.device, run.launch.timeout_seconds + WATCHED_FIRST)
    config_class, build = STAGES[run.stage]
    config = config_class(**run.config)
    torch.manual_seed(config.seed)
    work(build(config, run), config, run, ranks)
    _leave(0)


def _end(folder: Path, rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the fault file of this rank and go: no thread, hung or not, holds a process that has failed."""
    code = Fault.exit_code
    if isinstance(error, Fault):
        report, code = {"kind": kind.__name__, "what": str(error), "details": vars(error)}, error.exit_code
    elif isinstance(error, MemoryError):
        report = {"kind": "OutOfMemory", "what": f"rank {rank} got no memory: {error}; use fewer processes"}
    elif is_lost_peer(error):
        report = {"kind": "LostPeer", "what": str(error)}
    else:
        place = traceback.extract_tb(trace)[-1]
        report = {"kind": "Fault", "what": f"{kind.__name__}: {error} ({Path(place.filename).name}:{place.lineno})"}
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    try:
        write_json(Run.fault_file(folder, rank), report | {"rank": rank, "time": time.time()})
    finally:
        _leave(code)


def _leave(code: int) -> None:
    """End this process without the interpreter's shutdown, which may abort in native threads after the work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(train)
