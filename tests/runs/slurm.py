"""A real Slurm cluster for this user alone: munged, slurmctld and, as two nodes, two slurmd on this machine."""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("node1", "node2")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=64000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=64000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def is_installed() -> bool:
    """Whether all programs of Slurm and munge are here."""
    return all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for program in PROGRAMS)


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run the daemons, and have Slurm's commands in this process talk to them."""
    host = socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    settings = {"host": host, "ports": [_free_port() for _ in range(3)], "user": getpass.getuser(), "folder": folder}
    (folder / "slurm.conf").write_text(CONF.format(**settings))
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ |= {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = ["munged", "--foreground", "--force", f"--log-file={folder}/munge.log"]
    with ExitStack() as daemons:
        daemons.callback(_restore, before)
        _start(daemons, [*munge, *(f"--{option}={folder / name}" for option, name in places.items())], folder)
        wait_for(lambda: (folder / "munge.socket").exists(), 20)
        _start(daemons, ["slurmctld", "-D", "-c"], folder)
        for node in NODES:
            _start(daemons, ["slurmd", "-D", "-N", node], folder)
        wait_for(lambda: ask("sinfo", "--noheader", "--format=%D %T") == f"{len(NODES)} idle", 40)
        daemons.callback(lambda: (ask("scancel", f"--user={getpass.getuser()}"), time.sleep(1)))
        yield


def _start(daemons: ExitStack, command: list[str], folder: Path) -> None:
    """Start a daemon; it ends with the stack."""
    with (folder / f"{command[0]}.{len(list(folder.iterdir()))}.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()

    daemons.callback(end)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(*command: str) -> str:
    """What a command of Slurm prints, nothing when it fails."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def wait_for(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds, or fail with what Slurm says of its jobs."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"nothing for {seconds} s: {ask('scontrol', 'show', '--oneliner', 'jobs')}"
        time.sleep(0.2)


def fields(job: str) -> dict[str, str]:
    """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
    return dict(word.split("=", 1) for word in ask("scontrol", "show", "--oneliner", "job", job).split() if "=" in word)
