"""Finished models on disk: constructor arguments and weights in one file, checked by its hash when read."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ups.errors import DataFault
from ups.files import WEIGHTS, digest_of

Model = TypeVar("Model", bound=nn.Module)


def tensor_bytes(content: dict[str, Any]) -> memoryview:
    """Tensors and plain values as the bytes of a file; the same content gives the same bytes."""
    buffer = io.BytesIO()  # given a path, torch puts its name into the file, and hides why a disk refused it
    torch.save(content, buffer)
    return buffer.getbuffer()


def load(path: Path) -> dict[str, Any]:
    """Read what `tensor_bytes` made, on the CPU; only tensors and plain values are accepted."""
    return torch.load(path, map_location="cpu", weights_only=True)


def load_model(make: Callable[..., Model], data_root: Path, receipt: dict[str, Any]) -> Model:
    """Rebuild a finished, frozen model from a stage's receipt; `make` takes the settings saved with the weights.

    Raises:
        DataFault: the weights are missing, not those of the receipt, or of a model that is built otherwise by now.
    """
    content = _finished(data_root, receipt)
    try:
        model = make(**content["settings"])
        model.load_state_dict(content["weights"])
    except (TypeError, RuntimeError) as fault:
        raise _unusable(data_root, receipt, "is a model of another version of ups") from fault
    return model.requires_grad_(False).eval()


def load_settings(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments of a finished model."""
    return _finished(data_root, receipt)["settings"]


def load_weights(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """The weights of a finished model by name."""
    return _finished(data_root, receipt)["weights"]


def _finished(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    path = _path(data_root, receipt)
    if not path.is_file() or digest_of(path) != receipt["weights"]:
        raise _unusable(data_root, receipt, f"does not hold what {receipt['stage']} trained")
    return load(path)


def _unusable(data_root: Path, receipt: dict[str, Any], why: str) -> DataFault:
    return DataFault(f"{_path(data_root, receipt)} {why}; run `kedro run --from-nodes train_{receipt['stage']}`")


def _path(data_root: Path, receipt: dict[str, Any]) -> Path:
    return data_root / receipt["path"] / WEIGHTS
