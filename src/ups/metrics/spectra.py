"""Energy over wavenumber: full radial shells, PDEBench's corner of the spectrum, logarithmic bands, Nyquist's waves."""

from functools import lru_cache

import torch
from torch import Tensor

from ups.metrics.errors import EPS

NUM_BANDS = 4


def radial_spectrum(u: Tensor) -> Tensor:
    """Energy of each full radial shell of Fourier modes: (B, T, C, *grid) -> (B, T, C, K).

    E_k = sum of |u_hat|^2 / n^2 over all modes with floor(|k|) = k, both signs of every component, where n is the
    number of cells and |k| the length of the integer wave vector (waves per domain). K is the number of shells below
    min(grid) / 2; the corners of the spectrum beyond are left out. A field without energy there has sum_k E_k equal to
    the mean of u^2 (Parseval). Shell 0 holds the mean of the field alone.
    """
    num_shells, shells, multiplicity, _ = _shells(tuple(u.shape[3:]), u.device)
    return _sum_by_shell(_mode_energy(u) * multiplicity, shells, num_shells)


def error_spectra(error: Tensor) -> tuple[Tensor, Tensor]:
    """Radial spectrum (B, T, C, K) and PDEBench's spectrum (B, T, C, K') of an error (B, T, C, *grid).

    PDEBench's shells, floor(|k|) < min(grid) / 2, hold only modes with 0 <= k_i < n_i / 2 in every axis: a quadrant in
    2D, an octant in 3D. In 1D each mode 0, 1, ..., n / 2 is a shell of its own, Nyquist's included.
    """
    num_shells, shells, multiplicity, corner = _shells(tuple(error.shape[3:]), error.device)
    energy = _mode_energy(error)
    radial = _sum_by_shell(energy * multiplicity, shells, num_shells)
    return radial, energy if error.ndim == 4 else _sum_by_shell(energy, corner, num_shells)


def nyquist_energy(u: Tensor) -> Tensor:
    """Energy of the shortest waves, of two points, along each axis, summed: (B, T, C, *grid) -> (B, T, C, 1).

    Along an axis of n points it is the mean over its lines of a^2, a = sum_i w_i (-1)^i u_i / sum_i w_i with the Hann
    window w_i = sin^2(pi (i + 1/2) / n). Without a window a would measure the jump between both ends of an axis that is
    not periodic. A network whose tokens are patches of 2 points per axis shows its patches in these waves, as a
    checkerboard. Of an odd number of points the last one is left out. Energies have the precision of u, so that sums of
    them in float64 hardly depend on how many snapshots are reduced at once.
    """
    energy = torch.zeros(*u.shape[:3], 1, dtype=torch.float64, device=u.device)
    for axis, num_points in enumerate(u.shape[3:], start=3):
        weights = _alternating_window(num_points // 2 * 2, u.device)
        amplitudes = u.movedim(axis, -1)[..., : len(weights)].double() @ weights
        energy += amplitudes.square().reshape(*u.shape[:3], -1).mean(-1, keepdim=True)
    return energy.to(u.dtype)


def log_bands(num_shells: int) -> dict[int, tuple[int, int]]:
    """Shells [start, stop) of the bands 1 to 4 from 1 to num_shells, equally wide in log k; empty ones are left out."""
    edges = [round(num_shells ** (number / NUM_BANDS)) for number in range(NUM_BANDS + 1)]
    bands = enumerate(zip(edges[:-1], edges[1:], strict=True), start=1)
    return {number: (start, stop) for number, (start, stop) in bands if start < stop}


def energy_error(prediction: Tensor, reference: Tensor, floor: Tensor) -> float:
    """|log10(E_pred / E_ref)|, averaged over channels, of energies that are at least `floor`, all (C,)."""
    return float((torch.maximum(prediction, floor) / torch.maximum(reference, floor)).log10().abs().mean())


def energy_floor(reference: Tensor) -> Tensor:
    """EPS^2 of the total energy of a spectrum (C, K), (C,): what is weaker is round-off. EPS^4 where it is zero."""
    total = reference.sum(-1)
    return EPS**2 * torch.where(total > 0, total, EPS**2)


def band_scores(error: Tensor, prediction: Tensor, reference: Tensor) -> dict[str, float]:
    """Scores of the logarithmic bands, from energies (C, K) summed over samples and times.

    With sums over the shells of a band, averaged over channels:

    - `band_error_<i>`: sqrt(E_error / E_ref), 1 for a prediction without any energy there
    - `band_energy_<i>`: |log10(E_pred / E_ref)|

    Energies are at least `energy_floor`.
    """
    floor, scores = energy_floor(reference), {}
    for number, band in log_bands(reference.shape[-1]).items():
        e_error, e_pred, e_ref = (energy[..., slice(*band)].sum(-1) for energy in (error, prediction, reference))
        scores[f"band_error_{number}"] = float((e_error / torch.maximum(e_ref, floor)).sqrt().mean())
        scores[f"band_energy_{number}"] = energy_error(e_pred, e_ref, floor)
    return scores


def _mode_energy(u: Tensor) -> Tensor:
    """|u_hat|^2 / n^2 of the modes of rfftn: (B, T, C, *grid) -> (B, T, C, modes)."""
    u_hat = torch.fft.rfftn(u, dim=tuple(range(3, u.ndim)), norm="forward").flatten(3)
    return u_hat.real.square() + u_hat.imag.square()


def _sum_by_shell(energy: Tensor, shells: Tensor, num_shells: int) -> Tensor:
    """Sums over the modes (..., modes) of each shell; modes beyond all shells have the number K and are dropped."""
    sums = energy.new_zeros(*energy.shape[:-1], num_shells + 1)
    return sums.index_add_(-1, shells, energy)[..., :num_shells]


@lru_cache(maxsize=32)
def _alternating_window(num_points: int, device: torch.device) -> Tensor:
    """The Hann window over its sum, with alternating signs, (num_points,)."""
    i = torch.arange(num_points, dtype=torch.float64, device=device)
    weights = (torch.pi * (i + 0.5) / num_points).sin().square()
    return (1 - 2 * (i % 2)) * weights / weights.sum()


@lru_cache(maxsize=32)
def _shells(grid: tuple[int, ...], device: torch.device) -> tuple[int, Tensor, Tensor, Tensor]:
    """The number of shells K and, flat over rfftn's modes: radial shells, multiplicities, PDEBench's shells.

    A mode that is in no shell has the number K. The multiplicity counts the modes of the full spectrum that one mode of
    the half spectrum stands for.
    """
    axes = [torch.fft.fftfreq(n, d=1 / n, device=device).round().long() for n in grid[:-1]]
    modes = torch.meshgrid(*axes, torch.arange(grid[-1] // 2 + 1, device=device), indexing="ij")
    num_shells = (min(grid) + 1) // 2
    shells = torch.stack(modes).square().sum(dim=0).double().sqrt().floor().long().clamp_max(num_shells)
    single = (modes[-1] == 0) | (2 * modes[-1] == grid[-1])
    in_corner = torch.stack([(k >= 0) & (2 * k < n) for k, n in zip(modes, grid, strict=True)]).all(dim=0)
    corner = torch.where(in_corner, shells, num_shells)
    return num_shells, shells.flatten(), torch.where(single, 1.0, 2.0).flatten(), corner.flatten()
