"""PDEBench's error metrics (arXiv:2210.07182), averaged over samples instead of batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ups.metrics.errors import EPS, boundary_rms, rms
from ups.metrics.running import SampleMeans
from ups.metrics.spectra import error_spectra

BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}


@dataclass(frozen=True)
class SnapshotErrors:
    """What PDEBench's metrics are made of, for each sample, time and channel: (B, T, C), spectra (B, T, C, K)."""

    rms: Tensor
    rms_ref: Tensor
    boundary_rms: Tensor
    mean: Tensor
    maximum: Tensor
    radial: Tensor
    corner: Tensor

    @property
    def nRMSE(self) -> Tensor:  # noqa: N802
        return self.rms / self.rms_ref.clamp_min(EPS)


def snapshot_errors(u_pred: Tensor, u_ref: Tensor) -> SnapshotErrors:
    """Reduce a prediction and its truth (B, T, C, *grid) over space."""
    if u_pred.shape != u_ref.shape:
        expected = "two tensors (B, T, C, *grid) of one shape"
        raise ValueError(f"expected {expected}, got {tuple(u_pred.shape)} and {tuple(u_ref.shape)}")
    error = u_pred - u_ref
    axes = tuple(range(3, error.ndim))
    radial, corner = error_spectra(error)
    return SnapshotErrors(
        rms=rms(error),
        rms_ref=rms(u_ref),
        boundary_rms=boundary_rms(error),
        mean=error.mean(dim=axes),
        maximum=error.abs().amax(dim=axes),
        radial=radial,
        corner=corner,
    )


class MetricSuite:
    """The eight metrics of PDEBench over a stream of batches (B, T, C, *grid), without the initial snapshot.

    Sums run over samples in float64, so the result does not depend on how the samples are split into batches.
    With <.> the mean over samples, each line is then averaged over times and channels:

    - `nRMSE`, `RMSE`, `bRMSE`: <.> of the functions of these names
    - `cRMSE`: sqrt(<(mean over space of u_pred - u_ref)^2>)
    - `fRMSE_low`, `_mid`, `_high`: mean over the shells k of [0, 4), [4, 12), [12, end) of sqrt(<e_k>), where e_k sums
      |error_hat|^2 / n^2 over the independent modes of shell k: of each pair (k, -k), which a real field makes equal,
      one is counted. In 1D this is PDEBench's value for a domain of length 1, but for Nyquist's mode; in 2D and 3D
      PDEBench sums one quadrant or octant only. No mode lies in an empty band (high on 20 cells: the last shell is 9),
      so its error is 0.
    - `max_error`: max |u_pred - u_ref| over everything, not a mean
    """

    def __init__(self, num_dims: int) -> None:
        self.num_dims = num_dims
        self._means = SampleMeans()
        self._max_error = torch.tensor(0.0)
        self._clamped = torch.tensor(0)

    def update(self, u_pred: Tensor, u_ref: Tensor) -> None:
        """Add the samples of one batch."""
        if u_ref.ndim != 3 + self.num_dims:
            raise ValueError(f"expected (B, T, C, *grid) with {self.num_dims} grid axes, got {tuple(u_ref.shape)}")
        self.add(snapshot_errors(u_pred, u_ref))

    def add(self, errors: SnapshotErrors) -> None:
        """Add the samples of one batch that has been reduced over space."""
        shape, before = tuple(errors.rms.shape[1:]), self._means.shape("RMSE")
        if before not in (None, shape):
            raise ValueError(f"expected {before} times and channels as before, got {shape}")
        self._means.add(
            {
                "nRMSE": errors.nRMSE,
                "RMSE": errors.rms,
                "bRMSE": errors.boundary_rms,
                "squared_mean": errors.mean.square(),
                "spectrum": errors.radial,
            }
        )
        self._max_error = torch.maximum(self._max_error.to(errors.maximum.device), errors.maximum.amax())
        self._clamped = self._clamped.to(errors.rms_ref.device) + (errors.rms_ref < EPS).sum()

    def compute(self) -> dict[str, float]:
        """Return the metrics of all samples so far."""
        independent = self._means["spectrum"].clone()
        independent[..., 1:] /= 2
        metrics = {
            "nRMSE": self._means["nRMSE"].mean(),
            "RMSE": self._means["RMSE"].mean(),
            "max_error": self._max_error,
            "cRMSE": self._means["squared_mean"].sqrt().mean(),
            "bRMSE": self._means["bRMSE"].mean(),
        }
        metrics |= {f"fRMSE_{name}": _band_mean(independent.sqrt(), *band) for name, band in BANDS.items()}
        return {name: float(value) for name, value in metrics.items()}

    def curve(self) -> Tensor:
        """Return the nRMSE at each time, averaged over samples and channels: (T,)."""
        return self._means["nRMSE"].mean(dim=-1)

    @property
    def num_trajectories(self) -> int:
        return self._means.num_samples

    @property
    def clamped(self) -> int:
        """How many reference snapshots, counted per channel, are weaker than EPS."""
        return int(self._clamped)


def _band_mean(amplitudes: Tensor, start: int, stop: int | None) -> Tensor:
    band = amplitudes[..., start:stop]
    return band.mean() if band.shape[-1] else band.new_zeros(())
