"""Choosing among candidates: each trajectory gets its own best, and a good score is never made worse by more."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor

from ups.diffusion import correlated_noise, independent
from ups.evaluation.search import beam_search, best_of, weighted_mean
from ups.surrogate.surrogate import rollout


def path_of(step: Callable, score: Callable, z_0: Tensor, num_steps: int, **beam: int) -> Tensor:
    """The initial states and those of the best path after so many steps, (B, num_steps + 1, ...)."""
    history = list(islice(beam_search(step, score, z_0, **beam), num_steps))
    rows, place, path = torch.arange(len(z_0)), torch.zeros(len(z_0), dtype=torch.long), []
    for states, parents in reversed(history):
        path.append(states[place, rows])
        place = parents[place, rows]
    return torch.stack([z_0, *path[::-1]], 1)


def noisy_step(seed: int):
    """Halve the latents and add noise, of its own for every row."""
    generator = torch.Generator().manual_seed(seed)
    return lambda z, origins=None: z / 2 + torch.randn(z.shape, generator=generator)


def distance(z: Tensor) -> Tensor:
    """An oracle where the truth is zero: RMS of each trajectory (..., T, N, D)."""
    return z.square().mean(dim=(-3, -2, -1)).sqrt()


def members(num_members: int = 8) -> Tensor:
    """Rollouts (K, B = 5, T = 3, N = 3, D = 2)."""
    return rollout(noisy_step(0), torch.ones(5 * num_members, 3, 2), 3).unflatten(0, (num_members, 5))


def test_an_oracle_reaches_the_best_member_and_never_loses_by_more():
    """With the true error as score the error is that of the best member, so it falls with K."""
    z = members()
    errors = distance(z)
    chosen = [distance(best_of(z[:size], errors[:size])) for size in range(1, 9)]
    assert torch.equal(chosen[-1], errors.min(dim=0).values)
    assert all((more <= fewer).all() for fewer, more in zip(chosen[:-1], chosen[1:], strict=True))
    assert (chosen[-1] < chosen[0]).any()


def test_every_trajectory_gets_its_own_best():
    """Three trajectories whose best members are 2, 0 and 1 get these."""
    z = torch.arange(9.0).reshape(3, 3, 1)
    scores = torch.tensor([[9.0, 1.0, 5.0], [8.0, 2.0, 4.0], [7.0, 3.0, 6.0]])
    assert best_of(z, scores)[:, 0].tolist() == [6.0, 1.0, 5.0]


def test_a_constant_score_gives_the_first_member():
    """Equals are not told apart, and what has no number is never better."""
    z = members()
    assert torch.equal(best_of(z, torch.zeros(8, 5)), z[0])
    scores = torch.full((8, 5), torch.nan)
    scores[3] = 1e9
    assert torch.equal(best_of(z, scores), z[3])


def test_weights_fall_with_the_score():
    """Equal scores give the mean, log 3 apart a weight of 3 : 1, and a diverged member none."""
    z = torch.tensor([[[1.0]], [[5.0]]])
    assert weighted_mean(z, torch.zeros(2, 1)).item() == 3.0
    assert torch.isclose(weighted_mean(z, torch.tensor([[0.0], [3.0]]).log1p() * 0.7924812), torch.tensor(2.0)).all()
    z[1] = torch.nan
    assert weighted_mean(z, torch.tensor([[0.0], [torch.nan]])).item() == 1.0


def test_a_beam_of_one_is_a_rollout():
    """W = K = 1 is bit for bit the plain rollout, whatever the score."""
    z_0 = torch.ones(5, 3, 2)
    z = path_of(noisy_step(0), lambda z, z_next, t: z_next[:, 0, 0], z_0, 6, width=1, num_successors=1)
    assert torch.equal(z[:, 1:], rollout(noisy_step(0), z_0, 6))


def test_a_beam_of_width_one_takes_the_best_candidate_of_each_step():
    """Greedy search, once more in a plain loop over trajectories and steps."""
    z_0, step = torch.ones(2, 1, 1), noisy_step(3)
    z = path_of(step, lambda z, z_next, t: z_next[:, 0, 0].abs(), z_0, 4, width=1, num_successors=3)
    generator = torch.Generator().manual_seed(3)
    state = [1.0, 1.0]
    for t in range(1, 5):
        noise = torch.randn(6, 1, 1, generator=generator).reshape(3, 2)
        state = [min((state[b] / 2 + float(noise[k, b]) for k in range(3)), key=abs) for b in range(2)]
        assert torch.allclose(z[:, t, 0, 0], torch.tensor(state), atol=1e-6)


def test_a_beam_finds_the_path_that_is_best_in_the_end():
    """A cheap first step that leads to a costly second one is left for the other, by a beam of two and not of one."""
    cost = {1: 0.0, 2: 1.0, 11: 9.0, 12: 8.0, 21: 5.0, 22: 2.0}

    def step(z: Tensor, origins: Tensor | None = None) -> Tensor:
        return 10 * z + torch.tensor([1.0, 2.0, 1.0, 2.0] if z.any() else [1.0, 3.0, 3.0, 2.0])[: len(z), None, None]

    def score(z: Tensor, z_next: Tensor, t: int) -> Tensor:
        return torch.tensor([cost.get(int(value), 99.0) for value in z_next[:, 0, 0]])

    z_0 = torch.zeros(1, 1, 1)
    greedy = path_of(step, score, z_0, 2, width=1, num_successors=2)
    wide = path_of(step, score, z_0, 2, width=2, num_successors=2)
    assert greedy.flatten().tolist() == [0.0, 1.0, 12.0]
    assert wide.flatten().tolist() == [0.0, 2.0, 22.0]


def test_beams_of_trajectories_do_not_mix():
    """A trajectory has the same path alone and in a batch, whatever the others want."""
    wanted = torch.tensor([0.0, 1.0, 3.0])

    def found(rows: list[int]) -> Tensor:
        def step(z: Tensor, origins: Tensor | None = None) -> Tensor:
            return z + torch.arange(4.0).repeat_interleave(len(rows))[:, None, None] / 100

        def score(z: Tensor, z_next: Tensor, t: int) -> Tensor:
            return ((z_next - z)[:, 0, 0] * 100 - wanted[rows].repeat(4)).abs()

        z_0 = torch.tensor([10.0, 20.0, 30.0])[rows, None, None]
        return path_of(step, score, z_0, 3, width=2, num_successors=2)

    assert torch.equal(found([0, 1, 2]), torch.cat([found([0]), found([1]), found([2])]))


@pytest.mark.parametrize("correlation", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("width", [1, 4])
def test_noise_follows_the_path_that_is_kept(correlation: float, width: int):
    """Along the chosen path noises n steps apart have the correlation c^n, whichever rows the states were in."""
    generator = torch.Generator().manual_seed(0)
    step_noise = correlated_noise(1, correlation, independent(generator))

    def score(z: Tensor, z_next: Tensor, t: int) -> Tensor:
        return torch.rand(len(z), generator=generator)

    z = path_of(
        lambda z, origins=None: step_noise(z, origins)[0],
        score,
        torch.zeros(50, 40, 10),
        3,
        width=width,
        num_successors=3,
    )
    found = torch.corrcoef(z[:, 1:].transpose(0, 1).flatten(1))
    assert found[0, 1:].tolist() == pytest.approx([correlation, correlation**2], abs=0.03)
