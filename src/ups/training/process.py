"""One process of a job: it joins the other ranks, works, and reports the error that ends it.

Apart from `ups.training.worker`: encoding and scoring start here too, and an edit of the training loop must not make
latents and scores stale.
"""

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

from ups.data.pdebench import FAMILIES
from ups.errors import Fault
from ups.files import plain, write_json
from ups.runs.processes import is_out_of_memory, use_whole_float32
from ups.runs.run import Run
from ups.training.distributed import Ranks, is_lost_peer, with_agreed_memory

LESS_MEMORY = "use fewer processes, or set launch.micro_batch_tokens"
COLLECTIVE_EXTRA_SECONDS = 10
"""Added to the launcher's time-out in collectives: the launcher can tell which rank hangs, the waiting ranks cannot."""


def run_rank(work: Callable[[Run, Ranks], object]) -> None:
    """Call `work` with the job that `RUN_DIR/run.json` describes, on every rank, and exit; never returns.

    The run folder is the last argument of the command line. A rank that fails writes its error into its fault file.
    """
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    sys.excepthook = lambda *error: _report_and_exit(folder, rank, *error)
    run = Run.read(folder)
    FAMILIES.define(*run.families)
    with open(run.alive(rank), "w", encoding="utf-8", opener=plain) as file:
        file.write(f"{os.uname().nodename} {os.getpid()}")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s")
    if run.launch.deterministic:  # torch imports its compiler here, which takes half a second
        torch.use_deterministic_algorithms(True)
    use_whole_float32()
    ranks = Ranks.join(run.device, run.launch.timeout_seconds + COLLECTIVE_EXTRA_SECONDS)
    work(with_agreed_memory(run, ranks), ranks)
    _exit(0)


def _report_and_exit(
    folder: Path, rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the fault file of this rank and exit at once: a hung thread must not keep a failed process alive."""
    code = Fault.exit_code
    if isinstance(error, Fault):
        report, code = {"kind": kind.__name__, "what": str(error), "details": vars(error)}, error.exit_code
    elif is_out_of_memory(error):
        what = str(error).partition("\n")[0]
        report = {"kind": "OutOfMemory", "what": f"rank {rank} got no memory: {what}; {LESS_MEMORY}"}
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
        _exit(code)


def _exit(code: int) -> None:
    """End this process without the interpreter's shutdown, in which native threads of torch may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
