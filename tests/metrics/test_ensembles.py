"""Scores of ensembles whose calibration is known."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from ups.metrics.ensembles import EnsembleErrors, EnsembleSuite, ensemble_errors, fair_crps, rank_histogram

SIZES = [2, 4, 16]


def gaussian(num_members: int, std: float = 1.0, num_cells: int = 4000) -> tuple[Tensor, Tensor]:
    """Draw members (M, B, T, C, X) of this standard deviation and a truth of the standard normal distribution."""
    draws = torch.randn(num_members + 1, 2, 3, 2, num_cells, generator=torch.Generator().manual_seed(0))
    return std * draws[1:], draws[0]


def measure(members: Tensor, u_ref: Tensor) -> dict[str, float]:
    """Score one batch."""
    suite = EnsembleSuite()
    suite.add(ensemble_errors(members, u_ref))
    return suite.compute()


@pytest.mark.parametrize("num_members", SIZES)
def test_fair_crps_of_a_calibrated_gaussian(num_members: int):
    """Whatever the number of members, those from N(0, 1) score 1 / sqrt(pi) for a truth from N(0, 1)."""
    assert measure(*gaussian(num_members))["CRPS"] == pytest.approx(1 / math.sqrt(math.pi), rel=0.02)


def test_fair_crps_equals_the_sorted_form():
    """It is mean_i |x_i - y| - sum_i (2 i - M - 1) x_(i) / (M (M - 1)) over the sorted members x_(i)."""
    members, u_ref = gaussian(5, num_cells=20)
    weights = torch.tensor([2.0 * i - 6 for i in range(1, 6)]).reshape(5, 1, 1, 1, 1)
    expected = (members - u_ref).abs().mean(0) - (weights * members.sort(dim=0).values).sum(0) / 20
    assert torch.allclose(fair_crps(members, u_ref), expected, atol=1e-6)


def test_fair_crps_of_equal_members_is_the_absolute_error():
    """An ensemble without spread is a single prediction."""
    u_ref = torch.zeros(1, 1, 1, 3)
    assert torch.allclose(fair_crps(u_ref.expand(4, 1, 1, 1, 3) + 2, u_ref), torch.full((1, 1, 1, 3), 2.0))


@pytest.mark.parametrize("num_members", SIZES)
def test_calibrated_ensembles(num_members: int):
    """Members from the distribution of the truth have the spread of the error, flat ranks and nominal coverage."""
    scores = measure(*gaussian(num_members))
    assert scores["spread_skill"] == pytest.approx(1.0, rel=0.02)
    assert scores["rank_deviation"] == pytest.approx(0.0, abs=0.05)
    assert scores["coverage"] == pytest.approx((num_members - 1) / (num_members + 1), abs=0.01)
    assert scores["ECE"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(("std", "sign"), [(0.5, -1), (2.0, 1)], ids=["overconfident", "underconfident"])
def test_wrong_spread_shows(std: float, sign: int):
    """Half the spread gives ratio and coverage below those of a calibrated ensemble, twice the spread above."""
    scores = measure(*gaussian(4, std))
    assert sign * (scores["spread_skill"] - 1) > 0.2
    assert sign * (scores["coverage"] - 0.6) > 0.1
    assert scores["ECE"] > 0.1
    assert scores["rank_deviation"] > 0.2
    assert scores["CRPS"] > 1.05 / math.sqrt(math.pi)


def test_scores_by_hand():
    """Members 0, 1, 2, 4 beside the truths 3 and -1 in two cells: ranks 3 and 0, one of the two is covered."""
    members = torch.tensor([0.0, 1.0, 2.0, 4.0]).reshape(4, 1, 1, 1, 1).expand(4, 1, 1, 1, 2)
    u_ref = torch.tensor([3.0, -1.0]).reshape(1, 1, 1, 2)
    variance, mean = 35 / 12, 7 / 4
    squared_error = ((mean - 3) ** 2 + (mean + 1) ** 2) / 2
    pairs = 1 + 2 + 4 + 1 + 3 + 2
    expected = {
        "CRPS": ((3 + 2 + 1 + 1) / 4 + (1 + 2 + 3 + 5) / 4) / 2 - pairs / 12,
        "spread_skill": math.sqrt(5 / 4 * variance / squared_error),
        "miscalibration": math.sqrt(squared_error / (5 / 4 * variance)),
        "rank_deviation": 2 * 0.3 + 3 * 0.2,
        "coverage": 0.5,
        "ECE": (0.1 + 0.2) / 2,
    }
    assert measure(members, u_ref) == pytest.approx(expected)


def test_rank_histogram_equals_plain_loops():
    """Ranks are counted cell by cell; a tie counts in equal parts for all ranks between its ends."""
    generator = torch.Generator().manual_seed(0)
    members, u_ref = (torch.randint(4, shape, generator=generator) * 1.0 for shape in ((3, 2, 2, 1, 9), (2, 2, 1, 9)))
    expected = torch.zeros(2, 2, 1, 4)
    for b, t, x in product(range(2), range(2), range(9)):
        values, truth = members[:, b, t, 0, x].tolist(), u_ref[b, t, 0, x].item()
        below, ties = sum(v < truth for v in values), values.count(truth)
        expected[b, t, 0, below : below + ties + 1] += 1 / (9 * (ties + 1))
    assert torch.allclose(rank_histogram(members, u_ref), expected)


def test_ranks_of_many_members():
    """A truth below, among and above 300 members has rank 0, 137 and 300."""
    members = torch.arange(300.0).reshape(300, 1, 1, 1, 1).expand(-1, 1, 1, 1, 3)
    ranks = rank_histogram(members, torch.tensor([-1.0, 136.5, 300.0]).reshape(1, 1, 1, 3))[0, 0, 0]
    assert ranks.nonzero().flatten().tolist() == [0, 137, 300]
    assert torch.allclose(ranks[[0, 137, 300]], torch.full((3,), 1 / 3))


def test_equal_members_and_truth_are_flat():
    """Where members and truth are all the same, as on a wall, nothing speaks against calibration."""
    ranks = rank_histogram(torch.ones(4, 1, 1, 1, 6), torch.ones(1, 1, 1, 6))
    assert torch.allclose(ranks, torch.full((1, 1, 1, 5), 0.2))


@pytest.mark.parametrize("split", [[1, 6], [3, 1, 3], [1] * 7], ids=str)
def test_batches_do_not_matter(split: list[int]):
    """Any split into batches gives the scores of all samples at once."""
    members, u_ref = (u.transpose(-1, -4)[..., :5] for u in gaussian(3, num_cells=7))
    suite = EnsembleSuite()
    for batch in zip(members.split(split, dim=1), u_ref.split(split), strict=True):
        suite.add(ensemble_errors(*batch))
    assert suite.compute() == pytest.approx(measure(members, u_ref), rel=1e-6)


def test_ensembles_of_one_reference_are_averaged():
    """Reductions of two ensembles average to what lies halfway between them."""
    members, u_ref = gaussian(4, num_cells=10)
    one, other = ensemble_errors(members[:2], u_ref), ensemble_errors(members[2:], u_ref)
    for name, values in vars(EnsembleErrors.mean([one, other])).items():
        assert torch.allclose(2 * values, getattr(one, name) + getattr(other, name))


def test_diverged_member_is_not_hidden():
    """One NaN in one member makes every score NaN."""
    members, u_ref = gaussian(4, num_cells=10)
    members[2, 0, 0, 0, 0] = math.nan
    assert all(math.isnan(value) for value in measure(members, u_ref).values())


def test_scores_are_means_over_channels():
    """Each score of two channels of other calibration is the mean of the scores that they have alone."""
    members, u_ref = gaussian(4, num_cells=50)
    members[:, :, :, 1] *= 3
    alone = [measure(members[:, :, :, c : c + 1], u_ref[:, :, c : c + 1]) for c in range(2)]
    assert measure(members, u_ref) == pytest.approx({name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]})


def test_ranks_of_a_diverged_snapshot_alone_are_lost():
    """A NaN in one snapshot leaves the ranks of the other samples, times and channels as they are."""
    members, u_ref = gaussian(3, num_cells=10)
    expected = rank_histogram(members, u_ref)
    members[1, 0, 2, 1, 4] = math.nan
    ranks = rank_histogram(members, u_ref)
    assert ranks[0, 2, 1].isnan().all()
    ranks[0, 2, 1] = expected[0, 2, 1]
    assert torch.equal(ranks, expected)


def test_shares_of_ties_keep_double_precision():
    """Three ranks of a cell with two ties have a third each, to the precision of the fields."""
    members = torch.tensor([1.0, 1.0, 5.0], dtype=torch.float64).reshape(3, 1, 1, 1, 1)
    shares = rank_histogram(members, torch.ones(1, 1, 1, 1, dtype=torch.float64)).flatten()
    assert shares.dtype == torch.float64 and shares.tolist() == [1 / 3, 1 / 3, 1 / 3, 0.0]


def test_scores_stay_on_the_device_of_the_fields():
    """Another default device does not matter."""
    members, u_ref = gaussian(4, num_cells=5)
    suite = EnsembleSuite()
    suite.add(ensemble_errors(members, u_ref))
    with torch.device("meta"):
        scores = suite.compute()
    assert scores == measure(members, u_ref)


def test_channels_do_not_make_up_for_each_other():
    """Half the spread in one channel and three halves of it in another: ratios of mean 1, but miscalibrated."""
    members, u_ref = gaussian(16)
    scale = torch.tensor([0.5, 1.5])[:, None]
    scores = measure(scale * members, u_ref)
    assert scores["spread_skill"] == pytest.approx(1.0, rel=0.1)
    assert scores["miscalibration"] > 1.5
