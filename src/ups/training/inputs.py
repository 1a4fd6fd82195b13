"""What the stages on latents share: their cache, the sizes of their models, statistics and errors per field."""

from typing import Any, Literal

import torch
from torch import Tensor

from ups.config import Backbone
from ups.data.condition import NUM_CONDITIONS
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.models.amplitude import Amplitude
from ups.run import Run

SMALLEST_SCALE = 1e-3


def open_cache(run: Run, *kinds: Literal["transient", "steady"]) -> LatentCache:
    """The families of these kinds in the latent cache of a run's inputs.

    Raises:
        DataFault: the cache was made from something else than its receipt says.
    """
    receipt = run.inputs["latent_cache"]
    cache = LatentCache.open(run.data_root / receipt["path"], receipt["key"])
    return cache.only(*(family for kind in kinds for family in receipt[kind]))


def datasets_of(cache: LatentCache, family: str) -> list[dict[str, Any]]:
    """The descriptions of a family's datasets in the cache."""
    datasets = (entry["dataset"] for entry in cache.datasets.values())
    return [dataset for dataset in datasets if dataset["family"] == family]


def model_settings(cache: LatentCache, model: Backbone) -> dict[str, Any]:
    """Constructor arguments of the token models as plain values: sizes of families, 0 for those without data."""
    num_axes = {entry["dataset"]["family"]: len(entry["token_grid"]) for entry in cache.datasets.values()}
    sizes = {
        "num_axes": [num_axes.get(name, 0) for name in FAMILIES],
        "num_fields": [len(family.fields) for family in FAMILIES.values()],
        "latent_channels": [_channels(cache, name, "fields") for name in FAMILIES],
        "coefficient_channels": [_channels(cache, name, "coefficients") for name in FAMILIES],
        "num_conditions": NUM_CONDITIONS,
    }
    return {"sizes": sizes, "backbone": model.model_dump()}


def _channels(cache: LatentCache, family: str, kind: Literal["fields", "coefficients"]) -> int:
    """Latent channels of a family, 0 where it has no data or no coefficients."""
    entries = [entry for entry in cache.datasets.values() if entry["dataset"]["family"] == family]
    return max((entry["arrays"][kind]["shape"][-1] for entry in entries if kind in entry["arrays"]), default=0)


def set_amplitude(amplitude: Amplitude, cache: LatentCache) -> None:
    """Fill in the statistics of the cache's training split; of several datasets of a family the largest counts."""
    for family, statistics in _statistics_by_family(cache).items():
        index, num_components = list(FAMILIES).index(family), statistics.pop("components")
        for name, values in statistics.items():
            row = values.clamp(min=SMALLEST_SCALE).repeat_interleave(num_components)
            getattr(amplitude, name)[index, : len(row)] = row
        blocks = [torch.full((num_components, num_components), 1 / num_components)] * len(FAMILIES[family].fields)
        amplitude.pool[index, : len(row), : len(row)] = torch.block_diag(*blocks)


def _statistics_by_family(cache: LatentCache) -> dict[str, dict[str, Any]]:
    families: dict[str, dict[str, Any]] = {}
    for entry in cache.datasets.values():
        family, found = entry["dataset"]["family"], entry["statistics"]
        merged = families.setdefault(family, {})
        for name in ("fluctuation", "change", "bound", "spread", "growth", "largest"):
            values = torch.tensor(found[name])
            merged[name] = torch.maximum(merged.get(name, values), values)
        merged["components"] = entry["arrays"]["fields"]["shape"][-1] // len(FAMILIES[family].fields)
    return families


def field_rms(error: Tensor, family: int) -> Tensor:
    """RMS of latents (B, N, D) over the tokens and components of each field, (B, C)."""
    num_fields = len(list(FAMILIES.values())[family].fields)
    return (error.unflatten(2, (num_fields, -1)).square().mean(dim=(1, 3)) + 1e-12).sqrt()
