"""Stage `diffusion`: the denoiser of the operator's residual, what the operator misses given what it said."""

import torch
from torch import Tensor, nn

from ups.config import DiffusionConfig
from ups.data.loader import LatentBatch, LatentSamples, fixed_batches
from ups.data.pdebench import FAMILIES
from ups.diffusion.losses import denoising_loss
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator
from ups.models.weights import load_model
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, open_cache
from ups.training.loop import Stage
from ups.training.run import Run

SMALLEST_RESIDUAL = 1e-5


def build(config: DiffusionConfig, run: Run) -> Stage:
    """Denoise the standardised residual at log-normal noise levels."""
    cache = open_cache(run)
    operator = load_model(Operator, run.data_root, run.inputs["operator"])
    settings = model_settings(cache, config.model)
    train, valid = (LatentSamples(cache, split, steady=False) for split in ("train", "valid"))
    batch_sizes = train.batch_sizes(config.batch_tokens)
    denoiser = Denoiser(**settings)
    denoiser.scale.copy_(residual_scale(operator, valid, batch_sizes))
    residual = Residual(operator, denoiser.scale.clone())

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residual(batch)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp()
        noise = draw.normal(*y.shape[1:])
        return denoising_loss(lambda x, sigma: model(x, sigma, context, batch.condition, batch.domain), y, noise, sigma)

    return Stage(model=denoiser, settings=settings, loss=loss, train=train, valid=valid, batch_sizes=batch_sizes)


class Residual:
    """The operator's residual in units of `scale`, and the context in which it is denoised."""

    def __init__(self, operator: Operator, scale: Tensor) -> None:
        self.operator, self.scale = operator, scale

    @torch.no_grad()
    def __call__(self, batch: LatentBatch) -> tuple[Tensor, Tensor]:
        """Residual y (B, N, D) and context (B, N, 2 D + D_c)."""
        operator = self.operator.to(batch.z.device)
        z_pred = operator(batch.z, batch.coefficients, batch.condition, batch.domain)
        scale = self.scale[batch.domain.family, : batch.z.shape[-1]].to(batch.z)
        return (batch.z_next - z_pred) / scale, torch.cat([batch.z, z_pred, batch.coefficients], -1)


@torch.no_grad()
def residual_scale(operator: Operator, valid: LatentSamples, batch_sizes: dict[str, int]) -> Tensor:
    """RMS per family and latent channel (families, D) of the residual on validation steps, one value per field.

    Training residuals would be too small where the operator has learned the training set by heart.
    """
    scale = torch.ones_like(operator.change)
    for family, samples in fixed_batches(valid.num_samples, batch_sizes):
        batch = valid.load(family, samples, torch.device("cpu"))
        z_pred = operator(batch.z, batch.coefficients, batch.condition, batch.domain)
        rms = field_rms(batch.z_next - z_pred, batch.domain.family).square().mean(0).sqrt()
        channels = batch.z.shape[-1]
        scale[list(FAMILIES).index(family), :channels] = rms.repeat_interleave(channels // len(rms))
    return scale.clamp(min=SMALLEST_RESIDUAL)
