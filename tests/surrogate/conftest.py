"""A model of random weights for small data of six families, as `ups.load` gives it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.conftest import write_file
from tests.untrained import make_corrector, make_loadable
from ups.surrogate.bundle import Bundle
from ups.surrogate.model import Model, load

FAMILIES = ("advection_1d", "burgers_1d", "compressible_ns_1d", "darcy_2d", "diffusion_reaction_2d")
FAMILIES += ("incompressible_ns_2d",)
CORRECTION = {"mode": "sample", "sigma": 5.0, "sigma_min": 0.02, "num_steps": 2, "residual_scale": 0.7}
CORRECTION |= {"noise_correlation": 0.5}
METHODS = {
    "advection_1d": {"consistency": CORRECTION},
    "compressible_ns_1d": {"diffusion": CORRECTION},
    "darcy_2d": {"consistency": CORRECTION, "diffusion": CORRECTION},
    "incompressible_ns_2d": {"diffusion": CORRECTION | {"mode": "off"}},
}


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root as after training and `choose_corrector`, not evaluated; Burgers has two values of nu."""
    root = tmp_path_factory.mktemp("models")
    (root / "01_raw").mkdir()
    write_file(root / "01_raw", "burgers_1d", "1D_Burgers_Sols_Nu0.1.hdf5", count=5)
    make_loadable(root, FAMILIES, count=5)
    make_corrector(root, METHODS)
    return root


@pytest.fixture(scope="session")
def model(data_root: Path) -> Model:
    """The models of the data root; tests leave them alone."""
    return load(data_root, device="cpu")


@pytest.fixture
def altered(model: Model) -> Callable[[Callable[[Any], None]], Model]:
    """`altered(change)` is the model with another card, a copy that `change` takes."""

    def alter(change: Callable[[Any], None]) -> Model:
        card = copy.deepcopy(model._bundle.card)
        change(card)
        return Model(Bundle(model.surrogate, card), torch.device("cpu"))

    return alter
