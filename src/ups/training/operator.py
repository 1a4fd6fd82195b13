"""Stage `operator`: advance a latent by one time step."""

from typing import Any

import torch
from torch import Tensor, nn

from ups.config import Backbone, OperatorConfig
from ups.data.condition import NUM_CONDITIONS
from ups.data.latent_cache import LatentCache
from ups.data.loader import LatentBatch, LatentSamples
from ups.data.pdebench import FAMILIES
from ups.models.operator import Operator
from ups.training.distributed import Draw
from ups.training.loop import Stage
from ups.training.run import Run

BOUND_OVER_TRAINING = 1.5
SMALLEST_CHANGE = 1e-3


def build(config: OperatorConfig, run: Run) -> Stage:
    """Predict z_next from z with a little noise on z, in units of each field's own change per step."""
    cache = open_cache(run)
    settings = model_settings(cache, config.model)
    operator = Operator(**settings)
    operator.change.copy_(per_channel(cache, "change", settings["latent_channels"]).clamp(min=SMALLEST_CHANGE))
    operator.bound.copy_(BOUND_OVER_TRAINING * per_channel(cache, "max", settings["latent_channels"]))
    change = operator.change.clone()

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        scale = change[batch.domain.family, : batch.z.shape[-1]].to(batch.z)
        z = batch.z + config.noise * scale * draw.normal(*batch.z.shape[1:])
        z_pred = model(z, batch.coefficients, batch.condition, batch.domain)
        return field_rms((z_pred - batch.z_next) / scale, batch.domain.family).mean(1)

    train = LatentSamples(cache, "train", steady=False)
    return Stage(
        model=operator,
        settings=settings,
        loss=loss,
        train=train,
        valid=LatentSamples(cache, "valid", steady=False),
        batch_sizes=train.batch_sizes(config.batch_tokens),
    )


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
