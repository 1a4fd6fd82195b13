"""Parameters of the evaluation: corrector, scoring, search among members, shifts, gates, several seeds."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from ups.config.data import FamilyName
from ups.config.sections import NonNegative, PerDimension, Section, Seed, Steps

EnsembleSize = Annotated[int, Field(ge=4, multiple_of=2)]
"""Members of an ensemble, half of which have the noise of the others negated."""


def _expect_change(factor: float) -> float:
    if factor == 1:
        raise ValueError("a factor of 1 changes nothing")
    return factor


Factor = Annotated[PositiveFloat, AfterValidator(_expect_change)]


class Start(Section):
    """Start of sampling: the noise level `sigma`, and the network evaluations from there to `sigma_min`."""

    sigma: PositiveFloat
    num_steps: PositiveInt


class StudentConfig(Section):
    """Numbers of evaluations to try with the consistency student, and the limits of the student that is accepted.

    `max_nrmse` and `max_crps` limit the ratio student / denoiser and also decide which student is chosen,
    `min_evaluations_ratio` and `min_wall_time_ratio` limit the ratio denoiser / student.
    """

    num_steps: Annotated[list[Literal[1, 2]], Field(min_length=1)]
    max_nrmse: PositiveFloat
    max_crps: PositiveFloat
    min_evaluations_ratio: PositiveFloat
    min_wall_time_ratio: PositiveFloat


class CorrectorConfig(Section):
    """Ways to sample residuals; every family gets the best one on its validation trajectories, or none.

    Residuals have unit variance: `sample` starts from noise far above it, `refine` near or below it, with the first of
    the `noise_correlations` between neighbouring time steps. With the best start the other correlations are tried, then
    the two of the `residual_scales`, factors on the sampled residual, that may calibrate the ensemble best.

    The corrector is on for a family if, for one step and for rollouts of every dataset, the ratios to the model without
    corrector are within limits: CRPS to its MAE `max_crps`, nRMSE of the ensemble's mean `max_nrmse`, error in the
    highest band of wavenumbers `max_high_band`; and the spread-skill ratio is in [1 / m, m], m = `max_miscalibration`.

    Each dataset gives as many whole trajectories as have `num_tokens` tokens together, but at least `min_trajectories`;
    for a family with fewer it is off, and not trained. A trajectory with more tokens gives its first snapshots.
    """

    seed: Seed
    batch_tokens: PositiveInt
    num_tokens: PositiveInt
    min_trajectories: PositiveInt
    ensemble_size: EnsembleSize
    sigma_min: PositiveFloat
    sample: Start
    refine: list[Start]
    residual_scales: list[PositiveFloat]
    noise_correlations: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)]
    max_crps: PositiveFloat
    max_nrmse: PositiveFloat
    max_high_band: PositiveFloat
    max_miscalibration: Annotated[float, Field(gt=1.0)]
    student: StudentConfig

    @model_validator(mode="after")
    def _check_levels(self) -> "CorrectorConfig":
        if self.sigma_min >= min(start.sigma for start in (self.sample, *self.refine)):
            raise ValueError("corrector.sigma_min must be below the sigma of every start")
        return self


class EvaluationConfig(Section):
    """Scoring: `batch_tokens` tokens per batch, ensembles of `ensemble_size` members.

    All trajectories of further PDEBench files in `folder` are scored too, with `folder_correctors` false without
    correctors, many times faster. `folder` and `folder_correctors` affect the scores of that folder alone.

    Rollouts of the methods `keep_predictions` on the test split are kept as zarr.
    """

    folder: Annotated[Annotated[str, Field(min_length=1)] | None, Field(exclude=True)]
    folder_correctors: Annotated[bool, Field(exclude=True)]
    seed: Seed
    batch_tokens: PositiveInt
    ensemble_size: EnsembleSize
    keep_predictions: list[Literal["codec", "persistence", "operator", "steady", "diffusion", "consistency"]]

    @property
    def scores_only(self) -> Self:
        """The same, without rollouts that are kept: for other trajectories or models than those of `evaluate`."""
        return self.model_copy(update={"keep_predictions": []})


class PredictConfig(Section):
    """`--pipeline predict`: from all initial states in the file `input` to trajectories in the file `output`.

    `output` None: `07_model_output/predictions/<input>.zarr`. Of trajectories the snapshot with index `start` is the
    initial state, -1 is the last one. The others are arguments of `Model.predict`: `steps` None for steady families,
    `members` None without an ensemble, `dt` None for that of training; `parameters` of the PDE override those that the
    file states.
    """

    input: Annotated[str, Field(min_length=1)] | None
    output: Annotated[str, Field(min_length=1)] | None
    family: str | None
    start: int
    steps: Steps | None
    members: Annotated[int, Field(ge=2, multiple_of=2)] | None
    seed: Seed
    dt: PositiveFloat | None
    parameters: dict[str, float]


class BeamConfig(Section):
    """Beam search along a rollout: `width` states are kept, each with `successors` per time step."""

    width: PositiveInt
    successors: PositiveInt


class SelectionConfig(Section):
    """`--pipeline selection`: choosing among ensembles of these `sizes`, and beam search at the cost of one of them.

    Members are sampled by the method `sampler` with the family's correction; where the corrector is off, in mode
    `sample` from `if_corrector_off` to `sigma_min`. The first `max_trajectories` of each dataset and split are used.
    """

    seed: Seed
    sampler: Literal["consistency", "diffusion"]
    if_corrector_off: Start
    sigma_min: PositiveFloat
    sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    beam: BeamConfig
    max_trajectories: PositiveInt
    batch_tokens: PositiveInt

    @model_validator(mode="after")
    def _check_sizes(self) -> "SelectionConfig":
        if self.sigma_min >= self.if_corrector_off.sigma:
            raise ValueError("selection.sigma_min must be below selection.if_corrector_off.sigma")
        if self.sampler == "consistency" and self.if_corrector_off.num_steps > 2:
            raise ValueError("selection.if_corrector_off.num_steps must be 1 or 2 with selection.sampler consistency")
        if self.sizes != sorted(set(self.sizes)):
            raise ValueError(f"selection.sizes must increase, got {self.sizes}")
        cost = self.beam.width * self.beam.successors
        if cost not in self.sizes:
            raise ValueError(
                f"selection.beam.width * selection.beam.successors = {cost} must be in selection.sizes {self.sizes}: "
                "a beam is compared with an ensemble of the same cost"
            )
        return self


class SeedsConfig(Section):
    """`--pipeline seeds`: data roots with finished comparisons that differ in `seed` alone."""

    data_roots: list[str]

    @model_validator(mode="after")
    def _check_roots(self) -> "SeedsConfig":
        if len({Path(root) for root in self.data_roots}) < len(self.data_roots):
            raise ValueError(f"seeds.data_roots must differ, got {', '.join(self.data_roots)}")
        return self


class LeaderboardConfig(Section):
    """`--pipeline leaderboard`: finished runs, by default that of this data root alone, and scores of other models.

    `data_roots` are compared in this order: errors are relative to those of the first that never diverged. `scores` are
    files that `ups score --output` wrote. Both may be patterns such as `data/accuracy*`.
    """

    data_roots: list[Annotated[str, Field(min_length=1)]]
    scores: list[Annotated[str, Field(min_length=1)]]


class ShiftsConfig(Section):
    """`--pipeline coverage`: shifted trajectories that are simulated and predicted, one thing changed by each factor.

    There are `num_trajectories` of every shift on 1D, 2D and 3D grids, and `unshifted` times as many without shift.
    Factors on each parameter of the equation, the amplitude and the wavenumbers of the initial states (of steady
    families: of the coefficients), time step and grid; `noises` are RMS values relative to the fluctuation.
    """

    seed: Seed
    num_trajectories: PerDimension
    unshifted: PositiveInt
    parameters: list[Factor]
    amplitudes: list[Factor]
    wavenumbers: list[Annotated[int, Field(ge=2)]]
    noises: list[PositiveFloat]
    time_steps: list[Factor]
    grids: list[Annotated[int, Field(ge=2)]]


class ProtocolSizes(Section):
    """What PDEBench chose by family: snapshots given, sizes of its FNO, snapshots trained on (None: all)."""

    initial_step: PositiveInt
    modes: PositiveInt
    hidden_channels: PositiveInt
    train_snapshots: Annotated[int, Field(ge=2)] | None

    @model_validator(mode="after")
    def _expect_targets(self) -> Self:
        if self.train_snapshots is not None and self.train_snapshots <= self.initial_step:
            raise ValueError(f"train_snapshots = {self.train_snapshots} must exceed initial_step = {self.initial_step}")
        return self


class ProtocolConfig(Section):
    """`--pipeline protocol`: PDEBench's training of its FNO, and its sizes, `default` or by family.

    The learning rate is halved every `halve_every` epochs; weights are tested every `select_every` epochs.
    """

    seed: Seed
    epochs: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: NonNegative
    halve_every: PositiveInt
    select_every: PositiveInt
    num_layers: PositiveInt
    default: ProtocolSizes
    families: dict[FamilyName, ProtocolSizes]

    def of(self, family: str) -> ProtocolSizes:
        """The sizes of a family."""
        return self.families.get(family, self.default)


class ReportConfig(Section):
    """The page `report.html`; `compare` are data roots of finished runs, whose scores it shows beside its own."""

    compare: list[str]


class Gate(Section):
    """A gate holds on a dataset if `metric` of `method`, over that of `relative_to` if given, is at most `at_most`.

    `relative_to` is a method of the same evaluation, `baselines`, the better of FNO and U-Net where they were trained,
    or `champion`, the registered model where there is one, on the same trajectories. Where the gate does not hold,
    `otherwise` says what follows: the dataset is `weak`, it is weak and the run has failed (`fail`), or it is
    `unusable`, and the run has failed as well.
    """

    name: str
    method: Literal["codec", "rounding", "persistence", "operator", "steady", "diffusion", "consistency"]
    metric: str
    horizon: Literal["one_step", "rollout"]
    relative_to: Literal["persistence", "operator", "steady", "baselines", "champion"] | None
    at_most: float
    applies_to: Literal["transient", "steady", "all"]
    otherwise: Literal["weak", "fail", "unusable"]

    @model_validator(mode="after")
    def _expect_errors_of_trajectories(self) -> Self:
        if self.relative_to == "champion" and self.metric != "nRMSE":
            raise ValueError(f"gate {self.name}: the champion's trajectories have an nRMSE alone, not {self.metric}")
        return self


class JudgeConfig(Section):
    """The gates, those that can make a dataset `unusable` also on the first `first_trajectories` of each dataset.

    A run that these show to be hopeless stops before its correctors are chosen and all trajectories are scored.
    """

    first_trajectories: PositiveInt
    gates: list[Gate]


class RegistrationConfig(Section):
    """`--pipeline register`: the version of `name` that has the `alias` changes only if the new one is better.

    No family's mean error may then be more than `max_family_ratio` times what it was.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
    max_family_ratio: Annotated[float, Field(ge=1.0)]
