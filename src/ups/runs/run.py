"""Files of a run folder: `run.json` with all that a worker needs, metrics, heartbeats, faults.

Training code imports this module, so that a change here, or in a module imported here, trains every stage again.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.config import LaunchConfig
from ups.data.families import Family
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.files import RUN, plain, read_json, relative, resolved, storage_faults, write_json

STATUS, METRICS, LOG, CHECKPOINTS = "status.json", "metrics.jsonl", "train.log", "checkpoints"
ALIVE, FAULTS, STARTED, SAMPLING = "alive.rank*", "fault.rank*.json", "started.json", "sampling.json"
REQUEST, RESULT = "request.json", "result.json"  # of a job that trains nothing
PATHS = ("folder", "data_root", "raw")  # kept relative to the run folder, so that a data root can be moved
RANK_STORE = "UPS_RANK_STORE"
"""Environment variable: the file through which the ranks of a job on one node find each other."""


@dataclass(frozen=True)
class Run:
    """Contents of `run.json`: what a worker needs to train a stage, or to resume it.

    Attributes:
        folder: The run folder, `data_root/06_models/<stage>/<fingerprint>`.
        stage: A key of `ups.training.stages.STAGES`.
        fingerprint: Key of the stage cache.
        config: The stage's section of the parameters.
        inputs: Receipts of the steps that the stage is trained from.
        launch: Processes, device and checkpoints.
        device: `cpu` or `cuda`; `launch.device: auto` has been resolved.
        data_root: Folder of all results, among them the latents that stages are trained on.
        raw: Folder of the HDF5 files; only the codec reads them.
        stamps: Size and time of the raw files as they were described, see `ups.data.arrays.stamp`.
        families: Those that are not PDEBench's, as this command knows them: others may use the same names meanwhile.
    """

    folder: Path
    stage: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    launch: LaunchConfig
    device: str
    data_root: Path
    raw: Path | None = None
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    families: list[Family] = field(default_factory=lambda: FAMILIES.defined)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `folder/run.json`; raises `DataFault` if another version has written it, with other launch options."""
        content = read_json(folder / RUN)
        launch = content.get("launch") if isinstance(content, dict) else None
        if isinstance(launch, dict) and set(launch) != set(LaunchConfig.model_fields):
            raise DataFault(f"{folder / RUN} was written by another version of ups: train its stage again")
        run: Run = read_json(folder / RUN, cls)
        raw = None if run.raw is None else resolved(str(run.raw), folder)
        return replace(run, folder=folder, data_root=(folder / run.data_root).resolve(), raw=raw)

    def write(self) -> None:
        """Write `run.json`."""
        content = asdict(self) | {"launch": self.launch.model_dump(mode="json")}
        content |= {name: relative(content[name], self.folder) for name in PATHS if content[name] is not None}
        write_json(self.folder / RUN, content)

    def alive(self, rank: int) -> Path:
        """The heartbeat file, which the rank touches in every step; it holds host name and process id."""
        return self.folder / ALIVE.replace("*", str(rank))

    @staticmethod
    def fault_file(folder: Path, rank: int) -> Path:
        """The file in which a rank reports the error that ended it."""
        return folder / FAULTS.replace("*", str(rank))


def metric_lines(folder: Path) -> list[str]:
    """Complete lines of `metrics.jsonl`; rank 0 may be in the middle of writing another."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.split("\n")[:-1]


def saved_validation(folder: Path, patience: int | None) -> float:
    """The validation loss of the weights that a finished training saved: the last, with early stopping the best."""
    losses = [line["valid_loss"] for line in map(json.loads, metric_lines(folder)) if "valid_loss" in line]
    return losses[-1] if patience is None else min(losses)


def trained_steps(folder: Path) -> int:
    """Steps that a finished training made: with early stopping fewer than `steps` of its configuration."""
    return json.loads(metric_lines(folder)[-1])["step"]


def logged_training(folder: Path) -> dict[str, Any]:
    """The steps of a finished training, the losses by key of each of its validations, and its seconds of computing."""
    lines = (line for line in map(json.loads, metric_lines(folder)) if "valid_loss" in line)
    start = "valid_loss/"
    losses = [{k.removeprefix(start): loss for k, loss in line.items() if k.startswith(start)} for line in lines]
    return {"num_steps": trained_steps(folder), "validations": losses, "cpu_seconds": training_cpu_seconds(folder)}


def training_seconds(folder: Path) -> float:
    """Seconds on the clock that the training steps took; validations are not included."""
    return sum(seconds for seconds, _ in _logged_times(folder))


def training_cpu_seconds(folder: Path) -> float:
    """Seconds of computing, over all threads of rank 0, that the training steps took."""
    return sum(seconds * line["cpu_cores"] for seconds, line in _logged_times(folder))


def _logged_times(folder: Path) -> Iterator[tuple[float, dict[str, float]]]:
    """Lines of `metrics.jsonl` with rates, and the seconds on the clock of their training steps."""
    last = 0
    for line in map(json.loads, metric_lines(folder)):
        if "steps_per_second" in line:
            yield (line["step"] - last) / line["steps_per_second"], line
            last = line["step"]


def append_metrics(folder: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one line to `metrics.jsonl`; rank 0 only."""
    line = json.dumps({"step": step, "time": time.time(), **metrics})
    path = folder / METRICS
    with (
        storage_faults(path, "free some space, the same command resumes"),
        open(path, "a", encoding="utf-8", opener=plain) as file,
    ):
        file.write(line + "\n")
