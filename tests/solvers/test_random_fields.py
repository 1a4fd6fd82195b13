import numpy as np
import pytest
import torch

from ups.solvers import sample_initial_states
from ups.solvers.random_fields import fourier_field, gaussian_field, rescaled, sines, solenoidal, window

torch.set_num_threads(1)


def axes(num_axes: int, num_points: int) -> list[np.ndarray]:
    """Cell centres on the unit box."""
    return [(np.arange(num_points) + 0.5) / num_points] * num_axes


@pytest.mark.parametrize("num_axes", [2, 3])
def test_fourier_fields_have_their_modes(num_axes):
    """Components 1 to 4 of the wave vector along every axis, no others, and mean |F| = 1."""
    F = fourier_field(axes(num_axes, 16), np.random.default_rng(0))
    modes = np.argwhere(np.abs(np.fft.fftn(F)) > 1e-6 * F.size)
    magnitudes = np.minimum(modes, 16 - modes)
    assert (magnitudes.min(), magnitudes.max()) == (1, 4)
    assert np.abs(F).mean() == pytest.approx(1.0)


@pytest.mark.parametrize(("num_axes", "ratio"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_fourier_fields_decay_with_the_wavenumber(num_axes, ratio):
    """On average amplitudes fall like |k|^p, p = 0, -1/2 and -1 by dimension, from k = (1, ...) to (4, ...)."""
    fields = [fourier_field(axes(num_axes, 12), np.random.default_rng(i)) for i in range(300)]
    power = sum(np.abs(np.fft.fftn(F)) ** 2 for F in fields)
    assert np.sqrt(power[(1,) * num_axes] / power[(4,) * num_axes]) == pytest.approx(ratio, rel=0.15)


@pytest.mark.parametrize("smoothness", [1.0, 3.0])
def test_gaussian_fields_decay_with_their_smoothness(smoothness):
    """Amplitudes fall like |m|^(-2 smoothness): by 4^smoothness from |m| = 1 to 2, in the mean of their logarithms."""
    shape, logs = (8, 8), []
    for i in range(300):
        f_hat = np.fft.fft2(gaussian_field(shape, np.random.default_rng(i), scale=0.4, smoothness=smoothness))
        logs.append(np.log(np.abs(f_hat[[1, 0, 2, 0], [0, 1, 0, 2]])))
    one, two = np.mean(logs, 0).reshape(2, 2).mean(1)
    assert (one - two) / np.log(4) == pytest.approx(smoothness, abs=0.1)


def test_gaussian_fields_keep_their_scale():
    """Mean 0, deviation 1, and nothing longer than the scale: the lowest mode of forces is |m| = sqrt(5)."""
    f = gaussian_field((32, 32), np.random.default_rng(0), scale=0.15, smoothness=3.0)
    assert f.mean() == pytest.approx(0.0, abs=1e-12)
    assert f.std() == pytest.approx(1.0)
    f_hat = np.abs(np.fft.fft2(f)) / f.size
    assert max(f_hat[0, 1], f_hat[1, 1], f_hat[0, 2]) < 1e-12
    assert f_hat[1, 2] > 1e-3


def test_solenoidal_velocities_have_no_divergence():
    """The spectral divergence is gone, and a field without divergence stays as it is."""
    v = np.stack([fourier_field(axes(2, 16), np.random.default_rng(i)) for i in range(2)])
    w = solenoidal(v)
    k = 2j * np.pi * np.fft.fftfreq(16, 1 / 16)
    divergence = k[:, None] * np.fft.fft2(w[0]) + k * np.fft.fft2(w[1])
    assert np.abs(divergence).max() < 1e-9
    np.testing.assert_allclose(solenoidal(w), w, atol=1e-12)


def test_sines_are_the_same_function_on_every_grid():
    """Random numbers do not depend on the resolution: refining the grid refines the same function."""
    coarse, fine = ((np.arange(n) + 0.5) / n for n in (512, 1536))
    for i in range(8):
        u_coarse = sines(coarse, np.random.default_rng(i))
        u_fine = sines(fine, np.random.default_rng(i))[1::3]
        assert np.abs(u_coarse - u_fine).mean() < 0.02


def test_sines_have_the_published_spread():
    """Mean offset and spatial deviation are both about 0.47, as in PDEBench's one-dimensional files."""
    u_0, _ = sample_initial_states("advection_1d", range(2000), (64,), seed=0)
    assert u_0.std(-1).mean().item() == pytest.approx(0.47, abs=0.04)
    assert u_0.mean(-1).abs().median().item() == pytest.approx(0.47, abs=0.1)


def test_absolute_values_have_either_sign():
    """Of the states that do not change sign about as many are negative as are positive."""
    u_0, _ = sample_initial_states("advection_1d", range(1000), (64,), seed=0)
    positive, negative = (u_0.amin(-1) >= 0).sum().item(), (u_0.amax(-1) <= 0).sum().item()
    assert positive > 100
    assert negative == pytest.approx(positive, rel=0.2)


def test_window_opens_between_its_edges():
    """The window is one between its edges, one half on them and zero outside."""
    w = window(np.array([0.0, 0.2, 0.5, 0.8, 1.0]), 0.2, 0.8)
    np.testing.assert_allclose(w, [0.0, 0.5, 1.0, 0.5, 0.0], atol=1e-12)


def test_rescaled_touches_zero_and_one():
    """The smallest value becomes 0 and the largest 1."""
    np.testing.assert_allclose(rescaled(np.array([-2.0, 0.0, 2.0])), [0.0, 0.5, 1.0])
