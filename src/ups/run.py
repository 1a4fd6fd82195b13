"""A run folder: what to train, from what, how far it has come. It can be resumed and rebuilt from itself alone."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ups.config import LaunchConfig
from ups.files import read_json, storage_faults, write_json

RUN, STATUS, METRICS, LOG, CHECKPOINTS = "run.json", "status.json", "metrics.jsonl", "train.log", "checkpoints"
ALIVE, FAULTS, STARTED, SAMPLING = "alive.rank*", "fault.rank*.json", "started.json", "sampling.json"
PLACES = ("data_root", "raw")


@dataclass(frozen=True)
class Run:
    """Contents of `run.json`: the stage, its section, the receipts of its inputs and where their files are.

    Only the codec reads `raw` files; the other stages learn from latents below `data_root`. `device` is `cpu` or
    `cuda`, decided by the launcher.
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

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `folder/run.json`; the places in it are relative to the folder."""
        content = read_json(folder / RUN)
        places = {name: (folder / content.pop(name)).resolve() for name in PLACES if content[name] is not None}
        launch = LaunchConfig(**content.pop("launch"))
        return cls(folder=folder, launch=launch, **content | places)

    def write(self) -> None:
        """Write `run.json`, all that a training process is told."""
        content = asdict(self) | {"launch": self.launch.model_dump(mode="json")}
        content |= {name: os.path.relpath(content[name], self.folder) for name in PLACES if content[name] is not None}
        del content["folder"]
        write_json(self.folder / RUN, content)

    def alive(self, rank: int) -> Path:
        """The file that a rank touches at every step; it holds the rank's process id."""
        return self.folder / ALIVE.replace("*", str(rank))

    @staticmethod
    def fault_file(folder: Path, rank: int) -> Path:
        """Where a rank says why it ended."""
        return folder / FAULTS.replace("*", str(rank))


def metric_lines(folder: Path) -> list[str]:
    """Complete lines of `metrics.jsonl`; the last one may still be growing."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.split("\n")[:-1]


def last_validation(folder: Path) -> float:
    """The validation loss with which a finished training ended."""
    return next(value for line in reversed(metric_lines(folder)) if (value := json.loads(line).get("valid_loss")))


def training_seconds(folder: Path) -> float:
    """How long the steps of a training took as it was logged, without its validations."""
    seconds, last = 0.0, 0
    for line in map(json.loads, metric_lines(folder)):
        if "steps_per_second" in line:
            seconds, last = seconds + (line["step"] - last) / line["steps_per_second"], line["step"]
    return seconds


def append_metrics(folder: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one line to `metrics.jsonl`; rank 0 only."""
    line = json.dumps({"step": step, "time": time.time(), **metrics})
    path = folder / METRICS
    with storage_faults(path, "free some space, the same command goes on"), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
