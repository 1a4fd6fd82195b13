"""PDEBench's error metrics (arXiv:2210.07182), averaged over samples instead of batches."""

from functools import lru_cache

import torch
from torch import Tensor

EPS = 1e-6  # the float32 round-off of a field of order ten: a weaker reference holds no signal
BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}


def RMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """Root of the mean over space of (u_pred - u_ref)^2: (B, T, C, *grid) -> (B, T, C)."""
    return _rms(u_pred - u_ref)


def nRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE / max(RMS over space of u_ref, EPS) of each sample, time and channel: (B, T, C, *grid) -> (B, T, C)."""
    return _rms(u_pred - u_ref) / _rms(u_ref).clamp_min(EPS)


def bRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE over the first and last cells of every axis: (B, T, C, *grid) -> (B, T, C).

    The faces are joined, so a cell on an edge or corner counts once for each face it lies on.
    """
    error = u_pred - u_ref
    faces = [error.narrow(axis, start, 1).flatten(3) for axis in range(3, error.ndim) for start in (0, -1)]
    return _rms(torch.cat(faces, dim=-1))


def radial_spectrum(u: Tensor) -> Tensor:
    """Energy of each full radial shell of Fourier modes: (B, T, C, *grid) -> (B, T, C, K).

    E_k = sum of |u_hat|^2 / n^2 over all modes with floor(|k|) = k, both signs of every component, where n is the
    number of cells and |k| the length of the integer wave vector (waves per domain). K is the number of shells below
    min(grid) / 2; the corners of the spectrum beyond are left out. A field without energy there has sum_k E_k equal to
    the mean of u^2 (Parseval). Shell 0 holds the mean of the field alone.
    """
    grid = tuple(u.shape[3:])
    bins, multiplicity, num_shells = _shells(grid, u.device)
    u_hat = torch.fft.rfftn(u, dim=tuple(range(3, u.ndim)), norm="forward").flatten(3)
    energy = (u_hat.real.square() + u_hat.imag.square()) * multiplicity
    shells = energy.new_zeros(*u.shape[:3], num_shells + 1)
    return shells.index_add_(-1, bins, energy)[..., :num_shells]


class MetricSuite:
    """The eight metrics of PDEBench over a stream of batches (B, T, C, *grid), without the initial snapshot.

    Sums run over samples in float64, so the result does not depend on how the samples are split into batches.
    With <.> the mean over samples, each line is then averaged over times and channels:

    - `nRMSE`, `RMSE`, `bRMSE`: <.> of the functions above
    - `cRMSE`: sqrt(<(mean over space of u_pred - u_ref)^2>)
    - `fRMSE_low`, `_mid`, `_high`: mean over the shells k of [0, 4), [4, 12), [12, end) of sqrt(<e_k>), where e_k sums
      |error_hat|^2 / n^2 over the independent modes of shell k: of each pair (k, -k), which a real field makes equal,
      one is counted. In 1D this is PDEBench's value for a domain of length 1; in 2D and 3D PDEBench sums one quadrant
      or octant only. No mode lies in an empty band (high on 20 cells: the last shell is 9), so its error is 0.
    - `max_error`: max |u_pred - u_ref| over everything, not a mean
    """

    def __init__(self, num_dims: int) -> None:
        self.num_dims = num_dims
        self.num_trajectories = 0
        self._sums: dict[str, Tensor] = {}
        self._max_error = torch.tensor(0.0)
        self._clamped = torch.tensor(0)

    def update(self, u_pred: Tensor, u_ref: Tensor) -> None:
        """Add the samples of one batch."""
        self._check(u_pred, u_ref)
        error = u_pred - u_ref
        axes = tuple(range(3, error.ndim))
        samples = {
            "nRMSE": nRMSE(u_pred, u_ref),
            "RMSE": RMSE(u_pred, u_ref),
            "bRMSE": bRMSE(u_pred, u_ref),
            "squared_mean": error.mean(dim=axes).square(),
            "spectrum": radial_spectrum(error),
        }
        for name, values in samples.items():
            total = values.double().sum(dim=0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._max_error = torch.maximum(self._max_error.to(error.device), error.abs().amax())
        self._clamped = self._clamped.to(error.device) + (_rms(u_ref) < EPS).sum()
        self.num_trajectories += len(error)

    def compute(self) -> dict[str, float]:
        """Return the metrics of all samples so far."""
        mean = {name: self._mean(name) for name in ("nRMSE", "RMSE", "bRMSE", "squared_mean", "spectrum")}
        independent = mean["spectrum"].clone()
        independent[..., 1:] /= 2
        metrics = {
            "nRMSE": mean["nRMSE"].mean(),
            "RMSE": mean["RMSE"].mean(),
            "max_error": self._max_error,
            "cRMSE": mean["squared_mean"].sqrt().mean(),
            "bRMSE": mean["bRMSE"].mean(),
        }
        metrics |= {f"fRMSE_{name}": _band_mean(independent.sqrt(), *band) for name, band in BANDS.items()}
        return {name: float(value) for name, value in metrics.items()}

    def curve(self) -> Tensor:
        """Return the nRMSE at each time, averaged over samples and channels: (T,)."""
        return self._mean("nRMSE").mean(dim=-1)

    @property
    def clamped(self) -> int:
        """How many reference snapshots, counted per channel, are weaker than EPS."""
        return int(self._clamped)

    def _mean(self, name: str) -> Tensor:
        if not self.num_trajectories:
            raise ValueError("expected at least one trajectory, got none: call update() before asking for metrics")
        return self._sums[name] / self.num_trajectories

    def _check(self, u_pred: Tensor, u_ref: Tensor) -> None:
        if u_pred.shape != u_ref.shape or u_ref.ndim != 3 + self.num_dims:
            expected = f"two tensors (B, T, C, *grid) of one shape with {self.num_dims} grid axes"
            raise ValueError(f"expected {expected}, got {tuple(u_pred.shape)} and {tuple(u_ref.shape)}")
        if self._sums and self._sums["nRMSE"].shape != u_ref.shape[1:3]:
            expected = tuple(self._sums["nRMSE"].shape)
            raise ValueError(f"expected {expected} times and channels as before, got {tuple(u_ref.shape[1:3])}")


def _rms(u: Tensor) -> Tensor:
    return u.square().mean(dim=tuple(range(3, u.ndim))).sqrt()


def _band_mean(amplitudes: Tensor, start: int, stop: int | None) -> Tensor:
    band = amplitudes[..., start:stop]
    return band.mean() if band.shape[-1] else band.new_zeros(())


@lru_cache(maxsize=32)
def _shells(grid: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Bins, multiplicities (both flat over rfftn's modes) and the number of shells; the last bin is the rest.

    The multiplicity counts the modes of the full spectrum that one mode of the half spectrum stands for.
    """
    last = torch.arange(grid[-1] // 2 + 1, device=device)
    axes = [torch.fft.fftfreq(n, d=1 / n, device=device) for n in grid[:-1]] + [last.float()]
    modes = torch.meshgrid(*axes, indexing="ij")
    num_shells = (min(grid) + 1) // 2
    squared_norm = torch.stack(modes).round().long().square().sum(dim=0)
    bins = squared_norm.double().sqrt().floor().long().clamp_max(num_shells)
    single = (last == 0) | (2 * last == grid[-1])
    multiplicity = torch.where(single, 1.0, 2.0).expand(bins.shape)
    return bins.flatten(), multiplicity.flatten(), num_shells
