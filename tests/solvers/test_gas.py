import numpy as np
import pytest
import torch

from ups.errors import ConfigFault
from ups.solvers import draw
from ups.solvers.compressible import GAMMA
from ups.solvers.random_fields import fourier_field, gaussian_field, solenoidal

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


def test_fourier_fields_decay_with_the_wavenumber():
    """On average amplitudes fall like |k|^(-1/2) in two dimensions: by 2 from the first to the last shell."""
    power = np.zeros((24, 24))
    for i in range(200):
        power += np.abs(np.fft.fft2(fourier_field(axes(2, 24), np.random.default_rng(i)))) ** 2
    assert np.sqrt(power[1, 1] / power[4, 4]) == pytest.approx(2.0, rel=0.15)


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


@pytest.mark.parametrize("num_axes", [2, 3])
def test_speed_is_the_mach_number(num_axes):
    """Where no window cuts it, the mean speed is mach sqrt(Gamma T_0); a window only lowers it."""
    u, _ = draw(f"compressible_ns_{num_axes}d", range(12), (12,) * num_axes, seed=3, mach=0.5)
    speed = u[:, 2:].square().sum(1).sqrt().flatten(1).mean(1).numpy()
    T_0 = np.array([np.random.default_rng([3, i]).uniform(0.1, 10.0, 2)[1] for i in range(12)])
    ratio = speed / (0.5 * np.sqrt(GAMMA * T_0))
    assert np.isclose(ratio, 1, atol=1e-5).any()
    assert (ratio < 1 + 1e-5).all()


def test_sines_gas_stays_in_its_range():
    """Density lies between 1 and 20, pressure between 10 and 200, and velocities have either sign."""
    u, _ = draw("compressible_ns_1d", range(200), (64,), seed=0)
    assert 1 <= u[:, 0].min() < 1.5
    assert u[:, 0].max() <= 20
    assert 10 <= u[:, 1].min() < 15
    assert u[:, 1].max() <= 200
    assert u[:, 2].min() < 0 < u[:, 2].max()


def test_shock_tubes_have_two_states():
    """Each field has one jump in the middle half of the tube, and the velocity is always positive."""
    u, _ = draw("compressible_ns_1d", range(50), (64,), seed=0, start="Shock")
    jumps = u.diff(dim=-1) != 0
    assert (jumps.sum(-1) == 1).all()
    place = jumps.float().argmax(-1)
    assert place.min() >= 15
    assert place.max() <= 48
    assert u[:, 2].min() > 0.6


def test_turbulence_has_its_mach_number():
    """Density 1, pressure 1 / (Gamma M^2) and mean speed 1."""
    u, _ = draw("compressible_ns_3d", [0], (12,) * 3, seed=0, mach=0.5, start="Turb")
    assert torch.allclose(u[:, 0], torch.ones(()))
    assert torch.allclose(u[:, 1], torch.tensor(1 / (GAMMA * 0.25)))
    assert u[:, 2:].square().sum(1).sqrt().mean().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("compressible_ns_2d", {}, "needs a Mach number above 0, got None"),
        ("compressible_ns_3d", {"mach": 0.0}, "needs a Mach number above 0"),
        ("compressible_ns_1d", {"start": "Turb"}, "starts as one of Rand, Shock"),
    ],
)
def test_a_gas_that_cannot_be_drawn_is_refused(family, options, message):
    """A missing Mach number or an unknown start is a ConfigFault."""
    with pytest.raises(ConfigFault, match=message):
        draw(family, [0], (8,) * int(family[-2]), 0, **options)
