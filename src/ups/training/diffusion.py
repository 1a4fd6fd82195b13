"""Stage `diffusion`: the denoiser of the operator's residual, what the operator misses given what it said."""

import torch
from torch import Tensor, nn

from ups.config import DiffusionConfig
from ups.data.loader import LatentBatch, fixed_batches
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples
from ups.diffusion.losses import denoising_loss
from ups.models.denoiser import Denoiser, Prediction, predict
from ups.models.operator import Operator
from ups.models.sizes import from_settings
from ups.models.weights import load_model
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, open_cache
from ups.training.stage import Stage, batch_sizes

SMALLEST_RESIDUAL = 1e-3


def build(config: DiffusionConfig, run: Run) -> Stage:
    """Denoise the standardised residual at log-normal noise levels."""
    cache = open_cache(run, steady=False)
    operator = load_model(from_settings(Operator), run.data_root, run.inputs["operator"])
    settings = model_settings(cache, config.model)
    train, valid = (LatentSamples(cache, split, steady=False) for split in ("train", "valid"))
    denoiser = from_settings(Denoiser)(**settings)
    denoiser.scale.copy_(residual_scale(operator, valid, batch_sizes(valid.num_tokens, config)))

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residual(operator, denoiser, batch)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp()
        noise = draw.normal(*y.shape[1:])

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            return model(x, sigma, context, batch.condition, batch.domain)

        return denoising_loss(denoise, y, noise, sigma) / outlier_weight(y)

    return Stage(model=denoiser, settings=settings, loss=loss, train=train, valid=valid, num_tokens=train.num_tokens)


def outlier_weight(y: Tensor) -> Tensor:
    """Mean square of each residual (B,), at least 1: the few steps on which an operator fails count like the others."""
    return y.square().flatten(1).mean(1).clamp(min=1.0)


@torch.no_grad()
def residual(operator: Operator, denoiser: Denoiser, batch: LatentBatch) -> tuple[Tensor, Prediction]:
    """Residual y (B, N, D) of unit variance, and the prediction it belongs to."""
    operator = operator.to(batch.z.device)
    prediction = predict(operator, batch.z, batch.coefficients, batch.condition, batch.domain)
    return (batch.z_next - prediction.z_pred) / denoiser.units(prediction, batch.domain), prediction


@torch.no_grad()
def residual_scale(operator: Operator, valid: LatentSamples, sizes: dict[str, int]) -> Tensor:
    """Median RMS per family and latent channel (families, D) of the residual on validation steps, one value per field.

    Training residuals would be too small where the operator has learned the training set by heart; a mean would be that
    of the one trajectory it fails on.
    """
    scale = torch.ones_like(operator.amplitude.change)
    for family, samples in fixed_batches(valid.num_samples, sizes):
        batch = valid.load(family, samples)
        prediction = predict(operator, batch.z, batch.coefficients, batch.condition, batch.domain)
        error = (batch.z_next - prediction.z_pred) / prediction.unit
        rms = field_rms(error, batch.domain.family).median(0).values
        channels = batch.z.shape[-1]
        scale[list(FAMILIES).index(family), :channels] = rms.repeat_interleave(channels // len(rms))
    return scale.clamp(min=SMALLEST_RESIDUAL)
