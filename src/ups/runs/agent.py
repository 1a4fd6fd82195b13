"""Several nodes: the first one announces its run and each job in the data root, agents on the other nodes join them.

The announcements are in `.nodes/`, a folder that only its owner can enter. An agent runs no command that it reads: it
builds that of `ups.runs.node` from a known module and a run folder below its own data root.
"""

import contextlib
import errno
import hashlib
import logging
import math
import os
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ups.config import LaunchConfig
from ups.errors import KINDS, ConfigFault, DataFault, Fault, Locked, LostWorker, Preempted
from ups.files import place_of, private_folder, private_lock, read_json, storage_faults, write_json
from ups.runs import machine
from ups.runs.run import RUN, Run
from ups.runs.torchrun import JOB, JOIN, NODES, Job, started

log = logging.getLogger(__name__)

ANNOUNCEMENT, FIRST = "announcement.json", "first.lock"
BEAT_SECONDS = 2.0  # the first node touches its announcement this often
LOST_SECONDS = 60.0  # without a touch; a network disk may show changes half a minute late
POLL_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # for torchrun to end by itself when the first node's has ended


@dataclass(frozen=True)
class Announcement:
    """Contents of `announcement.json`: a `kedro run` on several nodes.

    Attributes:
        id: Random, of this `kedro run`.
        host: Name of the first node.
        source: SHA-256 of the source of this package.
        torch: Version of torch.
        num_nodes: Of which the first is one.
        rendezvous: HOST:PORT on the first node.
        ended: The run has ended, with the `fault` (name of its class) and `what` it says, if any.
    """

    id: str
    host: str
    source: str
    torch: str
    num_nodes: int
    rendezvous: str
    ended: bool = False
    fault: str | None = None
    what: str = ""

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in KINDS:
            raise ValueError("unknown kind of fault")

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and not by an interruption after which it is resumed."""
        return self.ended and self.fault != Preempted.__name__


@dataclass(frozen=True)
class Joined:
    """Contents of `agent.HOST.json`: ids of the run and of the job that a host has joined last."""

    run: str = ""
    job: str = ""


class FirstNode:
    """Announces a run in its data root, and that it is alive, until `close`."""

    def __init__(self, data_root: Path, launch: LaunchConfig) -> None:
        assert launch.rendezvous is not None
        folder = private_folder(data_root / NODES)
        self._lock = hold(folder / FIRST, f"another run on several nodes works in {data_root}; wait for it or stop it")
        check_rendezvous(launch.rendezvous)
        self._path, self._closed = folder / ANNOUNCEMENT, threading.Event()
        write_json(folder / JOB, None)  # instead of that of a killed run
        how = {"num_nodes": launch.num_nodes, "rendezvous": launch.rendezvous}
        self._run = Announcement(secrets.token_hex(8), os.uname().nodename, source_digest(), version("torch"), **how)
        write_json(self._path, asdict(self._run))
        threading.Thread(target=self._beat, daemon=True).start()
        log.info("%d nodes: run `ups agent --data-root %s` on each of the others", launch.num_nodes, data_root)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the work itself tells of a disk that fails
                os.utime(self._path)

    def close(self, fault: Fault | None) -> None:
        """Tell the agents that the run has ended; only the first call counts.

        Raises:
            StorageFault: the disk is full.
        """
        if not self._closed.is_set():
            self._closed.set()
            kind = type(fault).__name__ if fault else None
            try:
                write_json(self._path, asdict(replace(self._run, ended=True, fault=kind, what=str(fault or ""))))
            finally:
                self._lock.release()


def check_rendezvous(rendezvous: str) -> None:
    """Raise `ConfigFault` unless this node has the address, and nobody listens at the port."""
    host, _, port = rendezvous.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except (OSError, OverflowError) as error:
        raise ConfigFault(
            f"launch.rendezvous={rendezvous}: {error}; name an address of the node on which `kedro run` is started, "
            "and a free port"
        ) from error


def source_digest() -> str:
    """SHA-256 of all Python files of this package."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def hold(path: Path, refusal: str) -> FileLock:
    """Lock the file until this process ends; raises `Locked` with the `refusal` if another process holds it."""
    lock = private_lock(path, timeout=0)
    try:
        with storage_faults(path):
            lock.acquire()
    except Timeout:
        raise Locked(refusal) from None
    return lock


class Agent:
    """One of the other nodes: starts its torchrun for every job of the run in a data root, until that run ends.

    The output of its torchruns is in `agent.HOST.log`.
    """

    def __init__(self, data_root: Path, wait_minutes: float) -> None:
        if not data_root.is_dir():
            raise DataFault(f"{data_root} is no folder of this node; mount the disk that the first node works on")
        self._root, self._host, self._source = data_root.resolve(), os.uname().nodename, source_digest()
        self._folder, self._wait_minutes = private_folder(self._root / NODES), wait_minutes
        self._record, self._output = (self._folder / f"agent.{self._host}.{end}" for end in ("json", "log"))
        refusal = f"an agent for {self._root} works on {self._host} already; one starts all processes of a node"
        self._lock, self._place = hold(self._record.with_suffix(".lock"), refusal), None
        self._joined = _read(self._record, Joined) or Joined()  # by a predecessor that was killed
        self._admitted = self._left = ""  # the run that this process has joined, and its job that has ended here
        self._touched, self._alive = self._touch(), -math.inf  # of the first node, and when we saw a later one
        self._idle, self._told = time.monotonic(), -1  # since when there is no run, and the minute of the last line

    def serve(self) -> None:
        """Join jobs until the run has finished.

        Raises:
            Fault: that of the run; or this node does not fit the run, or no run has come in time.
        """
        while True:
            run = self._announced()
            if run is not None and run.is_over and (run.id == self._joined.run or self._alive > -math.inf):
                return self._end(run)
            if run is None or run.ended or time.monotonic() - self._alive > LOST_SECONDS:
                self._wait(run)
            else:
                self._idle, self._told = time.monotonic(), -1
                self._admit(run)
                self._join_job(run)
            time.sleep(POLL_SECONDS)

    def _touch(self) -> int:
        """Time of the first node's last touch, in its clock; 0 without an announcement."""
        with contextlib.suppress(OSError):  # there is none, or a network disk has replaced it
            return (self._folder / ANNOUNCEMENT).stat().st_mtime_ns
        return 0

    def _announced(self) -> Announcement | None:
        """The latest announcement; that of a killed run is never touched again."""
        touched = self._touch()  # before reading: the touch of a new run must not vouch for old content
        if touched not in (0, self._touched):
            self._touched, self._alive = touched, time.monotonic()
        return _read(self._folder / ANNOUNCEMENT, Announcement)

    def _wait(self, run: Announcement | None) -> None:
        """Say once a minute what is waited for; raises `LostWorker` after `wait_minutes`."""
        if run is None or run.id != self._joined.run:
            why = f"no `kedro run` with launch.num_nodes > 1 works in {self._root}; start it, or mount its disk here"
        else:
            why = f"the run on {run.host} {'was interrupted' if run.ended else 'is silent'}; start it there again"
        minutes = (time.monotonic() - self._idle) / 60
        if minutes > self._wait_minutes:
            raise LostWorker(f"waited {self._wait_minutes:g} minutes: {why}")
        if int(minutes) > self._told and minutes * 60 > 2 * BEAT_SECONDS:
            self._told = int(minutes)
            log.info("waiting, minute %d of %g: %s", self._told, self._wait_minutes, why)

    def _admit(self, run: Announcement) -> None:
        """Check once per run that this node fits it, and take the place of one of its nodes.

        Raises:
            ConfigFault, Locked: this node does not fit, or all places are taken.
        """
        if run.id == self._admitted:
            return
        if run.source != self._source:
            raise ConfigFault(f"{self._host} has other source code than {run.host}; check out the same commit on both")
        if run.torch != version("torch"):
            raise ConfigFault(f"torch is {version('torch')} on {self._host}, {run.torch} on {run.host}; use the same")
        host = run.rendezvous.rpartition(":")[0]
        if run.host == self._host and not ip_address(socket.gethostbyname(host)).is_loopback:
            raise ConfigFault(f"`kedro run` itself starts the processes of {self._host}; agents are for other nodes")
        self._place = self._free_place(run)
        self._admitted = run.id
        self._keep(Joined(run.id, self._joined.job))
        log.info("%s takes part in the run on %s", self._host, run.host)

    def _free_place(self, run: Announcement) -> FileLock:
        if self._place is not None:  # of an earlier run
            self._place.release()
        refusal = f"all {run.num_nodes} nodes of the run on {run.host} are there; raise launch.num_nodes for one more"
        for number in range(1, run.num_nodes):
            with contextlib.suppress(Locked):
                return hold(self._folder / f"place.{number}.lock", refusal)
        raise Locked(refusal)

    def _join_job(self, run: Announcement) -> None:
        """Run torchrun until it ends, or the first node has ended the job."""
        job = _read(self._folder / JOB, Job | None)
        if job is None or job.id == self._left:
            return
        folder = place_of(self._root, {"path": job.path})
        if job.id == self._joined.job:  # other nodes may wait for the processes of a predecessor
            if _read(self._folder / JOB, Job | None) == job:
                log.info("%s: the first node starts it again, because the agent was killed", folder.parent.name)
                (self._folder / JOB).unlink(missing_ok=True)
            return
        self._check(Run.read(folder), run)
        self._keep(Joined(run.id, job.id))
        log.info("%s: joined", folder.parent.name)
        with started(job.command(self._root, JOIN), {}, self._output) as child:
            while child.poll() is None and _read(self._folder / JOB, Job | None) == job:
                time.sleep(POLL_SECONDS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LEAVE_SECONDS)
            child.kill()
        self._left = job.id
        log.info("%s: %s", folder.parent.name, f"ended early, see {self._output}" if child.returncode else "done")

    def _check(self, job: Run, run: Announcement) -> None:
        if job.launch.rendezvous != run.rendezvous:
            raise DataFault(f"{job.folder / RUN} names another rendezvous than the run on {run.host}; start it again")
        if job.device == "cuda" and machine.device(job.launch) != "cuda":
            raise ConfigFault(f"the run on {run.host} trains on GPUs, {self._host} has none")

    def _keep(self, joined: Joined) -> None:
        self._joined = joined
        write_json(self._record, asdict(joined))

    def _end(self, run: Announcement) -> None:
        self._record.unlink(missing_ok=True)
        if run.fault is not None:
            raise KINDS[run.fault](f"the run on {run.host} has failed: {run.what}")
        log.info("the run on %s has finished", run.host)


def _read(path: Path, kind: Any) -> Any:
    """The content of a file that is replaced and removed while this node reads; None if there is none."""
    damaged = False
    while True:
        try:
            return read_json(path, kind)
        except FileNotFoundError:
            return None
        except DataFault:
            if not path.exists():
                return None
            if damaged:
                raise
            damaged = True  # or it has just appeared: read once more
        except OSError as error:
            if error.errno != errno.ESTALE:  # of a network disk: replaced
                raise
