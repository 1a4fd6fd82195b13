"""Stage `operator`: advance a latent by one time step."""

from torch import Tensor, nn

from ups.config import OperatorConfig
from ups.data.loader import LatentBatch, LatentSamples
from ups.models.operator import Operator
from ups.training.distributed import Draw
from ups.training.inputs import BOUND_OVER_TRAINING, field_rms, model_settings, open_cache, per_channel
from ups.training.loop import Stage
from ups.training.run import Run

SMALLEST_CHANGE = 1e-3


def build(config: OperatorConfig, run: Run) -> Stage:
    """Predict z_next from z with a little noise on z, in units of each field's own change per step."""
    cache = open_cache(run)
    settings = model_settings(cache, config.model)
    operator = Operator(**settings)
    operator.change.copy_(per_channel(cache, "change", settings["latent_channels"]).clamp(min=SMALLEST_CHANGE))
    operator.bound.copy_(BOUND_OVER_TRAINING * per_channel(cache, "max", settings["latent_channels"]))
    change = operator.change.clone()

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        scale = change[batch.domain.family, : batch.z.shape[-1]].to(batch.z)
        z = batch.z + config.noise * scale * draw.normal(*batch.z.shape[1:])
        z_pred = model(z, batch.coefficients, batch.condition, batch.domain)
        return field_rms((z_pred - batch.z_next) / scale, batch.domain.family).mean(1)

    train = LatentSamples(cache, "train", steady=False)
    return Stage(
        model=operator,
        settings=settings,
        loss=loss,
        train=train,
        valid=LatentSamples(cache, "valid", steady=False),
        batch_sizes=train.batch_sizes(config.batch_tokens),
    )
