"""Search at test time: choose among ensemble members by a score, after whole rollouts or step by step along a beam.

A score is one number per trajectory, computed without the reference; smaller is better, and of equal scores the first
is chosen. A `step` maps latents z -> z_next (B, N, D) with noise, by which the members of a trajectory differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.data.families import Dataset
from ups.diffusion.samplers import independent
from ups.evaluation.predictions import Compute, corrected_stepper, ensemble_rollouts
from ups.evaluation.timing import now
from ups.evaluation.violations import PhysicsScore, fit_score, rank_correlation, violations
from ups.metrics.errors import nRMSE
from ups.surrogate.surrogate import Correction, NoisyStep, Setting, Surrogate, rollout

DIVERGED = 1e3  # the nRMSE assigned to rollouts above it or not finite, so that means over trajectories stay finite
StepScore = Callable[[Tensor, Tensor, int], Tensor]
Batch = tuple[Tensor, Setting]  # reference (B, T + 1, C, *grid)
Key = tuple[str, int]  # search method or rival, number of members


def best_of(members: Tensor, scores: Tensor) -> Tensor:
    """For each trajectory the member of smallest score: (K, B, ...) and (K, B) -> (B, ...); NaN ranks last."""
    best = scores.nan_to_num(nan=torch.inf).argmin(dim=0)
    return members[best, torch.arange(len(best), device=best.device)]


def weighted_mean(members: Tensor, scores: Tensor) -> Tensor:
    """Mean of the members weighted by exp(-score), per trajectory: (K, B, ...), (K, B) -> (B, ...).

    Members without a finite score have no weight, unless all are without.
    """
    is_usable = scores.isfinite() | ~scores.isfinite().any(dim=0)
    logits = (-scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)).masked_fill(~is_usable, -torch.inf)
    weights = logits.softmax(dim=0).reshape(*scores.shape, *[1] * (members.ndim - 2))
    return torch.where(weights > 0, weights * members, 0.0).sum(dim=0)


def beam_search(
    step: NoisyStep, score: StepScore, z_0: Tensor, num_steps: int, *, width: int, num_successors: int
) -> Tensor:
    """Rollouts (B, num_steps + 1, ...) with the smallest sum of scores that a beam of `width` states finds.

    Every time step makes K = `num_successors` successors of each of the W kept states, scores them by
    score(z, z_next, t) -> (W K B,) for t = 0, 1, ..., and keeps for each trajectory the W of smallest sum. `step`
    always gets W K B states, trajectories innermost, and the rows of its previous output that they come from: the noise
    of a successor continues that of the state it succeeds.
    """
    num_trajectories, rows = len(z_0), torch.arange(len(z_0), device=z_0.device)
    states, totals = torch.stack([z_0] * width), torch.zeros(width, num_trajectories, device=z_0.device)
    history, origins = [], None
    for t in range(num_steps):
        z = states.repeat_interleave(num_successors, dim=0).flatten(0, 1)
        z_next = step(z, origins)
        added = score(z, z_next, t).unflatten(0, (-1, num_trajectories)).nan_to_num(nan=torch.inf)
        sums = totals.repeat_interleave(num_successors, dim=0) + added
        kept = sums.argsort(dim=0, stable=True)[:width]
        states, totals = z_next.unflatten(0, (-1, num_trajectories))[kept, rows], sums.gather(0, kept)
        history.append((states, kept // num_successors))
        origins = (kept * num_trajectories + rows).repeat_interleave(num_successors, dim=0).flatten()
    return torch.stack([z_0, *_backtrack(history, rows)], dim=1)


def _backtrack(history: list[tuple[Tensor, Tensor]], rows: Tensor) -> list[Tensor]:
    """The path to the best final state, from the kept states (W, B, ...) and the positions of their parents."""
    place, path = torch.zeros_like(rows), []
    for states, parents in reversed(history):
        path.append(states[place, rows])
        place = parents[place, rows]
    return path[::-1]


@dataclass
class SearchResults:
    """Errors (N,) and total seconds per search method and rival, over a stream of batches.

    `rank_correlations` (B,) of score and error among the members of each trajectory, per batch.
    """

    errors: dict[Key, Tensor] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)
    rank_correlations: list[Tensor] = field(default_factory=list)

    def add(self, key: Key, errors: Tensor, seconds: float) -> None:
        """Add the errors (B,) of a batch and the seconds it took."""
        before = self.errors.get(key, torch.empty(0, dtype=torch.float64))
        self.errors[key] = torch.cat((before, errors.double().cpu()))
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


@dataclass(frozen=True)
class DatasetSearch:
    """All search methods on one dataset: `best`, `weighted` and `beam`.

    Their rivals are the `operator` alone, a `single` member, the `mean` of as many members, and the `oracle`, the
    member of smallest true error, a lower bound on the error of any choice.
    """

    surrogate: Surrogate
    dataset: Dataset
    correction: Correction
    config: SelectionConfig
    compute: Compute

    @property
    def num_members(self) -> int:
        """Members of the largest ensemble; smaller ones are its first members."""
        return max(self.config.sizes)

    def members(self, u_ref: Tensor, setting: Setting, generator: torch.Generator) -> Tensor:
        """Decoded members (K, B, T + 1, C, *grid), each beginning with the decoded initial state."""
        z_0 = self.surrogate.encode(u_ref[:, 0], setting.family)
        step = self._step(setting, self.num_members, generator)
        z = ensemble_rollouts(step, z_0, u_ref.shape[1] - 1, self.num_members)
        return self.surrogate.decode(z, setting.family)

    def violations(self, members: Tensor, u_ref: Tensor) -> dict[str, Tensor]:
        """Violations (K, B, T, C_r) of the members."""
        values = violations(self.dataset, members.flatten(0, 1), torch.cat([u_ref[:, 0]] * len(members)))
        return {name: value.unflatten(0, members.shape[:2]) for name, value in values.items()}

    def fit(self, batches: Iterable[Batch]) -> tuple[PhysicsScore, dict[str, float | None]]:
        """The score fitted on these trajectories, and the members' mean violations relative to the reference's."""
        truth, predicted, errors = [], [], []
        generator = self._generator(0)
        for u_ref, setting in batches:
            members = self.members(u_ref, setting, generator)
            truth.append(violations(self.dataset, u_ref, u_ref[:, 0]))
            predicted.append(self.violations(members, u_ref))
            errors.append(_member_errors(members, u_ref))
        joined = {name: torch.cat([values[name] for values in predicted], dim=1) for name in predicted[0]}
        return fit_score(truth, joined, torch.cat(errors, dim=1))

    def run(self, batches: Iterable[Batch], score: PhysicsScore) -> SearchResults:
        """Errors and costs of all search methods and rivals, on members with other noise than in `fit`."""
        results, generator = SearchResults(), self._generator(1)
        for u_ref, setting in batches:
            self._run_operator(results, u_ref, setting)
            self._run_members(results, u_ref, setting, score, generator)
            self._run_beam(results, u_ref, setting, score, generator)
        return results

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.compute.device).manual_seed(2 * self.config.seed + stream)

    def _step(self, setting: Setting, num_members: int, generator: torch.Generator) -> NoisyStep:
        sampler, normal = self.config.sampler, independent(generator)
        return corrected_stepper(self.surrogate, sampler, self.correction, num_members, normal).start(setting)

    # Comparisons with the reference stay outside the timed parts: in use there is no reference.

    def _run_operator(self, results: SearchResults, u_ref: Tensor, setting: Setting) -> None:
        started = now(self.compute.device)
        z_0 = self.surrogate.encode(u_ref[:, 0], setting.family)
        z = rollout(self.surrogate.plain_step(setting), z_0, u_ref.shape[1] - 1)
        u, seconds = self.surrogate.decode(z, setting.family), now(self.compute.device) - started
        results.add(("operator", 1), trajectory_error(u, u_ref), seconds)

    def _run_members(
        self, results: SearchResults, u_ref: Tensor, setting: Setting, score: PhysicsScore, generator: torch.Generator
    ) -> None:
        started = now(self.compute.device)
        members = self.members(u_ref, setting, generator)
        sampled = now(self.compute.device)
        scores = score(self.violations(members, u_ref)).mean(dim=-1)
        scored = now(self.compute.device)
        errors = _member_errors(members, u_ref)
        results.rank_correlations.append(rank_correlation(scores, errors))
        each, each_scored = (sampled - started) / len(members), (scored - started) / len(members)
        results.add(("single", 1), errors.mean(dim=0), each)
        for size in self.config.sizes:
            some, theirs = members[:size], scores[:size]
            results.add(("mean", size), trajectory_error(some.mean(dim=0), u_ref), size * each)
            results.add(("best", size), best_of(errors[:size], theirs), size * each_scored)
            results.add(("weighted", size), trajectory_error(weighted_mean(some, theirs), u_ref), size * each_scored)
            results.add(("oracle", size), errors[:size].amin(dim=0), size * each)

    def _run_beam(
        self, results: SearchResults, u_ref: Tensor, setting: Setting, score: PhysicsScore, generator: torch.Generator
    ) -> None:
        beam, started = self.config.beam, now(self.compute.device)
        size = beam.width * beam.successors
        u_0 = torch.cat([u_ref[:, 0]] * size)

        def score_step(z: Tensor, z_next: Tensor, t: int) -> Tensor:
            u = self.surrogate.decode(torch.stack((z, z_next), dim=1), setting.family)
            return score(violations(self.dataset, u, u_0), t)[:, 0]

        step = self._step(setting, size, generator)
        z_0, num_steps = self.surrogate.encode(u_ref[:, 0], setting.family), u_ref.shape[1] - 1
        z = beam_search(step, score_step, z_0, num_steps, width=beam.width, num_successors=beam.successors)
        u, seconds = self.surrogate.decode(z, setting.family), now(self.compute.device) - started
        results.add(("beam", size), trajectory_error(u, u_ref), seconds)


def trajectory_error(u: Tensor, u_ref: Tensor) -> Tensor:
    """Mean nRMSE over the steps after the first and channels: (B, T + 1, C, *grid) -> (B,), at most DIVERGED."""
    errors = nRMSE(u[:, 1:], u_ref[:, 1:]).flatten(1).mean(1)
    return errors.nan_to_num(nan=DIVERGED, posinf=DIVERGED).clamp(max=DIVERGED)


def _member_errors(members: Tensor, u_ref: Tensor) -> Tensor:
    """Errors (K, B) of members (K, B, T + 1, C, *grid)."""
    return torch.stack([trajectory_error(u, u_ref) for u in members])
