"""All scores of a method together: which there are, their intervals, and that batches do not matter."""

import math

import pytest
import torch
from torch import Tensor

from ups.metrics.ensembles import ensemble_errors
from ups.metrics.spectra import log_bands
from ups.metrics.suite import COMPAT, Score, ScoreSuite, Timeline, Truth, joined

PDEBENCH = {"nRMSE", "RMSE", "max_error", "cRMSE", "bRMSE", "fRMSE_low", "fRMSE_mid", "fRMSE_high"}
BANDS = {f"band_{kind}_{number}" for kind in ("error", "energy") for number in range(1, 5)}
ALWAYS = PDEBENCH | {f"{COMPAT}{name}" for name in PDEBENCH} | BANDS | {"MAE", "L2RE", "VRMSE", "nyquist_energy"}
WITH_UNIT = PDEBENCH - {"nRMSE"} | {"MAE", "CRPS"}
ENSEMBLE = {"CRPS", "spread_skill", "miscalibration", "rank_deviation", "coverage", "ECE"}


def random_fields(num_trajectories: int, num_members: int = 3) -> tuple[Tensor, Tensor]:
    """Draw members (M, B, T + 1, C, X) and a truth with the initial snapshot."""
    shape = (num_members + 1, num_trajectories, 5, 2, 32)
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draws[1:], draws[0]


def measure(members: Tensor, u_ref: Tensor, split: list[int], conserved: tuple[int, ...] = (0,)) -> dict[str, Score]:
    """Score rollouts of an ensemble that come in batches."""
    suite = ScoreSuite(1, 4, conserved, seed=0)
    for batch, truth in zip(members.split(split, dim=1), u_ref.split(split), strict=True):
        u_pred, u = batch.mean(0)[:, 1:], truth[:, 1:]
        suite.add(suite.reduce(u_pred, Truth(u), truth[:, 0], ensemble_errors(batch[:, :, 1:], u)))
    return suite.compute()


def test_scores_are_those_that_apply():
    """An ensemble has its scores, a rollout a correlation time, a conserved channel a drift; nothing else has them."""
    members, u_ref = random_fields(3)
    rollout = ALWAYS | {"correlation_time"}
    assert set(measure(members, u_ref, [3])) == rollout | ENSEMBLE | {"conservation_drift"}
    assert set(measure(members, u_ref, [3], conserved=())) == rollout | ENSEMBLE
    suite = ScoreSuite(1, 4, (0,), seed=0)
    suite.add(suite.reduce(members[0], Truth(u_ref)))
    assert set(suite.compute()) == ALWAYS
    assert suite.ranks() is None


@pytest.mark.parametrize("split", [[1, 8], [4, 1, 4], [1] * 9], ids=str)
def test_batches_do_not_matter(split: list[int]):
    """Any split into batches gives the values and intervals of all samples at once."""
    members, u_ref = random_fields(9)
    whole, parts = measure(members, u_ref, [9]), measure(members, u_ref, split)
    assert {name: score.value for name, score in parts.items()} == pytest.approx(
        {name: score.value for name, score in whole.items()}, rel=1e-12
    )
    for name, score in whole.items():
        assert (parts[name].interval is None) == (score.interval is None)
        assert score.interval is None or parts[name].interval == pytest.approx(score.interval, rel=1e-12)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 1]], ids=str)
def test_pieces_of_times_and_trajectories_do_not_matter(lengths: list[int]):
    """Reduced piece by piece in time and over trajectories, an ensemble has the scores of all at once."""
    members, u_ref = random_fields(9)
    suite, start = ScoreSuite(1, 4, (0,), seed=0), 1
    timeline = Timeline(num_times=6)
    for length in lengths:
        of_rows = []
        for rows in (slice(0, 5), slice(5, 9)):
            u, some = u_ref[rows, start : start + length], members[:, rows, start : start + length]
            of_rows.append(suite.reduce(some.mean(0), Truth(u), u_ref[rows, 0], ensemble_errors(some, u)))
        timeline.append(joined(of_rows))
        start += length
    suite.add(timeline.whole)
    expected = {name: score.value for name, score in measure(members, u_ref, [9]).items()}
    assert {name: score.value for name, score in suite.compute().items()} == pytest.approx(expected, rel=1e-12)


def test_units_matter_only_to_scores_with_a_unit():
    """In units a billion times as large all relative scores stay, also where the truth vanishes at some time."""
    members, u_ref = random_fields(9)
    u_ref[3, 2, 1] = 0.0
    usual, tiny = measure(members, u_ref, [9]), measure(1e-9 * members, 1e-9 * u_ref, [9])
    relative = [name for name in usual if name.removeprefix(COMPAT) not in WITH_UNIT and name != f"{COMPAT}nRMSE"]
    assert {"nRMSE", "L2RE", "VRMSE", "correlation_time", "conservation_drift", "nyquist_energy"} <= set(relative)
    for name in relative:
        assert tiny[name].value == pytest.approx(usual[name].value, rel=1e-9), name


def test_opposite_errors_of_two_channels_do_not_cancel():
    """Spectral scores are of every channel by itself: errors of other sign are as large as errors of the same."""
    u_ref, error = (
        torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(0)),
        torch.randn(2, 3, 1, 32, generator=torch.Generator().manual_seed(1)),
    )
    found = []
    for sign in (1.0, -1.0):
        suite = ScoreSuite(1, 4, (), seed=0)
        suite.add(suite.reduce(u_ref + error * torch.tensor([1.0, sign])[:, None], Truth(u_ref)))
        found.append({name: s.value for name, s in suite.compute().items() if "fRMSE" in name or "band_error" in name})
    assert found[1] == pytest.approx(found[0], rel=1e-4) and min(found[0].values()) > 0.01


def test_intervals_hold_their_values():
    """Statistics over trajectories lie in their interval; seven trajectories have none."""
    members, u_ref = random_fields(9)
    scores = measure(members, u_ref, [9])
    with_interval = {name for name, score in scores.items() if score.interval is not None}
    trajectories = {"nRMSE", "RMSE", "MAE", "bRMSE", "L2RE", "VRMSE", "CRPS", "correlation_time", "conservation_drift"}
    assert with_interval == trajectories
    assert all(scores[name].interval[0] <= scores[name].value <= scores[name].interval[1] for name in with_interval)
    few = measure(members[:, :7], u_ref[:7], [7])
    assert all(score.interval is None for score in few.values())


def test_compat_converts_to_corrected():
    """With one initial and four predicted snapshots the published nRMSE is 4 / 5 of that of `MetricSuite`."""
    scores = measure(*random_fields(8), [8])
    assert scores[f"{COMPAT}nRMSE"].value == pytest.approx(0.8 * scores["nRMSE"].value)


def test_the_persistence_of_a_rollout_conserves_and_decorrelates():
    """The initial state kept for ever does not drift, and is uncorrelated with noise from the first step on."""
    _, u_ref = random_fields(8)
    suite = ScoreSuite(1, 4, (0, 1), seed=0)
    suite.add(suite.reduce(u_ref[:, :1].expand_as(u_ref[:, 1:]), Truth(u_ref[:, 1:]), u_ref[:, 0]))
    scores = suite.compute()
    assert scores["conservation_drift"] == Score(0.0, (0.0, 0.0))
    assert scores["correlation_time"] == Score(1.0, (1.0, 1.0))


def test_correlation_time_is_a_median():
    """One rollout of eight that stays correlated for 9 steps moves neither value nor interval; a mean would be 2."""
    u = torch.randn(8, 9, 1, 16, generator=torch.Generator().manual_seed(0))
    suite = ScoreSuite(1, 4, (), seed=0)
    suite.add(suite.reduce(u * torch.tensor([-1.0] * 7 + [1.0]).reshape(8, 1, 1, 1), Truth(u), u[:, 0]))
    assert suite.of_trajectories("correlation_time").tolist() == [1.0] * 7 + [9.0]
    assert suite.compute()["correlation_time"] == Score(1.0, (1.0, 1.0))


def test_intervals_depend_on_the_seed():
    """Another seed resamples other trajectories, and leaves the values as they are."""
    members, u_ref = random_fields(9)
    scores = []
    for seed in (0, 1):
        suite = ScoreSuite(1, 4, (), seed)
        suite.add(suite.reduce(members[0], Truth(u_ref)))
        scores.append(suite.compute()["nRMSE"])
    assert scores[0].value == scores[1].value
    assert scores[0].interval != scores[1].interval


def test_band_errors_count_every_direction():
    """Without the only wave of the truth, whose vector (-2, 3) PDEBench does not count, its whole band is wrong."""
    x = 2 * math.pi * torch.arange(16, dtype=torch.float64) / 16
    u_ref = (3 * x - 2 * x[:, None]).cos()[None, None, None]
    suite = ScoreSuite(2, 4, (), seed=0)
    suite.add(suite.reduce(torch.zeros_like(u_ref), Truth(u_ref)))
    (band,) = (band for band, (start, stop) in log_bands(8).items() if start <= 3 < stop)
    assert suite.compute()[f"band_error_{band}"].value == pytest.approx(1.0)


def test_compat_counts_by_batch_size_and_axes():
    """In 3D the boundary error adds both channels up; in batches of two the maximum is the mean of 1 and 3."""
    error = torch.tensor([1.0, 1.0, 3.0, 3.0]).reshape(4, 1, 1, 1, 1, 1).expand(4, 3, 2, 4, 4, 4)
    suite = ScoreSuite(3, 2, (), seed=0)
    suite.add(suite.reduce(1 + error, Truth(torch.ones_like(error))))
    scores = {name: score.value for name, score in suite.compute().items()}
    assert scores[f"{COMPAT}max_error"] == pytest.approx(3 / 4 * 2)
    assert scores[f"{COMPAT}bRMSE"] == pytest.approx(3 / 4 * 2 * math.sqrt(2))
    assert scores["bRMSE"] == pytest.approx(2.0)


def test_drift_is_that_of_the_conserved_channels():
    """The drift of a channel that the equation does not conserve is not counted."""
    u_ref = random_fields(2)[1]
    u_pred = u_ref[:, :1].expand_as(u_ref[:, 1:]).clone()
    u_pred[:, :, 1] += 5.0
    suite = ScoreSuite(1, 4, (0,), seed=0)
    suite.add(suite.reduce(u_pred, Truth(u_ref[:, 1:]), u_ref[:, 0]))
    assert suite.compute()["conservation_drift"].value == 0.0


def test_diverged_prediction_is_not_hidden():
    """One NaN makes every score NaN but the correlation time, which ends there."""
    members, u_ref = random_fields(3)
    members[0, 1, 3, 0, 0] = math.nan
    scores = measure(members, u_ref, [3])
    assert {name for name, score in scores.items() if not math.isnan(score.value)} == {"correlation_time"}


def test_errors_are_means_of_trajectories():
    """One wrong trajectory of nine moves the MAE and the intervals of its errors, whose medians would be zero."""
    u_ref = torch.ones(9, 2, 1, 8)
    suite = ScoreSuite(1, 4, (), seed=0)
    suite.add(suite.reduce(u_ref + torch.tensor([9.0] + [0.0] * 8).reshape(9, 1, 1, 1), Truth(u_ref)))
    scores = suite.compute()
    assert scores["MAE"].value == pytest.approx(1.0)
    assert scores["RMSE"].interval[1] > 1.0


def test_band_errors_are_means_over_channels():
    """Channels of all times together: one without its energy at any time, one right, are wrong by a half."""
    u_ref = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    u_pred = u_ref.clone()
    u_pred[:, :, 0] = 0.0
    suite = ScoreSuite(1, 4, (), seed=0)
    suite.add(suite.reduce(u_pred, Truth(u_ref)))
    assert {round(suite.compute()[f"band_error_{band}"].value, 4) for band in log_bands(16)} == {0.5}


def test_checkerboards_are_decades_of_energy():
    """Ten times the amplitude of the shortest waves is an error of two decades; their phase does not matter."""
    waves = (-1.0) ** torch.arange(32) * torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
    u_ref = 5.0 + waves
    suite = ScoreSuite(1, 4, (), seed=0)
    suite.add(suite.reduce(5.0 - 10 * waves, Truth(u_ref)))
    assert suite.compute()["nyquist_energy"].value == pytest.approx(2.0, abs=1e-5)


def test_ranks_are_those_of_each_channel():
    """Members all below the truth in one channel and all above it in the other: the last rank, and the first."""
    u_ref = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1).expand(2, 3, 2, 8)
    suite = ScoreSuite(1, 4, (), seed=0)
    suite.add(suite.reduce(0 * u_ref, Truth(u_ref), ensemble=ensemble_errors(torch.zeros(3, *u_ref.shape), u_ref)))
    assert suite.ranks().tolist() == [[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
