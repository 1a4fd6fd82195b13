"""How the stages are trained: what their one training loop needs, and what each adds."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ups.config.data import FamilyName
from ups.config.loss import Noise, Terms, Unroll
from ups.config.models import Backbone, CodecModel
from ups.config.sections import NonNegative, PerDimensionFloat, Section, Seed, Steps


class Recipe(Section):
    """How the one training loop trains, whatever it trains and for how long.

    `batch_tokens` is global: about so many tokens per optimizer step over all processes. A batch has a multiple of
    `batch_multiple` snapshots of one family, equally many for each process. Families are drawn in proportion to (their
    number of samples)^`balance` times the number in `draws` for the dimensions of their grid, which may stand against
    what a step on such a grid costs.

    A step whose gradient norm is not finite, or above `spike_factor` times its running mean, changes nothing; more
    than `max_skipped_steps` of them end the run. `patience`: validations without a better one after which training
    ends early, with the best weights, and half of it after which schedule `plateau` halves the learning rate.
    """

    seed: Seed
    batch_tokens: PositiveInt
    batch_multiple: PositiveInt
    balance: Annotated[float, Field(ge=0.0, le=1.0)]
    draws: PerDimensionFloat
    optimizer: Literal["adamw", "muon"]
    schedule: Literal["cosine", "step", "plateau", "constant"]
    weight_decay: NonNegative
    clip_norm: PositiveFloat
    spike_factor: Annotated[float, Field(gt=1.0)]
    max_skipped_steps: Annotated[int, Field(ge=0)]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    precision: Literal["float32", "bfloat16"]
    patience: PositiveInt | None
    log_every: PositiveInt
    validate_every: PositiveInt

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "plateau" and self.patience is None:
            raise ValueError("schedule plateau needs patience: after half of it the learning rate is halved")
        return self


class TrainingSection(Recipe):
    """What the one training loop needs; `warmup_steps` of the steps raise the learning rate to its peak."""

    steps: Steps
    learning_rate: PositiveFloat
    warmup_steps: Annotated[int, Field(ge=0)]


class CodecConfig(TrainingSection):
    """Stage `codec`: fields to latents and back."""

    model: CodecModel


class OperatorConfig(TrainingSection):
    """Stage `operator`: one time step; `noise` makes it robust to its own errors.

    With `conserve` no step changes the integral of a field that the PDE and its boundaries conserve; with `symmetries`
    samples are mirrored and turned at random, where the PDE and its domain allow it.
    """

    model: Backbone
    noise: Noise
    conserve: bool
    symmetries: bool
    unroll: Unroll
    terms: Terms


class DiffusionConfig(TrainingSection):
    """Stage `diffusion`: EDM's log-normal noise levels (P_mean, P_std) for residuals of unit variance."""

    model: Backbone
    P_mean: float
    P_std: PositiveFloat


class ConsistencyConfig(TrainingSection):
    """Stage `consistency`: easy consistency tuning (Geng et al. 2024); pairs with sigma_next = (1 - n(t)/q) sigma."""

    P_mean: float
    P_std: PositiveFloat
    q: Annotated[float, Field(gt=1.0)]
    k: NonNegative
    b: PositiveFloat


class SteadyConfig(TrainingSection):
    """Stage `steady`: coefficient fields to steady solutions, with `symmetries` as the operator's."""

    model: Backbone
    symmetries: bool


class FinetuneConfig(TrainingSection):
    """Stage `finetune`: go on with the operator on one family, with the loss it was trained with."""

    family: FamilyName | None
