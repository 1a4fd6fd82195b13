"""Stage `steady`: the model that maps coefficient fields to steady solutions, and its loss."""

from torch import Tensor, nn

from ups.config import SteadyConfig
from ups.data.samples import LatentBatch, LatentSamples
from ups.models.operator import SteadyModel
from ups.models.weights import from_settings
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, network_bytes, open_cache, set_statistics
from ups.training.stage import Stage
from ups.training.symmetry import augmented


def build(config: SteadyConfig, run: Run) -> Stage:
    """The steady model for all steady families of the latent cache, trained with `steady_loss`."""
    cache = open_cache(run, "steady")
    settings = model_settings(cache, config.model)
    model = from_settings(SteadyModel)(**settings)
    set_statistics(model.statistics, cache)
    loss = augmented(steady_loss, cache, run) if config.symmetries else steady_loss
    train, valid = (LatentSamples(cache, split) for split in ("train", "valid"))
    sizes = {"num_tokens": train.num_tokens, "sample_bytes": network_bytes(settings, train.num_tokens)}
    return Stage(model=model, settings=settings, loss=loss, train=train, valid=valid, **sizes)


def steady_loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
    """RMSE of the latents of the solution, of about unit variance; mean over fields, one value per sample (B,)."""
    z_pred = model(batch.z, batch.coefficients, batch.condition, batch.domain)
    return field_rms(z_pred - batch.z_next, batch.domain.family).mean(1)
