"""Confidence intervals over trajectories: the cells and snapshots of one trajectory are not independent."""

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

MIN_TRAJECTORIES = 8  # for an interval, and for a decision that rests on one
BLOCK = 2**21  # resampled values at a time, which bounds the memory
NUM_RESAMPLES = 1000


def bootstrap_interval(
    *samples: Tensor, statistic: Callable[..., np.ndarray], seed: int, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of a statistic of one or several paired samples (N,), one value per trajectory.

    `statistic(*resamples, axis)` reduces arrays along an axis, as `numpy.mean` does. Several samples are resampled with
    the same trajectories. The same seed and number of trajectories give the same resamples, so that intervals of two
    methods are comparable.

    Returns:
        The lower and the upper end, or None for fewer than MIN_TRAJECTORIES, whose resamples differ too little: a 95 %
        interval holds the mean of normal (log-normal) values in 50 (42) % of all cases for N = 2, 84 (72) for 5, 88
        (79) for 8 and 93 (87) for 26. Both ends are NaN if a value is not finite, as that of a diverged rollout.
    """
    num_trajectories = len(samples[0])
    if num_trajectories < MIN_TRAJECTORIES:
        return None
    if not all(sample.isfinite().all() for sample in samples):
        return math.nan, math.nan
    from scipy.stats import bootstrap  # its import takes a second, which commands without scores can do without

    interval = bootstrap(
        [sample.numpy() for sample in samples],
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, BLOCK // num_trajectories),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def ratio_of_means(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """A statistic of two paired samples: the mean of a over that of b."""
    return a.mean(axis) / b.mean(axis)
