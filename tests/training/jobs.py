"""Small training jobs for tests: latents to train on, stages that train in seconds, what a job leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from tests.backbones import SMALL
from ups.config import (
    WHOLE,
    AdaptConfig,
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SimulateConfig,
    SplitConfig,
    SteadyConfig,
)
from ups.config.studies import AdaptRecipe
from ups.config.training import Terms, TrainingSection
from ups.files import digest_of, read_json, write_json
from ups.pipelines.data import describe_datasets, fit_normalization, simulate_pdebench
from ups.pipelines.training import encode_latents, train_codec
from ups.runs.launcher import train_stage
from ups.runs.stage_cache import Receipt, trained_receipts

PROJECT = Path(__file__).parents[2]
SECONDS_PER_JOB = 60
SECONDS_TO_VANISH = 10

SIZES = {"num_trajectories": 8, "resolution": 16, "num_snapshots": 6, "duration": 0.3}
DATASETS = [
    {"family": "advection_1d", "parameters": {"beta": 0.4}, **SIZES},
    {"family": "diffusion_reaction_1d", "parameters": {"nu": 0.5, "rho": 1.0}, **SIZES},
    {"family": "darcy_2d", "parameters": {"beta": 1.0}, **SIZES | {"num_snapshots": 1}},
]
LOOP = {
    "seed": 0,
    "steps": 24,
    "batch_tokens": 64,
    "batch_multiple": 12,
    "balance": 0.5,
    "family_weights_by_dimension": [1.0, 1.0, 1.0],
    "max_difficulty": 2.0,  # so that exact resume is shown with it
}
LOOP |= {"optimizer": "adamw", "learning_rate": 0.003, "schedule": "cosine", "warmup_steps": 4, "weight_decay": 0.01}
LOOP |= {"clip_norm": 1.0, "spike_factor": 100.0, "max_skipped_steps": 2, "ema_decay": 0.9, "precision": "float32"}
LOOP |= {"patience": None, "log_every": 1, "validate_every": 12}
PATCHES = {"patch_size": [2, 2, 2], "max_tokens": [8, 16, 64], "components": 2, "tolerance": None}
LAUNCH = {"num_processes": 2, "num_nodes": 1, "rendezvous": None, "threads_per_process": 1, "device": "cpu"}
LAUNCH |= {"sharding": "ddp", "compile": False, "activation_checkpointing": False, "deterministic": False}
LAUNCH |= {"micro_batch_tokens": None, "nccl": {}}
LAUNCH |= {
    "bucket_megabytes": 25.0,
    "exchange_precision": "float32",
    "memory_gigabytes": None,
    "memory_fraction": 0.9,
    "preload_latents": None,
    "latent_store": None,
    "checkpoint_steps": 4,
    "checkpoint_minutes": 10.0,
    "keep_checkpoints": 2,
}
LAUNCH |= {"restarts": 3, "timeout_seconds": 30, "force": False}

NO_TERMS: dict[str, dict[str, Any]] = {
    name: {"weight": 0.0, "phase": [0.0, 1.0]}
    | ({"num_points": 16, "every": 1, "warmup_steps": 0} if name == "query" else {})
    for name in Terms.model_fields
}
ONE_STEP = {"horizon": 1, "pushforward": False, "start": 0.5, "families": None}
NOISE = {"P_mean": -0.4, "P_std": 1.2}


def noisy(std: float, own_error: float = 0.0) -> dict[str, Any]:
    """The section of the noise on the states from which training steps."""
    return {"std": std, "own_error": own_error}


CONFIGS: dict[str, tuple[type[TrainingSection], dict[str, Any]]] = {
    "codec": (CodecConfig, {"model": PATCHES}),
    "operator": (
        OperatorConfig,
        {
            "model": SMALL,
            "noise": noisy(0.05, own_error=1.0),
            "conserve": True,
            "symmetries": True,
            "history": ["diffusion_reaction_2d", "compressible_ns_1d"],
            "unroll": ONE_STEP,
            "terms": NO_TERMS,
        },
    ),
    "diffusion": (DiffusionConfig, {"model": SMALL} | NOISE),
    "consistency": (ConsistencyConfig, NOISE | {"q": 256.0, "k": 8.0, "b": 0.5}),
    "steady": (SteadyConfig, {"model": SMALL, "symmetries": True}),
}


def section(stage: str = "operator", **changes: Any) -> TrainingSection:
    """The configuration of a small stage."""
    kind, own = CONFIGS[stage]
    return kind(**LOOP | own | changes)


RECIPE = {name: value for name, value in LOOP.items() if name in AdaptRecipe.model_fields}


def adapt_section(**changes: Any) -> AdaptConfig:
    """The configuration of a short adaptation."""
    section = {"folder": None, "donor": None, "sizes": [4], "test_fraction": 0.3, "valid_fraction": 0.25}
    section |= {"recipe": RECIPE, "steps": 12, "learning_rates": [0.003, 0.01], "warmup_share": 0.1}
    section |= {"noise": noisy(0.0, own_error=1.0), "unroll": ONE_STEP, "symmetries": True, "fno": None}
    return AdaptConfig(**section | changes)


def launched(**changes: Any) -> LaunchConfig:
    """Two processes that save every four steps."""
    return LaunchConfig(**LAUNCH | changes)


def prepare(root: Path) -> None:
    """Fill a data root with raw files of three families, a codec and their latents."""
    raw, launch = root / "01_raw", launched(num_processes=1)
    simulated = SimulateConfig(seed=0, fill_below=0, fill_to=0, datasets=DATASETS)
    files = simulate_pdebench("simulate", simulated, raw)
    split = SplitConfig(seed=0, valid_fraction=0.25, test_fraction=0.25)
    datasets = describe_datasets(files, {}, {}, split, WHOLE, simulated, raw, root)
    normalization = fit_normalization(datasets, raw, root)
    codec = train_codec(datasets, normalization, section("codec"), launch, raw, root)
    cache = encode_latents(datasets, codec, LatentsConfig(tolerance=None, on_disk=True), launch, raw, root)
    receipts = {"datasets": datasets, "normalization": normalization, "codec": codec, "latent_cache": cache}
    for name, receipt in receipts.items():
        write_json(root / f"receipts/{name}.json", receipt)
    write_json(root / "04_feature/latent_cache.json", cache)


INPUTS = {
    "codec": ("datasets", "normalization"),
    "operator": ("latent_cache",),
    "diffusion": ("latent_cache", "operator", "steady"),
    "consistency": ("latent_cache", "operator", "steady", "diffusion"),
    "steady": ("latent_cache",),
}


def inputs_of(root: Path, stage: str = "operator") -> dict[str, Receipt]:
    """The receipts that a stage is trained from."""
    return trained_receipts({name: read_json(root / f"receipts/{name}.json") for name in INPUTS[stage]})


def train(root: Path, stage: str = "operator", launch: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Train a stage in `root`; returns its run folder."""
    config, raw = section(stage, **changes), root / "01_raw" if stage == "codec" else None
    receipt = train_stage(stage, config, inputs_of(root, stage), launched(**launch or {}), root, raw)
    write_json(root / f"receipts/{stage}.json", receipt)
    return root / receipt["path"]


def folder_of(root: Path, stage: str = "operator") -> Path:
    """The only run folder of a stage."""
    (folder,) = (path for path in (root / "06_models" / stage).iterdir())
    return folder


def status_of(root: Path, stage: str = "operator") -> dict[str, Any]:
    """`status.json` of a stage."""
    return read_json(folder_of(root, stage) / "status.json")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, kind: str = "loss") -> list[tuple[int, str]]:
    """Step and loss in hexadecimal digits, in the order they were written."""
    return [(line["step"], float(line[kind]).hex()) for line in lines_of(folder) if kind in line]


def assert_same_training(folder: Path, expected: Path) -> None:
    """Two run folders hold the same weights and losses, bit for bit, and nothing half written."""
    assert losses(folder) == losses(expected)
    assert losses(folder, "valid_loss") == losses(expected, "valid_loss")
    assert digest_of(folder / "weights.pt") == digest_of(expected / "weights.pt")
    assert [*folder.rglob("*.tmp"), *folder.glob("checkpoints")] == []


def processes_of(root: Path) -> list[psutil.Process]:
    """The torchrun and workers that train in `root`; zombies do not count."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if f"ups.training.worker {root}/" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def torchrun_of(root: Path) -> psutil.Process:
    """The torchrun that trains in `root`."""
    (found,) = (process for process in processes_of(root) if "torch.distributed.run" in process.cmdline())
    return found


def worker_of(root: Path, rank: int, stage: str = "operator") -> psutil.Process:
    """The process of a rank."""
    _, pid = (folder_of(root, stage) / f"alive.rank{rank}").read_text().split()
    return psutil.Process(int(pid))


@contextmanager
def free_port(*, listen: bool = False) -> Iterator[int]:
    """A port of this machine that nobody uses, or that we hold without ever answering."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        if listen:
            place.listen(8)
        yield place.getsockname()[1]


def assert_nothing_left(root: Path) -> None:
    """No process trains in `root`, and nobody holds a lock there."""
    assert wait_until(lambda: not processes_of(root), SECONDS_TO_VANISH), processes_of(root)
    for path in root.rglob(".lock"):
        with FileLock(path, timeout=0):
            pass


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS_PER_JOB) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not (is_true := bool(condition())) and time.monotonic() < end:
        time.sleep(0.005)
    return is_true


def has_reached(root: Path, step: int, stage: str = "operator") -> bool:
    """Whether the job in `root` has logged a step."""
    return any(
        line["step"] >= step for path in root.glob(f"06_models/{stage}/*/metrics.jsonl") for line in _whole(path)
    )


def _whole(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@contextmanager
def meanwhile(condition: Callable[[], bool], act: Callable[[], Any]) -> Iterator[None]:
    """While the body trains, act as soon as the condition holds."""
    thread = threading.Thread(target=lambda: wait_until(condition) and act())
    thread.start()
    try:
        yield
    finally:
        thread.join()


def sockets_of(root: Path) -> set[str]:
    """The local addresses on which processes that train in `root` listen, for TCP or UDP."""
    found = set()
    for process in processes_of(root):
        try:
            connections = process.net_connections("inet")
        except psutil.Error:  # it has just ended
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                found.add(connection.laddr.ip)
    return found


@contextmanager
def watched(root: Path) -> Iterator[set[str]]:
    """The addresses on which any process of a job listens at any time while the body trains."""
    found: set[str] = set()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.2):
            found.update(sockets_of(root))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        finished.set()
        thread.join()


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Interrupt what takes longer."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


FOREIGN = ("MLFLOW_TRACKING_URI", "UPS_TRACKING_RUN", "UPS_SAMPLE_DATA")


def start_kedro(
    root: Path,
    *params: str,
    wrap: tuple[str, ...] = (),
    steps: tuple[str, ...] = ("--nodes", "train_operator"),
    **environment: str,
) -> subprocess.Popen[str]:
    """`kedro run --env smoke` of some steps in `root`, on two processes, in a session of its own."""
    words = [f"data_root={root}", "launch.num_processes=2", "operator.log_every=1", *params]
    command = [sys.executable, "-m", "kedro", "run", "--env", "smoke", *steps]
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return subprocess.Popen(
        [*wrap, *command, "--params", ",".join(words)],
        cwd=PROJECT,
        env=inherited | {"DO_NOT_TRACK": "true", "COLUMNS": "500"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_agent(root: Path, **environment: str) -> subprocess.Popen[str]:
    """`ups agent` for `root`."""
    command = [sys.executable, "-m", "ups.commands", "agent", "--data-root", str(root), "--wait", "3"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **streams)


def finish(process: subprocess.Popen[str], seconds: float = 2 * SECONDS_PER_JOB) -> tuple[int, str]:
    """The exit code and what was written to stderr."""
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors
