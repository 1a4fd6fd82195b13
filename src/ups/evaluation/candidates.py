"""Candidate corrections: ways to sample residuals, scored on validation trajectories relative to the plain model."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ups.config import CorrectorConfig
from ups.diffusion.samplers import antithetic
from ups.evaluation.predictions import (
    HORIZONS,
    Stepper,
    corrected_stepper,
    initial_state,
    latent_states,
    plain_stepper,
    predict_one_step,
    predict_rollout,
    targets,
)
from ups.evaluation.scores import TrajectorySet, batches
from ups.evaluation.timing import in_turns
from ups.metrics.suite import ScoreSuite, Truth
from ups.surrogate.surrogate import Correction, Surrogate

HIGH_BAND = "band_error_4"  # error in the highest of four bands of wavenumbers
METRICS = ("nRMSE", "MAE", "CRPS", "spread_skill", HIGH_BAND)
COMPAT_BATCH_SIZE = 1  # affects metrics that are not used here
TIMED_ROUNDS = 5
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
        """Sort key, best first: those that qualify, then by mean CRPS ratio to two decimals, then by calibration."""
        values = (round(self.mean_crps, 2), self.miscalibration)
        crps, miscalibration = (math.inf if math.isnan(value) else value for value in values)
        return not self.qualifies, crps, miscalibration

    @property
    def spread_skill(self) -> tuple[float, float]:
        """Lowest and highest spread-skill ratio over datasets and horizons."""
        lowest, highest = _values(self.scores, "spread_skill").aminmax()
        return float(lowest), float(highest)

    def worst_ratio_to(self, other: "Candidate", metric: str) -> float:
        """Largest ratio of a metric to that of another candidate, over datasets and horizons."""
        return _worst_ratio(self.scores, other.scores, metric)


@dataclass(frozen=True)
class Validation:
    """Validation trajectories of one family, as many per dataset as `CorrectorConfig` allows, and the models."""

    surrogate: Surrogate
    sets: list[TrajectorySet]
    config: CorrectorConfig
    device: torch.device

    @cached_property
    def num_trajectories(self) -> int:
        """Number of trajectories that are scored, over all datasets."""
        return sum(len(each.indices) for each in self._scored)

    @cached_property
    def plain(self) -> Scores:
        """Scores of the operator or the steady model, without corrector."""
        return self._scores(plain_stepper(self.surrogate))

    def candidate(self, method: str, correction: Correction) -> Candidate:
        """Score a correction; all candidates are sampled with the same random numbers."""
        scores = self._scores(self._stepper(method, correction))
        config, reference = self.config, self.plain
        crps = _values(scores, "CRPS") / _values(reference, "MAE")
        worst_crps, worst_nrmse = float(crps.max()), _worst_ratio(scores, reference, "nRMSE")
        worst_high_band = _worst_ratio(scores, reference, HIGH_BAND)
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
        u_ref, setting = next(batches(self.surrogate, self._scored[0], self.config.batch_tokens, self.device))
        z = initial_state(self.surrogate, u_ref, setting.family)
        contenders = {}
        for name, candidate in (("first", first), ("second", second)):
            stepper = self._stepper(candidate.method, candidate.correction)
            contenders[name] = partial(stepper.start(setting), z.repeat(stepper.num_members, 1, 1))
        seconds = in_turns(contenders, TIMED_ROUNDS, self.device)
        return seconds["first"] / seconds["second"]

    def _stepper(self, method: str, correction: Correction) -> Stepper:
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        return corrected_stepper(self.surrogate, method, correction, self.config.ensemble_size, antithetic(generator))

    @cached_property
    def _scored(self) -> list[TrajectorySet]:
        counts = [max(self.config.min_trajectories, self.config.num_tokens // each.num_tokens) for each in self.sets]
        return [replace(each, indices=each.indices[:count]) for each, count in zip(self.sets, counts, strict=True)]

    @torch.no_grad()
    def _scores(self, stepper: Stepper) -> Scores:
        """Scores of one step and of whole rollouts, in physical units."""
        scores: Scores = {}
        for each in self._scored:
            num_dims, seed = len(each.dataset.grid), self.config.seed
            suites = {horizon: ScoreSuite(num_dims, COMPAT_BATCH_SIZE, (), seed) for horizon in HORIZONS}
            for u_ref, setting in batches(self.surrogate, each, self.config.batch_tokens, self.device):
                z_ref, target = latent_states(self.surrogate, u_ref, setting.family), targets(u_ref, setting.family)
                thinned = target[:, ::STRIDE]
                first = predict_one_step(self.surrogate, stepper, setting, thinned, z_ref[:, :-1:STRIDE])
                whole = predict_rollout(self.surrogate, stepper, setting, target, z_ref[:, 0])
                suites["one_step"].update(first.u, Truth(thinned), ensemble=first.ensemble)
                suites["rollout"].update(whole.u, Truth(target), ensemble=whole.ensemble)
            scores[each.dataset.name] = {
                horizon: {name: score.value for name, score in suite.compute().items() if name in METRICS}
                for horizon, suite in suites.items()
            }
        return scores


def _values(scores: Scores, metric: str) -> Tensor:
    """One value per dataset and horizon."""
    values = [of_horizon[metric] for of_dataset in scores.values() for of_horizon in of_dataset.values()]
    return torch.tensor(values, dtype=torch.float64)


def _worst_ratio(scores: Scores, reference: Scores, metric: str) -> float:
    return float((_values(scores, metric) / _values(reference, metric)).max())
