"""Trained models on disk: one file with constructor arguments and weights, whose hash is compared when it is read."""

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ups.errors import DataFault
from ups.files import WEIGHTS, digest_of, open_plain, place_of
from ups.models.sizes import Backbone, Sizes

# What torch raises on content that it did not write, of which some does not even look like a pickle.
FOREIGN = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)
FOREIGN += (AssertionError, OverflowError, struct.error)
Model = TypeVar("Model", bound=nn.Module)


def from_settings(model: Callable[[Sizes, Backbone], Model]) -> Callable[..., Model]:
    """The constructor `model` as a function of the plain values `sizes` and `backbone` that are saved with weights."""

    def make(sizes: dict[str, Any], backbone: dict[str, Any]) -> Model:
        return model(Sizes(**sizes), Backbone(**backbone))

    return make


def tensor_bytes(content: dict[str, Any]) -> memoryview:
    """Tensors and plain values as the bytes of a file; the same content gives the same bytes."""
    # In memory first: given a path, torch stores its name in the file and hides the cause of a failed write.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def load(path: Path) -> dict[str, Any]:
    """Content of a file made by `tensor_bytes`, on the CPU; a file with anything but tensors and plain values fails."""
    with open_plain(path) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except FOREIGN as fault:
            raise DataFault(f"{path} does not hold tensors and plain values alone") from fault


def load_model(make: Callable[..., Model], data_root: Path, receipt: dict[str, Any]) -> Model:
    """The trained model of a stage's receipt, without gradients; `make` takes the constructor arguments saved with it.

    Raises:
        DataFault: the file is missing, has another hash than the receipt, or does not fit the class of the model.
    """
    content = _checked(data_root, receipt)
    try:
        model = make(**content["settings"])
        model.load_state_dict(content["weights"])
    except (TypeError, RuntimeError, ValueError) as fault:
        raise _unusable(data_root, receipt, "was saved by another version of ups") from fault
    return model.requires_grad_(False).eval().float()  # whatever torch's default type is


def load_settings(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments saved with a trained model; raises as `load_model`."""
    return _checked(data_root, receipt)["settings"]


def _checked(data_root: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    path = place_of(data_root, receipt) / WEIGHTS
    if not path.is_file() or digest_of(path) != receipt.get("weights"):
        raise _unusable(data_root, receipt, "is missing or differs from the weights that training saved")
    try:
        content = load(path)
    except DataFault as fault:
        raise _unusable(data_root, receipt, "does not hold tensors and plain values alone") from fault
    if not isinstance(content, dict) or not {"settings", "weights"} <= content.keys():
        raise _unusable(data_root, receipt, "does not hold settings and weights")
    return content


def _unusable(data_root: Path, receipt: dict[str, Any], reason: str) -> DataFault:
    path, stage = place_of(data_root, receipt) / WEIGHTS, receipt.get("stage")
    return DataFault(f"{path} {reason}; train it again with `kedro run --from-nodes train_{stage}`")
