"""Sections of the training stages: the training loop, the networks, the losses."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ups.config.data import VariantName
from ups.config.sections import NonNegative, PerDimension, PerDimensionFloat, Section, Seed, Steps, section_of
from ups.data.definitions import is_named
from ups.models import sizes

BackbonePrecision = Literal["float32", "bfloat16", "float8"]
FLOAT8_MULTIPLE = 16  # of the edges of matrices that float8 multiplies


class Backbone(section_of(sizes.Backbone)):
    """The options of `ups.models.sizes.Backbone`; a class of this module, because `ParallelRunner` pickles sections."""


class CodecModel(Section):
    """Square patches with an edge of at least `patch_size` points, larger until a snapshot has at most `max_tokens`.

    Both are for 1D, 2D and 3D grids. `components`: the largest number of latent channels per field. With a `tolerance`
    each family gets the patch of at most that many points and the numbers of components with the fewest latents that
    keep it: it limits the RMS error of every field on the training split, in units of the field's standard deviation.
    """

    patch_size: PerDimension
    max_tokens: PerDimension
    components: PositiveInt
    tolerance: PositiveFloat | None


class Noise(Section):
    """Normal noise on the states from which training steps start, in units of the expected change of one step.

    Its standard deviation is `std` + `own_error` |n| e, with n ~ N(0, 1) per sample and the latest validation error e
    of the family (0 before the first): training states from exact to as wrong as predictions stabilize rollouts.
    """

    std: NonNegative
    own_error: NonNegative


class Unroll(Section):
    """Unrolled time steps in training: 1 up to the fraction `start` of the training, then growing to `horizon`.

    With `pushforward` no gradient flows from one unrolled step into the one before it (Brandstetter et al. 2022,
    arXiv:2202.03376). Other families than `families` always learn from one step; None: all are unrolled.
    """

    horizon: PositiveInt
    pushforward: bool
    start: Annotated[float, Field(ge=0.0, lt=1.0)]
    families: list[VariantName] | None

    def of(self, family: str) -> "Unroll":
        """How the steps of one family are unrolled."""
        is_unrolled = self.families is None or is_named(family, self.families)
        return self.model_copy(update={"families": None, "horizon": self.horizon if is_unrolled else 1})


class Term(Section):
    """A further term of the training loss with its weight; with weight 0 it is not computed.

    `phase`: the fractions of the training between which it is computed.
    """

    weight: NonNegative
    phase: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _check_phase(self) -> Self:
        start, end = self.phase
        if start >= end:
            raise ValueError(f"a term's phase must end after its start, got [{start}, {end}]")
        return self


class Query(Term):
    """Error at `num_points` random points in every `every`-th step; the weight grows over the first `warmup_steps`."""

    num_points: PositiveInt
    every: PositiveInt
    warmup_steps: Annotated[int, Field(ge=0)]


class Terms(Section):
    """Terms added to the latent error in training, not in validation; formulas in `ups.training.losses`.

    `spectral` compares changes of latents; the others compare decoded fields: at random points, integrals that the PDE
    conserves, negative values, boundary values, the divergence of incompressible flow.
    """

    query: Query
    spectral: Term
    conservation: Term
    positivity: Term
    boundary: Term
    divergence: Term


class Optimization(Section):
    """Batches and optimizer of a training of any length; the average of the weights is what a training ends with.

    A batch of one optimizer step, over all processes, holds about `batch_tokens` tokens: a multiple of `batch_multiple`
    snapshots of one family, divided equally among the processes.
    """

    seed: Seed
    batch_tokens: PositiveInt
    batch_multiple: PositiveInt
    optimizer: Literal["adamw", "muon"]
    schedule: Literal["cosine", "step", "plateau", "constant"]
    weight_decay: NonNegative
    clip_norm: PositiveFloat
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    validate_every: PositiveInt


class Recipe(Optimization):
    """Options of the training loop that do not depend on the length of a training.

    A family is sampled with a probability proportional to (its number of samples)^`balance` times the entry of
    `family_weights_by_dimension` for 1D, 2D or 3D grids; after the first validation also to its validation loss over
    the geometric mean of all families, between 1 / m and m with m = `max_difficulty`.

    A step is skipped if its gradient norm is not finite or exceeds `spike_factor` times the running mean; more than
    `max_skipped_steps` skipped steps end the training. After `patience` validations without a new best loss training
    ends with the best weights; with schedule `plateau` the learning rate is halved after half as many.
    """

    balance: Annotated[float, Field(ge=0.0, le=1.0)]
    family_weights_by_dimension: PerDimensionFloat
    max_difficulty: Annotated[float, Field(ge=1.0)]
    spike_factor: Annotated[float, Field(gt=1.0)]
    max_skipped_steps: Annotated[int, Field(ge=0)]
    precision: Literal["float32", "bfloat16"]
    patience: PositiveInt | None
    log_every: PositiveInt

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "plateau" and self.patience is None:
            raise ValueError("schedule plateau needs patience: after half of it the learning rate is halved")
        return self


class Training(Optimization):
    """One training; in the first `warmup_steps` of `steps` the learning rate rises to its peak."""

    steps: Steps
    learning_rate: PositiveFloat
    warmup_steps: Annotated[int, Field(ge=0)]


class TrainingSection(Recipe, Training):
    """All options of the training loop."""


class NetworkSection(TrainingSection):
    """A stage whose network is a `Backbone`; `float8` is bfloat16, with products of its blocks' layers in float8."""

    precision: BackbonePrecision
    model: Backbone

    @model_validator(mode="after")
    def _check_float8(self) -> Self:
        expect_float8_channels("precision", self.precision, self.model)
        return self


def expect_float8_channels(parameter: str, precision: str, model: Backbone) -> None:
    """Refuse a precision of float8, set by `parameter`, for channels whose products it has not; raises ValueError."""
    if precision == "float8" and any(n % FLOAT8_MULTIPLE for n in model.hidden_channels):
        needed = f"hidden_channels that are multiples of {FLOAT8_MULTIPLE}"
        raise ValueError(f"{parameter} = float8 needs {needed}, found {list(model.hidden_channels)}: choose bfloat16")


class CodecConfig(TrainingSection):
    """Stage `codec`: fields to latents and back."""

    model: CodecModel


class OperatorConfig(NetworkSection):
    """Stage `operator`: one time step in latent space.

    `conserve`: no step changes the integral of a field that the PDE conserves under its boundary condition. Predictions
    keep mass, momentum and energy of compressible flow, and incompressible flow between walls has no divergence.
    `symmetries`: training samples are mirrored and rotated at random, where PDE and domain allow it. `history`: the
    families whose steps start from two snapshots, see `ups.models.history`.
    """

    noise: Noise
    conserve: bool
    symmetries: bool
    history: list[VariantName]
    unroll: Unroll
    terms: Terms


class DiffusionConfig(NetworkSection):
    """Stage `diffusion`: unit-variance residuals at EDM's log-normal noise levels, log sigma ~ N(P_mean, P_std^2)."""

    P_mean: float
    P_std: PositiveFloat


class ConsistencyConfig(TrainingSection):
    """Stage `consistency`: easy consistency tuning (Geng et al. 2024, arXiv:2406.14548); q, k, b as in `next_sigma`."""

    precision: BackbonePrecision
    P_mean: float
    P_std: PositiveFloat
    q: Annotated[float, Field(gt=1.0)]
    k: NonNegative
    b: PositiveFloat


class SteadyConfig(NetworkSection):
    """Stage `steady`: coefficient fields to steady solutions; `symmetries` as for the operator."""

    symmetries: bool
