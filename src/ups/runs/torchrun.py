"""A torchrun job as a child process: start it, watch the heartbeats of its ranks, end it with all its workers."""

import contextlib
import errno
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ups.config import LaunchConfig
from ups.errors import LostWorker, Preempted, StorageFault
from ups.files import num_cores, plain, private_folder, read_json, storage_faults, write_json
from ups.runs.compiler_caches import compiler_caches
from ups.runs.processes import die_with_parent
from ups.runs.progress import stop_requested
from ups.runs.run import ALIVE, FAULTS, LOG, RANK_STORE, REQUEST, RESULT, Run
from ups.runs.status import find_fault, warnings_in

log = logging.getLogger(__name__)

WORKER, NODE = "ups.training.worker", "ups.runs.node"
ON_SEVERAL_NODES = (WORKER, "ups.performance.tune", "ups.performance.profile", "ups.performance.pace")
NODES, JOB = ".nodes", "job.json"  # private folder below the data root, and the file that announces a job in it
HOST, JOIN = "host", "join"  # the first node hosts the store through which torchruns find each other
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
STORE, STORE_BYTES = "store.", 2**16  # reserved: a job whose store cannot grow on a full disk hangs until the time-out
POLL_SECONDS = 0.2
GRACE_SECONDS = 35.0  # torchrun itself waits 30 s for its workers after SIGTERM
DUMP_SECONDS = 1.0  # for ranks to write their stacks into the log before they are killed

_jobs: set[int] = set()  # process ids of the torchruns that this process watches


def is_watching() -> bool:
    """Whether a job of this process runs: it saves its step and ends once `stop_requested` is set."""
    return bool(_jobs)


@dataclass(frozen=True)
class Job:
    """Contents of `job.json`: what the agents of the other nodes need to join a job.

    Attributes:
        id: Random; a job that is started again is another one.
        module: Run by every process, one of ON_SEVERAL_NODES.
        path: The run folder, relative to the data root.
    """

    id: str
    module: str
    path: str

    def __post_init__(self) -> None:
        if self.module not in ON_SEVERAL_NODES:
            raise ValueError(f"{self.module!r} does not run on several nodes")

    def command(self, data_root: Path, role: str) -> list[str]:
        """The command that runs `module` on this node: `ups.runs.node` binds torchrun to one network interface."""
        return [sys.executable, "-m", NODE, self.module, str(data_root / self.path), self.id, role]


def command(module: str, folder: Path, launch: LaunchConfig, store: Path) -> list[str]:
    """The command that runs `module` on a single node; torchrun keeps its state in `store` and listens on no port."""
    # A heartbeat appends to the file, and on a single node no other torchrun reads it: one a minute is enough.
    place = ["--nnodes=1", "--local-addr=127.0.0.1", f"--rdzv-endpoint={store}"]
    place += ["--rdzv-conf=store_type=file,keep_alive_interval=60"]
    return [sys.executable, "-m", "torch.distributed.run", *place, *torchrun_arguments(module, folder, launch)]


def torchrun_arguments(module: str, folder: Path, launch: LaunchConfig) -> list[str]:
    """Arguments of torchrun for one or several nodes. It never restarts workers: the launcher restarts whole jobs."""
    options = ["--rdzv-backend=c10d", f"--nproc-per-node={launch.num_processes}", "--max-restarts=0"]
    options.append(f"--log-dir={os.devnull}")  # or it leaves an empty folder of each job in the temporary folder
    return [*options, "-m", module, str(folder)]


def environment(launch: LaunchConfig, data_root: Path, interface: str) -> dict[str, str]:
    """Environment variables of a job: threads, private compiler caches, NCCL, and no socket beyond `interface`."""
    threads = launch.threads_per_process or max(1, num_cores() // launch.num_processes)
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "HDF5_PLUGIN_PATH": ""}
    # NCCL takes a name without "=" as the beginning of several.
    variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} | launch.nccl
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or torchrun opens a store on all addresses
    variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if launch.deterministic else {}  # torch refuses to run without
    return variables | compiler_caches(data_root)


def run_job(module: str, run: Run, on_poll: Callable[[], None]) -> tuple[int, int]:
    """Run `module` under torchrun; call `on_poll` five times a second until the job has ended or this function raises.

    Returns:
        torchrun's exit code, 1 for every failure, and the offset in bytes at which the job's output begins in the log,
        for `ups.runs.status.find_fault`.

    Raises:
        Preempted: this command was interrupted; the job has saved its step.
        LostWorker: a rank made no step for `launch.timeout_seconds`, none has started in time, or an agent lost some.
    """
    folder, launch = run.folder, run.launch
    for path in (*folder.glob(FAULTS), *folder.glob(ALIVE), *folder.glob(f"{STORE}*")):
        path.unlink()
    log = folder / LOG
    log_start = log.stat().st_size if log.is_file() else 0
    heartbeats = Heartbeats(folder, launch.timeout_seconds)
    with _prepared(module, run) as (arguments, variables), started(arguments, variables, log) as child:
        while child.poll() is None:
            if stop_requested.is_set():
                raise Preempted(f"{folder.parent.name} was interrupted; the same command resumes at the saved step")
            if launch.num_nodes > 1 and not (run.data_root / NODES / JOB).is_file():
                raise LostWorker(f"{folder.parent.name}: a node lost its processes; the same command resumes")
            heartbeats.check()
            on_poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_SECONDS)
        return child.returncode, log_start


@contextlib.contextmanager
def _prepared(module: str, run: Run) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command and environment variables of this node's torchrun; a job on several nodes is announced meanwhile."""
    if run.launch.num_nodes > 1:
        job = Job(secrets.token_hex(8), module, str(run.folder.relative_to(run.data_root)))
        announcement = private_folder(run.data_root / NODES) / JOB
        write_json(announcement, asdict(job))
        try:
            yield job.command(run.data_root, HOST), {}  # each node prepares its own environment
        finally:
            with contextlib.suppress(StorageFault):  # then agents leave when their torchrun has ended
                write_json(announcement, None)
        return
    with _new_store(run.folder) as store, _new_store(run.folder) as ranks:
        variables = environment(run.launch, run.data_root, LOOPBACK) | {RANK_STORE: str(ranks)}
        yield command(module, run.folder, run.launch, store), variables


@contextlib.contextmanager
def started(arguments: list[str], variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """The command as a child process that appends to `log`; at the end it is terminated with all its workers."""
    with open(log, "a", encoding="utf-8", opener=plain) as output:
        output.write(f"$ {shlex.join(arguments)}\n")
        output.flush()
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        session = {"env": os.environ | variables, "start_new_session": True, "preexec_fn": die_with_parent}
        child = subprocess.Popen(arguments, **streams, **session)
        _jobs.add(child.pid)
        try:
            yield child
        finally:
            _terminate(child)
            _jobs.discard(child.pid)


@contextlib.contextmanager
def _new_store(folder: Path) -> Iterator[Path]:
    """A new, empty file (mode 0600) through which processes of one job find each other; removed when the job ends.

    Every job needs its own: a file that an earlier job has written to gives wrong ranks or never returns.
    """
    with storage_faults(folder):
        if shutil.disk_usage(folder).free < STORE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        descriptor, name = tempfile.mkstemp(prefix=STORE, dir=folder)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _terminate(child: subprocess.Popen) -> None:
    """Send SIGTERM to torchrun, which forwards it to its workers; kill what has not ended in GRACE_SECONDS."""
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


class Heartbeats:
    """Time since each rank last touched its heartbeat file, which it does in every step.

    Time is measured by this process's clock from when a change was seen: the clock of a network disk may be wrong.
    """

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self.folder, self.timeout_seconds, self.started = folder, timeout_seconds, time.monotonic()
        self.seen: dict[Path, tuple[int, float]] = {}  # file -> (its modification time, when we saw that change)

    def check(self) -> None:
        """Kill all ranks of this machine, after they have written their stacks to the log, if one makes no steps.

        Raises:
            LostWorker: a rank hangs, is stopped, or no rank has started in time.
        """
        now = time.monotonic()
        for path in self.folder.glob(ALIVE):
            touched = path.stat().st_mtime_ns
            if path not in self.seen or self.seen[path][0] != touched:
                self.seen[path] = (touched, now)
        if not self.seen and now - self.started > self.timeout_seconds + GRACE_SECONDS:
            raise LostWorker(
                f"{self.folder.parent.name}: no training process has started; does `ups agent` run on all other nodes, "
                f"and is the port of launch.rendezvous free? torchrun's output is in {self.folder / LOG}"
            )
        latest = min(self.seen, key=lambda path: self.seen[path][1], default=None)
        if latest is not None and now - self.seen[latest][1] > self.timeout_seconds:
            raise self._kill_all(latest)

    def _kill_all(self, latest: Path) -> LostWorker:
        """Kill every rank; the fault names a stopped process (SIGSTOP) first, for the others only wait for it."""
        processes = {path: process for path in self.seen if (process := _process(path)) is not None}
        stopped = [path for path, process in processes.items() if _is_stopped(process)]
        hung = stopped[0] if stopped else latest
        _signal((process for path, process in processes.items() if path not in stopped), signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        _signal(processes.values(), signal.SIGKILL)
        fault = LostWorker(
            f"{self.folder.parent.name}: rank {rank_of(hung)} {'is stopped' if stopped else 'hangs'}, no step for "
            f"{self.timeout_seconds:.0f} s; the stacks of all ranks are in {self.folder / LOG}, the same command "
            "resumes from the last checkpoint"
        )
        fault.rank = rank_of(hung)
        return fault


def rank_of(path: Path) -> int:
    """The rank in a file name such as `alive.rank3` or `fault.rank3.json`."""
    return int(path.name.partition("rank")[2].partition(".")[0])


def _process(path: Path) -> psutil.Process | None:
    """The process of a rank, if it runs on this machine; its id may by now belong to another program."""
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


def run_query(module: str, run: Run, request: dict[str, Any], on_poll: Callable[[], None] = lambda: None) -> Any:
    """Run a job that trains nothing: `module` reads `request.json`, its rank 0 writes the returned `result.json`.

    What its processes warn of is repeated here, once each.

    Raises:
        Fault: the job ended without a result.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    result = run.folder / RESULT
    result.unlink(missing_ok=True)
    run.write()
    write_json(run.folder / REQUEST, request)
    ended = run_job(module, run, on_poll)
    for warning in warnings_in(run.folder / LOG, log_start=ended[1]):
        log.warning("%s", warning)
    if not result.is_file():
        raise find_fault(run.folder, run.launch.world_size, *ended)
    return read_json(result)
