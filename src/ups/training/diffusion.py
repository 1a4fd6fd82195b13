"""Stage `diffusion`: the denoiser of residuals, what operator and steady model miss given what they said."""

from torch import Tensor, nn

from ups.config import DiffusionConfig
from ups.data.loader import LatentBatch
from ups.data.samples import LatentSamples
from ups.diffusion.losses import denoising_loss
from ups.models.denoiser import Denoiser
from ups.models.sizes import from_settings
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import model_settings
from ups.training.residuals import Residuals
from ups.training.stage import Stage, batch_sizes


def build(config: DiffusionConfig, run: Run) -> Stage:
    """Denoise the standardised residual at log-normal noise levels."""
    residuals = Residuals(run)
    settings = model_settings(residuals.cache, config.model)
    train, valid = (LatentSamples(residuals.cache, split) for split in ("train", "valid"))
    denoiser = from_settings(Denoiser)(**settings)
    residuals.set_scale(denoiser, valid, batch_sizes(valid.num_tokens, config))

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residuals.of(batch, denoiser)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp()
        noise = draw.normal(*y.shape[1:])

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            return model(x, sigma, context, batch.condition, batch.domain)

        return denoising_loss(denoise, y, noise, sigma) / outlier_weight(y)

    return Stage(model=denoiser, settings=settings, loss=loss, train=train, valid=valid, num_tokens=train.num_tokens)


def outlier_weight(y: Tensor) -> Tensor:
    """Mean square of each residual (B,), at least 1: the few steps on which a model fails count like the others."""
    return y.square().flatten(1).mean(1).clamp(min=1.0)
