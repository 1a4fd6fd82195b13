"""Errors and costs of every way to choose among candidates, on trajectories whose truth is known."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.diffusion.samplers import independent
from ups.emulator import Correction, Emulator, Setting
from ups.evaluation.rewards import Physics, violations
from ups.evaluation.scorer import (
    Scorer,
    fit_weights,
    log_ratios,
    mean_reference,
    rank_correlation,
    ratios_to_truth,
)
from ups.evaluation.selection import beam_search, best_of, candidates, weighted_mean
from ups.metrics.errors import nRMSE
from ups.rollout import NoisyStep, rollout

DIVERGED = 1e3  # the nRMSE that stands for all above it and for what is not finite
Batch = tuple[Tensor, Setting]  # truth (B, T + 1, C, *grid)
Key = tuple[str, int]  # way to choose, number of members


@dataclass(frozen=True)
class Sampler:
    """How to make the random step for a setting, and its network evaluations."""

    step_of: Callable[[Setting, torch.Generator], NoisyStep]
    evaluations: int


def sampler_of(emulator: Emulator, name: str, correction: Correction) -> Sampler:
    """The operator corrected by the denoiser, `diffusion`, or by the student, `consistency`."""
    make = emulator.diffusion_step if name == "diffusion" else emulator.consistency_step
    return Sampler(
        lambda setting, generator: make(setting, correction, independent(generator)), 1 + correction.num_steps
    )


@dataclass(frozen=True)
class Trial:
    """One dataset: its physics, the emulator and where candidates come from."""

    emulator: Emulator
    physics: Physics
    sampler: Sampler
    config: SelectionConfig
    device: torch.device

    @property
    def num_members(self) -> int:
        return max(self.config.sizes)

    def members(self, u_ref: Tensor, setting: Setting, generator: torch.Generator) -> Tensor:
        """Decoded candidates (K, B, T + 1, C, *grid), each beginning with the decoded initial state."""
        step = self.sampler.step_of(setting.repeated(self.num_members), generator)
        z_0 = self.emulator.encode(u_ref[:, 0], setting.family)
        return self.emulator.decode(candidates(step, z_0, u_ref.shape[1] - 1, self.num_members), setting.family)

    def violations(self, members: Tensor, u_ref: Tensor) -> dict[str, Tensor]:
        """Violations (K, B, T, C_r) of the candidates."""
        values = violations(self.physics, members.flatten(0, 1), _repeated(u_ref[:, 0], len(members)))
        return {name: value.unflatten(0, members.shape[:2]) for name, value in values.items()}

    def fit(self, batches: Iterable[Batch]) -> tuple[Scorer, dict[str, float | None]]:
        """The scorer of these trajectories, and the candidates' mean violations over those of the truth."""
        truth, predicted, errors = [], [], []
        generator = self._generator(0)
        for u_ref, setting in batches:
            members = self.members(u_ref, setting, generator)
            truth.append(violations(self.physics, u_ref, u_ref[:, 0]))
            predicted.append(self.violations(members, u_ref))
            errors.append(_errors(members, u_ref))
        joined = {name: torch.cat([values[name] for values in predicted], dim=1) for name in predicted[0]}
        reference = mean_reference(truth)
        terms = {name: term.mean(-1) for name, term in log_ratios(joined, reference).items()}
        weights = fit_weights(terms, torch.cat(errors, dim=1))
        return Scorer(reference, weights), ratios_to_truth(joined, reference)

    def run(self, batches: Iterable[Batch], scorer: Scorer) -> "Outcome":
        """Errors and costs of every way to choose, among candidates that `fit` has not seen."""
        outcome, generator = Outcome(), self._generator(1)
        for u_ref, setting in batches:
            self._operator(outcome, u_ref, setting)
            self._members(outcome, u_ref, setting, scorer, generator)
            self._beam(outcome, u_ref, setting, scorer, generator)
        return outcome

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(2 * self.config.seed + stream)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _operator(self, outcome: "Outcome", u_ref: Tensor, setting: Setting) -> None:
        started = self._now()
        z_0 = self.emulator.encode(u_ref[:, 0], setting.family)
        z = rollout(self.emulator.plain_step(setting), z_0, u_ref.shape[1] - 1)
        u = self.emulator.decode(z, setting.family)
        made = self._now()
        outcome.add(("operator", 1), trajectory_error(u, u_ref), made - started)

    def _members(
        self, outcome: "Outcome", u_ref: Tensor, setting: Setting, scorer: Scorer, generator: torch.Generator
    ) -> None:
        started = self._now()
        members = self.members(u_ref, setting, generator)
        made = self._now()
        scores = scorer(self.violations(members, u_ref)).mean(dim=-1)
        scored = self._now()
        errors = _errors(members, u_ref)
        outcome.rank_correlations.append(rank_correlation(scores, errors).cpu())
        each, each_scored = (made - started) / len(members), (scored - started) / len(members)
        outcome.add(("single", 1), errors.mean(dim=0), each)
        for size in self.config.sizes:
            some, theirs = members[:size], scores[:size]
            outcome.add(("mean", size), trajectory_error(some.mean(dim=0), u_ref), size * each)
            outcome.add(("best", size), best_of(errors[:size], theirs), size * each_scored)
            outcome.add(("weighted", size), trajectory_error(weighted_mean(some, theirs), u_ref), size * each_scored)
            outcome.add(("oracle", size), errors[:size].amin(dim=0), size * each)

    def _beam(
        self, outcome: "Outcome", u_ref: Tensor, setting: Setting, scorer: Scorer, generator: torch.Generator
    ) -> None:
        beam, started = self.config.beam, self._now()
        size = beam.width * beam.candidates
        u_0 = _repeated(u_ref[:, 0], size)

        def score(z: Tensor, z_next: Tensor, t: int) -> Tensor:
            u = self.emulator.decode(torch.stack((z, z_next), dim=1), setting.family)
            return scorer(violations(self.physics, u, u_0), t)[:, 0]

        step = self.sampler.step_of(setting.repeated(size), generator)
        z_0, num_steps = self.emulator.encode(u_ref[:, 0], setting.family), u_ref.shape[1] - 1
        z = beam_search(step, score, z_0, num_steps, width=beam.width, num_candidates=beam.candidates)
        u = self.emulator.decode(z, setting.family)
        made = self._now()
        outcome.add(("beam", size), trajectory_error(u, u_ref), made - started)


@dataclass
class Outcome:
    """Errors (N,) and seconds, in total, of every way to choose, over a stream of batches."""

    errors: dict[Key, Tensor] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    rank_correlations: list[Tensor] = field(default_factory=list)

    def add(self, key: Key, errors: Tensor, seconds: float) -> None:
        """Add the errors (B,) of a batch and the time it took."""
        before = self.errors.get(key, torch.empty(0, dtype=torch.float64))
        self.errors[key] = torch.cat((before, errors.double().cpu()))
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


def trajectory_error(u: Tensor, u_ref: Tensor) -> Tensor:
    """Mean nRMSE over the steps after the first and channels: (B, T + 1, C, *grid) -> (B,), at most DIVERGED."""
    errors = nRMSE(u[:, 1:], u_ref[:, 1:]).flatten(1).mean(1)
    return errors.nan_to_num(nan=DIVERGED, posinf=DIVERGED).clamp(max=DIVERGED)


def _errors(members: Tensor, u_ref: Tensor) -> Tensor:
    """Errors (K, B) of members (K, B, T + 1, C, *grid)."""
    return torch.stack([trajectory_error(u, u_ref) for u in members])


def _repeated(u: Tensor, times: int) -> Tensor:
    return u.repeat(times, *[1] * (u.ndim - 1))
