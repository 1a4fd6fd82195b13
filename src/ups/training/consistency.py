"""Stage `consistency`: tune a copy of the denoiser until one or two evaluations do the work of many."""

from torch import Tensor, nn

from ups.config import ConsistencyConfig
from ups.data.loader import LatentBatch
from ups.data.samples import LatentSamples
from ups.diffusion.losses import consistency_loss, next_sigma
from ups.models.denoiser import Denoiser
from ups.models.sizes import from_settings
from ups.models.weights import load_model, load_settings
from ups.run import Run
from ups.training.diffusion import outlier_weight
from ups.training.distributed import Draw
from ups.training.residuals import Residuals
from ups.training.stage import Stage

LARGEST_SIGMA = 80.0


def build(config: ConsistencyConfig, run: Run) -> Stage:
    """Easy consistency tuning: the student starts as the teacher and becomes consistent along its own noise levels."""
    residuals = Residuals(run)
    teacher = load_model(from_settings(Denoiser), run.data_root, run.inputs["diffusion"])
    settings = load_settings(run.data_root, run.inputs["diffusion"])
    student = from_settings(Denoiser)(**settings)
    student.load_state_dict(teacher.state_dict())

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        y, context = residuals.of(batch, student)
        sigma = (config.P_mean + config.P_std * draw.normal()).exp().clamp(1e-3, LARGEST_SIGMA)
        noise = draw.normal(*y.shape[1:])
        sigma_next = next_sigma(sigma, config.q, config.k, config.b, stage=0)

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            return model(x, sigma, context, batch.condition, batch.domain)

        return consistency_loss(denoise, y, noise, sigma, sigma_next) / outlier_weight(y)

    train = LatentSamples(residuals.cache, "train")
    return Stage(
        model=student,
        settings=settings,
        loss=loss,
        train=train,
        valid=LatentSamples(residuals.cache, "valid"),
        num_tokens=train.num_tokens,
    )
