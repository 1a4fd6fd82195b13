"""Stage `operator`: advance a latent by one time step."""

import math

import torch
from torch import Tensor, nn

from ups.config import BaselineConfig, Noise, OperatorConfig, Terms, Unroll
from ups.data.loader import LatentBatch
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples
from ups.models.amplitude import Amplitude
from ups.models.codec import Codec, codec_from
from ups.models.operator import Operator
from ups.models.sizes import from_settings
from ups.models.weights import load_model
from ups.run import Run
from ups.training.conservation import conserved_directions
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, open_cache, set_amplitude
from ups.training.stage import Loss, Stage
from ups.training.symmetry import augmented
from ups.training.weighted_terms import Transition, WeightedTerms


def build(config: OperatorConfig, run: Run) -> Stage:
    """Predict what follows z, one step at a time."""
    cache = open_cache(run, "transient")
    settings = model_settings(cache, config.model)
    operator = from_settings(Operator)(**settings)
    set_amplitude(operator.amplitude, cache)
    codec = load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"])
    if config.conserve:
        operator.conserved.copy_(conserved_directions(cache, codec, operator.conserved))
    train = LatentSamples(cache, "train", horizon=config.unroll.horizon)
    terms = weighted_terms(config.terms, codec)
    loss = step_loss(operator.amplitude, config, terms)
    return Stage(
        model=operator,
        settings=settings,
        loss=augmented(loss, cache, run) if config.symmetries else loss,
        train=train,
        valid=LatentSamples(cache, "valid"),
        num_tokens=train.num_tokens,
        terms=terms.values if terms else None,
        validated=set_error,
    )


def weighted_terms(config: Terms, codec: Codec) -> WeightedTerms | None:
    """The terms of the loss that count, with the codec of the run's latents; None if none does."""
    return WeightedTerms(config, codec) if any(term.weight > 0 for _, term in config) else None


def step_loss(
    amplitude: Amplitude, config: OperatorConfig | BaselineConfig, terms: WeightedTerms | None = None
) -> Loss:
    """Mean error of h steps from z, in units of what a step changes; in validation h = 1.

    L = 1/h sum_k RMS((z_k - z_ref_k) / unit(z_ref_(k-1))), z_k = model(z_(k-1)), mean over fields; in training z
    has a little noise on it, and each step adds its `terms`.
    """

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        horizon = 1 if draw.step is None else horizon_at(draw.step, config.steps, config.unroll)
        states = batch.states(horizon)
        units = [amplitude.unit(state, batch.domain) for state in states[:-1]]
        z = states[0]
        if draw.step is not None:
            error = amplitude.error[batch.domain.family]
            z = z + units[0] * noise(config.noise, error, draw, z.shape)
        errors = []
        for before, z_ref, unit in zip(states[:-1], states[1:], units, strict=True):
            z_pred = model(z, batch.coefficients, batch.condition, batch.domain)
            errors.append(field_rms((z_pred - z_ref) / unit, batch.domain.family).mean(1))
            if terms is not None and draw.step is not None:
                errors[-1] = errors[-1] + terms(Transition(before, z_ref, z_pred, unit, batch, terms.codec), draw)
            z = z_pred.detach() if config.unroll.pushforward else z_pred
        return torch.stack(errors).mean(0)

    return loss


def noise(config: Noise, error: Tensor, draw: Draw, shape: torch.Size) -> Tensor:
    """Normal numbers of the shape (B, N, D), of a std that may vary with the sample and a model's own error."""
    white, spread = draw.normal(*shape[1:]), draw.normal(1, 1).abs()
    return (config.std + config.own_error * error * spread) * white


def set_error(model: nn.Module, losses: dict[str, float]) -> None:
    """Keep what validation found for each family: the noise follows it."""
    for family, loss in losses.items():
        model.amplitude.error[list(FAMILIES).index(family)] = loss


def horizon_at(step: int, steps: int, unroll: Unroll) -> int:
    """Steps to unroll in training step `step` of `steps`: 1 + ceil(p (horizon - 1)), p from 0 at `start` to 1."""
    p = min(1.0, max(0.0, step / steps - unroll.start) / (1 - unroll.start))
    return 1 + math.ceil(p * (unroll.horizon - 1))
