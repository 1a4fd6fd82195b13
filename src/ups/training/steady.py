"""Stage `steady`: coefficient fields to steady solutions."""

from torch import Tensor, nn

from ups.config import SteadyConfig
from ups.data.loader import LatentBatch
from ups.data.samples import LatentSamples
from ups.models.sizes import from_settings
from ups.models.steady import SteadyModel
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, open_cache, set_amplitude
from ups.training.stage import Stage
from ups.training.symmetry import augmented


def build(config: SteadyConfig, run: Run) -> Stage:
    """Regress the solution."""
    cache = open_cache(run, "steady")
    settings = model_settings(cache, config.model)
    model = from_settings(SteadyModel)(**settings)
    set_amplitude(model.amplitude, cache)

    train = LatentSamples(cache, "train")
    return Stage(
        model=model,
        settings=settings,
        loss=augmented(steady_loss, cache, run) if config.symmetries else steady_loss,
        train=train,
        valid=LatentSamples(cache, "valid"),
        num_tokens=train.num_tokens,
    )


def steady_loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
    """RMS error of the normalized solution, mean over fields, one value per sample."""
    z_pred = model(batch.z, batch.coefficients, batch.condition, batch.domain)
    return field_rms(z_pred - batch.z_next, batch.domain.family).mean(1)
