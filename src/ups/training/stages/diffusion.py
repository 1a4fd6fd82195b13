"""Stage `diffusion`: the denoiser of residuals, which are truth minus prediction of the operator or steady model."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ups.config import DiffusionConfig
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch, LatentSamples
from ups.models.denoiser import Denoiser, PredictedStep, denoising_loss, predict_step
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import row_of
from ups.models.weights import from_settings, load_model
from ups.runs.run import Run
from ups.training.batches import micro_batch_size
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, network_bytes, open_cache
from ups.training.stage import Stage, fixed_batches

SMALLEST_RESIDUAL = 1e-3
MODELS = {"transient": ("operator", from_settings(Operator)), "steady": ("steady", from_settings(SteadyModel))}


class Residuals:
    """Residuals of the trained models that are inputs of a run: operator, steady model, or both.

    `cache` is the latent cache with the families of these models only.
    """

    def __init__(self, run: Run) -> None:
        self.models = {
            kind: load_model(make, run.data_root, run.inputs[stage])
            for kind, (stage, make) in MODELS.items()
            if stage in run.inputs
        }
        self.cache = open_cache(run, *self.models)

    def samples(self, split: str) -> LatentSamples:
        """The samples of a split, as the models need them."""
        operator = self.models.get("transient")
        return LatentSamples(self.cache, split, history=operator.statistics.history.families if operator else ())

    @torch.no_grad()
    def standardized(self, batch: LatentBatch, denoiser: Denoiser) -> tuple[Tensor, PredictedStep]:
        """Residual y = (z_next - z_pred) / residual unit of the denoiser, (B, N, D), and the prediction."""
        # In bfloat16 rounding errors of the prediction would be larger than the residual.
        with torch.autocast(batch.z.device.type, enabled=False):
            prediction = self._predict(batch)
            return (batch.z_next - prediction.z_pred) / denoiser.residual_unit(prediction, batch.domain), prediction

    @torch.no_grad()
    def set_residual_rms(self, stage: Stage, config: DiffusionConfig, run: Run) -> None:
        """Set `residual_rms` of the denoiser: RMS of residual / `change_rms` per family and field, median over samples.

        Measured on validation samples, because residuals of training samples are too small where the model overfits;
        the median, because a mean would be dominated by the few samples on which the model fails.
        """
        denoiser, device = stage.model, torch.device(run.device)
        for family, samples in fixed_batches(stage.valid.num_samples, stage.batch_sizes(config)):
            found = []
            for part in np.array_split(samples, math.ceil(len(samples) / micro_batch_size(stage, family, run))):
                batch = stage.valid.load(family, part).to(device)
                prediction = self._predict(batch)
                found.append(field_rms((batch.z_next - prediction.z_pred) / prediction.change_rms, family))
            rms = torch.cat(found).median(0).values.clamp(min=SMALLEST_RESIDUAL).cpu()
            row, channels = row_of(denoiser.rows, family), batch.z.shape[-1]
            denoiser.residual_rms[row, :channels] = rms.repeat_interleave(channels // len(rms))

    def _predict(self, batch: LatentBatch) -> PredictedStep:
        kind = "steady" if FAMILIES[batch.domain.family].steady else "transient"
        return predict_step(
            self.models[kind].to(batch.z.device), batch.state, batch.coefficients, batch.condition, batch.domain
        )


def build(config: DiffusionConfig, run: Run) -> Stage:
    """The denoiser, trained on residuals of unit variance at noise levels ln sigma ~ N(P_mean, P_std^2)."""
    residuals = Residuals(run)
    settings = model_settings(residuals.cache, config.model)
    train, valid = residuals.samples("train"), residuals.samples("valid")
    denoiser = from_settings(Denoiser)(**settings)

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residuals.standardized(batch, denoiser)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp()
        noise = draw.normal(*y.shape[1:])
        denoise = partial(model, context=context, condition=batch.condition, domain=batch.domain)
        return denoising_loss(denoise, y, noise, sigma) / residual_power(y)

    sizes = {"num_tokens": train.num_tokens, "sample_bytes": network_bytes(settings, train.num_tokens)}
    stage = Stage(model=denoiser, settings=settings, loss=loss, train=train, valid=valid, **sizes)
    residuals.set_residual_rms(stage, config, run)
    return stage


def residual_power(y: Tensor) -> Tensor:
    """Mean square of each residual y (B, N, D), at least 1, (B,).

    Losses are divided by it, so that the few samples on which the model fails do not dominate them.
    """
    return y.square().flatten(1).mean(1).clamp(min=1.0)
