"""How the trained models predict, choose and are judged."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ups.config.sections import Section, Seed

EnsembleSize = Annotated[int, Field(ge=4, multiple_of=2)]
"""Members of an ensemble, half of which have the noise of the others negated."""


class Start(Section):
    """A noise level from which residuals are drawn, and the evaluations from there to `sigma_min`."""

    sigma: PositiveFloat
    num_steps: PositiveInt


class StudentConfig(Section):
    """Evaluations that the consistency student may take, and what it must reach to be called accepted.

    `max_nrmse` and `max_crps` are over the teacher's, `min_evaluations` and `min_wall_time` the teacher's over its own.
    """

    num_steps: Annotated[list[Literal[1, 2]], Field(min_length=1)]
    max_nrmse: PositiveFloat
    max_crps: PositiveFloat
    min_evaluations: PositiveFloat
    min_wall_time: PositiveFloat


class CorrectorConfig(Section):
    """Ways to draw residuals, of which every family gets the best on its validation trajectories, or none.

    `sample` starts where noise hides the residual, `refine` lower. On the best start are tried the `memories`,
    correlations of a member's noise between neighbouring steps, and then those of the `spreads`, factors of the drawn
    residuals, that may calibrate them.
    A family is on if, for one step and for rollouts, the CRPS is at most `max_crps` of the operator's MAE, and of the
    ensemble's mean the nRMSE at most `max_nrmse` and the error in the highest band of wavenumbers at most
    `max_high_band` of the operator's. Its spread-skill must lie between the inverse of `max_miscalibration` and it.
    Of each dataset so many whole trajectories count as have `num_tokens` tokens together, but at least
    `min_trajectories`; a family that has fewer is off.
    """

    seed: Seed
    batch_tokens: PositiveInt
    num_tokens: PositiveInt
    min_trajectories: PositiveInt
    ensemble_size: EnsembleSize
    sigma_min: PositiveFloat
    sample: Start
    refine: list[Start]
    spreads: list[PositiveFloat]
    memories: list[Annotated[float, Field(ge=0.0, le=1.0)]]
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
    """How test trajectories are predicted: about so many tokens at a time, in ensembles of so many members.

    `folder` holds further PDEBench files to score, all their trajectories; with `folder_correctors` the correctors
    sample there too, member by member. Both change only the scores of that folder.
    """

    folder: Annotated[Annotated[str, Field(min_length=1)] | None, Field(exclude=True)]
    folder_correctors: Annotated[bool, Field(exclude=True)]
    seed: Seed
    batch_tokens: PositiveInt
    ensemble_size: EnsembleSize


class BeamConfig(Section):
    """Beam search along a rollout: `width` states are kept, each with `candidates` successors per step."""

    width: PositiveInt
    candidates: PositiveInt


class SelectionConfig(Section):
    """What `--pipeline selection` compares: `sizes` of ensembles to choose from, and a beam of as many candidates.

    `sampler` makes the candidates as `corrector` decided, and where that is off from `where_off` to `sigma_min`. The
    first `max_trajectories` of a split are used, `batch_tokens` tokens at a time.
    """

    seed: Seed
    sampler: Literal["consistency", "diffusion"]
    where_off: Start
    sigma_min: PositiveFloat
    sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    beam: BeamConfig
    max_trajectories: PositiveInt
    batch_tokens: PositiveInt

    @model_validator(mode="after")
    def _check_sizes(self) -> "SelectionConfig":
        if self.sigma_min >= self.where_off.sigma:
            raise ValueError("selection.sigma_min must be below selection.where_off.sigma")
        if self.sizes != sorted(set(self.sizes)):
            raise ValueError(f"selection.sizes must increase, got {self.sizes}")
        cost = self.beam.width * self.beam.candidates
        if cost not in self.sizes:
            raise ValueError(
                f"selection.beam.width * selection.beam.candidates = {cost} must be in selection.sizes {self.sizes}: "
                "a beam is held against an ensemble of the same cost"
            )
        return self


class SeedsConfig(Section):
    """The data roots that `--pipeline seeds` lays beside each other: the same comparison, each with its own seed."""

    data_roots: list[str]

    @model_validator(mode="after")
    def _check_roots(self) -> "SeedsConfig":
        if len({Path(root) for root in self.data_roots}) < len(self.data_roots):
            raise ValueError(f"seeds.data_roots must differ, got {', '.join(self.data_roots)}")
        return self


class Gate(Section):
    """A family passes when `metric` of `method` (over that of `relative_to`, if given) is at most `at_most`."""

    name: str
    method: str
    metric: str
    horizon: Literal["one_step", "rollout"]
    relative_to: str | None
    at_most: float
    applies_to: Literal["transient", "steady", "all"]


class JudgeConfig(Section):
    """The gates a run must pass."""

    gates: list[Gate]
