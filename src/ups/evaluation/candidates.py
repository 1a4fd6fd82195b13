"""Ways to draw residuals, scored on validation trajectories beside the operator."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from ups.config import CorrectorConfig
from ups.diffusion.samplers import mirrored
from ups.emulator import Correction, Emulator
from ups.evaluation.evaluate import Subject, batches
from ups.evaluation.predict import (
    HORIZONS,
    Stepper,
    corrected_stepper,
    initial_state,
    one_step,
    plain_stepper,
    states,
    targets,
    whole_rollout,
)
from ups.metrics.suite import ScoreSuite, Truth

HIGH_BAND = "band_error_4"
SCORES = ("nRMSE", "MAE", "CRPS", "spread_skill", HIGH_BAND)
COMPAT_BATCH_SIZE = 1  # of scores that are not looked at
TIMED_ROUNDS = 5
STRIDE = 3  # of the snapshots from which one step is scored: neighbours tell the same

Scores = dict[str, dict[str, dict[str, float]]]
"""Dataset -> horizon -> metric -> value."""


@dataclass(frozen=True)
class Candidate:
    """A way to draw residuals and its scores; the rest sums up datasets and horizons, beside the operator.

    - `crps`: over the MAE of the operator, which is the CRPS of its one prediction; the worst, `mean_crps` the
      geometric mean
    - `nrmse`, `high_band`: nRMSE and highest band error of the ensemble's mean, over the operator's; the worst
    - `miscalibration`: |log spread_skill|, the mean
    - `exceeded`: the limits that it does not keep; without any, on is better than off
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
        """Whether on is better than off."""
        return not self.exceeded

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Smaller is better: those that qualify first, then by CRPS in whole per cent, then by calibration."""
        values = (round(self.mean_crps, 2), self.miscalibration)
        crps, miscalibration = (math.inf if math.isnan(value) else value for value in values)
        return not self.qualifies, crps, miscalibration

    @property
    def spread_skill(self) -> tuple[float, float]:
        """The lowest and the highest of datasets and horizons."""
        values = _values(self.scores, "spread_skill")
        return float(values.min()), float(values.max())

    def worst_over(self, other: "Candidate", metric: str) -> float:
        """The largest ratio of a score to that of another candidate."""
        return _worst_ratio(self.scores, other.scores, metric)


@dataclass(frozen=True)
class Validation:
    """Validation trajectories of the datasets of one family, of each so many as `CorrectorConfig` says."""

    emulator: Emulator
    subjects: list[Subject]
    config: CorrectorConfig
    device: torch.device

    @cached_property
    def num_trajectories(self) -> int:
        """So many are used, of all datasets."""
        return sum(len(subject.trajectories) for subject in self._used)

    @cached_property
    def plain(self) -> Scores:
        """Scores without corrector."""
        return self._scores(plain_stepper(self.emulator))

    def candidate(self, method: str, correction: Correction) -> Candidate:
        """Score a correction; all see the same random numbers."""
        scores = self._scores(self._stepper(method, correction))
        config, reference = self.config, self.plain
        crps = _values(scores, "CRPS") / _values(reference, "MAE")
        worst_crps, worst_nrmse = float(crps.max()), _worst_ratio(scores, reference, "nRMSE")
        worst_high_band = _worst_ratio(scores, reference, HIGH_BAND)
        miscalibration = _values(scores, "spread_skill").log().abs()
        kept = {
            "max_crps": worst_crps <= config.max_crps,
            "max_nrmse": worst_nrmse <= config.max_nrmse,
            "max_high_band": worst_high_band <= config.max_high_band,
            "max_miscalibration": float(miscalibration.max()) <= math.log(config.max_miscalibration),
        }
        return Candidate(
            method=method,
            correction=correction,
            scores=scores,
            crps=worst_crps,
            mean_crps=float(crps.log().mean().exp()),
            nrmse=worst_nrmse,
            high_band=worst_high_band,
            miscalibration=float(miscalibration.mean()),
            exceeded=[limit for limit, is_kept in kept.items() if not is_kept],
        )

    @torch.no_grad()
    def wall_time_ratio(self, first: Candidate, second: Candidate) -> float:
        """Median seconds of a step of one candidate over those of the other, measured in turns."""
        u_ref, setting = next(batches(self.emulator, self._used[0], self.config.batch_tokens, self.device))
        z = initial_state(self.emulator, u_ref, setting.family)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 + TIMED_ROUNDS):
            for candidate, taken in zip((first, second), seconds, strict=True):
                stepper = self._stepper(candidate.method, candidate.correction)
                step = stepper.step_of(setting.repeated(stepper.num_members))
                taken.append(_seconds(step, z.repeat(stepper.num_members, 1, 1)))
        return median(seconds[0][1:]) / median(seconds[1][1:])

    def _stepper(self, method: str, correction: Correction) -> Stepper:
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        return corrected_stepper(self.emulator, method, correction, self.config.ensemble_size, mirrored(generator))

    @cached_property
    def _used(self) -> list[Subject]:
        used = []
        for subject in self.subjects:
            most = max(self.config.min_trajectories, self.config.num_tokens // subject.num_tokens)
            used.append(replace(subject, trajectories=subject.trajectories[:most]))
        return used

    @torch.no_grad()
    def _scores(self, stepper: Stepper) -> Scores:
        """Scores of one step and of whole rollouts, in physical units."""
        scores: Scores = {}
        for subject in self._used:
            num_dims, seed = len(subject.dataset.grid), self.config.seed
            suites = {horizon: ScoreSuite(num_dims, COMPAT_BATCH_SIZE, (), seed) for horizon in HORIZONS}
            for u_ref, setting in batches(self.emulator, subject, self.config.batch_tokens, self.device):
                z_ref, truth = states(self.emulator, u_ref, setting.family), targets(u_ref, setting.family)
                thinned = truth[:, ::STRIDE]
                first = one_step(self.emulator, stepper, setting, thinned, z_ref[:, :-1:STRIDE])
                whole = whole_rollout(self.emulator, stepper, setting, truth, z_ref[:, 0])
                suites["one_step"].update(first.u, Truth(thinned), ensemble=first.ensemble)
                suites["rollout"].update(whole.u, Truth(truth), ensemble=whole.ensemble)
            scores[subject.dataset.name] = {horizon: _chosen(suite) for horizon, suite in suites.items()}
        return scores


def _chosen(suite: ScoreSuite) -> dict[str, float]:
    return {name: score.value for name, score in suite.compute().items() if name in SCORES}


def _values(scores: Scores, metric: str) -> Tensor:
    """One value per dataset and horizon."""
    values = [of_horizon[metric] for of_dataset in scores.values() for of_horizon in of_dataset.values()]
    return torch.tensor(values, dtype=torch.float64)


def _worst_ratio(scores: Scores, reference: Scores, metric: str) -> float:
    return float((_values(scores, metric) / _values(reference, metric)).max())


def _seconds(step: Callable[[Tensor], Tensor], z: Tensor) -> float:
    start = time.perf_counter()
    step(z)
    if z.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
