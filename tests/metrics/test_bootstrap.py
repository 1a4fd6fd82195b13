"""Confidence intervals over trajectories."""

import math

import numpy as np
import pytest
import torch

from ups.metrics import bootstrap
from ups.metrics.bootstrap import MIN_TRAJECTORIES, bootstrap_interval, ratio_of_means


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_interval_covers_the_mean_at_its_level(level: float):
    """In 300 repetitions of 60 skewed values the true mean, 1, lies inside about as often as the level says."""
    draws = torch.empty(300, 60, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
    intervals = [
        bootstrap_interval(values, statistic=np.mean, seed=seed, level=level) for seed, values in enumerate(draws)
    ]
    coverage = sum(low <= 1.0 <= high for low, high in intervals) / len(intervals)
    assert coverage == pytest.approx(level, abs=0.05)


@pytest.mark.parametrize(
    ("num_trajectories", "normal", "skewed"), [(2, 0.50, 0.42), (5, 0.84, 0.72), (8, 0.88, 0.79), (26, 0.93, 0.87)]
)
def test_coverage_by_number_of_trajectories(
    num_trajectories: int, normal: float, skewed: float, monkeypatch: pytest.MonkeyPatch
):
    """Intervals of 95 % hold the mean of 1,000 normal and log-normal samples as often as the docstring says."""
    monkeypatch.setattr(bootstrap, "MIN_TRAJECTORIES", 2)
    draws = torch.randn(1000, num_trajectories, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for values, expected, mean_value in ((draws, normal, 0.0), (draws.exp(), skewed, math.exp(0.5))):
        intervals = [bootstrap_interval(sample, statistic=np.mean, seed=seed) for seed, sample in enumerate(values)]
        coverage = sum(low <= mean_value <= high for low, high in intervals) / len(intervals)
        assert coverage == pytest.approx(expected, abs=0.04)


def test_few_trajectories_have_no_interval():
    """One less than MIN_TRAJECTORIES has none, however alike they are."""
    values = torch.ones(MIN_TRAJECTORIES, dtype=torch.float64)
    assert bootstrap_interval(values, statistic=np.mean, seed=0) == (1.0, 1.0)
    assert bootstrap_interval(values[1:], statistic=np.mean, seed=0) is None


def test_interval_of_normal_values_is_the_known_one():
    """For many values the interval of the mean is mean +- 1.96 std / sqrt(N)."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = 1.96 * values.std().item() / 20
    low, high = bootstrap_interval(values, statistic=np.mean, seed=0)
    assert (low, high) == pytest.approx((values.mean().item() - half, values.mean().item() + half), abs=0.1 * half)


def test_interval_is_reproducible_and_scales():
    """The same seed draws the same trajectories, so twice the values have twice the interval."""
    values = torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(values, statistic=np.mean, seed=3)
    assert bootstrap_interval(values, statistic=np.mean, seed=3) == (low, high)
    assert bootstrap_interval(2 * values, statistic=np.mean, seed=3) == pytest.approx((2 * low, 2 * high))
    assert bootstrap_interval(values, statistic=np.mean, seed=4) != (low, high)


@pytest.mark.parametrize(("block", "rows"), [(32, [4, 2]), (4, [1] * 6)])
def test_resamples_come_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int, rows: list[int]):
    """NUM_RESAMPLES resamples of eight trajectories are drawn, as many at a time as fit into a block, one at least."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 6)
    monkeypatch.setattr(bootstrap, "BLOCK", block)
    found = []

    def mean(values: np.ndarray, axis: int) -> np.ndarray:
        found.extend([len(values)] if values.ndim == 2 else [])
        return values.mean(axis)

    assert bootstrap_interval(torch.ones(8), statistic=mean, seed=0) == (1.0, 1.0)
    assert found == rows


def test_interval_of_a_diverged_trajectory_is_not_finite():
    """One NaN is in some resamples, and the interval does not hide it."""
    low, high = bootstrap_interval(torch.tensor([1.0, math.nan, *range(8)]), statistic=np.mean, seed=0)
    assert math.isnan(low) and math.isnan(high)


def test_median_has_an_interval_too():
    """Of 1, ..., 99 the interval of the median is about 50 +- 1.96 * 50 / sqrt(99)."""
    low, high = bootstrap_interval(torch.arange(1.0, 100.0), statistic=np.median, seed=0)
    assert (low, high) == pytest.approx((40.0, 60.0), abs=3.0)


def test_paired_samples_are_resampled_together():
    """The ratio of proportional samples is the same in every resample."""
    values = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = bootstrap_interval(values, 2 * values, statistic=ratio_of_means, seed=0)
    assert ends == pytest.approx((0.5, 0.5))
