"""A run folder: what to train, from what, how far it has come. It can be resumed and rebuilt from itself alone."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.files import read_json

RUN, METRICS, STATE = "run.json", "metrics.jsonl", "state.pt"


@dataclass(frozen=True)
class Run:
    """Contents of `run.json`: the stage, its section, the receipts of its inputs and where their files are.

    Only the codec reads `raw` files; the other stages learn from latents below `data_root`.
    """

    folder: Path
    stage: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    launch: dict[str, Any]
    data_root: Path
    raw: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `folder/run.json`; the places in it are relative to the folder."""
        content = read_json(folder / RUN)
        places = {name: (folder / content.pop(name)).resolve() for name in ("data_root", "raw") if name in content}
        return cls(folder=folder, **content, **places)


def append_metrics(folder: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one line to `metrics.jsonl`; rank 0 only."""
    line = json.dumps({"step": step, "time": time.time(), **metrics})
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
