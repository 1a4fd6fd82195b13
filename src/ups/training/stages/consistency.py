"""Stage `consistency`: the denoiser distilled into a consistency model, which samples in one or two evaluations."""

from functools import partial

from torch import Tensor, nn

from ups.config import ConsistencyConfig
from ups.data.samples import LatentBatch
from ups.models.denoiser import Denoiser, consistency_loss, next_sigma
from ups.models.weights import from_settings, load_model, load_settings
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import network_bytes
from ups.training.stage import Stage
from ups.training.stages.diffusion import Residuals, residual_power

SMALLEST_SIGMA, LARGEST_SIGMA = 1e-3, 80.0


def build(config: ConsistencyConfig, run: Run) -> Stage:
    """Easy consistency tuning (Geng et al. 2024, arXiv:2406.14548): the student starts with the denoiser's weights.

    sigma is log-normal, ln sigma ~ N(P_mean, P_std^2), clamped to EDM's range.
    """
    residuals = Residuals(run)
    settings = load_settings(run.data_root, run.inputs["diffusion"])
    student = load_model(from_settings(Denoiser), run.data_root, run.inputs["diffusion"]).requires_grad_().train()

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residuals.standardized(batch, student)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp().clamp(SMALLEST_SIGMA, LARGEST_SIGMA)
        noise = draw.normal(*y.shape[1:])
        sigma_next = next_sigma(sigma, config.q, config.k, config.b)
        denoise = partial(model, context=context, condition=batch.condition, domain=batch.domain)
        return consistency_loss(denoise, y, noise, sigma, sigma_next) / residual_power(y)

    train, valid = residuals.samples("train"), residuals.samples("valid")
    sizes = {"num_tokens": train.num_tokens, "sample_bytes": network_bytes(settings, train.num_tokens)}
    return Stage(model=student, settings=settings, loss=loss, train=train, valid=valid, **sizes)
