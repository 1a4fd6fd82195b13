"""Stage `operator`: the model that advances a latent state by one time step, and its loss over one or several steps."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ups.config import OperatorConfig
from ups.config.baselines import BaselineConfig
from ups.config.studies import AdaptTraining
from ups.config.training import Noise, Unroll
from ups.data.definitions import is_named
from ups.data.samples import LatentBatch, LatentSamples
from ups.models.codec import codec_from
from ups.models.operator import Operator
from ups.models.sizes import row_of
from ups.models.state_statistics import StateStatistics
from ups.models.weights import from_settings, load_model
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import (
    field_rms,
    fit_to_steps,
    model_settings,
    network_bytes,
    open_cache,
    set_statistics,
)
from ups.training.losses import TermSum, Transition
from ups.training.stage import Loss, Stage
from ups.training.symmetry import augmented, set_conserved


def build(config: OperatorConfig, run: Run) -> Stage:
    """The operator for all transient families of the latent cache, trained with `step_loss`."""
    cache = open_cache(run, "transient")
    history = [family for family in cache.families if is_named(family, config.history)]
    settings = model_settings(cache, config.model, history)
    operator = from_settings(Operator)(**settings)
    set_statistics(operator.statistics, cache)
    codec = load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"])
    fit_to_steps(operator, cache, codec, constrained=config.conserve)
    if config.conserve:
        set_conserved(operator, cache, codec)
    terms = TermSum(config.terms, codec, config.steps)
    loss = step_loss(operator.statistics, config, terms)
    loss = augmented(loss, cache, run) if config.symmetries else loss
    horizons = {family: config.unroll.of(family).horizon for family in cache.families}
    train = LatentSamples(cache, "train", horizons=horizons, history=history)
    valid = LatentSamples(cache, "valid", history=history)
    num_tokens = train.num_tokens
    sample_bytes = network_bytes(settings, num_tokens, horizons)
    stage = Stage(operator, settings, loss, train, valid, num_tokens, sample_bytes)
    logged = terms.values if terms.configs else None

    def phase(step: int) -> tuple[int, tuple[str, ...]]:
        return horizon_at(step, config.steps, config.unroll), terms.active(step)

    return replace(stage, terms=logged, phase=phase, after_validation=store_validation_error)


def step_loss(
    statistics: StateStatistics, config: OperatorConfig | BaselineConfig | AdaptTraining, terms: TermSum | None = None
) -> Loss:
    """Mean error of a rollout of h steps, relative to the change that is expected in each step.

    L = 1/h sum_k RMS((z_k - z_ref_k) / unit(z_ref_(k-1))) with z_k = model(z_(k-1)), RMS over tokens and components,
    mean over fields; one value per sample, (B,). In training z_0 has noise (`state_noise`), as has the snapshot before
    it where a state is two; h grows (`horizon_at`) and each step adds `terms`. In validation there is no noise, h = 1
    and no term, so that its loss can be compared between configurations.
    """

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        horizon = 1 if draw.step is None else horizon_at(draw.step, config.steps, config.unroll)
        channels, (state, *later) = batch.z.shape[-1], batch.states(horizon)
        snapshots = [state[..., :channels], *later]
        units = [statistics.expected_change(z, batch.domain) for z in snapshots[:-1]]
        if draw.step is not None:
            error = statistics.validation_error[row_of(statistics.rows, batch.domain.family)]
            unit = units[0].repeat(1, 1, state.shape[-1] // channels)
            state = state + unit * state_noise(config.noise, error, draw, state.shape)
        errors = []
        for before, z_ref, unit in zip(snapshots[:-1], snapshots[1:], units, strict=True):
            state = model(state, batch.coefficients, batch.condition, batch.domain)
            z_pred = state[..., :channels]
            errors.append(field_rms((z_pred - z_ref) / unit, batch.domain.family).mean(1))
            if terms is not None and terms.configs and draw.step is not None:
                errors[-1] = errors[-1] + terms(Transition(before, z_ref, z_pred, unit, batch, terms.codec), draw)
            # Pushforward: a step learns from the errors of earlier steps, but no gradient flows through them.
            state = state.detach() if config.unroll.pushforward else state
        return torch.stack(errors).mean(0)

    return loss


def state_noise(config: Noise, error: Tensor, draw: Draw, shape: torch.Size) -> Tensor:
    """(`std` + `own_error` |n| e) times white noise of shape (B, N, D), see `ups.config.Noise`.

    n is a unit normal number per sample, e = `error` the latest validation error of the family.
    """
    white, magnitude = draw.normal(*shape[1:]), draw.normal(1, 1).abs()
    return (config.std + config.own_error * error * magnitude) * white


def store_validation_error(model: nn.Module, losses: dict[str, float]) -> None:
    """Copy the validation loss of each family into the statistics, for `state_noise` and the operator's filter."""
    for family, loss in losses.items():
        model.statistics.validation_error[row_of(model.statistics.rows, family)] = loss


def horizon_at(step: int, steps: int, unroll: Unroll) -> int:
    """Rollout length in training step `step` of `steps`: 1 + ceil(p (horizon - 1)), with p from 0 at `start` to 1."""
    p = min(1.0, max(0.0, step / steps - unroll.start) / (1 - unroll.start))
    return 1 + math.ceil(p * (unroll.horizon - 1))
