"""Scores of ensembles: accuracy, and calibration (whether the reference is distributed as the members are)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ups.metrics.errors import SampleMeans


@dataclass(frozen=True)
class EnsembleErrors:
    """Reductions over space of an ensemble of M members, from which its scores follow.

    Fair CRPS, variance of the members and squared error of their mean: (B, T, C). Fraction of the cells where r members
    are below the reference: `ranks` (B, T, C, M + 1).
    """

    crps: Tensor
    variance: Tensor
    squared_error: Tensor
    ranks: Tensor

    @classmethod
    def mean(cls, parts: Sequence["EnsembleErrors"]) -> "EnsembleErrors":
        """Average the reductions of ensembles of the same size and with the same reference."""
        return cls._joined(parts, lambda values: torch.stack(values).mean(dim=0))

    @classmethod
    def of_fields(cls, parts: Iterable["EnsembleErrors"]) -> "EnsembleErrors":
        """The reductions of all fields, from those of each."""
        return cls._joined(parts, partial(torch.cat, dim=2))

    @classmethod
    def _joined(
        cls, parts: Iterable["EnsembleErrors"], join: Callable[[tuple[Tensor, ...]], Tensor]
    ) -> "EnsembleErrors":
        return cls(*map(join, zip(*(vars(part).values() for part in parts), strict=True)))


def ensemble_errors(members: Tensor, u_ref: Tensor) -> EnsembleErrors:
    """Reduce M > 1 members (M, B, T, C, *grid) and their reference (B, T, C, *grid) over space.

    One field after the other: the intermediate values of all fields would be several times as large as a member.
    """
    return EnsembleErrors.of_fields(map(_errors_of_field, members.split(1, dim=3), u_ref.split(1, dim=2)))


def _errors_of_field(members: Tensor, u_ref: Tensor) -> EnsembleErrors:
    axes = tuple(range(3, u_ref.ndim))
    mean = members.mean(dim=0)
    variance = (_sum((member - mean).square_() for member in members) / (len(members) - 1)).mean(dim=axes)
    squared_error = (mean - u_ref).square().mean(dim=axes)
    del mean  # as large as a member
    return EnsembleErrors(
        fair_crps(members, u_ref).mean(dim=axes), variance, squared_error, rank_histogram(members, u_ref)
    )


def fair_crps(members: Tensor, u_ref: Tensor) -> Tensor:
    """mean_i |x_i - y| - sum_{i<j} |x_i - x_j| / (M (M - 1)): (M, *) and (*) -> (*).

    Unbiased in M: its expectation is the CRPS of the distribution of the members, whatever their number (Ferro 2014).
    """
    num_members = len(members)
    error = _sum((member - u_ref).abs_() for member in members) / num_members
    difference = _sum((members[i] - members[j]).abs_() for i in range(1, num_members) for j in range(i))
    return error - difference / (num_members * (num_members - 1))


def rank_histogram(members: Tensor, u_ref: Tensor) -> Tensor:
    """Fraction of the cells where r members are below the reference: (M, B, T, C, *grid) -> (B, T, C, M + 1) over r.

    A reference that equals some members counts in equal parts for every rank it could have: the expectation of ties
    broken at random. Snapshots with a value that is not finite have NaN.
    """
    below = _sum((member < u_ref).to(torch.int16) for member in members)
    highest = below + _sum((member == u_ref).to(torch.int16) for member in members)
    weight = 1 / (highest - below + 1).to(u_ref.dtype)
    axes = tuple(range(3, u_ref.ndim))
    ranks = range(len(members) + 1)
    shares = [torch.where((below <= rank) & (rank <= highest), weight, 0).mean(dim=axes) for rank in ranks]
    is_finite = (members.sum(dim=0) + u_ref).isfinite().flatten(3).all(dim=-1)
    return torch.stack(shares, dim=-1).masked_fill(~is_finite[..., None], torch.nan)


def _sum(terms: Iterator[Tensor]) -> Tensor:
    """The sum in place of the first term: `sum` would hold two more tensors of the size of a member."""
    total = next(terms)
    for term in terms:
        total += term
    return total


class EnsembleSuite:
    """Scores of an ensemble of M members over a stream of batches, means over samples, times and channels.

    - `CRPS`: the fair CRPS, in the units of the field
    - `spread_skill`: sqrt((M + 1) / M <s^2>) / sqrt(<(mean - u_ref)^2>) per channel, with the variance s^2 of the
      members (divided by M - 1); 1 is calibrated, less is overconfident
    - `miscalibration`: max(r, 1 / r) of the spread-skill r per channel; 1 is calibrated. In the mean of r a channel
      with too little spread makes up for one with too much
    - `rank_deviation`: sum_r |f_r - 1 / (M + 1)| for the fractions f_r of the ranks r = 0, ..., M; 0 is flat
    - `coverage`: fraction of the cells whose reference lies between the smallest and the largest member; calibrated is
      (M - 1) / (M + 1)
    - `ECE`: mean over k = 1, ..., M / 2 of |fraction of cells between the k-th smallest and the k-th largest member
      - (M + 1 - 2 k) / (M + 1)|
    """

    def __init__(self) -> None:
        self._means = SampleMeans()

    def add(self, errors: EnsembleErrors) -> None:
        """Add the samples of one batch."""
        self._means.add(vars(errors))

    def ranks(self) -> Tensor:
        """Return the rank histogram of each channel: (C, M + 1)."""
        return self._means["ranks"].mean(dim=0)

    def compute(self) -> dict[str, float]:
        """Return the scores of all samples so far."""
        ranks = self.ranks()
        num_members = ranks.shape[-1] - 1
        variance, squared_error = (self._means[name].mean(dim=0) for name in ("variance", "squared_error"))
        levels = range(1, num_members // 2 + 1)
        coverage = torch.stack([ranks[:, k : num_members + 1 - k].sum(-1) for k in levels])
        nominal = torch.tensor([(num_members + 1 - 2 * k) / (num_members + 1) for k in levels], device=ranks.device)
        spread_skill = ((num_members + 1) / num_members * variance / squared_error).sqrt()
        scores = {
            "CRPS": self._means["crps"],
            "spread_skill": spread_skill,
            "miscalibration": torch.maximum(spread_skill, 1 / spread_skill),
            "rank_deviation": (ranks - 1 / (num_members + 1)).abs().sum(-1),
            "coverage": coverage[0],
            "ECE": (coverage - nominal[:, None]).abs(),
        }
        return {name: float(value.mean()) for name, value in scores.items()}
