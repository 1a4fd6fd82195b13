"""A run folder: what to train, from what, how far it has come. It can be resumed and rebuilt from itself alone."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ups.errors import DataFault
from ups.files import digest_of, publish, read_json

Model = TypeVar("Model", bound=nn.Module)

RUN, METRICS, STATE, WEIGHTS, RECEIPT = "run.json", "metrics.jsonl", "state.pt", "weights.pt", "receipt.json"


@dataclass(frozen=True)
class Run:
    """Contents of `run.json`: the stage, its section, the receipts of its inputs and where their files are."""

    folder: Path
    stage: str
    fingerprint: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    launch: dict[str, Any]
    data_root: Path
    raw: Path

    @classmethod
    def read(cls, folder: Path) -> "Run":
        content = read_json(folder / RUN)
        places = {name: (folder / content.pop(name)).resolve() for name in ("data_root", "raw")}
        return cls(folder=folder, **content, **places)


def append_metrics(folder: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one line to `metrics.jsonl`; rank 0 only."""
    line = json.dumps({"step": step, "time": time.time(), **metrics})
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def save(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values atomically."""
    with publish(path) as temporary:
        torch.save(content, temporary)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, on the CPU; only tensors and plain values are accepted."""
    return torch.load(path, map_location="cpu", weights_only=True)


def save_model(path: Path, settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write a finished model: constructor arguments and weights."""
    save(path, {"settings": settings, "weights": weights})


def load_model(make: Callable[..., Model], data_root: Path, receipt: dict[str, Any]) -> Model:
    """Rebuild a finished, frozen model from a stage's receipt; `make` takes the settings saved with the weights.

    Raises:
        DataFault: the weights are missing or not those of the receipt.
    """
    content = _finished(data_root, receipt)
    model = make(**content["settings"])
    model.load_state_dict(content["weights"])
    return model.requires_grad_(False).eval()


def load_settings(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments of a finished model."""
    return _finished(data_root, receipt)["settings"]


def _finished(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    path, stage = data_root / receipt["path"] / WEIGHTS, receipt["stage"]
    if not path.is_file() or digest_of(path) != receipt["weights"]:
        raise DataFault(f"{path} does not hold the weights that {stage} trained; run `kedro run --from-nodes train_{stage}`")
    return load(path)
