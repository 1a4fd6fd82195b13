"""One score per trajectory from its violations: how implausible it is, fitted on validation trajectories."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.metrics.errors import EPS

Violations = dict[str, Tensor]  # reward -> (B, T, C_r)


@dataclass(frozen=True)
class Scorer:
    """S = sum_r w_r <log(1 + v_r / v_r*)>_c for violations v_r: 0 is best, differences below the truth's count little.

    `reference` holds v_r*, the truth's mean violation at each step, (T, C_r); `weights` are not negative.
    """

    reference: Violations
    weights: dict[str, float]

    def __call__(self, values: Violations, start: int = 0) -> Tensor:
        """Scores (B, T) of the steps `start`, `start` + 1, ... with violations (B, T, C_r)."""
        terms = log_ratios(values, self.reference, start)
        return sum(self.weights[name] * term for name, term in terms.items())


def mean_reference(truth: Sequence[Violations]) -> Violations:
    """Mean violation of true trajectories, given in batches, at each step: (T, C_r), at least EPS."""
    return {name: torch.cat([values[name] for values in truth]).mean(0).clamp_min(EPS) for name in truth[0]}


def log_ratios(values: Violations, reference: Violations, start: int = 0) -> dict[str, Tensor]:
    """<log(1 + v_r / v_r*)>_c of each reward: (..., T, C_r) -> (..., T)."""
    terms = {}
    for name, value in values.items():
        usual = reference[name][start : start + value.shape[-2]]
        terms[name] = (value / usual).log1p().mean(dim=-1)
    return terms


def ratios_to_truth(values: Violations, reference: Violations) -> dict[str, float | None]:
    """Mean of v_r / v_r* over candidates (..., T, C_r), steps and channels.

    None where it is not finite, or where some v_r* is at its floor: the truth violates less than can be told.
    """
    ratios = {}
    for name, value in values.items():
        ratio = float((value / reference[name]).mean())
        ratios[name] = ratio if math.isfinite(ratio) and (reference[name] > EPS).all() else None
    return ratios


def fit_weights(terms: dict[str, Tensor], errors: Tensor) -> dict[str, float]:
    """w_r = max(0, rho_r) / s_r from log ratios (K, B) and errors (K, B) of K members of each trajectory.

    rho_r is the rank correlation with the error and s_r the standard deviation, both among the members of a trajectory,
    averaged over trajectories: a reward counts as much as it knows, and none that misleads counts.
    """
    weights = {}
    for name, term in terms.items():
        spread = float(term.std(dim=0).nan_to_num(nan=0.0).mean())
        rho = float(rank_correlation(term, errors).mean())
        weights[name] = max(0.0, rho) / spread if spread > 0 else 0.0
    return weights


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation over the first axis, equals sharing their mean rank: (K, B), (K, B) -> (B,).

    0 where all are equal. What is not a number ranks last.
    """
    x, y = (_centred_ranks(values.nan_to_num(nan=torch.inf)) for values in (a, b))
    scale = (x.square().sum(0) * y.square().sum(0)).sqrt()
    return torch.where(scale > 0, (x * y).sum(0) / scale.clamp_min(EPS), 0.0)


def _centred_ranks(values: Tensor) -> Tensor:
    above = (values[:, None] > values[None]).double() + 0.5 * (values[:, None] == values[None]).double()
    return above.sum(1) - 0.5 * len(values)
