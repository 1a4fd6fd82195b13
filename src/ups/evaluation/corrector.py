"""The choice of the corrector: for each family whether and how residuals are sampled, from its validation split.

Candidates (ways to sample residuals) are compared with the plain model: operator or steady model without corrector.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ups.config import CorrectorConfig
from ups.config.evaluation import StudentConfig
from ups.diffusion import antithetic
from ups.evaluation.predictions import HORIZONS, Compute, Forecast, Stepper, corrected_stepper, predict
from ups.evaluation.records import Suites
from ups.evaluation.scores import TrajectorySet, batches, score_batch
from ups.evaluation.tables import finite
from ups.metrics.suite import ScoreSuite
from ups.runs.machine import in_turns
from ups.surrogate.surrogate import Correction, Surrogate
from ups.surrogate.trained import OFF

HIGH_BAND = "band_error_4"  # error in the highest of four bands of wavenumbers
METRICS = ("nRMSE", "MAE", "CRPS", "spread_skill", HIGH_BAND)
COMPAT_BATCH_SIZE = 1  # of `CompatSuite`, whose metrics are not used here
TIMED_ROUNDS = 5
MARGIN = 1.25  # by which the expected spread-skill may exceed its limit: the error grows with the residual scale too
SCALES_TRIED = 2  # those whose expected spread-skill is nearest to 1
STRIDE = 3  # one step is scored from every third snapshot, because neighbouring snapshots are alike

Scores = dict[str, dict[str, dict[str, float]]]
"""Dataset -> horizon -> metric -> value."""


@dataclass(frozen=True)
class Candidate:
    """A correction of one method and its scores, summarised over datasets and horizons relative to the plain model.

    - `crps`: largest ratio of the CRPS to the plain model's MAE, which is the CRPS of a single prediction
    - `mean_crps`: geometric mean of these ratios
    - `nrmse`, `high_band`: largest ratio of the ensemble mean's nRMSE, and error in the highest band, to the plain
      model's
    - `miscalibration`: mean of |log spread_skill|, 0 for a calibrated ensemble
    - `exceeded`: the limits of `CorrectorConfig` that are exceeded
    """

    method: str
    correction: Correction
    scores: Scores
    crps: float
    mean_crps: float
    nrmse: float
    high_band: float
    miscalibration: float
    exceeded: list[str]

    @property
    def qualifies(self) -> bool:
        """Whether all limits hold, so that the correction is better than none."""
        return not self.exceeded

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key, see `rank_of`."""
        return rank_of(self.mean_crps, self.miscalibration, self.exceeded)


@dataclass(frozen=True)
class Validation:
    """Validation trajectories of one family, as much of each dataset as `CorrectorConfig` allows, and the models."""

    surrogate: Surrogate
    sets: list[TrajectorySet]
    config: CorrectorConfig
    compute: Compute

    @cached_property
    def num_trajectories(self) -> int:
        """Number of trajectories that are scored, over all datasets."""
        return sum(len(each.indices) for each in self._scored)

    @cached_property
    def plain(self) -> Scores:
        """Scores of the plain model."""
        return self._scores("plain", dict.fromkeys(HORIZONS, Stepper(self.surrogate.plain_step, 1)))

    def candidate(self, method: str, correction: Correction) -> Candidate:
        """Score a correction; all candidates are sampled with the same random numbers."""
        scores = self._scores(method, {horizon: self._stepper(method, correction) for horizon in HORIZONS})
        config, reference = self.config, self.plain
        crps = _values(scores, "CRPS") / _values(reference, "MAE")
        worst_crps, worst_nrmse = float(crps.max()), worst_ratio(scores, reference, "nRMSE")
        worst_high_band = worst_ratio(scores, reference, HIGH_BAND)
        miscalibration = _values(scores, "spread_skill").log().abs()
        holds = {  # false for NaN too: scores of a diverged rollout exceed every limit
            "max_crps": worst_crps <= config.max_crps,
            "max_nrmse": worst_nrmse <= config.max_nrmse,
            "max_high_band": worst_high_band <= config.max_high_band,
            "max_miscalibration": float(miscalibration.max()) <= math.log(config.max_miscalibration),
        }
        ratios = worst_crps, float(crps.log().mean().exp()), worst_nrmse, worst_high_band
        exceeded = [limit for limit, is_kept in holds.items() if not is_kept]
        return Candidate(method, correction, scores, *ratios, float(miscalibration.mean()), exceeded)

    @torch.no_grad()
    def wall_time_ratio(self, first: Candidate, second: Candidate) -> float:
        """Median seconds of one step of the first candidate over those of the second, measured alternately."""
        size = self.config.ensemble_size
        batch = next(batches(self.surrogate, self._scored[0], self.config.batch_tokens, self.compute, size))
        z = next(batch.slabs(self.surrogate.encode)).z_ref[:, 0]
        contenders = {}
        for name, candidate in (("first", first), ("second", second)):
            stepper = self._stepper(candidate.method, candidate.correction)
            contenders[name] = partial(stepper.start(batch.setting), z.repeat(stepper.num_members, 1, 1))
        seconds = in_turns(contenders, TIMED_ROUNDS, self.compute.device)
        return seconds["first"] / seconds["second"]

    def _stepper(self, method: str, correction: Correction) -> Stepper:
        normal = antithetic(torch.Generator(self.compute.device).manual_seed(self.config.seed))
        return corrected_stepper(self.surrogate, method, correction, self.config.ensemble_size, normal)

    @cached_property
    def _scored(self) -> list[TrajectorySet]:
        return [self._leading(each) for each in self.sets]

    def _leading(self, whole: TrajectorySet) -> TrajectorySet:
        """The first trajectories of a dataset; of those longer than `num_tokens` the first snapshots, at least two."""
        num_snapshots = max(2, self.config.num_tokens // math.prod(whole.domain.grid))
        leading = replace(whole, dataset=replace(whole.dataset, times=whole.dataset.times[:num_snapshots]))
        count = max(self.config.min_trajectories, self.config.num_tokens // leading.num_tokens)
        return replace(leading, indices=whole.indices[:count])

    @torch.no_grad()
    def _scores(self, method: str, steppers: dict[str, Stepper]) -> Scores:
        """Scores of one step and of whole rollouts, in physical units."""
        scores: Scores = {}
        for each in self._scored:
            num_dims, seed = len(each.dataset.grid), self.config.seed
            suites: Suites = {(method, h): ScoreSuite(num_dims, COMPAT_BATCH_SIZE, (), seed) for h in HORIZONS}
            size = steppers["rollout"].num_members
            for batch in batches(self.surrogate, each, self.config.batch_tokens, self.compute, size):
                forecasts = {method: Forecast(steppers, batch.setting, STRIDE)}
                score_batch(self.surrogate.encode, batch, [partial(predict, self.surrogate, batch, forecasts)], suites)
            # On an axis of 2 to 4 points there is no such band, and nothing to limit.
            scores[each.dataset.name] = {
                horizon: {HIGH_BAND: 1.0} | {name: s.value for name, s in suite.compute().items() if name in METRICS}
                for (_, horizon), suite in suites.items()
            }
        return scores


def rank_of(mean_crps: float | None, miscalibration: float | None, exceeded: list[str]) -> tuple[bool, float, float]:
    """Sort key of a `Candidate`, best first: those that qualify, by mean CRPS to two decimals, then by calibration.

    What is not finite, in reports None, comes last.
    """
    values = (mean_crps, miscalibration)
    crps, spread = (math.inf if value is None or math.isnan(value) else value for value in values)
    return bool(exceeded), round(crps, 2), spread


def _values(scores: Scores, metric: str) -> Tensor:
    """One value per dataset and horizon."""
    values = [of_horizon[metric] for of_dataset in scores.values() for of_horizon in of_dataset.values()]
    return torch.tensor(values, dtype=torch.float64)


def worst_ratio(scores: Scores, reference: Scores, metric: str) -> float:
    """Largest ratio of a metric to that of the reference, over datasets and horizons."""
    return float((_values(scores, metric) / _values(reference, metric)).max())


def choose_for_family(validation: Validation) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice for each method, and a report; with too few trajectories both methods stay off.

    Corrections of the denoiser come first. The student is only tried where the denoiser's best one qualifies, because
    it was distilled from the denoiser and is compared with it.
    """
    choice: dict[str, Any] = {"diffusion": {"mode": OFF}, "consistency": {"mode": OFF}}
    report: dict[str, Any] = {"num_trajectories": validation.num_trajectories, "decision": choice}
    if validation.num_trajectories < validation.config.min_trajectories:
        return choice, report
    tried = try_diffusion(validation)
    teacher = min(tried, key=lambda candidate: candidate.rank)
    choice["diffusion"] = _correction_or_off(teacher)
    if teacher.qualifies and validation.surrogate.student is not None:
        students = try_consistency(validation, teacher)
        student = min(students, key=lambda candidate: _student_rank(candidate, teacher, validation.config.student))
        choice["consistency"] = _correction_or_off(student)
        report["accept"] = compare_with_teacher(validation, teacher, student)
        tried += students
    candidates = [finite(asdict(candidate)) for candidate in tried]
    return choice, report | {"plain": finite(validation.plain), "candidates": candidates}


def try_diffusion(validation: Validation) -> list[Candidate]:
    """Candidates of the denoiser, one option at a time.

    First every start, with the first noise correlation and residual scale 1; then the other noise correlations with the
    best start; then other residual scales with the best of all these.
    """
    config = validation.config
    first, *others = config.noise_correlations
    modes = [("sample", config.sample), *(("refine", start) for start in config.refine)]
    starts = [Correction(mode, start.sigma, config.sigma_min, start.num_steps, 1.0, first) for mode, start in modes]
    tried = [validation.candidate("diffusion", start) for start in starts]
    best = min(tried, key=lambda candidate: candidate.rank).correction
    tried += [validation.candidate("diffusion", replace(best, noise_correlation=c)) for c in others]
    return tried + _with_residual_scales(validation, min(tried, key=lambda candidate: candidate.rank))


def try_consistency(validation: Validation, teacher: Candidate) -> list[Candidate]:
    """Candidates of the student from the teacher's noise level, in few evaluations, then in more if none is as good."""
    tried, limits = [], validation.config.student
    for num_steps in sorted(limits.num_steps):
        correction = replace(teacher.correction, num_steps=num_steps, residual_scale=1.0)
        unscaled = validation.candidate("consistency", correction)
        tried += [unscaled, *_with_residual_scales(validation, unscaled)]
        if any(_is_as_good(student, teacher, limits) for student in tried):
            break
    return tried


def _with_residual_scales(validation: Validation, unscaled: Candidate) -> list[Candidate]:
    """The correction with the scales that may calibrate it best: spread-skill is about proportional to them.

    None above 1 where an error exceeds its limit, and that of the plain model, at 1: the squared error is a parabola in
    the scale, which begins at scale 0 with that of the plain model, so that it rises further beyond 1.
    """
    config, limit = validation.config, MARGIN * validation.config.max_miscalibration
    lowest, highest = _values(unscaled.scores, "spread_skill").aminmax()

    def expected(scale: float) -> float:
        """The larger of the factors by which spread-skill would be above and below 1."""
        return max(float(scale * highest), 1 / float(scale * lowest))

    errors = (unscaled.nrmse, config.max_nrmse), (unscaled.high_band, config.max_high_band)
    largest = 1.0 if any(error > max(1.0, most) for error, most in errors) else math.inf
    scales = [s for s in config.residual_scales if s != 1.0 and s <= largest and expected(s) <= limit]
    best = sorted(scales, key=expected)[:SCALES_TRIED]
    corrections = [replace(unscaled.correction, residual_scale=scale) for scale in best]
    return [validation.candidate(unscaled.method, correction) for correction in corrections]


def _student_rank(student: Candidate, teacher: Candidate, limits: StudentConfig) -> tuple[bool, int, tuple]:
    """Sort key, best first: students as good as the teacher, by number of evaluations; then the others, by rank."""
    is_as_good = _is_as_good(student, teacher, limits)
    return not is_as_good, student.correction.num_steps * is_as_good, student.rank


def _is_as_good(student: Candidate, teacher: Candidate, limits: StudentConfig) -> bool:
    return student.qualifies and _is_within(_errors_over(teacher, student), limits)


def _errors_over(teacher: Candidate, student: Candidate) -> dict[str, float]:
    return {metric: worst_ratio(student.scores, teacher.scores, metric) for metric in ("nRMSE", "CRPS")}


def _is_within(errors: dict[str, float], limits: StudentConfig) -> bool:
    return errors["nRMSE"] <= limits.max_nrmse and errors["CRPS"] <= limits.max_crps


def compare_with_teacher(validation: Validation, teacher: Candidate, student: Candidate) -> dict[str, Any]:
    """Ratios of errors, student over teacher, and of costs, teacher over student, and whether all limits hold."""
    limits, num_steps = validation.config.student, student.correction.num_steps
    errors = _errors_over(teacher, student)
    evaluations, wall_time = teacher.correction.num_steps / num_steps, validation.wall_time_ratio(teacher, student)
    is_faster = evaluations >= limits.min_evaluations_ratio and wall_time >= limits.min_wall_time_ratio
    ratios = finite(errors | {"evaluations": evaluations, "wall_time": wall_time})
    return ratios | {"num_steps": num_steps, "accepted": _is_within(errors, limits) and is_faster}


def _correction_or_off(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate.correction) if candidate.qualifies else {"mode": OFF}
