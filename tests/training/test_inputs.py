"""What a model is told of the data when it is made."""

from types import SimpleNamespace
from typing import Any

from tests.backbones import small
from ups.data.pdebench import FAMILIES
from ups.training.inputs import model_settings


def test_sizes_are_those_of_each_family():
    """A family has its own axes and channels, whatever others have; those without data have none."""
    cache = SimpleNamespace(
        families=list(FAMILIES),
        datasets={
            "waves": entry("advection_1d", grid=[32], fields=4),
            "waves of another speed": entry("advection_1d", grid=[64], fields=2),
            "flow": entry("darcy_2d", grid=[8, 8], fields=16, coefficients=12),
        },
    )
    sizes = model_settings(cache, SimpleNamespace(model_dump=small))["sizes"]
    names = list(FAMILIES)
    found = {
        kind: {names[i]: size for i, size in enumerate(sizes[kind]) if size}
        for kind in ("num_axes", "latent_channels", "coefficient_channels")
    }
    assert found == {
        "num_axes": {"advection_1d": 1, "darcy_2d": 2},
        "latent_channels": {"advection_1d": 4, "darcy_2d": 16},
        "coefficient_channels": {"darcy_2d": 12},
    }


def entry(family: str, grid: list[int], **channels: int) -> dict[str, Any]:
    """A dataset of the cache with arrays of so many channels."""
    arrays = {name: {"shape": [3, 5, 7, count]} for name, count in channels.items()}
    return {"dataset": {"family": family}, "token_grid": grid, "arrays": arrays}
