"""Records of sizes: plain values are enough to make a model again."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backbones import small
from ups.errors import DataFault
from ups.files import WEIGHTS, digest_of
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Sizes, common_inputs, row_of
from ups.models.weights import from_settings, load_model, tensor_bytes


@pytest.mark.parametrize("model", [Operator, Denoiser, SteadyModel])
def test_model_is_rebuilt_from_its_file(model: type[nn.Module], tmp_path: Path):
    """Settings that survive JSON and weights on disk give the same model."""
    sizes, backbone = (
        Sizes(
            families=("advection_1d", "burgers_1d"),
            num_axes=(1, 2),
            num_fields=(1, 2),
            latent_channels=(4, 4),
            coefficient_channels=(2, 2),
            num_conditions=3,
        ),
        small(),
    )
    made = model(sizes, backbone)
    settings = json.loads(json.dumps({"sizes": asdict(sizes), "backbone": asdict(backbone)}))
    (tmp_path / WEIGHTS).write_bytes(tensor_bytes({"settings": settings, "weights": made.state_dict()}))
    receipt = {"path": ".", "stage": "any", "weights": digest_of(tmp_path / WEIGHTS)}
    rebuilt = load_model(from_settings(model), tmp_path, receipt).state_dict()
    assert all(torch.equal(rebuilt[name], value) for name, value in made.state_dict().items())


def test_a_family_without_data_is_not_known():
    """A family on which a model is not trained has no row, whatever its place among the others."""
    rows = Sizes(("advection_1d", "burgers_1d", "darcy_2d"), (1, 0, 2), (1,) * 3, (4, 0, 4), (0,) * 3, 3).rows
    assert (row_of(rows, "advection_1d"), row_of(rows, "darcy_2d")) == (0, 2)
    with pytest.raises(DataFault, match="not trained on 'burgers_1d', only on advection_1d, darcy_2d"):
        row_of(rows, "burgers_1d")


@pytest.mark.parametrize(
    ("family", "history", "expected"),
    [
        ("a", ["a"], [(0, 0, 2), (3, 2, 2), (6, 4, 2), (9, 6, 1)]),
        ("a", [], [(0, 0, 2), (3, 2, 2), (9, 4, 1)]),
        ("b", [], [(0, 0, 3), (3, 4, 3)]),
    ],
)
def test_inputs_that_two_stems_have_in_common(family: str, history: list[str], expected: list[tuple[int, int, int]]):
    """Places in both and their number, of 3 latents with a history and 1 coefficient, and of 2 or 4 latents."""
    own = Sizes(["a"], [1], [1], [3], [1], 1, ["a"])
    source = Sizes(["a", "b"], [1, 1], [1, 1], [2, 4], [1, 1], 1, history)
    found = list(common_inputs(own, source, source.rows[family]))
    assert [(into.start, of.start, into.stop - into.start) for into, of in found] == expected
    assert all(into.stop - into.start == of.stop - of.start for into, of in found)
