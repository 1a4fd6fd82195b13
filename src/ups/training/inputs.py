"""What the stages on latents share: their cache, the sizes of their models, statistics and errors per field."""

from typing import Any

import torch
from torch import Tensor

from ups.config import Backbone
from ups.data.condition import NUM_CONDITIONS
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.training.run import Run

BOUND_OVER_TRAINING = 1.5


def open_cache(run: Run) -> LatentCache:
    """The latent cache of a run's inputs; refused if it was made from something else than its receipt says."""
    receipt = run.inputs["latent_cache"]
    return LatentCache.open(run.data_root / receipt["path"], receipt["key"])


def model_settings(cache: LatentCache, model: Backbone) -> dict[str, Any]:
    """Constructor arguments of the token models: sizes that hold every family in the cache."""
    arrays = [entry["arrays"] for entry in cache.datasets.values()]
    return {
        "num_families": len(FAMILIES),
        "latent_channels": max(array["fields"]["shape"][-1] for array in arrays),
        "coefficient_channels": max(array.get("coefficients", {"shape": [0]})["shape"][-1] for array in arrays),
        "num_conditions": NUM_CONDITIONS,
        **model.model_dump(),
    }


def per_channel(cache: LatentCache, statistic: str, latent_channels: int) -> Tensor:
    """A statistic of the cache for every family and latent channel (families, D): the largest over its datasets."""
    result = torch.zeros(len(FAMILIES), latent_channels)
    for entry in cache.datasets.values():
        family = list(FAMILIES).index(entry["dataset"]["family"])
        values = torch.tensor(entry["statistics"][statistic])
        values = values.repeat_interleave(entry["arrays"]["fields"]["shape"][-1] // len(values))
        result[family, : len(values)] = torch.maximum(result[family, : len(values)], values)
    return result


def field_rms(error: Tensor, family: int) -> Tensor:
    """RMS of latents (B, N, D) over the tokens and components of each field, (B, C)."""
    num_fields = len(list(FAMILIES.values())[family].fields)
    return (error.unflatten(2, (num_fields, -1)).square().mean(dim=(1, 3)) + 1e-12).sqrt()
