"""Jobs for clusters and clouds: the script or task file of a `kedro run`, filled from the section `submit`."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ups.config import LaunchConfig, SubmitConfig
from ups.errors import ConfigFault, DataFault, Diverged, GateFailed, OutOfMemory, StorageFault, nearest

MOUNT = "/results"  # where a job of a cloud has its storage
GRACE_SECONDS = 120  # between SIGTERM and SIGKILL, in which a job saves its step
FINAL = [fault.exit_code for fault in (ConfigFault, DataFault, Diverged, OutOfMemory, StorageFault, GateFailed)]
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
CONFIGURATION = {".yml", ".yaml", ".json"}  # suffixes of the files that Kedro reads below conf/
CATALOGS = Path.home() / ".sky" / "catalogs"


@dataclass(frozen=True)
class Target:
    """A kind of cluster or cloud: the template of a job, the command that submits its file, the options it needs.

    `several`: which of `nodes` and `num_seeds` may be more than one per job.
    """

    template: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    several: tuple[str, ...] = ()


TARGETS = {
    "slurm": Target("slurm.sh.jinja", ("sbatch",), several=("nodes", "num_seeds")),
    "sky": Target("sky.yml.jinja", ("sky", "jobs", "launch"), ("storage",)),
    "dstack": Target("dstack.yml.jinja", ("dstack", "apply", "-f"), ("image", "storage")),
    "k8s": Target("k8s.yml.jinja", ("kubectl", "create", "-f"), ("image", "storage")),
    "trainjob": Target("trainjob.yml.jinja", ("kubectl", "create", "-f"), ("image", "storage"), ("nodes",)),
}


@dataclass(frozen=True)
class Job:
    """A `kedro run` on a cluster or cloud.

    Attributes:
        words: The command, without its parameters.
        params: The parameters that were given for the run, as text for `--params`.
        data_root: Where the results are, if the target shares the disk of this machine.
    """

    words: tuple[str, ...]
    params: str
    project: Path
    data_root: Path
    submit: SubmitConfig
    launch: LaunchConfig

    def render(self, name: str) -> str:
        """The script or task file for a target.

        Raises:
            ConfigFault: the target needs an option that is not set, or cannot do what one asks for.
        """
        self._check(name)
        environment = Environment(  # noqa: S701, shell and YAML, which the filters quote
            loader=PackageLoader("ups.runs", "."),
            undefined=StrictUndefined,
            trim_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {"quote": shlex.quote, "json": json.dumps}
        given = ["launch.device=cuda"] if self.submit.accelerator else []  # a machine without a GPU is a fault then
        given += [self.params] if self.params else []
        in_cloud = ",".join([*given, f"data_root={MOUNT}/{self.submit.name}"])
        return environment.get_template(TARGETS[name].template).render(
            submit=self.submit,
            launch=self.launch,
            project=self.project,
            data_root=str(self.data_root),
            words=self.words,
            programs=Path(sys.executable).parent,
            params=",".join(given),
            line_of_run=shlex.join([*self.words, "--params", in_cloud]),
            mount=MOUNT,
            grace_seconds=GRACE_SECONDS,
            final_codes=FINAL,
        )

    def _check(self, name: str) -> None:
        if name not in TARGETS:
            raise ConfigFault(f"there is no target {name!r}{nearest(name, list(TARGETS))}")
        submit, launch = self.submit, self.launch
        for option in TARGETS[name].needs:
            if getattr(submit, option) is None:
                raise ConfigFault(f"submit.{option} is missing, which {name} needs: --params submit.{option}=NAME")
        if launch.num_nodes > 1:
            raise ConfigFault(f"launch.num_nodes = {launch.num_nodes}: set submit.nodes={launch.num_nodes} instead")
        if submit.cores < launch.num_processes:
            fewer = f"submit.cores = {submit.cores} is less than launch.num_processes = {launch.num_processes}"
            raise ConfigFault(f"{fewer}: each process needs a core")
        if name == "slurm" and "," in str(self.data_root):
            raise ConfigFault(f"{self.data_root}: --params is split at the comma; choose a data root without one")
        if name != "slurm":
            self._check_cloud(name)

    def _check_cloud(self, name: str) -> None:
        storage = self.submit.storage
        if TARGETS[name].command[0] == "kubectl" and not DNS_NAME.fullmatch(storage or ""):
            raise ConfigFault(f"submit.storage = {storage} is no name of a PersistentVolumeClaim, which {name} needs")
        for option in ("nodes", "num_seeds"):
            if (value := getattr(self.submit, option)) > 1 and option not in TARGETS[name].several:
                able = " and ".join(other for other, target in TARGETS.items() if option in target.several)
                raise ConfigFault(f"submit.{option} = {value} is for {able} only: with {name} set submit.{option}=1")
        local = sorted((self.project / "conf" / "local").rglob("*")) if "local" in self.words else []
        for path in (path for path in local if path.suffix in CONFIGURATION):
            if set(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) - {"submit"}:
                remedy = "move its values to an environment of its own, conf/NAME, for --env NAME"
                raise ConfigFault(f"{path} is not copied to the machines of {name}: {remedy}")

    def submit_to(self, name: str) -> None:
        """Give the job to the target's own command, which may ask for a confirmation of the price.

        Raises:
            ConfigFault: the command is not installed here, or refuses the job.
        """
        content, command = self.render(name), TARGETS[name].command
        if (program := shutil.which(command[0])) is None:
            raise ConfigFault(f"{command[0]} is not installed here; `--dry-run` writes the file for another machine")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.submit.name}{Path(TARGETS[name].template).suffixes[0]}"
            path.write_text(content, encoding="utf-8")
            secrets = [word for secret in self.submit.secrets for word in ("--secret", secret) if name == "sky"]
            ended = subprocess.run([program, *command[1:], *secrets, str(path)], cwd=self.project, check=False)
        if ended.returncode != 0:
            raise ConfigFault(f"{' '.join(command)} refused the job with exit code {ended.returncode}, see above")


def hourly_price(submit: SubmitConfig, launch: LaunchConfig, catalogs: Path) -> float | None:
    """The lowest price in US dollars per hour of such a machine in SkyPilot's catalogs on this disk; None without one.

    It has these GPUs, or none, and at least as many cores and as much memory.
    """
    column = "SpotPrice" if submit.spot else "Price"
    asked = (submit.accelerator or "", launch.num_processes if submit.accelerator else 0)
    prices = []
    for path in catalogs.glob("v*/*/vms.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                count, cores, memory = (float(row[name] or 0) for name in ("AcceleratorCount", "vCPUs", "MemoryGiB"))
                is_large_enough = cores >= submit.cores and memory >= submit.memory_gigabytes
                if (row["AcceleratorName"], count) == asked and is_large_enough and row[column]:
                    prices.append(float(row[column]))
    return min(prices, default=None)
