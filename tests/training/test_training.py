import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ups.config import CodecConfig, LatentsConfig, LaunchConfig, OperatorConfig, SimulateConfig, SplitConfig
from ups.data.loader import LatentBatch, LatentSamples
from ups.errors import ConfigFault, Diverged, LostWorker
from ups.files import digest_of
from ups.launch import train_stage
from ups.models.weights import load
from ups.pipelines.data.nodes import describe_datasets, fit_normalization, simulate_pdebench
from ups.pipelines.training.nodes import encode_latents, train_codec
from ups.run import Run
from ups.training import operator
from ups.training.distributed import Ranks
from ups.training.loop import Stage, train

Receipt = dict[str, Any]

SIZES = {"num_trajectories": 8, "resolution": 16, "num_snapshots": 6, "duration": 0.3}
DATASETS = [
    {"family": "advection_1d", "parameters": {"beta": 0.4}, **SIZES},
    {"family": "diffusion_reaction_1d", "parameters": {"nu": 0.5, "rho": 1.0}, **SIZES},
]
LOOP = {"seed": 0, "batch_tokens": 64, "learning_rate": 0.003, "warmup_steps": 10, "weight_decay": 0.01}
LOOP |= {"clip_norm": 1.0, "ema_decay": 0.9, "log_every": 20, "validate_every": 60, "checkpoint_every": 20}
PATCHES = {"patch_size": [2, 2, 2], "max_tokens": [8, 64, 64], "components": 2}
BACKBONE = {"hidden_channels": 16, "num_layers": 2, "modes": 4}
LAUNCH = {"threads_per_process": 1, "device": "cpu", "timeout_seconds": 60, "force": False}
SECONDS_PER_STAGE = 90
SECONDS_TO_VANISH = 10


def _operator_config(steps: int = 300, **changes: float) -> OperatorConfig:
    return OperatorConfig(**LOOP | {"steps": steps, "model": BACKBONE, "noise": 0.05} | changes)


def train_operator(root: Path, num_processes: int = 1, **changes: float) -> Receipt:
    """Train the operator in `root`, on the latents that lie there."""
    launch = LaunchConfig(**LAUNCH, num_processes=num_processes)
    with at_most(SECONDS_PER_STAGE):
        return train_stage("operator", _operator_config(**changes), _inputs(root), launch, root, root / "01_raw")


def _inputs(root: Path) -> dict[str, Receipt]:
    return {"latent_cache": json.loads(next(root.glob("04_feature/latents/*/receipt.json")).read_text())}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Interrupt what takes longer, as Ctrl-C would."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with raw files of two families and their latents, made by the nodes; tests take copies."""
    root = tmp_path_factory.mktemp("encoded")
    raw, launch = root / "01_raw", LaunchConfig(**LAUNCH, num_processes=1)
    files = simulate_pdebench("simulate", SimulateConfig(seed=0, datasets=DATASETS), raw)
    split = SplitConfig(seed=0, valid_fraction=0.25, test_fraction=0.25)
    datasets = describe_datasets(files, {}, {}, split, raw, root)
    normalization = fit_normalization(datasets, raw, root)
    config = CodecConfig(**LOOP | {"steps": 20, "model": PATCHES})
    with at_most(SECONDS_PER_STAGE):
        codec = train_codec(datasets, normalization, config, launch, raw, root)
    encode_latents(datasets, codec, LatentsConfig(dtype="float32"), launch, raw, root)
    return root


@pytest.fixture
def root(encoded: Path, tmp_path: Path) -> Path:
    """A data root of the test's own, in which no operator has been trained."""
    return shutil.copytree(encoded, tmp_path / "root")


@pytest.fixture(scope="module")
def undisturbed(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`undisturbed(n)` is the run folder of an operator trained on n processes without interruption."""
    folders: dict[int, Path] = {}

    def of(num_processes: int) -> Path:
        if num_processes not in folders:
            root = shutil.copytree(encoded, tmp_path_factory.mktemp("undisturbed") / "root")
            folders[num_processes] = root / train_operator(root, num_processes)["path"]
        return folders[num_processes]

    return of


def metrics(folder: Path, kind: str) -> dict[int, float]:
    """Step -> `loss` or `valid_loss`, each step at most once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(line["step"] for line in lines if kind in line)
    assert set(steps.values()) == {1}
    return {line["step"]: line[kind] for line in lines if kind in line}


def processes_of(root: Path) -> list[psutil.Process]:
    """The torchrun and workers that train in `root`; zombies do not count."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if f"ups.training.train {root}/" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def _workers_of(root: Path) -> list[psutil.Process]:
    return [process for process in processes_of(root) if "torch.distributed.run" not in process.cmdline()]


def _torchrun_of(root: Path) -> list[psutil.Process]:
    return [process for process in processes_of(root) if "torch.distributed.run" in process.cmdline()]


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(condition())


def _has_checkpoint(root: Path) -> bool:
    return any(root.glob("06_models/operator/*/state.pt"))


@contextmanager
def killing_after_checkpoint(root: Path, victims: Callable[[Path], list[psutil.Process]]) -> Iterator[None]:
    """While the body trains, kill the process groups of `victims(root)` as soon as there is a checkpoint."""

    def kill() -> None:
        if wait_until(lambda: _has_checkpoint(root), SECONDS_PER_STAGE):
            os.killpg(victims(root)[-1].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_latents_are_keyed_by_the_raw_files(encoded: Path):
    """The key of the latents has the MD5 sum of every raw file they were made from."""
    sources = _inputs(encoded)["latent_cache"]["key"]["source files"]
    assert sources == {path.name: digest_of(path, "md5") for path in (encoded / "01_raw").glob("*.hdf5")}


def test_two_ranks_learn_what_one_learns(undisturbed: Callable[[int], Path]):
    """On two ranks the losses are those of one rank to four digits, and so are the weights."""
    one, two = undisturbed(1), undisturbed(2)
    assert metrics(two, "loss") == pytest.approx(metrics(one, "loss"), rel=1e-4)
    assert metrics(two, "valid_loss") == pytest.approx(metrics(one, "valid_loss"), rel=1e-4)
    weights_of_two = load(two / "weights.pt")["weights"]
    for name, expected in load(one / "weights.pt")["weights"].items():
        torch.testing.assert_close(weights_of_two[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_run_resumes_bit_for_bit(undisturbed: Callable[[int], Path], root: Path, num_processes: int):
    """A run whose last rank was killed, started again, ends with the weights and metrics of an undisturbed run."""
    expected = undisturbed(num_processes)
    with pytest.raises(LostWorker), killing_after_checkpoint(root, _workers_of):
        train_operator(root, num_processes)
    folder = root / train_operator(root, num_processes)["path"]
    assert digest_of(folder / "weights.pt") == digest_of(expected / "weights.pt")
    assert folder.name == expected.name
    for kind in ("loss", "valid_loss"):
        assert metrics(folder, kind) == metrics(expected, kind)


def test_lost_torchrun_is_reported_and_leaves_nothing(root: Path):
    """A torchrun that is killed ends the stage with the place of its output, and takes its workers along."""
    told = pytest.raises(LostWorker, match=r"without a word \(torchrun: -9\).*train.log")
    with told as fault, killing_after_checkpoint(root, _torchrun_of):
        train_operator(root, 2)
    assert "\n" not in str(fault.value)
    assert wait_until(lambda: not processes_of(root), SECONDS_TO_VANISH)


PARENT = """
import json, sys
from pathlib import Path
from ups.config import LaunchConfig, OperatorConfig
from ups.launch import train_stage
root, config, inputs, launch = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
train_stage("operator", OperatorConfig(**config), inputs, LaunchConfig(**launch), root, root / "01_raw")
"""


def test_no_process_outlives_a_killed_parent(root: Path):
    """When the process that started torchrun is killed, torchrun and all workers vanish within ten seconds."""
    arguments = _operator_config(steps=100_000).model_dump(mode="json"), _inputs(root), LAUNCH | {"num_processes": 2}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(root), *map(json.dumps, arguments)])
    try:
        assert wait_until(lambda: _has_checkpoint(root), SECONDS_PER_STAGE)
        assert len(processes_of(root)) == 3
        parent.kill()
        assert wait_until(lambda: not processes_of(root), SECONDS_TO_VANISH)
    finally:
        parent.kill()
        parent.wait()
        for process in processes_of(root):
            process.kill()


def test_diverged_training_says_so(root: Path):
    """A learning rate far too high ends as `Diverged` with one line that names stage, step and remedy."""
    with pytest.raises(Diverged, match=r"^operator: loss .* at step \d+; lower operator.learning_rate$") as fault:
        train_operator(root, learning_rate=1e20, warmup_steps=0)
    assert "\n" not in str(fault.value)
    assert not processes_of(root)


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Iterator[Run]:
    """The run of an operator that is trained in this process, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with at_most(SECONDS_PER_STAGE):
        yield Run(tmp_path, "operator", "", {}, _inputs(root), {}, root, root / "01_raw")
    torch.set_num_threads(num_threads)


def _train_here(stage: Stage, config: OperatorConfig, run: Run, world_size: int = 1) -> None:
    train(stage, config, run, Ranks(0, world_size, torch.device("cpu")))


def test_more_processes_than_samples_are_refused(run: Run):
    """A batch of four samples cannot be shared by five processes, and the fault says what to do."""
    config = _operator_config(batch_tokens=1)
    with pytest.raises(ConfigFault, match="batch of 4 .* by 5 processes: raise batch_tokens or lower"):
        _train_here(operator.build(config, run), config, run, world_size=5)


def test_operator_overfits_four_trajectories(run: Run):
    """On four trajectories, without noise, a few hundred steps make the loss five times smaller."""
    config = _operator_config(steps=300, noise=0.0, learning_rate=0.01, weight_decay=0.0)
    torch.manual_seed(0)
    stage = operator.build(config, run)
    _train_here(replace(stage, train=_first_four(stage.train)), config, run)
    losses = metrics(run.folder, "loss")
    assert losses[300] < losses[20] / 5


def _first_four(samples: LatentSamples) -> LatentSamples:
    for entry in samples.cache.datasets.values():
        entry["split"]["train"] = entry["split"]["train"][:2]
    return LatentSamples(samples.cache, "train", steady=False)


def test_latents_that_are_not_finite_end_the_training(run: Run):
    """NaN in the latents ends the training at the next logged step, and no weights are written."""

    class Spoilt(LatentSamples):
        def load(self, *place: Any) -> LatentBatch:
            batch = super().load(*place)
            return replace(batch, z=batch.z * torch.nan)

    config = _operator_config()
    stage = operator.build(config, run)
    spoilt = Spoilt(stage.train.cache, "train", steady=False)
    with pytest.raises(Diverged, match="loss nan.* at step 20"):
        _train_here(replace(stage, train=spoilt), config, run)
    assert not (run.folder / "weights.pt").exists()
