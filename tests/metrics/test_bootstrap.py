"""Confidence intervals over trajectories."""

import math

import pytest
import torch

from ups.metrics.bootstrap import BLOCK, bootstrap_interval, mean, median


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_interval_covers_the_mean_at_its_level(level: float):
    """In 300 repetitions of 60 skewed values the true mean, 1, lies inside about as often as the level says."""
    draws = torch.empty(300, 60, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
    intervals = [bootstrap_interval(values, mean, seed, level) for seed, values in enumerate(draws)]
    coverage = sum(low <= 1.0 <= high for low, high in intervals) / len(intervals)
    assert coverage == pytest.approx(level, abs=0.05)


def test_interval_of_normal_values_is_the_known_one():
    """For many values the interval of the mean is mean +- 1.96 std / sqrt(N)."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = 1.96 * values.std().item() / 20
    low, high = bootstrap_interval(values, mean, seed=0)
    assert (low, high) == pytest.approx((values.mean().item() - half, values.mean().item() + half), abs=0.1 * half)


def test_interval_is_reproducible_and_scales():
    """The same seed draws the same trajectories, so twice the values have twice the interval."""
    values = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(values, mean, seed=3)
    assert bootstrap_interval(values, mean, seed=3) == (low, high)
    assert bootstrap_interval(2 * values, mean, seed=3) == pytest.approx((2 * low, 2 * high))
    assert bootstrap_interval(values, mean, seed=4) != (low, high)


def test_many_trajectories_are_drawn_in_blocks():
    """More resampled values than a block holds make the same number of resamples."""
    values = torch.ones(BLOCK // 4, dtype=torch.float64)
    assert bootstrap_interval(values, mean, seed=0, num_resamples=6) == (1.0, 1.0)


def test_interval_of_a_diverged_trajectory_is_not_finite():
    """One NaN is in some resamples, and the interval does not hide it."""
    low, high = bootstrap_interval(torch.tensor([1.0, math.nan, 2.0]), mean, seed=0)
    assert math.isnan(low) and math.isnan(high)


def test_median_lies_between_the_middle_values():
    """Of an even number of values it is the mean of the two in the middle."""
    assert median(torch.tensor([4.0, 1.0, 9.0])).item() == 4.0
    assert median(torch.tensor([[4.0, 1.0, 9.0, 5.0], [0.0, 0.0, 2.0, 2.0]])).tolist() == [4.5, 1.0]
