"""Stage `operator`: advance a latent by one time step."""

from torch import Tensor, nn

from ups.config import OperatorConfig
from ups.data.loader import LatentBatch, LatentSamples
from ups.models.operator import Operator
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import field_rms, model_settings, open_cache, set_amplitude
from ups.training.stage import Stage


def build(config: OperatorConfig, run: Run) -> Stage:
    """Predict z_next from z with a little noise on z; errors count in units of what a step changes."""
    cache = open_cache(run)
    settings = model_settings(cache, config.model)
    operator = Operator(**settings)
    amplitude = operator.amplitude
    set_amplitude(amplitude, cache)

    def loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        unit = amplitude.unit(batch.z, batch.domain)
        z = batch.z + config.noise * unit * draw.normal(*batch.z.shape[1:])
        z_pred = model(z, batch.coefficients, batch.condition, batch.domain)
        return field_rms((z_pred - batch.z_next) / unit, batch.domain.family).mean(1)

    train = LatentSamples(cache, "train", steady=False)
    return Stage(
        model=operator,
        settings=settings,
        loss=loss,
        train=train,
        valid=LatentSamples(cache, "valid", steady=False),
        num_tokens=train.num_tokens,
    )
