"""Further terms of the operator's loss: pure functions, one value per sample (B,), 0 where nothing is violated.

Fields u are (B, C, *grid); `floor` (C,) is the smallest magnitude by which an error of a field is divided.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ups.metrics.spectra import log_bands

TINY = 1e-12
SMALLEST_BAND = 1e-2


def query_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor, points: Tensor) -> Tensor:
    """RMSE at `points` (B, P), numbers of grid points, over the RMS of u_ref on the grid; mean over fields."""
    error = (u_pred - u_ref).flatten(2).gather(2, points[:, None].expand(-1, u_ref.shape[1], -1))
    return (_rms(error) / _size(u_ref, floor)).mean(1)


def spectral_error(change_pred: Tensor, change_ref: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """Relative error of Fourier amplitudes along the axes of space, of changes (B, C, K, *grid) of K components.

    With A = |rfftn| along space (an axis that is not periodic is mirrored, which makes its modes half-turns, as in the
    mixer): sqrt(sum (A_pred - A_ref)^2 / sum A_ref^2), sums over components and the modes of one of up to four bands,
    equally wide in log |k|; mean over bands and fields. Changes are in units of a usual step's change: a band weaker
    than a hundredth of it, or of all bands together, counts as that strong.
    """
    bands = _bands(tuple(change_ref.shape[3:]), periodic, change_ref.device)
    amplitude_pred, amplitude_ref = (_amplitudes(change, periodic) for change in (change_pred, change_ref))
    error, energy = (amplitude_pred - amplitude_ref).square().sum(2) @ bands, amplitude_ref.square().sum(2) @ bands
    floor = SMALLEST_BAND**2 * energy.sum(-1, keepdim=True).clamp(min=1.0)
    return (error / torch.maximum(energy, floor) + TINY).sqrt().mean((1, 2))


def conservation_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor) -> Tensor:
    """|mean over space of u_pred - u_ref| / mean of |u_ref|; mean over fields, whose integral u_ref has conserved."""
    change = (u_pred - u_ref).flatten(2).mean(2).abs()
    return (change / torch.maximum(u_ref.abs().flatten(2).mean(2), floor)).mean(1)


def positivity_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of what lies below 0 over the RMS of u_ref; mean over fields, which cannot be negative."""
    return (_rms(u_pred.clamp(max=0.0)) / _size(u_ref, floor)).mean(1)


def boundary_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """RMSE over the first and last cells of all axes that are not periodic over the RMS of u_ref; mean over fields."""
    error, axes = u_pred - u_ref, [axis for axis, wraps in enumerate(periodic, start=2) if not wraps]
    faces = [error.narrow(axis, start, 1).flatten(2) for axis in axes for start in (0, error.shape[axis] - 1)]
    return (_rms(torch.cat(faces, 2)) / _size(u_ref, floor)).mean(1)


def divergence_error(v_pred: Tensor, v_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of div v_pred - div v_ref over the RMS of the derivatives of v_ref, velocities (B, d, *grid) in a unit cube.

    Central differences in the interior. The truth's own divergence is not 0 at the points where it is stored.
    """
    derivatives_pred, derivatives_ref = _own_derivatives(v_pred), _own_derivatives(v_ref)
    size = _size(derivatives_ref.flatten(1)[:, None], floor.amax())
    return (_rms((derivatives_pred - derivatives_ref).sum(1, keepdim=True)) / size)[:, 0]


def _own_derivatives(v: Tensor) -> Tensor:
    """The derivatives d v_i / d x_i in the interior, (B, d, *interior)."""
    derivatives = []
    for axis in range(v.shape[1]):
        component = v[:, axis]
        for other in range(1, component.ndim):
            component = component if other == axis + 1 else component.narrow(other, 1, component.shape[other] - 2)
        num_points = v.shape[axis + 2]
        ahead, behind = (component.narrow(axis + 1, start, num_points - 2) for start in (2, 0))
        derivatives.append((ahead - behind) * (num_points / 2))
    return torch.stack(derivatives, 1)


def _rms(error: Tensor) -> Tensor:
    """RMS over all but the first two axes, (B, C); where there is no error its gradient is 0, not undefined."""
    return (error.flatten(2).square().mean(2) + TINY).sqrt()


def _size(u_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of the truth over space, (B, C), at least `floor`."""
    return torch.maximum(u_ref.flatten(2).square().mean(2).sqrt(), floor)


def _amplitudes(change: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """|rfftn| over the axes of space with the others mirrored, flat over modes: (B, C, K, modes)."""
    for axis, wraps in enumerate(periodic, start=3):
        change = change if wraps else torch.cat([change, change.flip(axis)], axis)
    u_hat = torch.fft.rfftn(change, dim=tuple(range(3, change.ndim)), norm="forward").flatten(3)
    return (u_hat.real.square() + u_hat.imag.square() + TINY).sqrt()


@lru_cache(maxsize=32)
def _bands(grid: tuple[int, ...], periodic: tuple[bool, ...], device: torch.device) -> Tensor:
    """Which modes of the mirrored grid make which band, (modes, bands), weighted as often as the spectrum has them.

    |k| counts turns per domain. The mean belongs to the first band, the corners beyond half the finest axis to none.
    """
    points = [n if wraps else 2 * n for n, wraps in zip(grid, periodic, strict=True)]
    halves = [1.0 if wraps else 0.5 for wraps in periodic]
    axes = [torch.fft.fftfreq(n, 1 / n) for n in points[:-1]] + [torch.fft.rfftfreq(points[-1], 1 / points[-1])]
    k = torch.meshgrid(*(half * axis for half, axis in zip(halves, axes, strict=True)), indexing="ij")
    shell = torch.stack(k).square().sum(0).sqrt().floor().flatten()
    twice = 1.0 + ((k[-1] > 0) & (2 * k[-1] < grid[-1])).float().flatten()
    num_shells = (min(grid) + 1) // 2
    edges = [0, *(stop for _, stop in log_bands(num_shells).values())] if num_shells > 1 else [0, 1]
    parts = [(shell >= start) & (shell < stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    return (torch.stack(parts, 1) * twice[:, None]).to(device)
