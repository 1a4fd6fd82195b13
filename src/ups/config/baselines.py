"""Section `baselines`: models of one family each on its grid, with which our models are compared."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ups.config.data import VariantName
from ups.config.sections import Fraction, NonNegative, PerDimension, Section
from ups.config.training import Noise, OperatorConfig, Recipe, SteadyConfig, TrainingSection, Unroll
from ups.data.definitions import base_of, is_named
from ups.data.pdebench import FAMILIES

Kind = Literal["linear", "unet", "fno", "transformer", "normalized_unet", "normalized_fno"]
NORMALIZED = "normalized_"  # kinds with this prefix have the normalization and the conservation of the operator
REQUIRED = ("linear", "unet", "fno")  # the comparison needs these; others are rows beside them
Tuned = Literal["learning_rate", "hidden_channels", "modes"]
Candidate = dict[str, int]
"""What a trial changes -> how often its factor has been applied to the configured value; negative: divided by it."""
Trial = tuple[Candidate, float]
"""What was tried, and its validation loss."""


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


class TransformerModel(Section):
    """Sizes of the vision transformer: `patch_size` points per axis of the patches of 1D, 2D and 3D grids."""

    hidden_channels: PositiveInt
    num_layers: PositiveInt
    head_channels: PositiveInt
    patch_size: PerDimension


class LinearModel(Section):
    """Size of the linear stencil: `kernel_size` points per axis, an odd number."""

    kernel_size: PositiveInt

    @field_validator("kernel_size")
    @classmethod
    def _check_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"must be odd, found {value}: as many points on both sides")
        return value


Sizes = FNOModel | UNetModel | TransformerModel | LinearModel


class BaselineRecipe(Recipe):
    """The training loop of all baselines; the FNO's Fourier transforms exist on GPUs in no smaller precision."""

    precision: Literal["float32"]


class BaselineConfig(TrainingSection):
    """Stage `baseline`: a model of one family on its grid, trained as the operator or the steady model is."""

    kind: Kind
    family: VariantName
    model: Sizes
    noise: Noise
    symmetries: bool
    history: bool
    unroll: Unroll

    @property
    def architecture(self) -> str:
        """The network, without the prefix that says how its states are normalized."""
        return self.kind.removeprefix(NORMALIZED)

    @property
    def normalized(self) -> bool:
        """Whether the network has the inputs, the units and the conserved integrals of the operator."""
        return self.kind.startswith(NORMALIZED)


class BaselinesConfig(Section):
    """What `--pipeline baselines` trains: one model per family and kind.

    Number of steps = training time of our codec and model per family * `time_shares` of the kind / seconds per step.

    - `time_shares`: the kinds that are trained; `linear`, `unet` and `fno` must be among them
    - `learning_rate`: the first one that is tried, with the sizes of the sections
    - `factors`: a trial multiplies or divides one of these by its factor. From the best trial so far each one is tried
      both ways, so that the best one in the end has worse ones on all sides, or `max_trials` have been made; every kind
      and family has this number. A trial has the fraction `trial_share` of the training time, which does not count as
      training time; a size that takes more time per step gets fewer steps. The lowest validation loss is the best
    - `chosen`: values of a kind and family that earlier trials found, for its variants too; such a model has no trials,
      and where it diverges smaller learning rates
    - `warmup_share`: fraction of the steps in which the learning rate rises to its peak
    - `validate_share`: fraction of the steps between two validations, unless `recipe.validate_every` is less; also
      short trainings need several: the noise of `operator.noise.own_error` is scaled by the latest validation error
    - `max_time_ratio`: the run fails if the CPU seconds of our trainings and those of FNO or U-Net differ by more than
      this factor, although numbers of steps were chosen for equal times: other programs were in the way
    - `pace_seconds`, `pace_rounds`: seconds per step are the median over `pace_rounds` rounds of about `pace_seconds`
    """

    recipe: BaselineRecipe
    learning_rate: PositiveFloat
    factors: dict[Tuned, Annotated[float, Field(gt=1.0)]]
    chosen: dict[Kind, dict[VariantName, dict[Tuned, PerDimension | PositiveInt | PositiveFloat]]]
    max_trials: PositiveInt
    trial_share: Fraction
    warmup_share: Fraction
    validate_share: Fraction
    time_shares: dict[Kind, PositiveFloat]
    max_time_ratio: Annotated[float, Field(gt=1.0)]
    fno: FNOModel
    unet: UNetModel
    transformer: TransformerModel
    linear: LinearModel
    pace_seconds: PositiveFloat
    pace_rounds: PositiveInt

    @field_validator("factors")
    @classmethod
    def _has_a_learning_rate(cls, factors: dict[str, float]) -> dict[str, float]:
        if "learning_rate" not in factors:
            raise ValueError("learning_rate is missing: without it no other rate is tried")
        return factors

    @field_validator("time_shares")
    @classmethod
    def _has_what_the_comparison_needs(cls, shares: dict[Kind, float]) -> dict[Kind, float]:
        if missing := [kind for kind in REQUIRED if kind not in shares]:
            raise ValueError(f"the comparison needs {', '.join(REQUIRED)}; missing: {', '.join(missing)}")
        return shares

    @model_validator(mode="after")
    def _has_possible_choices(self) -> Self:
        for kind, by_family in self.chosen.items():
            for family in by_family:
                self._rate_and_sizes(kind, family, {})
        return self

    def sizes(self, kind: Kind) -> Sizes:
        """The configured sizes of a kind of model; a normalized one has those of its architecture."""
        return getattr(self, kind.removeprefix(NORMALIZED))

    def start(self, kind: Kind, family: VariantName) -> Candidate:
        """The configured values of what trials of this kind change; nothing where they are `chosen`."""
        if self._chosen(kind, family):
            return {}
        return {name: 0 for name in self.factors if name == "learning_rate" or hasattr(self.sizes(kind), name)}

    def values(self, kind: Kind, family: VariantName, candidate: Candidate) -> dict[str, Any]:
        """The learning rate and sizes of a candidate, e.g. {"learning_rate": 0.003, "modes": (32, 16, 8)}."""
        chosen = self._chosen(kind, family)
        known = {"learning_rate": self.learning_rate} | self.sizes(kind).model_dump() | chosen
        return chosen | {name: _scaled(known[name], self.factors[name] ** power) for name, power in candidate.items()}

    def _chosen(self, kind: Kind, family: VariantName) -> dict[str, Any]:
        """The `chosen` values of a family, or of that which it is a variant of; none without an entry."""
        of_kind = self.chosen.get(kind, {})
        return of_kind.get(family, of_kind.get(base_of(family), {}))

    def _rate_and_sizes(self, kind: Kind, family: VariantName, candidate: Candidate) -> tuple[float, Sizes]:
        changed = {"learning_rate": self.learning_rate} | self.values(kind, family, candidate)
        rate, sizes = changed.pop("learning_rate"), self.sizes(kind)
        return rate, type(sizes).model_validate(sizes.model_dump() | changed)

    def section(
        self,
        kind: Kind,
        family: VariantName,
        steps: int,
        candidate: Candidate,
        operator: OperatorConfig,
        steady: SteadyConfig,
    ) -> BaselineConfig:
        """The section of a baseline that is trained for `steps` steps, at least one.

        Noise, symmetries, number of snapshots and unrolled steps are those of the training of the operator, symmetries
        of a steady family those of the steady model.
        """
        steps = max(1, steps)
        rate, sizes = self._rate_and_sizes(kind, family, candidate)
        optimizer = "adamw" if kind == "linear" else self.recipe.optimizer  # a stencil has no hidden layers
        between = max(1, round(self.validate_share * steps))
        return BaselineConfig(
            **self.recipe.model_dump(exclude={"validate_every", "optimizer"}),
            optimizer=optimizer,
            validate_every=min(self.recipe.validate_every, between),
            steps=steps,
            learning_rate=rate,
            warmup_steps=round(self.warmup_share * steps),
            kind=kind,
            family=family,
            model=sizes,
            noise=operator.noise,
            symmetries=steady.symmetries if FAMILIES[family].steady else operator.symmetries,
            history=is_named(family, operator.history) and not FAMILIES[family].steady,
            unroll=operator.unroll.of(family),
        )


def _scaled(value: float | tuple[int, ...], factor: float) -> float | int | tuple[int, ...]:
    """A rate with two digits, a size as an integer, each size of a tuple; sizes are at least 1."""
    if isinstance(value, tuple):
        return tuple(max(1, round(each * factor)) for each in value)
    return max(1, round(value * factor)) if isinstance(value, int) else float(f"{value * factor:.2g}")


def is_measured(candidate: Candidate) -> bool:
    """Whether the time of its steps is measured: at most one size is changed, by its factor."""
    return sum(abs(power) for name, power in candidate.items() if name != "learning_rate") <= 1


def neighbours(candidate: Candidate) -> list[Candidate]:
    """The candidates that differ by one factor: each value raised, then lowered."""
    return [candidate | {name: power + change} for name, power in candidate.items() for change in (1, -1)]


def next_candidate(trials: Sequence[Trial], start: Candidate, max_trials: int) -> Candidate | None:
    """What to try next: `start`, then the untried neighbours of the best candidate so far whose pace is measured.

    None: the best candidate has worse ones on all sides, or there have been `max_trials` trials.
    """
    if not trials:
        return start
    tried = [candidate for candidate, _ in trials]
    beside = filter(is_measured, neighbours(min(trials, key=itemgetter(1))[0]))
    left = (each for each in beside if each not in tried)
    return next(left, None) if len(trials) < max_trials else None
