"""Section `baselines`: FNO, U-Net and linear stencil of one family each, with which our models are compared."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ups.config.data import VariantName
from ups.config.sections import Fraction, NonNegative, PerDimension, Section
from ups.config.training import Noise, Recipe, TrainingSection, Unroll

Kind = Literal["fno", "unet", "linear"]


class FNOModel(Section):
    """Sizes of the Fourier neural operator: `modes` frequencies of each sign per axis on 1D, 2D and 3D grids.

    Axes that are not periodic are padded by the fraction `padding` of their points, half of it at each end.
    """

    hidden_channels: PositiveInt
    num_layers: PositiveInt
    modes: PerDimension
    padding: NonNegative


class UNetModel(Section):
    """Channels of the U-Net on its finest grid; they double on each coarser one."""

    hidden_channels: PositiveInt


class LinearModel(Section):
    """Size of the linear stencil: `kernel_size` points per axis."""

    kernel_size: PositiveInt


class BaselineConfig(TrainingSection):
    """Stage `baseline`: a model of one family on its grid, trained as the operator or the steady model is."""

    kind: Kind
    family: VariantName
    model: FNOModel | UNetModel | LinearModel
    noise: Noise
    symmetries: bool
    unroll: Unroll


class BaselinesConfig(Section):
    """What `--pipeline baselines` trains: one model per family and kind.

    Number of steps = training time of our codec and model per family * `time_shares` of the kind / seconds per step.

    - `learning_rates`: each is tried for the fraction `trial_share` of the steps, which does not count as training
      time; the one with the lowest validation loss is used. While that is the smallest or the largest, one beyond is
      tried too, up to `max_learning_rates` in all
    - `warmup_share`: fraction of the steps in which the learning rate rises to its peak
    - `validate_share`: fraction of the steps between two validations, unless `recipe.validate_every` is less; also
      short trainings need several, because the noise of `noise.own_error` is scaled by the latest validation error
    - `max_time_ratio`: the run fails if the CPU seconds of our trainings and those of FNO or U-Net differ by more than
      this factor, although numbers of steps were chosen for equal times: other programs were in the way
    - `pace_seconds`, `pace_rounds`: seconds per step are the median over `pace_rounds` rounds of about `pace_seconds`
    """

    recipe: Recipe
    noise: Noise
    symmetries: bool
    unroll: Unroll
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=2)]
    max_learning_rates: PositiveInt
    trial_share: Fraction
    warmup_share: Fraction
    validate_share: Fraction
    time_shares: dict[Kind, PositiveFloat]
    max_time_ratio: Annotated[float, Field(gt=1.0)]
    fno: FNOModel
    unet: UNetModel
    linear: LinearModel
    pace_seconds: PositiveFloat
    pace_rounds: PositiveInt

    def section(self, kind: Kind, family: VariantName, steps: int, learning_rate: float) -> BaselineConfig:
        """The section of a baseline that is trained for `steps` steps, at least one."""
        steps = max(1, steps)
        between = max(1, round(self.validate_share * steps))
        return BaselineConfig(
            **self.recipe.model_dump(exclude={"validate_every"}),
            validate_every=min(self.recipe.validate_every, between),
            steps=steps,
            learning_rate=learning_rate,
            warmup_steps=round(self.warmup_share * steps),
            kind=kind,
            family=family,
            model=getattr(self, kind),
            noise=self.noise,
            symmetries=self.symmetries,
            unroll=self.unroll,
        )
