"""Errors of snapshots and trajectories against values known in advance."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ups.metrics.errors import (
    EPS,
    L2RE,
    MAE,
    VRMSE,
    conservation_drift,
    correlation,
    correlation_time,
    negative_part,
    nRMSE,
    rms,
)


def random_field(*shape: int) -> Tensor:
    """Draw a field of float64 with a mean."""
    return 0.5 + torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("grid", [(64,), (8, 12), (4, 6, 8)], ids=str)
def test_VRMSE_of_the_mean_is_one(grid: tuple[int, ...]):  # noqa: N802
    """To predict the mean of the truth scores 1, whatever that mean is."""
    u_ref = random_field(2, 3, 2, *grid)
    u_pred = u_ref.flatten(3).mean(-1).reshape(2, 3, 2, *[1] * len(grid)).expand_as(u_ref)
    assert torch.allclose(VRMSE(u_pred, u_ref), torch.ones(2, 3, 2, dtype=u_ref.dtype))


def test_VRMSE_is_nRMSE_without_a_mean():  # noqa: N802
    """For a truth of zero mean the variance is the mean square."""
    x = 2 * math.pi * torch.arange(32, dtype=torch.float64) / 32
    u_ref, u_pred = x.sin().reshape(1, 1, 1, 32), random_field(1, 1, 1, 32)
    assert torch.allclose(VRMSE(u_pred, u_ref), nRMSE(u_pred, u_ref))


def test_VRMSE_of_a_constant_truth_is_finite():  # noqa: N802
    """Where the truth does not vary the error is divided by the root of 1e-7 times its RMS."""
    u_ref = torch.full((1, 1, 1, 8), 3.0)
    assert VRMSE(u_ref + 1e-3, u_ref).item() == pytest.approx(1e-3 / (3 * math.sqrt(1e-7)), rel=1e-3)


def test_MAE_by_hand():  # noqa: N802
    """Errors 3, 0, -4, 0 have the mean magnitudes 1.5 and 2 at the two times, whatever the truth."""
    u_ref = random_field(1, 2, 1, 2)
    u_pred = u_ref + torch.tensor([[3.0, 0.0], [-4.0, 0.0]]).reshape(1, 2, 1, 2)
    assert MAE(u_pred, u_ref).flatten().tolist() == pytest.approx([1.5, 2.0])


def test_L2RE_by_hand():  # noqa: N802
    """Over both times the error is (3, 0, 4, 0) and the truth (1, 3, 3, 9): 5 / 10."""
    u_ref = torch.tensor([[1.0, 3.0], [3.0, 9.0]]).reshape(1, 2, 1, 2)
    u_pred = u_ref + torch.tensor([[3.0, 0.0], [-4.0, 0.0]]).reshape(1, 2, 1, 2)
    assert L2RE(rms(u_pred - u_ref), rms(u_ref)).tolist() == [[pytest.approx(0.5)]]


@pytest.mark.parametrize("error", [nRMSE, lambda u_pred, u_ref: L2RE(rms(u_pred - u_ref), rms(u_ref))])
def test_a_truth_of_zero_is_divided_by_eps(error: Callable[[Tensor, Tensor], Tensor]):
    """An error of EPS beside a truth of zero is a relative error of 1."""
    u_ref = torch.zeros(1, 2, 1, 8)
    assert torch.allclose(error(u_ref + EPS, u_ref), torch.ones(()))


@pytest.mark.parametrize("error", [nRMSE, VRMSE, correlation])
def test_units_do_not_matter(error: Callable[[Tensor, Tensor], Tensor]):
    """Prediction and truth in other units have the same error, also at a time when the truth vanishes."""
    u_pred, u_ref = random_field(2, 3, 2, 16).flip(0), random_field(2, 3, 2, 16)
    u_ref[0, 1, 0] = 0.0
    assert torch.allclose(error(1e-9 * u_pred, 1e-9 * u_ref), error(u_pred, u_ref))


@pytest.mark.parametrize("violation", [conservation_drift, negative_part])
def test_units_do_not_matter_to_physics(violation: Callable[[Tensor, Tensor], Tensor]):
    """Drift and negative parts are relative to the initial state."""
    u, u_0 = random_field(2, 3, 2, 16), 1 + random_field(2, 2, 16)
    assert torch.allclose(violation(1e-9 * u, 1e-9 * u_0), violation(u, u_0))


def test_correlation_counts_relative_variations():
    """A tiny field that varies counts; a field that varies by less than EPS of its RMS says nothing."""
    u = random_field(1, 1, 1, 16)
    assert correlation(-1e-8 * u, 1e-8 * u).item() == pytest.approx(-1.0)
    assert correlation(-u, 1e4 + 1e-3 * u).item() == 1.0


def test_correlation_ignores_scale_and_offset():
    """Pearson's correlation of a u + b with u is the sign of a, in every channel alike."""
    u = random_field(2, 3, 2, 16)
    assert torch.allclose(correlation(2 * u + 7, u), torch.ones(2, 3, dtype=u.dtype))
    assert torch.allclose(correlation(3 - u, u), -torch.ones(2, 3, dtype=u.dtype))


def test_correlation_of_a_shifted_sine():
    """A sine shifted by the angle a correlates as cos a."""
    x = 2 * math.pi * torch.arange(24, dtype=torch.float64) / 24
    rho = correlation((x + 0.7).sin().reshape(1, 1, 1, 24), x.sin().reshape(1, 1, 1, 24))
    assert rho.item() == pytest.approx(math.cos(0.7))


def test_correlation_leaves_constant_truths_out():
    """A channel without variation says nothing, and a constant prediction of one with variation is uncorrelated."""
    u_ref, u_pred = random_field(1, 1, 2, 16), random_field(1, 1, 2, 16)
    u_ref[:, :, 1] = 0.1
    assert correlation(u_pred, u_ref).item() == pytest.approx(1.0)
    u_pred[:, :, 0] = 0.1
    assert correlation(u_pred, u_ref).item() == pytest.approx(0.0, abs=1e-6)
    assert correlation(u_pred, torch.ones_like(u_ref)).item() == 1.0
    assert correlation(torch.full_like(u_ref, torch.nan), torch.ones_like(u_ref)).isnan()


def test_correlation_time_of_a_drifting_phase():
    """A wave whose phase is wrong by 0.1 per step falls below 0.8 when cos(0.1 s) does, at step 7."""
    x = 2 * math.pi * torch.arange(24, dtype=torch.float64) / 24
    phase = 0.1 * torch.arange(1, 11).reshape(1, 10, 1, 1)
    u_ref = x.sin().expand(1, 10, 1, 24)
    assert correlation_time(correlation((x + phase).sin(), u_ref)).tolist() == [7.0]
    assert correlation_time(correlation((x + phase)[:, :5].sin(), u_ref[:, :5])).tolist() == [
        5.0
    ]  # it has not fallen yet


def test_correlation_time_of_a_diverged_rollout():
    """From the first value that is not finite on nothing is correlated."""
    u = random_field(3, 5, 1, 16)
    u_pred = u.clone()
    u_pred[0, 2, 0, 3], u_pred[1, 3, 0, 3] = math.nan, math.inf
    assert correlation_time(correlation(u_pred, u)).tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("grid", [(16,), (6, 8), (4, 6, 8)], ids=str)
def test_a_shifted_field_is_conserved(grid: tuple[int, ...]):
    """On periodic axes a shift changes no integral."""
    u_0 = random_field(2, 2, *grid)
    u = torch.stack([u_0.roll(shift, dims=-1) for shift in range(5)], dim=1)
    assert torch.allclose(conservation_drift(u, u_0), torch.zeros(2, 5, 2, dtype=u.dtype), atol=1e-14)


def test_drift_by_hand():
    """A field (1, -3) that gains or loses 2 has drifted by half of |1| + |-3|."""
    u_0 = torch.tensor([1.0, -3.0]).reshape(1, 1, 2)
    u = torch.stack([u_0, u_0 + 1, u_0 - 1], dim=1)
    assert conservation_drift(u, u_0).flatten().tolist() == [0.0, 0.5, 0.5]


def test_correlation_at_the_threshold_is_none_below_it():
    """A rollout whose correlation equals the threshold stays correlated; the time has the type of the fields."""
    u = torch.ones(2, 4, 1, 8, dtype=torch.float64)  # nothing varies: the correlation is 1
    time = correlation_time(correlation(u, u), threshold=1.0)
    assert time.tolist() == [4.0, 4.0] and time.dtype == torch.float64
