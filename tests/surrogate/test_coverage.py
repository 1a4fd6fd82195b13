"""Features of states, their ranges in training, and what is said outside of these."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.metrics.spectra import log_bands
from ups.surrogate.coverage import FEATURES, Coverage, FieldCoverage, band_starts, describe

N = 64
BANDS = band_starts((N,))
AMPLITUDE, PEAK, GRADIENT, BAND_1 = map(FEATURES.index, ("amplitude", "peak", "gradient", "band 1"))


def sine(wavenumber: int = 1, amplitude: float = 1.0, mean: float = 0.0, n: int = N) -> Tensor:
    """A sine on n cells, (1, n)."""
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return mean + amplitude * torch.sin(2 * math.pi * wavenumber * x)[None]


def states(count: int = 200) -> Tensor:
    """Random sums of two sines with amplitudes of 1 to 2 and means of -1 to 1, (count, 1, N)."""
    generator = np.random.default_rng(0)
    a, b, mean = generator.uniform(1, 2, count), generator.uniform(0.1, 0.5, count), generator.uniform(-1, 1, count)
    waves = (sine(1, a[i], mean[i]) + sine(3, b[i]) for i in range(count))
    return torch.stack(list(waves))


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    """Of a family with field `u`, parameter `nu`, and an error of 1 %."""
    field = FieldCoverage.fit(describe(states()[:, 0], BANDS), log=False, mean=0.0, std=1.0)
    return Coverage({"nu": (0.001, 0.01)}, (0.1, 0.1), (N,), BANDS, {"u": field}, {}, error=0.01)


def check(coverage: Coverage, u: Tensor, nu: float = 0.01, grid: tuple[int, ...] = (N,), dt: float = 0.1):
    """What is said of states u."""
    return coverage.check(u, None, {"nu": nu}, grid=grid, dt=dt)


def test_features_of_a_sine():
    """A sine of wavenumber 3, amplitude 5 and mean 2 has RMS 5 / sqrt(2), and all energy in the band of 3."""
    features = describe(sine(3, 5.0, 2.0), BANDS)[0]
    assert BANDS == (1, 2, 6, 13)
    assert float(features[0]) == pytest.approx(2.0)
    assert features[[AMPLITUDE, PEAK]].exp().tolist() == pytest.approx([5 / math.sqrt(2), math.sqrt(2)], rel=2e-3)
    assert float(features[GRADIENT].exp()) == pytest.approx(2 * math.pi * 3 * math.sqrt(2), rel=0.02)
    assert features[BAND_1:].exp().tolist() == pytest.approx([0.01, 1.01, 0.01, 0.01], rel=0.02)


def test_a_factor_changes_mean_and_amplitude_alone():
    """The other features are ratios to the amplitude."""
    one, three = (describe(factor * states(5)[:, 0], BANDS) for factor in (1.0, 3.0))
    expected = torch.zeros_like(one)
    expected[:, 0], expected[:, AMPLITUDE] = 2 * one[:, 0], math.log(3)
    assert torch.allclose(three - one, expected, atol=1e-3)


def test_features_do_not_depend_on_the_resolution():
    """A smooth field on four times as many points has the same features."""
    coarse, fine = (describe(sine(2, 1.3, 0.4, n=n), BANDS) for n in (N, 4 * N))
    assert torch.allclose(coarse, fine, atol=0.01)


def test_bands_are_those_of_the_scores():
    """The first three bands start and end where those of `band_error_1` to `3` do."""
    for n in (32, 64, 128, 1024):
        starts = band_starts((n, n))
        assert [(starts[number - 1], starts[number]) for number in (1, 2, 3)] == [
            log_bands(n // 2)[k] for k in (1, 2, 3)
        ]


def test_rarity_is_the_mahalanobis_distance():
    """As NumPy computes it with the covariance of training; 1 % of the training states are rarer than 1."""
    features = describe(states()[:, 0], BANDS).double()
    field, x = FieldCoverage.fit(features, log=False, mean=0.0, std=1.0), features.numpy()
    deviation = x - x.mean(0)
    inverse = np.linalg.inv(np.cov(x.T, ddof=0) + 0.05**2 * np.eye(x.shape[1]))
    distance = np.sqrt(np.einsum("si,ij,sj->s", deviation, inverse, deviation) / x.shape[1])
    assert field.rarity(features).numpy() == pytest.approx(distance / np.quantile(distance, 0.99), rel=1e-5)


def test_nothing_is_said_inside(coverage: Coverage):
    """Of the training states with trained parameters there is no warning and no reason."""
    found = check(coverage, states(), nu=0.004)
    assert found.reasons == () and not found.warned.any()
    assert found.score.max() < 10


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"nu": 0.1}, "nu = 0.1 is outside the trained range 0.001 to 0.01"),
        ({"nu": 0.0001}, "nu = 0.0001 is outside the trained range 0.001 to 0.01"),
        ({"dt": 0.2}, "dt = 0.2 is not the trained 0.1"),
        ({"grid": (128,)}, "the grid of 128 points is not the trained one of 64"),
    ],
)
def test_settings_outside_are_named(coverage: Coverage, changed: dict, reason: str):
    """Parameters, time step and grid are given with what was trained."""
    found = check(coverage, states(1), **changed)
    assert found.reasons == (reason,)
    assert bool(found.warned.all()) == ("grid" not in changed)


@pytest.mark.parametrize(
    ("u", "reason"),
    [
        (4 * sine(1, 2.0), "amplitude of u is 3.9"),
        (sine(1, 2.0, 5.0), "mean of u is 5, outside the trained range -0.9"),
        (0.1 * sine(1, 1.0), "amplitude of u is 0.097"),
        (sine(20), "share of u at wavenumbers 13 to the finest is "),
        (sine(20), "steepest gradient of u, over its amplitude, is "),
        ((sine() > 0.99).double(), "largest deviation of u from its mean, over its amplitude, is "),
    ],
)
def test_states_outside_are_described(coverage: Coverage, u: Tensor, reason: str):
    """In words, with the factor to what was trained."""
    found = check(coverage, u[None])
    assert found.warned.tolist() == [True]
    assert any(each.startswith(reason) for each in found.reasons), found.reasons


def test_parameters_are_judged_one_by_one(coverage: Coverage):
    """One of four values of nu is outside; the state with it is the only one that is warned of."""
    found = check(coverage, states(4), nu=torch.tensor([0.004, 0.004, 0.1, 0.004]))
    assert found.warned.tolist() == [False, False, True, False]
    assert found.reasons == ("nu = 0.1 is outside the trained range 0.001 to 0.01, in 1 of 4 states",)


def test_states_too_large_for_float32_are_warned_of(coverage: Coverage):
    """Their squares are infinite, and so are their features."""
    found = check(coverage, 1e30 * states(2).float())
    assert found.warned.all() and found.reasons


def test_states_are_judged_one_by_one(coverage: Coverage):
    """Of a batch the states outside are warned of, their number is in the reason, the others have a low score."""
    u = states(4)
    u[1:3] *= 5
    found = check(coverage, u)
    assert found.warned.tolist() == [False, True, True, False]
    assert any(reason.endswith(", in 2 of 4 states") for reason in found.reasons)
    assert found.score[[1, 2]].min() > 10 * found.score[[0, 3]].max()
    alone = torch.cat([check(coverage, state[None]).score for state in u])
    assert torch.allclose(alone, found.score)


def test_a_warning_depends_on_the_usual_error(coverage: Coverage):
    """Twice the viscosity matters to a model with an error of 1 %, and not to one of 30 %; both name the reason."""
    exact, rough = (check(replace(coverage, error=error), states(1), nu=0.02) for error in (0.01, 0.3))
    assert exact.reasons == rough.reasons and len(exact.reasons) == 1
    assert exact.warned.all() and not rough.warned.any()
    assert float(exact.score / rough.score) == pytest.approx(30)


def test_fields_of_logarithms_and_coefficients_are_checked():
    """The coefficients of a steady family, normalized after the logarithm, have a geometric mean."""
    a = (0.5 * states()).exp()
    features = describe((a[:, 0].log() - 1.0) / 2.0, BANDS)
    field = FieldCoverage.fit(features, log=True, mean=1.0, std=2.0)
    coverage = Coverage({}, None, (N,), BANDS, {}, {"a": field}, error=0.01)
    assert coverage.check(None, a, {}, grid=(N,), dt=None).reasons == ()
    found = coverage.check(None, 10 * a[:1], {}, grid=(N,), dt=None)
    mean = float(10 * a[0].log().mean().exp())
    assert found.reasons[0].startswith(f"geometric mean of a is {mean:.3g}, outside the trained range 0.6")


def test_coverage_is_plain_json(coverage: Coverage):
    """Written and read again it says the same; a field takes about a hundred numbers."""
    text = json.dumps(asdict(coverage))
    read = Coverage.from_json(json.loads(text))
    assert read == coverage
    assert torch.equal(check(read, states(3)).score, check(coverage, states(3)).score)
    assert text.count(",") < 120


def test_states_far_outside_have_a_finite_score(coverage: Coverage):
    """A mean a thousand standard deviations away is given as it is."""
    found = check(coverage, states(1) + 4000)
    assert found.score.isfinite().all() and found.warned.all()
    assert any(reason.startswith("mean of u is 4e+03, outside") for reason in found.reasons)


def test_a_single_training_state_is_enough():
    """Its features are the whole range; others are outside, with finite scores."""
    field = FieldCoverage.fit(describe(sine(), BANDS), log=False, mean=0.0, std=1.0)
    alone = Coverage({}, None, (N,), BANDS, {"u": field}, {}, error=0.01)
    inside, outside = (alone.check(u[None], None, {}, grid=(N,), dt=None) for u in (sine(), 2 * sine()))
    assert inside.score.tolist() == pytest.approx([0.0], abs=1e-3) and inside.reasons == ()
    assert outside.score.isfinite().all() and outside.warned.all()
