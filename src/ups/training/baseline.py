"""Stage `baseline`: an FNO, a U-Net or a linear stencil of one family on its grid, by the same loop and loss."""

from typing import Any

from ups.config import BaselineConfig
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples, domains
from ups.models.baselines import grid_model
from ups.run import Run
from ups.training.inputs import open_cache, set_amplitude
from ups.training.operator import set_error, step_loss
from ups.training.stage import Stage
from ups.training.steady import steady_loss
from ups.training.symmetry import augmented


def build(config: BaselineConfig, run: Run) -> Stage:
    """Regress the next state as the operator does, or the steady solution; errors count alike."""
    cache = open_cache(run, "transient", "steady").only(config.family)
    settings = _settings(config, cache)
    model = grid_model(**settings)
    amplitude = model.amplitude
    set_amplitude(amplitude, cache)

    loss = steady_loss if FAMILIES[config.family].steady else step_loss(amplitude, config)
    if config.symmetries:
        loss = augmented(loss, cache, run)
    train = LatentSamples(cache, "train", horizon=config.unroll.horizon)
    valid = LatentSamples(cache, "valid")
    return Stage(model, settings, loss, train, valid, train.num_tokens, validated=set_error)


def _settings(config: BaselineConfig, cache: LatentCache) -> dict[str, Any]:
    """Constructor arguments of `grid_model`."""
    domain = domains(cache)[config.family]
    family = FAMILIES[config.family]
    return {
        "kind": config.kind,
        "steady": family.steady,
        "num_families": len(FAMILIES),
        "in_channels": len(family.coefficients) + (0 if family.steady else len(family.fields)),
        "out_channels": len(family.fields),
        "grid": domain.grid,
        "periodic": domain.periodic,
        "told": _varying(cache),
        "model": config.model.model_dump(),
    }


def _varying(cache: LatentCache) -> list[int]:
    """Which of the conditions differ between the datasets: what a model cannot learn by heart."""
    conditions = [entry["condition"] for entry in cache.datasets.values()]
    return [place for place, values in enumerate(zip(*conditions, strict=True)) if len(set(values)) > 1]
