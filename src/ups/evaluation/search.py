"""Search at test time: choose among ensemble members by a score, after whole rollouts or step by step along a beam.

A score is one number per trajectory, computed without the reference; smaller is better, and of equal scores the first
is chosen. A `step` maps latents z -> z_next (B, N, D) with noise, by which the members of a trajectory differ.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.data.families import Dataset
from ups.diffusion import independent
from ups.evaluation.predictions import Batch, Compute, corrected_stepper
from ups.evaluation.violations import PhysicsScore, fit_score, rank_correlation, violations
from ups.metrics.errors import nRMSE
from ups.metrics.suite import Timeline, joined
from ups.runs.processes import now
from ups.surrogate.surrogate import Correction, NoisyStep, Setting, Surrogate, decoded, rollout_steps

DIVERGED = 1e3  # the nRMSE assigned to rollouts above it or not finite, so that means over trajectories stay finite
StepScore = Callable[[Tensor, Tensor, int], Tensor]
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
    step: NoisyStep, score: StepScore, z_0: Tensor, *, width: int, num_successors: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The states (W, B, ...) that a beam of `width` keeps at every time step, and which of those before they succeed.

    Every step makes K = `num_successors` successors of each of the W kept states, scores them by
    score(z, z_next, t) -> (W K B,) for t = 0, 1, ..., and keeps for each trajectory the W of smallest sum along their
    path, best first. `step` always gets W K B states, trajectories innermost, and the rows of its previous output that
    they come from: the noise of a successor continues that of the state it succeeds.
    """
    num_trajectories, rows = len(z_0), torch.arange(len(z_0), device=z_0.device)
    states, totals = torch.stack([z_0] * width), torch.zeros(width, num_trajectories, device=z_0.device)
    origins = None
    for t in count():
        z = states.repeat_interleave(num_successors, dim=0).flatten(0, 1)
        z_next = step(z, origins)
        added = score(z, z_next, t).unflatten(0, (-1, num_trajectories)).nan_to_num(nan=torch.inf)
        sums = totals.repeat_interleave(num_successors, dim=0) + added
        kept = sums.argsort(dim=0, stable=True)[:width]
        states, totals = z_next.unflatten(0, (-1, num_trajectories))[kept, rows], sums.gather(0, kept)
        origins = (kept * num_trajectories + rows).repeat_interleave(num_successors, dim=0).flatten()
        yield states, kept // num_successors


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

    @classmethod
    def of(cls, surrogate: Surrogate, dataset: Dataset, config: SelectionConfig, compute: Compute) -> "DatasetSearch":
        """Members are sampled with the family's correction, or as configured if the corrector is off."""
        start = config.if_corrector_off
        otherwise = Correction("sample", start.sigma, config.sigma_min, start.num_steps, 1.0, 0.0)
        correction = surrogate.corrections.get((config.sampler, dataset.family), otherwise)
        return cls(surrogate, dataset, correction, config, compute)

    @property
    def num_members(self) -> int:
        """Members of the largest ensemble; smaller ones are its first members."""
        return max(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Numbers of members to choose from."""
        return self.config.sizes

    def members(self, batch: Batch, generator: torch.Generator) -> Iterator["Members"]:
        """Members of a batch, a slab of snapshots after the other."""
        u_0 = batch.read(0, 1)
        z_0, step = self._encoded(u_0), self._step(batch.setting, self.num_members, generator)
        states = rollout_steps(step, z_0.repeat(self.num_members, 1, 1))
        before = self.decoded(z_0[:, None], batch).expand(self.num_members, *u_0.shape)
        for start, u_ref in _slabs(batch):
            started = now(self.compute.device)
            z = torch.stack(list(islice(states, u_ref.shape[1] - 1)), 1)
            u = self.decoded(z, batch).unflatten(0, (self.num_members, -1))
            yield Members(start, before, u, u_ref, u_0[:, 0], now(self.compute.device) - started)
            before = u[:, :, -1:]

    def violations(self, members: "Members", at_once: int) -> dict[str, Tensor]:
        """Violations (K B, T, C_r) of the members."""
        parts = []
        for before, u in zip(members.before.split(at_once), members.u.split(at_once), strict=True):
            u_0 = torch.cat([members.u_0] * len(u))
            parts.append(violations(self.dataset, torch.cat((before, u), 2).flatten(0, 1), u_0))
        return joined(parts)

    def fit(self, batches: Iterable[Batch]) -> tuple[PhysicsScore, dict[str, float | None]]:
        """The score fitted on these trajectories, and the members' mean violations relative to the reference's."""
        truth, predicted, errors = [], [], []
        generator = self._generator(0)
        for batch in batches:
            of_truth, of_members = Timeline(batch.num_times), Timeline(batch.num_times)
            for members in self.members(batch, generator):
                of_truth.append(violations(self.dataset, members.u_ref, members.u_0))
                found = self.violations(members, batch.members_at_once)
                of_members.append(found | {"errors": members.errors.flatten(0, 1)})
            whole = {name: value.unflatten(0, (self.num_members, -1)) for name, value in of_members.whole.items()}
            errors.append(trajectory_error(whole.pop("errors")))
            truth.append(of_truth.whole)
            predicted.append(whole)
        of_all = {name: torch.cat([each[name] for each in predicted], dim=1) for name in predicted[0]}
        return fit_score(truth, of_all, torch.cat(errors, dim=1))

    def run(self, batches: Iterable[Batch], score: PhysicsScore) -> SearchResults:
        """Errors and costs of all search methods and rivals, on members with other noise than in `fit`."""
        results, generator = SearchResults(), self._generator(1)
        for batch in batches:
            self._run_operator(results, batch)
            self._run_members(results, batch, score, generator)
            self._run_beam(results, batch, score, generator)
        return results

    def _encoded(self, u_0: Tensor) -> Tensor:
        return self.surrogate.encode(u_0[:, 0], self.dataset.family)

    def decoded(self, z: Tensor, batch: Batch) -> Tensor:
        """Snapshots of states (R, ..., N, D), as many rows at once as fit into memory."""
        at_once = len(z) if batch.members_at_once > 1 else 1
        return decoded(self.surrogate, z, self.dataset.family, at_once)

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.compute.device).manual_seed(2 * self.config.seed + stream)

    def _step(self, setting: Setting, num_members: int, generator: torch.Generator) -> NoisyStep:
        sampler, normal = self.config.sampler, independent(generator)
        return corrected_stepper(self.surrogate, sampler, self.correction, num_members, normal).start(setting)

    # Comparisons with the reference stay outside the timed parts: in use there is no reference.

    def _run_operator(self, results: SearchResults, batch: Batch) -> None:
        states = rollout_steps(self.surrogate.plain_step(batch.setting), self._encoded(batch.read(0, 1)))
        errors, seconds = [], 0.0
        for _, u_ref in _slabs(batch):
            started = now(self.compute.device)
            u = self.decoded(torch.stack(list(islice(states, u_ref.shape[1] - 1)), 1), batch)
            seconds += now(self.compute.device) - started
            errors.append(step_errors(u, u_ref[:, 1:]))
        results.add(("operator", 1), trajectory_error(torch.cat(errors, -1)), seconds)

    def _run_members(
        self, results: SearchResults, batch: Batch, score: PhysicsScore, generator: torch.Generator
    ) -> None:
        same_noise, timeline = generator.clone_state(), Timeline(batch.num_times)
        sampling, scoring = 0.0, 0.0
        for members in self.members(batch, generator):
            started = now(self.compute.device)
            scores = score(self.violations(members, batch.members_at_once), members.start)
            scoring, sampling = scoring + now(self.compute.device) - started, sampling + members.seconds
            means = {f"mean {size}": step_errors(members.u[:size].mean(0), members.targets) for size in self.sizes}
            timeline.append({"scores": scores, "errors": members.errors.flatten(0, 1)} | means)
        found, shape = timeline.whole, (self.num_members, -1)
        scores, errors = (
            found["scores"].mean(-1).unflatten(0, shape),
            trajectory_error(found["errors"]).unflatten(0, shape),
        )
        results.rank_correlations.append(rank_correlation(scores, errors))
        seconds, with_scores = sampling / self.num_members, (sampling + scoring) / self.num_members
        results.add(("single", 1), errors.mean(dim=0), seconds)
        # The weights depend on whole rollouts: members that do not fit into memory are sampled again.
        again = [members] if members.start == 0 else self.members(batch, same_noise)
        weighted = self._weighted_errors(again, scores, batch.num_times)
        for size in self.sizes:
            results.add(("mean", size), trajectory_error(found[f"mean {size}"]), size * seconds)
            results.add(("best", size), best_of(errors[:size], scores[:size]), size * with_scores)
            results.add(("weighted", size), weighted[size], size * with_scores)
            results.add(("oracle", size), errors[:size].amin(dim=0), size * seconds)

    def _weighted_errors(self, slabs: Iterable["Members"], scores: Tensor, num_times: int) -> dict[int, Tensor]:
        """Errors (B,) of the mean weighted by scores (K, B), by the number of members."""
        timeline = Timeline(num_times)
        for members in slabs:
            means = {str(size): weighted_mean(members.u[:size], scores[:size]) for size in self.sizes}
            timeline.append({size: step_errors(u, members.targets) for size, u in means.items()})
        return {size: trajectory_error(timeline.whole[str(size)]) for size in self.sizes}

    def beam(self, batch: Batch, score: PhysicsScore, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """States and parents that `beam_search` keeps at every step of a batch."""
        beam, family, u_0 = self.config.beam, self.dataset.family, batch.read(0, 1)
        size = beam.width * beam.successors
        rows = len(u_0) * (size if batch.members_at_once > 1 else 1)

        def score_step(z: Tensor, z_next: Tensor, t: int) -> Tensor:
            start, scores = torch.cat([u_0[:, 0]] * (rows // len(u_0))), []
            for pair in zip(z.split(rows), z_next.split(rows), strict=True):
                u = torch.stack([self.surrogate.decode(each, family) for each in pair], 1)
                scores.append(score(violations(self.dataset, u, start), t)[:, 0])
            return torch.cat(scores)

        step = self._step(batch.setting, size, generator)
        return beam_search(step, score_step, self._encoded(u_0), width=beam.width, num_successors=beam.successors)

    def _run_beam(self, results: SearchResults, batch: Batch, score: PhysicsScore, generator: torch.Generator) -> None:
        beam, family, kept = self.config.beam, self.dataset.family, self.beam(batch, score, generator)
        sums, seconds = torch.zeros(beam.width, len(batch.setting.condition), device=self.compute.device), 0.0
        for _, u_ref in _slabs(batch):
            for u_next in u_ref[:, 1:].unbind(1):
                started = now(self.compute.device)
                states, parents = next(kept)
                seconds += now(self.compute.device) - started
                found = [step_errors(self.surrogate.decode(z[:, None], family), u_next[:, None])[:, 0] for z in states]
                sums = sums.gather(0, parents) + torch.stack(found)
        key = "beam", beam.width * beam.successors
        results.add(key, trajectory_error(sums[0][:, None] / (batch.num_times - 1)), seconds)


@dataclass(frozen=True)
class Members:
    """Members u (K, B, T, C, *grid) of the T steps after the first `start`, and the state `before`, with T = 1.

    Beside them the reference u_ref (B, T + 1, C, *grid), which begins with the state before, too, and the initial
    states u_0 (B, C, *grid). They took `seconds`.
    """

    start: int
    before: Tensor
    u: Tensor
    u_ref: Tensor
    u_0: Tensor
    seconds: float

    @property
    def targets(self) -> Tensor:
        return self.u_ref[:, 1:]

    @cached_property
    def errors(self) -> Tensor:
        """Errors (K, B, T) of all members."""
        return torch.stack([step_errors(u, self.targets) for u in self.u])


def _slabs(batch: Batch) -> Iterator[tuple[int, Tensor]]:
    """Reference (B, T + 1, C, *grid) of some steps, beginning with the snapshot before, and the number of the first."""
    for start in range(0, batch.num_times - 1, batch.num_steps):
        yield start, batch.read(start, min(start + batch.num_steps + 1, batch.num_times))


def step_errors(u: Tensor, u_ref: Tensor) -> Tensor:
    """Mean nRMSE over channels: (B, T, C, *grid) -> (B, T)."""
    return nRMSE(u, u_ref).mean(-1)


def trajectory_error(errors: Tensor) -> Tensor:
    """Mean over steps (..., T) of the `step_errors`, at most DIVERGED."""
    return errors.mean(-1).nan_to_num(nan=DIVERGED, posinf=DIVERGED).clamp(max=DIVERGED)
