"""Stage `baseline`: an FNO, U-Net, transformer or linear stencil of one family on its grid, trained by our loop."""

from dataclasses import replace
from functools import partial
from typing import Any

from ups.config.baselines import BaselineConfig
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples, domains
from ups.models.baselines import grid_model
from ups.models.codec import codec_from
from ups.models.weights import load_model
from ups.runs.run import Run
from ups.training.inputs import fit_to_steps, open_cache, set_statistics
from ups.training.stage import Stage
from ups.training.stages.operator import horizon_at, step_loss, store_validation_error
from ups.training.stages.steady import steady_loss
from ups.training.symmetry import augmented, set_conserved


def build(config: BaselineConfig, run: Run) -> Stage:
    """The baseline of `config.family` with the loss of the operator or steady model, so that errors are comparable."""
    cache = open_cache(run, "transient", "steady").only(config.family)
    family, domain = FAMILIES[config.family], domains(cache)[config.family]
    settings = {
        "kind": config.architecture,
        "normalized": config.normalized,
        "steady": family.steady,
        "family": config.family,
        "in_channels": len(family.coefficients) + (0 if family.steady else len(family.fields)),
        "out_channels": len(family.fields),
        "grid": domain.grid,
        "periodic": domain.periodic,
        "condition_channels": _varying_conditions(cache),
        "history": config.history,
        "model": config.model.model_dump(),
    }
    model = grid_model(**settings)
    set_statistics(model.statistics, cache)
    if config.normalized:
        codec = load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"])
        fit_to_steps(model, cache, codec, constrained=True)
        set_conserved(model, cache, codec)
    loss = steady_loss if family.steady else step_loss(model.statistics, config)
    loss = augmented(loss, cache, run) if config.symmetries else loss
    history = [config.family] if config.history else []
    num_steps = config.unroll.horizon
    train = LatentSamples(cache, "train", horizons={config.family: num_steps}, history=history)
    valid = LatentSamples(cache, "valid", history=history)
    num_tokens, floats = train.num_tokens, _floats_per_point(settings)
    sample_bytes = {name: 4 * points * floats * num_steps for name, points in num_tokens.items()}
    stage = Stage(model, settings, loss, train, valid, num_tokens, sample_bytes)
    phase = None if family.steady else partial(horizon_at, steps=config.steps, unroll=config.unroll)
    return replace(stage, phase=phase, after_validation=store_validation_error)


def _floats_per_point(settings: dict[str, Any]) -> int:
    """What training keeps: 11 to 17 for each hidden channel of each of an FNO's layers, and as for 4 of a U-Net's."""
    sizes = settings["model"]
    return 20 * sizes.get("hidden_channels", settings["out_channels"]) * sizes.get("num_layers", 4)


def _varying_conditions(cache: LatentCache) -> list[int]:
    """Indices of the condition features that differ between the datasets of the family; others carry no information."""
    conditions = [entry["condition"] for entry in cache.datasets.values()]
    return [index for index, values in enumerate(zip(*conditions, strict=True)) if len(set(values)) > 1]
