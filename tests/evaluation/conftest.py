"""Models with random weights for small files of five families in all four layouts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.untrained import copy_some, make_root_of, receipt

TRAINED = ("advection_1d", "compressible_ns_1d", "darcy_2d", "diffusion_reaction_2d", "incompressible_ns_2d")


def unpadded(text: str) -> list[str]:
    """Lines without the spaces that align the columns of a Markdown table."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root as after training; tests leave its receipts alone."""
    return make_root_of(tmp_path_factory.mktemp("trained"), TRAINED, count=5)


@pytest.fixture
def held_out(trained: Path, tmp_path: Path) -> Callable[[], Path]:
    """`held_out()` is a folder with the test trajectories of every dataset, in files of the same names."""

    def make() -> Path:
        folder = tmp_path / "held out"
        folder.mkdir()
        datasets = receipt(trained, "datasets")
        for name, entry in datasets["datasets"].items():
            (file,) = entry["files"]
            chosen = datasets["splits"][name]["test"]
            copy_some(trained / "01_raw" / file, folder / file, entry["family"], chosen)
        return folder

    return make
