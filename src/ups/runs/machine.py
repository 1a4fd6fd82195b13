"""The machine: its device, the micro-batch that fits into its memory, times on it, its description in tables."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import PositiveInt

from ups.config import LaunchConfig
from ups.errors import ConfigFault
from ups.files import num_cores, read_json, write_json
from ups.runs.processes import now, use_whole_float32

if TYPE_CHECKING:
    import torch

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
TUNING = "tuning.json"
OF_MEMORY = ("kind", "family", "model", "precision", "batch_tokens", "history", "unroll", "terms")  # options of a stage
GIBIBYTE = 2**30
LONG_CALL_SECONDS = 5.0
# Of trajectories that several processes score on a CPU. On two cores their start takes longer than they save with
# 82,000 tokens (18 s, and 13 s with one), and pays with 306,000 (56 s, and 67 s with one).
MANY_TOKENS, MOST_PROCESSES = 200_000, 8
FLOAT8_CAPABILITY = (8, 9)  # of GPUs that multiply matrices in float8: Ada, Hopper and later
FOR_GPUS = {"compile": ("reduce-overhead", "true"), "sharding": ("fsdp-offload", "fsdp")}
Tuning = dict[str, PositiveInt | None]
"""Contents of `tuning.json`: key of a place -> tokens of a micro-batch, None for the whole batch."""


def refuse_under_torchrun() -> None:
    """Refuse to run a pipeline under torchrun: the pipeline starts torchrun, and every rank would run all of it.

    Raises:
        ConfigFault: this process was started by torchrun.
    """
    if found := [name for name in TORCHRUN_VARIABLES if name in os.environ]:
        raise ConfigFault(
            f"started under torchrun ({', '.join(found)} set): run plain `kedro run`, with "
            "--params launch.num_processes=N for N processes per stage"
        )


def device(launch: LaunchConfig) -> str:
    """`cpu` or `cuda`; a GPU machine never falls back to the CPU by itself.

    Raises:
        ConfigFault: CUDA is asked for and absent, or there are more processes than GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if launch.device == "cpu" or (launch.device == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus < launch.num_processes:
        raise ConfigFault(
            f"launch.num_processes={launch.num_processes} needs as many GPUs, found {num_gpus}: "
            "lower it or set launch.device=cpu"
        )
    return "cuda"


def training_device(launch: LaunchConfig, stage: str, precision: str) -> str:
    """The `device` of a training job of a stage.

    Raises:
        ConfigFault: as `device`, and if there is no GPU or no package for an option that needs one.
    """
    where = device(launch)
    if where == "cpu":
        for name, (value, instead) in FOR_GPUS.items():
            if getattr(launch, name) == value:
                raise ConfigFault(f"launch.{name}={value} needs a GPU: set launch.{name}={instead}")
        if launch.nccl:
            raise ConfigFault(f"launch.nccl={launch.nccl} needs GPUs: leave it empty")
    if precision == "float8":
        _expect_float8(f"{stage}.precision", launch.num_processes if where == "cuda" else 0)
    return where


def _expect_float8(parameter: str, num_gpus: int) -> None:
    if missing := float8_needs(num_gpus):
        raise ConfigFault(f"{parameter}=float8 needs {missing}; or set {parameter}=bfloat16")


def float8_needs(num_gpus: int) -> str | None:
    """What is missing for products of matrices in float8 on the first `num_gpus` GPUs; None if nothing is."""
    import torch

    if num_gpus == 0:
        return "a GPU"
    found = min(torch.cuda.get_device_capability(index) for index in range(num_gpus))
    if found < FLOAT8_CAPABILITY:
        have, needed = (".".join(map(str, pair)) for pair in (found, FLOAT8_CAPABILITY))
        return f"GPUs of compute capability {needed}, found {have}"
    return None if find_spec("torchao") else "the extra: pip install -e '.[float8]'"


def compute_as_in_training(launch: LaunchConfig) -> None:
    """Let torch use as many threads in this process, and as precise convolutions, as in a training process."""
    import torch

    torch.set_num_threads(launch.threads_per_process or num_cores())
    use_whole_float32()


def scoring_launch(launch: LaunchConfig, num_tokens: int) -> LaunchConfig:
    """`launch` with a process for each core of a CPU where there is much to score; `num_tokens` are those of all data.

    A step of training is too short to be shared by processes on the cores of a small CPU, whole trajectories are not.
    """
    if device(launch) == "cuda" or launch.num_processes > 1 or num_tokens < MANY_TOKENS:
        return launch
    return launch.model_copy(update={"num_processes": min(num_cores(), MOST_PROCESSES), "threads_per_process": 1})


def with_tuned_micro_batch(
    launch: LaunchConfig, stage: str, section: dict[str, Any], device: str, data_root: Path
) -> LaunchConfig:
    """`launch` with the micro-batch that `--pipeline tune` found here, unless the parameters set one."""
    path = data_root / "06_models" / TUNING
    if launch.micro_batch_tokens is not None or not path.is_file():
        return launch
    found: Tuning = read_json(path, Tuning)
    return launch.model_copy(update={"micro_batch_tokens": found.get(tuning_key(launch, stage, section, device))})


def save_micro_batch(
    launch: LaunchConfig, stage: str, section: dict[str, Any], device: str, data_root: Path, tokens: int
) -> None:
    """Save the largest micro-batch that fits into memory, in tokens."""
    path = data_root / "06_models" / TUNING
    found = read_json(path, Tuning) if path.is_file() else {}
    write_json(path, found | {tuning_key(launch, stage, section, device): tokens})


def tuning_key(launch: LaunchConfig, stage: str, section: dict[str, Any], device: str) -> str:
    """All that the memory of a micro-batch depends on, beside the machine: "operator on 2 x cuda, ddp, 5f3a09c1".

    The digits stand for what the section of the stage and `launch` say of model and memory.
    """
    graphs = ", reduce-overhead" if launch.compile == "reduce-overhead" else ""
    content = [section.get(name) for name in OF_MEMORY]
    content += [launch.activation_checkpointing, launch.memory_gigabytes, launch.memory_fraction]
    digits = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    return f"{stage} on {launch.world_size} x {device}, {launch.sharding}{graphs}, {digits}"


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int, device: "torch.device") -> dict[str, float]:
    """Median seconds per call of each contender over `rounds`, after one round as warm-up.

    They are called alternately, so that other load on the machine slows all alike. A contender that takes over
    `LONG_CALL_SECONDS` in the first round is not called again: rounds of minutes, of a numerical solver for example,
    cost more than they tell.
    """

    def seconds_of(name: str) -> float:
        started = now(device)
        contenders[name]()
        return now(device) - started

    first = medians({name: partial(seconds_of, name) for name in contenders}, 1)
    quick = [name for name, seconds in first.items() if seconds <= LONG_CALL_SECONDS]
    taken = [first, *({name: seconds_of(name) for name in quick} for _ in range(rounds - 1))]
    return {name: median(each[name] for each in taken if name in each) for name in contenders}


def medians(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of the seconds that each contender returns, in turns, after one round as warm-up."""
    taken = [{name: run() for name, run in contenders.items()} for _ in range(1 + rounds)]
    return {name: median(each[name] for each in taken[1:]) for name in contenders}


def describe_machine(device: str, threads: int, seed: int) -> dict[str, Any]:
    """CPU, cores, memory, GPU, versions, threads of a process, date, seed and the commit of the source."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / GIBIBYTE, 1),
        "gpu": _gpu() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "git": _commit(),
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _commit() -> str | None:
    """The git commit of this source, with `-dirty` if files were changed; None outside a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None
