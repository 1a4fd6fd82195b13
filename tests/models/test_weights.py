import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ups.errors import DataFault
from ups.files import WEIGHTS, digest_of
from ups.models.weights import load_model, tensor_bytes

SETTINGS = {"in_features": 3, "out_features": 2}


@pytest.fixture
def trained() -> nn.Linear:
    """A model with random weights."""
    return nn.Linear(**SETTINGS)


@pytest.fixture
def receipt(tmp_path: Path, trained: nn.Linear) -> dict[str, Any]:
    """The receipt of the model, whose file is on disk."""
    folder = tmp_path / "06_models"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(tensor_bytes({"settings": SETTINGS, "weights": trained.state_dict()}))
    return {"stage": "operator", "path": "06_models", "weights": digest_of(folder / WEIGHTS)}


def test_a_model_comes_back_as_it_was_and_frozen(tmp_path: Path, receipt: dict[str, Any], trained: nn.Linear):
    """Saved and loaded weights are equal bit for bit; the model is in evaluation mode and has no gradients."""
    model = load_model(nn.Linear, tmp_path, receipt)
    x = torch.randn(5, 3)
    assert torch.equal(model(x), trained(x))
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_other_weights_than_those_of_the_receipt_are_refused(tmp_path: Path, receipt: dict[str, Any]):
    """A truncated file ends in one line with its path and the command that trains the model again."""
    path = tmp_path / "06_models" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFault, match="differs from the weights that training saved"):
        load_model(nn.Linear, tmp_path, receipt)


def _with_other_arguments(in_features: int, width: int) -> nn.Module:
    return nn.Linear(in_features, width)


def _with_more_layers(in_features: int, out_features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_features, out_features), nn.Linear(out_features, out_features))


def _with_another_shape(in_features: int, out_features: int) -> nn.Module:
    return nn.Linear(in_features, out_features + 1)


@pytest.mark.parametrize("make", [_with_other_arguments, _with_more_layers, _with_another_shape])
def test_a_model_of_another_version_is_one_line(
    tmp_path: Path, receipt: dict[str, Any], make: Callable[..., nn.Module]
):
    """Saved weights whose arguments, layers or shapes differ from the class end in one line, not in a traceback."""
    with pytest.raises(DataFault, match="another version of ups.*--from-nodes train_operator") as fault:
        load_model(make, tmp_path, receipt)
    assert "\n" not in str(fault.value)


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b"text", b"", tensor_bytes({"a": 1}), tensor_bytes([1])])
def test_foreign_weights_are_one_line(
    tmp_path: Path, receipt: dict[str, Any], content: bytes, monkeypatch: pytest.MonkeyPatch
):
    """A pickle, a text and other tensors end in one line, even with the right hash, and run nothing."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "06_models" / WEIGHTS
    path.write_bytes(content)
    with pytest.raises(DataFault, match="does not hold .*--from-nodes train_operator") as fault:
        load_model(nn.Linear, tmp_path, receipt | {"weights": digest_of(path)})
    assert "\n" not in str(fault.value) and not Path("marker").exists()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.99, 0.999])
def test_truncated_weights_with_their_hash_are_one_line(tmp_path: Path, receipt: dict[str, Any], share: float):
    """Weights that were cut off before their hash was recorded end in one line with path and remedy."""
    path = tmp_path / "06_models" / WEIGHTS
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(DataFault, match=rf"^{path} does not hold .*--from-nodes train_operator`$") as fault:
        load_model(nn.Linear, tmp_path, receipt | {"weights": digest_of(path)})
    assert "\n" not in str(fault.value)
