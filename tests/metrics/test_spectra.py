"""Spectra by band: logarithmic edges, energies and errors of single waves."""

import math

import pytest
import torch
from torch import Tensor

from ups.metrics.errors import EPS
from ups.metrics.spectra import band_scores, error_spectra, log_bands, nyquist_energy, radial_spectrum


def wave(wavenumber: int, amplitude: float = 1.0) -> Tensor:
    """The snapshot (1, 1, 1, 64) of one wave."""
    x = 2 * math.pi * torch.arange(64, dtype=torch.float64) / 64
    return amplitude * (wavenumber * x).cos().reshape(1, 1, 1, 64)


def scores(u_pred: Tensor, u_ref: Tensor) -> dict[str, float]:
    """Band scores of one snapshot."""
    return band_scores(*(radial_spectrum(u)[0, 0] for u in (u_pred - u_ref, u_pred, u_ref)))


@pytest.mark.parametrize("num_shells", [2, 5, 8, 16, 64, 512])
def test_bands_cover_all_shells_but_the_mean(num_shells: int):
    """The bands follow each other from shell 1 to the last, none is empty."""
    bands = list(log_bands(num_shells).values())
    assert [shell for band in bands for shell in range(*band)] == list(range(1, num_shells))
    assert all(start < stop for start, stop in bands)


def test_bands_are_equally_wide_in_log_k():
    """On 32 shells the edges are 32^(i/4)."""
    assert log_bands(32) == {1: (1, 2), 2: (2, 6), 3: (6, 13), 4: (13, 32)}


def test_an_error_stays_in_its_band():
    """Of waves in three bands one is doubled, one is left out and one is right."""
    u_ref = wave(1) + wave(4) + wave(20)
    u_pred = 2 * wave(1) + wave(20)
    expected = {"band_error_1": 1.0, "band_error_2": 1.0, "band_error_4": 0.0}
    found = scores(u_pred, u_ref)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert found["band_energy_1"] == pytest.approx(math.log10(4))
    assert found["band_energy_2"] == pytest.approx(math.log10(0.5 / (EPS**2 * 1.5)))
    assert found["band_energy_4"] == pytest.approx(0.0, abs=1e-9)


def test_a_wrong_phase_has_the_right_energy():
    """The energy of a band does not know the phases, its error does."""
    found = scores(-wave(4), wave(4))
    assert found["band_error_2"] == pytest.approx(2.0)
    assert found["band_energy_2"] == pytest.approx(0.0, abs=1e-9)


def test_errors_of_two_channels_do_not_cancel():
    """Ten times the energy in one channel and a tenth in the other are both wrong by one decade."""
    reference = torch.ones(2, 16)
    found = band_scores(reference, torch.tensor([[10.0], [0.1]]) * reference, reference)
    assert [found[f"band_energy_{band}"] for band in range(1, 5)] == pytest.approx([1.0] * 4)


def test_a_weak_channel_counts_beside_a_strong_one():
    """Other units of one channel leave the scores as they are: round-off is measured against its own energy."""
    spectra = torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, scale = band_scores(*spectra), torch.tensor([[1.0], [1e-14]], dtype=torch.float64)
    assert band_scores(*(scale * spectra)) == pytest.approx(expected, rel=1e-6)


def test_a_truth_of_zero_is_finite():
    """Without any energy in the truth the scores are large, not NaN."""
    assert all(math.isfinite(value) for value in scores(wave(4), torch.zeros(1, 1, 1, 64)).values())


@pytest.mark.parametrize(("grid", "share"), [((64, 64), 1 / 2), ((24, 24, 24), 1 / 4)], ids=["2D", "3D"])
def test_corner_holds_a_part_of_the_independent_modes(grid: tuple[int, ...], share: float):
    """Of the independent modes of white noise PDEBench counts a half in 2D, a quarter in 3D, and a few on the axes."""
    u = torch.randn(4, 1, 1, *grid, generator=torch.Generator().manual_seed(0))
    radial, corner = (spectrum[..., 8:].sum().item() for spectrum in error_spectra(u))
    assert share < corner / (radial / 2) < 1.2 * share


def test_a_truth_of_zero_has_the_energy_of_eps_squared_squared():
    """Beside a truth of zero, energies are compared with EPS^4: a hundred times as much is ten times the amplitude."""
    zero = torch.zeros(1, 16, dtype=torch.float64)
    energy = torch.zeros_like(zero)
    energy[0, 1] = 100 * EPS**4
    found = band_scores(energy, energy, zero)
    assert (found["band_error_1"], found["band_energy_1"]) == pytest.approx((10.0, 2.0))


def test_spectrum_stays_on_the_device_of_the_field():
    """Another default device does not matter."""
    u = torch.ones(1, 1, 1, 22)
    with torch.device("meta"):
        spectrum = radial_spectrum(u)
    assert spectrum.flatten().tolist() == pytest.approx([1.0] + [0.0] * 10)


def test_energy_of_a_checkerboard():
    """Stripes of alternating sign with an RMS of 0.1 have an energy of 0.01, along any axis; smooth waves have none."""
    smooth = wave(3)[..., None].expand(1, 1, 1, 64, 6)
    stripes = torch.tensor([0.1, -0.1] * 3, dtype=torch.float64) * wave(5)[..., None] * math.sqrt(2)
    u = torch.cat([smooth + stripes, smooth + stripes + 0.2 * (-1.0) ** torch.arange(64)[:, None]], 2)
    assert nyquist_energy(u).flatten().tolist() == pytest.approx([0.01, 0.01 + 0.04])
    assert nyquist_energy(torch.ones(1, 1, 1, 7)).item() == pytest.approx(0.0, abs=1e-30)


def test_a_slope_is_no_checkerboard():
    """A field with different values at both ends of an axis has a thousandth of the energy that it has as a period."""
    slope = torch.linspace(0, 1, 32, dtype=torch.float64).reshape(1, 1, 1, 32)
    as_period = torch.fft.fft(slope)[..., 16].abs().square() / 32**2
    assert nyquist_energy(slope).item() < 1e-3 * as_period.item()


@pytest.mark.parametrize("grid", [(32,), (8, 6), (4, 6, 8)])
def test_energies_add_up_whatever_is_reduced_at_once(grid: tuple[int, ...]):
    """Energies of snapshots in single precision, summed in double, are those of all at once, bit for bit."""
    u = torch.randn(3, 21, 2, *grid, generator=torch.Generator().manual_seed(0))
    whole = nyquist_energy(u).double().sum(1)
    assert torch.equal(sum(nyquist_energy(u[:, t : t + 1]).double().sum(1) for t in range(21)), whole)
