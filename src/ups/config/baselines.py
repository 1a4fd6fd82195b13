"""Reference models and how they are trained."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ups.config.data import FamilyName
from ups.config.loss import Noise, Unroll
from ups.config.models import FNOModel, LinearModel, UNetModel
from ups.config.sections import Fraction, Section
from ups.config.training import Recipe, TrainingSection

Kind = Literal["fno", "unet", "linear"]


class BaselineConfig(TrainingSection):
    """Stage `baseline`: a reference model of one family on its grid, trained as the operator or the steady model is."""

    kind: Kind
    family: FamilyName
    model: FNOModel | UNetModel | LinearModel
    noise: Noise
    symmetries: bool
    unroll: Unroll


class BaselinesConfig(Section):
    """What `--pipeline baselines` trains, per family and kind of model.

    Each family gets the time in which the multi-task model was trained, divided by the number of families, times
    `shares` of its kind. The learning rate is that of `learning_rates` with the lowest validation loss after
    `trial_share` of these steps; the trials are not counted. Every run validates after each `validate_share` of its
    steps, or `recipe.validate_every` where that is less: noise that follows a model's own error needs to know it.
    """

    recipe: Recipe
    noise: Noise
    symmetries: bool
    unroll: Unroll
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    trial_share: Fraction
    warmup_share: Fraction
    validate_share: Fraction
    shares: dict[Kind, PositiveFloat]
    fno: FNOModel
    unet: UNetModel
    linear: LinearModel
    pace_seconds: PositiveFloat
    pace_rounds: PositiveInt

    def section(self, kind: Kind, family: FamilyName, steps: int, learning_rate: float) -> BaselineConfig:
        """The section of a baseline that trains for so many steps, one at least."""
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
