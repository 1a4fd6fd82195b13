"""One torchrun job as a child process: started, watched, ended with all it started."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from ups.config import LaunchConfig
from ups.errors import LostWorker, Preempted
from ups.processes import die_with_parent
from ups.run import ALIVE, FAULTS, LOG

WORKER = "ups.training.train"
POLL_SECONDS = 0.2
GRACE_SECONDS = 35.0  # torchrun itself gives its workers 30
DUMP_SECONDS = 1.0

stop_requested = threading.Event()
"""Set when this command was interrupted: a job may be watched from a thread that no signal reaches."""
_jobs: set[int] = set()


def is_watching() -> bool:
    """Whether a job of this process runs, which ends in good order once `stop_requested` is set."""
    return bool(_jobs)


def command(module: str, folder: Path, launch: LaunchConfig) -> list[str]:
    """The command that runs `module` on every process of this node; with several nodes, the same on each of them."""
    meet = ["--standalone"]
    if launch.num_nodes > 1:
        meet = [f"--nnodes={launch.num_nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={launch.rendezvous}"]
        meet += [f"--rdzv-id={folder.parent.name}-{folder.name}"]
        meet += [f"--rdzv-conf=join_timeout={launch.timeout_seconds}"]
    workers = [f"--nproc-per-node={launch.num_processes}", "--max-restarts=0", "-m", module, str(folder)]
    return [sys.executable, "-m", "torch.distributed.run", *meet, *workers]


def run_job(module: str, folder: Path, launch: LaunchConfig, tick: Callable[[], None]) -> tuple[int, int]:
    """Run `module` on the run folder under torchrun, calling `tick` now and then. Whatever ends this ends the job.

    Returns:
        torchrun's exit code, which says little, and where the job's output begins in the log; what happened is in the
        folder.

    Raises:
        Preempted: this command was interrupted; the job has saved its step.
        LostWorker: a rank made no step for `launch.timeout_seconds`, or none has come to life in time.
    """
    for path in (*folder.glob(FAULTS), *folder.glob(ALIVE)):
        path.unlink()
    log = folder / LOG
    log_start = log.stat().st_size if log.is_file() else 0
    pulse = Pulse(folder, launch.timeout_seconds)
    with _started(command(module, folder, launch), log, launch) as child:
        while child.poll() is None:
            if stop_requested.is_set():
                _end(child)
                raise Preempted(f"{folder.parent.name} was interrupted; the same command goes on where it was")
            pulse.check()
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_SECONDS)
        return child.returncode, log_start


@contextlib.contextmanager
def _started(words: list[str], log: Path, launch: LaunchConfig) -> Iterator[subprocess.Popen]:
    threads = launch.threads_per_process or max(1, (os.cpu_count() or 1) // launch.num_processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "HDF5_PLUGIN_PATH": ""}
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ OMP_NUM_THREADS={threads} {shlex.join(words)}\n")
        output.flush()
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    _jobs.add(child.pid)
    try:
        yield child
    finally:
        _end(child)
        _jobs.discard(child.pid)


def _end(child: subprocess.Popen) -> None:
    """Ask torchrun to end, which asks its workers; what has not ended in time is killed."""
    if child.poll() is not None:
        return
    workers = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    _signal(workers, signal.SIGKILL)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Pulse:
    """Sees that every rank makes steps; measured by this process's own clock, whatever that of the disk says."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self.folder, self.timeout_seconds, self.begin = folder, timeout_seconds, time.monotonic()
        self.beats: dict[Path, tuple[int, float]] = {}

    def check(self) -> None:
        """Look at the files that ranks touch; if one has not for too long, end them all, their stacks in the log.

        Raises:
            LostWorker: a rank hangs, is stopped, or none has come to life.
        """
        now = time.monotonic()
        for path in self.folder.glob(ALIVE):
            touched = path.stat().st_mtime_ns
            if path not in self.beats or self.beats[path][0] != touched:
                self.beats[path] = (touched, now)
        if not self.beats and now - self.begin > self.timeout_seconds + GRACE_SECONDS:
            raise LostWorker(
                f"{self.folder.parent.name}: no training process has come to life; are all nodes there, and is the "
                f"port of launch.rendezvous free? torchrun's words are in {self.folder / LOG}"
            )
        late = min(self.beats, key=lambda path: self.beats[path][1], default=None)
        if late is not None and now - self.beats[late][1] > self.timeout_seconds:
            raise self._end_all(late)

    def _end_all(self, late: Path) -> LostWorker:
        processes = {path: process for path in self.beats if (process := _process(path)) is not None}
        stopped = [path for path, process in processes.items() if _is_stopped(process)]
        hung = stopped[0] if stopped else late
        _signal((process for path, process in processes.items() if path not in stopped), signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        _signal(processes.values(), signal.SIGKILL)
        fault = LostWorker(
            f"{self.folder.parent.name}: rank {rank_of(hung)} {'is stopped' if stopped else 'hangs'}, no step for "
            f"{self.timeout_seconds:.0f} s; the stacks of all ranks are in {self.folder / LOG}, the same command goes "
            "on from the last checkpoint"
        )
        fault.rank = rank_of(hung)
        return fault


def rank_of(path: Path) -> int:
    """The rank in the name of one of its files."""
    return int(path.name.partition("rank")[2].partition(".")[0])


def _process(path: Path) -> psutil.Process | None:
    """The rank's process if it runs on this machine and still is what it was."""
    host, _, pid = path.read_text(encoding="utf-8").partition(" ")
    if host == os.uname().nodename:
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie: it has ended
            process = psutil.Process(int(pid))
            return process if str(path.parent) in process.cmdline() else None
    return None


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False
