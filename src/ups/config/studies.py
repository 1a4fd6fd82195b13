"""Parameters of studies: variants of the operator beside a base variant; adapting to a few trajectories."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ups.config.baselines import FNOModel
from ups.config.data import Tolerance, VariantName
from ups.config.sections import Fraction, Section, Seed, Steps
from ups.config.training import Noise, OperatorConfig, Optimization, Training, Unroll

BASE = "base"


class Variant(Section):
    """A row of the ablation, with its changes to the section `operator`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    overrides: dict[str, Any]

    @field_validator("overrides")
    @classmethod
    def _check_overrides(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for name in {"steps", "seed"} & overrides.keys():
            raise ValueError(f"{name} is the same for all variants")
        return overrides


class AblationConfig(Section):
    """`--pipeline ablation`: the operator of every variant is trained for `steps` steps, once per seed.

    The time of a training step is measured in `pace_rounds` rounds, in each for about `pace_seconds` per variant.
    """

    steps: Steps
    seeds: Annotated[list[Seed], Field(min_length=1)]
    pace_seconds: PositiveFloat
    pace_rounds: PositiveInt
    variants: list[Variant]

    def section(self, variant: Variant, seed: int, operator: OperatorConfig) -> OperatorConfig:
        """The section `operator` with the overrides of a variant.

        Raises:
            ValidationError: a key that the section does not have, or a wrong value.
        """
        overrides = variant.overrides | {"steps": self.steps, "seed": seed}
        return OperatorConfig(**_merged(operator.model_dump(), overrides))

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [variant.name for variant in self.variants]
        if BASE not in names or len(set(names)) < len(names):
            raise ValueError(f"variants need different names, and one of them is {BASE}: found {', '.join(names)}")
        return self


class CompressionVariant(Section):
    """Rows of the table: `codec` is `codec.model.tolerance`, `latents` is `latents.tolerance`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    codec: PositiveFloat | None
    latents: Tolerance | None


class CompressionConfig(Section):
    """`--pipeline compression`: codec, latents and models of every variant; the first one is not compressed."""

    variants: Annotated[list[CompressionVariant], Field(min_length=2)]

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise ValueError(f"compression.variants need different names: found {', '.join(names)}")
        if (self.variants[0].codec, self.variants[0].latents) != (None, None):
            raise ValueError("the first of compression.variants is the one to compare with: codec and latents null")
        return self


def _merged(section: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`section` with `overrides`, merged recursively: an override of one key keeps the others of its section."""
    inner = {
        name: _merged(section[name], value)
        for name, value in overrides.items()
        if isinstance(value, dict) and isinstance(section.get(name), dict)
    }
    return section | overrides | inner


class AdaptRecipe(Optimization):
    """Batches and optimizer of a training on a few trajectories; `plateau` would need trajectories for validation."""

    schedule: Literal["cosine", "step", "constant"]


class AdaptTraining(AdaptRecipe, Training):
    """One training on a few trajectories, with the loss of the operator or of the steady model."""

    noise: Noise
    unroll: Unroll


class AdaptConfig(Section):
    """`--pipeline adapt`: trained networks learn the files of `folder` from `sizes` of their trajectories.

    Trials choose the start. A family that the models know begins with its own network, with the trained head or one
    that least squares solve; another one halfway between random weights and the network of another family; both with
    random weights where those are better. With a `donor` a known family begins with that family's network, with `other`
    with the best of all others. The fraction `test_fraction` of a dataset's trajectories is for scores.

    - `learning_rates`: every start is tried untrained and with the first of them, the best one also with those beside
      the best so far, until none is better. A trial has all steps, and holds out the fraction `valid_fraction` of the
      trajectories for its error. The final training uses all of them
    - `warmup_share`: fraction of the steps in which the learning rate rises to its peak
    - `symmetries`: the images of the trajectories under the symmetries of the PDE are added to them
    - `fno`: a Fourier neural operator of this size is trained beside; null: none
    """

    folder: Annotated[Annotated[str, Field(min_length=1)] | None, Field(exclude=True)]
    donor: Literal["other"] | VariantName | None
    sizes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    test_fraction: Fraction
    valid_fraction: Fraction
    recipe: AdaptRecipe
    steps: Steps
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    warmup_share: Fraction
    noise: Noise
    unroll: Unroll
    symmetries: bool
    fno: FNOModel | None

    def training(self, learning_rate: float) -> AdaptTraining:
        """The section of one training."""
        return AdaptTraining(
            **self.recipe.model_dump(),
            steps=self.steps,
            learning_rate=learning_rate,
            warmup_steps=round(self.warmup_share * self.steps),
            noise=self.noise,
            unroll=self.unroll,
        )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.sizes != sorted(set(self.sizes)):
            raise ValueError(f"adapt.sizes must increase, got {self.sizes}")
        return self
