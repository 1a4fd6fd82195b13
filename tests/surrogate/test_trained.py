"""The models of a run by their receipts."""

from pathlib import Path

import torch
from torch import nn

from tests.untrained import STAGE_NAMES, make_root_of, receipt
from ups.files import WEIGHTS, place_of
from ups.models.weights import load
from ups.surrogate.trained import Trained


def test_every_model_has_the_weights_of_its_own_receipt(tmp_path: Path):
    """Denoiser and student have one class and other weights; a stage that is not there is None."""
    root = make_root_of(tmp_path, ("advection_1d", "darcy_2d"), count=5)
    stages = {stage: receipt(root, stage) for stage in STAGE_NAMES}
    found = Trained(receipt(root, "latent_cache"), stages, root).surrogate("cpu")

    def has_weights_of(model: nn.Module, stage: str) -> bool:
        weights = load(place_of(root, stages[stage]) / WEIGHTS)["weights"]
        return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    assert has_weights_of(found.codec, "codec") and has_weights_of(found.operator, "operator")
    assert has_weights_of(found.denoiser, "diffusion") and has_weights_of(found.student, "consistency")
    assert not has_weights_of(found.denoiser, "consistency")
    del stages["consistency"]
    assert Trained(receipt(root, "latent_cache"), stages, root).surrogate("cpu").student is None
