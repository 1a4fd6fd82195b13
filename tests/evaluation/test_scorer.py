"""Scores are small for what is as plausible as the truth, and count what is worth counting."""

import pytest
import torch
from scipy.stats import spearmanr

from ups.evaluation.violations import (
    PhysicsScore,
    fit_weights,
    log_ratios,
    mean_reference,
    rank_correlation,
    ratios_to_reference,
)
from ups.metrics.errors import EPS


def test_the_reference_is_the_mean_over_trajectories_of_all_batches():
    """One of 1 and two of 4 make 3, at each step and for each channel; where the truth violates nothing it is EPS."""
    batches = [{"a": torch.full((1, 2, 3), 1.0)}, {"a": torch.full((2, 2, 3), 4.0)}]
    assert torch.equal(mean_reference(batches)["a"], torch.full((2, 3), 3.0))
    assert torch.equal(mean_reference([{"a": torch.zeros(4, 2, 1)}])["a"], torch.full((2, 1), EPS))


def test_a_score_is_the_weighted_sum_of_log_ratios():
    """S = 2 mean(log 1, log 4) + 0.5 log 2 where violations are 0 and 3 times, and once the truth's."""
    reference = {"a": torch.tensor([[9.0, 9.0], [1.0, 2.0]]), "b": torch.tensor([[9.0], [5.0]])}
    score = PhysicsScore(reference, {"a": 2.0, "b": 0.5})
    found = score({"a": torch.tensor([[[0.0, 6.0]]]), "b": torch.tensor([[[5.0]]])}, start=1)
    expected = 2.0 * torch.tensor(4.0).log() / 2 + 0.5 * torch.tensor(2.0).log()
    assert found.shape == (1, 1) and torch.isclose(found[0, 0], expected)


def test_no_violation_scores_zero():
    """0 is best, and every violation raises the score."""
    score = PhysicsScore({"a": torch.ones(3, 1)}, {"a": 1.0})
    assert score({"a": torch.zeros(2, 3, 1)}).eq(0).all()
    assert score({"a": torch.rand(2, 3, 1) + 1e-3}).gt(0).all()


def test_members_may_lead():
    """Ratios of (K, B, T, C_r) are those of each member."""
    values, reference = {"a": torch.rand(4, 2, 3, 2)}, {"a": torch.rand(3, 2) + 1}
    both = log_ratios(values, reference)["a"]
    assert torch.equal(both[1], log_ratios({"a": values["a"][1]}, reference)["a"])


def test_ratios_to_a_truth_that_violates_nothing_have_no_number():
    """2 and 4 times the truth's are 3; ten times a truth below the floor is nothing, and so is what diverged."""
    truth = {"a": torch.tensor([[1.0], [2.0]]), "low": torch.full((2, 1), EPS / 50), "lost": torch.ones(2, 1)}
    values = {
        "a": torch.tensor([[[2.0], [8.0]]]),
        "low": 10 * truth["low"][None],
        "lost": torch.full((1, 2, 1), torch.nan),
    }
    reference = mean_reference([{name: value[None] for name, value in truth.items()}])
    assert ratios_to_reference(values, reference) == {"a": 3.0, "low": None, "lost": None}


def test_rank_correlation_is_spearmans():
    """As SciPy has it, with equals among the values, for each trajectory."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(5, (8, 6), generator=generator).double() for _ in range(2))
    expected = [spearmanr(a[:, i], b[:, i]).statistic for i in range(6)]
    assert torch.allclose(rank_correlation(a, b), torch.tensor(expected, dtype=torch.float64))


def test_equal_scores_correlate_with_nothing_and_a_diverged_member_ranks_last():
    """All equal: 0; a NaN is the largest."""
    errors = torch.tensor([[1.0], [2.0], [3.0]])
    assert rank_correlation(torch.ones(3, 1), errors).item() == 0
    assert rank_correlation(torch.tensor([[1.0], [2.0], [torch.nan]]), errors).item() == pytest.approx(1.0)


def test_weights_are_the_correlation_over_the_spread_and_never_negative():
    """A violation that orders the members weighs 1 / its deviation; one that misleads, or is constant, nothing."""
    errors = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]])
    terms = {"knows": 10 * errors, "misleads": -errors, "constant": torch.ones(3, 2)}
    weights = fit_weights(terms, errors)
    assert weights == {"knows": pytest.approx(0.1), "misleads": 0.0, "constant": 0.0}


def test_noise_has_no_weight_to_speak_of():
    """Shuffled violations get a weight near zero from many trajectories."""
    generator = torch.Generator().manual_seed(0)
    errors, noise = (torch.randn(8, 2000, generator=generator) for _ in range(2))
    assert fit_weights({"noise": noise}, errors)["noise"] < 0.03
