"""Choosing among candidates at test time: the best of whole rollouts, and beam search along the rollout.

`step` maps latents z -> z_next (B, N, D); the candidates of a trajectory differ by the noise the step draws. A score is
one number per trajectory, small for what is good; the first of equals is chosen. Nothing here knows models or physics.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ups.rollout import NoisyStep, rollout


def candidates(step: NoisyStep, z_0: Tensor, num_steps: int, num_members: int) -> Tensor:
    """Rollouts (K, B, num_steps + 1, ...) of K members from the same z_0 (B, ...), which they begin with."""
    z = rollout(step, z_0.repeat(num_members, *[1] * (z_0.ndim - 1)), num_steps)
    return z.unflatten(0, (num_members, -1))


def best_of(members: Tensor, scores: Tensor) -> Tensor:
    """For each trajectory the member of smallest score: (K, B, ...) and (K, B) -> (B, ...); a NaN is never better."""
    best = scores.nan_to_num(nan=torch.inf).argmin(dim=0)
    return members[best, torch.arange(len(best), device=best.device)]


def weighted_mean(members: Tensor, scores: Tensor) -> Tensor:
    """Mean of the members with the weights exp(-score), of each trajectory its own: (K, B, ...), (K, B) -> (B, ...).

    Members without a finite score do not count, unless there is no other.
    """
    is_usable = scores.isfinite() | ~scores.isfinite().any(dim=0)
    logits = (-scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)).masked_fill(~is_usable, -torch.inf)
    weights = logits.softmax(dim=0).reshape(*scores.shape, *[1] * (members.ndim - 2))
    return torch.where(weights > 0, weights * members, 0.0).sum(dim=0)


def beam_search(
    step: NoisyStep,
    score: Callable[[Tensor, Tensor, int], Tensor],
    z_0: Tensor,
    num_steps: int,
    *,
    width: int,
    num_candidates: int,
) -> Tensor:
    """Rollouts (B, num_steps + 1, ...) of the smallest sum of scores that a beam of `width` states finds.

    Every step makes `num_candidates` successors of each of the W kept states, scores them by
    score(z, z_next, t) -> (W K B,) for the step t = 0, 1, ..., and keeps for each trajectory the W of smallest sum.
    `step` always gets W K B states, trajectories innermost, and the rows of its last call that they come from: the
    noise of a successor goes on from that of the state it succeeds.
    """
    num_trajectories = len(z_0)
    rows = torch.arange(num_trajectories, device=z_0.device)
    states, totals = torch.stack([z_0] * width), torch.zeros(width, num_trajectories, device=z_0.device)
    history: list[tuple[Tensor, Tensor]] = []
    origins: Tensor | None = None
    for t in range(num_steps):
        z = states.repeat_interleave(num_candidates, dim=0).flatten(0, 1)
        z_next = step(z, origins)
        added = score(z, z_next, t).unflatten(0, (-1, num_trajectories)).nan_to_num(nan=torch.inf)
        sums = totals.repeat_interleave(num_candidates, dim=0) + added
        kept = sums.argsort(dim=0, stable=True)[:width]
        states, totals = z_next.unflatten(0, (-1, num_trajectories))[kept, rows], sums.gather(0, kept)
        history.append((states, kept // num_candidates))
        origins = (kept * num_trajectories + rows).repeat_interleave(num_candidates, dim=0).flatten()
    return torch.stack([z_0, *_followed(history, rows)], dim=1)


def _followed(history: list[tuple[Tensor, Tensor]], rows: Tensor) -> list[Tensor]:
    """The states on the way to the best last one, from kept states (W, B, ...) and the positions of their parents."""
    place, path = torch.zeros_like(rows), []
    for states, parents in reversed(history):
        path.append(states[place, rows])
        place = parents[place, rows]
    return path[::-1]
