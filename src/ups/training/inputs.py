"""Shared by all stages that are trained on latents: latent cache, model sizes, state statistics, RMS per field."""

from typing import Any, Literal

import torch
from torch import Tensor

from ups.config.training import Backbone
from ups.data.families import NUM_CONDITIONS
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.models.sizes import row_of
from ups.models.state_statistics import StateStatistics
from ups.runs.run import Run

SMALLEST_STATISTIC = 1e-3  # latents have about unit variance; fields that are constant in the data have 0


def open_cache(run: Run, *kinds: Literal["transient", "steady"]) -> LatentCache:
    """The latent cache of a run's inputs, limited to families of these kinds.

    Raises:
        DataFault: the key of the cache is not that of the receipt.
    """
    receipt = run.inputs["latent_cache"]
    cache = LatentCache.open(run.data_root / receipt["path"], receipt["key"])
    return cache.only(*(family for kind in kinds for family in receipt[kind]))


def datasets_of(cache: LatentCache, family: str) -> list[dict[str, Any]]:
    """The descriptions of a family's datasets in the cache."""
    datasets = (entry["dataset"] for entry in cache.datasets.values())
    return [dataset for dataset in datasets if dataset["family"] == family]


def model_settings(cache: LatentCache, model: Backbone) -> dict[str, Any]:
    """Constructor arguments of operator, steady model or denoiser as plain values, as saved with the weights."""
    num_axes = {entry["dataset"]["family"]: len(entry["token_grid"]) for entry in cache.datasets.values()}
    sizes = {
        "families": cache.families,
        "num_axes": [num_axes.get(name, 0) for name in cache.families],
        "num_fields": [len(FAMILIES[name].fields) for name in cache.families],
        "latent_channels": [_channels(cache, name, "fields") for name in cache.families],
        "coefficient_channels": [_channels(cache, name, "coefficients") for name in cache.families],
        "num_conditions": NUM_CONDITIONS,
    }
    return {"sizes": sizes, "backbone": model.model_dump()}


def _channels(cache: LatentCache, family: str, kind: Literal["fields", "coefficients"]) -> int:
    """Latent channels of a family's fields or coefficients, 0 if it has none or is not in the cache."""
    entries = [entry for entry in cache.datasets.values() if entry["dataset"]["family"] == family]
    return max((entry["arrays"][kind]["shape"][-1] for entry in entries if kind in entry["arrays"]), default=0)


def set_statistics(statistics: StateStatistics, cache: LatentCache) -> None:
    """Fill in the statistics of the training split, the maximum over the datasets of a family.

    The cache has one value per field, the model one per latent channel: each value is repeated over the components of
    its field.
    """
    for family, measured in _statistics_by_family(cache).items():
        row, num_components = row_of(statistics.rows, family), measured.pop("components")
        for name, of_fields in measured.items():
            values = of_fields.clamp(min=SMALLEST_STATISTIC).repeat_interleave(num_components)
            getattr(statistics, name)[row, : len(values)] = values
        blocks = [torch.full((num_components, num_components), 1 / num_components)] * len(FAMILIES[family].fields)
        statistics.field_average[row, : len(values), : len(values)] = torch.block_diag(*blocks)


def _statistics_by_family(cache: LatentCache) -> dict[str, dict[str, Any]]:
    """Each statistic (C,) as the maximum over the datasets of a family; `components` is their number per field."""
    families: dict[str, dict[str, Any]] = {}
    for entry in cache.datasets.values():
        family, measured = entry["dataset"]["family"], entry["statistics"]
        merged = families.setdefault(family, {})
        for name, of_fields in measured.items():
            values = torch.tensor(of_fields)
            merged[name] = torch.maximum(merged.get(name, values), values)
        merged["components"] = entry["arrays"]["fields"]["shape"][-1] // len(FAMILIES[family].fields)
    return families


def field_rms(error: Tensor, family: str) -> Tensor:
    """RMS of latents (B, N, D) over the tokens and components of each field, (B, C)."""
    num_fields = len(FAMILIES[family].fields)
    return (error.unflatten(2, (num_fields, -1)).square().mean(dim=(1, 3)) + 1e-12).sqrt()
