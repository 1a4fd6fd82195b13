"""Confidence intervals over trajectories: snapshots and cells of one trajectory are not independent of each other."""

from collections.abc import Callable

import torch
from torch import Tensor

MIN_TRAJECTORIES = 8  # for an interval, and for what is decided by one
BLOCK = 2**21  # resampled values at a time


def bootstrap_interval(
    values: Tensor,
    statistic: Callable[[Tensor], Tensor],
    seed: int,
    level: float = 0.95,
    num_resamples: int = 1000,
) -> tuple[float, float] | None:
    """Percentile interval of `statistic`, which maps (R, N) to (R,), for one value per trajectory, (N,).

    With several values per trajectory, (N, K), it maps (R, N, K) to (R,).

    The same seed and number of trajectories give the same resamples, so that intervals of two methods belong together.
    There is none for fewer than MIN_TRAJECTORIES, whose resamples differ too little: a 95 % interval holds the mean of
    normal (log-normal) values in 50 (42) % of all cases for N = 2, 84 (72) for 5, 88 (79) for 8 and 93 (87) for 26.
    """
    if len(values) < MIN_TRAJECTORIES:
        return None
    generator = torch.Generator().manual_seed(seed)
    size = max(1, BLOCK // len(values))
    statistics = [
        statistic(
            values[torch.randint(len(values), (min(size, num_resamples - start), len(values)), generator=generator)]
        )
        for start in range(0, num_resamples, size)
    ]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)
    low, high = torch.cat(statistics).quantile(tails).tolist()
    return low, high


def mean(values: Tensor) -> Tensor:
    """Mean over the last axis."""
    return values.mean(dim=-1)


def median(values: Tensor) -> Tensor:
    """Median over the last axis, between the two middle values of an even number."""
    ordered, num_values = values.sort(dim=-1).values, values.shape[-1]
    return (ordered[..., (num_values - 1) // 2] + ordered[..., num_values // 2]) / 2
