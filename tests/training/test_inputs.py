"""What a model is told of the data when it is made."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.backbones import small
from ups.data.pdebench import FAMILIES
from ups.models.sizes import Sizes
from ups.models.state_statistics import StateStatistics
from ups.training.inputs import model_settings, network_bytes, set_statistics


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


def test_memory_of_a_sample_by_hand():
    """50 floats per token, channel and layer and 20 per latent channel, for each unrolled step and separate field."""
    sizes = {"families": ["waves", "flow"], "num_fields": [1, 3], "latent_channels": [4, 12]}
    backbone = {"hidden_channels": [8, 16, 10], "num_layers": 2, "separate_fields": False}
    settings = {"sizes": sizes, "backbone": backbone}
    assert network_bytes(settings, {"flow": 5}) == {"flow": 4 * 5 * (50 * 16 * 2 + 20 * 12)}
    assert network_bytes(settings, {"waves": 7}, horizons={"waves": 3}) == {"waves": 3 * 4 * 7 * (50 * 16 * 2 + 20 * 4)}
    settings["backbone"] = backbone | {"separate_fields": True}
    assert network_bytes(settings, {"flow": 5}) == {"flow": 4 * 5 * (3 * 50 * 16 * 2 + 20 * 12)}


def test_statistics_are_the_largest_of_a_familys_datasets():
    """Each field has its own, repeated over its components, at least 0.001; rows of other families stay as they are."""
    rms = {"slow": [0.5, 0.0, 3.0], "fast": [2.0, 0.0, 1.0], "flow": [9.0]}
    families = {"slow": "compressible_ns_1d", "fast": "compressible_ns_1d", "flow": "darcy_2d"}
    channels = {"compressible_ns_1d": 6, "darcy_2d": 4}
    datasets = {name: entry(family, grid=[8], fields=channels[family]) for name, family in families.items()}
    datasets = {name: one | {"statistics": {"step_rms": rms[name]}} for name, one in datasets.items()}
    names = ("burgers_1d", "compressible_ns_1d", "darcy_2d")
    statistics = StateStatistics(Sizes(names, (1, 1, 2), (1, 3, 1), (2, 6, 4), (0, 0, 0), 1))
    set_statistics(statistics, SimpleNamespace(datasets=datasets))
    expected = [[1.0] * 6, [2.0, 2.0, 0.001, 0.001, 3.0, 3.0], [9.0] * 4 + [1.0] * 2]
    torch.testing.assert_close(statistics.step_rms, torch.tensor(expected))
    average = torch.block_diag(*[torch.full((2, 2), 0.5)] * 3)
    assert torch.equal(statistics.field_average[1], average)


def entry(family: str, grid: list[int], **channels: int) -> dict[str, Any]:
    """A dataset of the cache with arrays of so many channels."""
    arrays = {name: {"shape": [3, 5, 7, count]} for name, count in channels.items()}
    return {"dataset": {"family": family}, "token_grid": grid, "arrays": arrays}
