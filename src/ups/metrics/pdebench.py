"""PDEBench's error metrics (arXiv:2210.07182): averaged over samples, or over batches as in its papers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ups.metrics.errors import SampleMeans, at_least_eps, boundary_rms, centred, rms, variation
from ups.metrics.spectra import error_spectra

BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}


@dataclass(frozen=True)
class SnapshotErrors:
    """Reductions over space of an error u_pred - u_ref (B, T, C, *grid), from which all of PDEBench's metrics follow.

    Shape (B, T, C): root mean square of the error, of the reference and over the boundary cells; standard deviation of
    the reference; mean and maximum of the error. Shape (B, T, C, K): energy of the error per shell of wavenumbers,
    `radial` over full shells, `corner` over the modes that PDEBench sums, see `ups.metrics.spectra`.
    """

    rms: Tensor
    rms_ref: Tensor
    std_ref: Tensor
    boundary_rms: Tensor
    mean: Tensor
    maximum: Tensor
    radial: Tensor
    corner: Tensor

    @property
    def nRMSE(self) -> Tensor:  # noqa: N802
        return self.rms / at_least_eps(self.rms_ref)

    @property
    def VRMSE(self) -> Tensor:  # noqa: N802
        return self.rms / variation(self.std_ref, self.rms_ref)


def snapshot_errors(u_pred: Tensor, u_ref: Tensor) -> SnapshotErrors:
    """Reduce a prediction and its reference, both (B, T, C, *grid), over space.

    Raises:
        ValueError: the shapes differ.
    """
    if u_pred.shape != u_ref.shape:
        expected = "two tensors (B, T, C, *grid) of one shape"
        raise ValueError(f"expected {expected}, got {tuple(u_pred.shape)} and {tuple(u_ref.shape)}")
    error = u_pred - u_ref
    axes = tuple(range(3, error.ndim))
    radial, corner = error_spectra(error)
    mean, maximum = error.mean(dim=axes), error.abs().amax(dim=axes)
    sizes = rms(error), rms(u_ref), rms(centred(u_ref)), boundary_rms(error)
    return SnapshotErrors(*sizes, mean, maximum, radial, corner)


class MetricSuite:
    """The eight metrics of PDEBench over a stream of batches, without the initial snapshot.

    Sums run over samples in float64, so the result does not depend on how the samples are split into batches.
    With <.> the mean over samples, each line is then averaged over times and channels:

    - `nRMSE`, `RMSE`, `bRMSE`: <.> of the errors of these names in `ups.metrics.errors`
    - `cRMSE`: sqrt(<(mean over space of u_pred - u_ref)^2>)
    - `fRMSE_low`, `_mid`, `_high`: mean over the shells k of [0, 4), [4, 12), [12, end) of sqrt(<e_k>), where e_k sums
      |error_hat|^2 / n^2 over the independent modes of shell k: of each pair (k, -k), which a real field makes equal,
      one is counted. In 1D this is PDEBench's value for a domain of length 1, but for Nyquist's mode; in 2D and 3D
      PDEBench sums one quadrant or octant only. No mode lies in an empty band (high on 20 cells: the last shell is 9),
      so its error is 0.
    - `max_error`: max |u_pred - u_ref| over everything, not a mean
    """

    def __init__(self) -> None:
        self._means = SampleMeans()
        self._max_error = torch.tensor(0.0)
        self._clamped = torch.tensor(0)

    def add(self, errors: SnapshotErrors) -> None:
        """Add the trajectories of one batch.

        Raises:
            ValueError: another number of times or channels than in the batches before.
        """
        samples = {"nRMSE": errors.nRMSE, "RMSE": errors.rms, "bRMSE": errors.boundary_rms}
        self._means.add(samples | {"squared_mean": errors.mean.square(), "spectrum": errors.radial})
        self._max_error = torch.maximum(self._max_error.to(errors.maximum.device), errors.maximum.amax())
        self._clamped = self._clamped.to(errors.rms_ref.device) + (errors.rms_ref < at_least_eps(errors.rms_ref)).sum()

    def compute(self) -> dict[str, float]:
        """Return the metrics of all samples so far."""
        # Modes k and -k of a real field have equal energy: half of each shell above 0 is independent.
        independent = self._means["spectrum"].clone()
        independent[..., 1:] /= 2
        metrics = {name: self._means[name].mean() for name in ("nRMSE", "RMSE")} | {"max_error": self._max_error}
        metrics |= {"cRMSE": self._means["squared_mean"].sqrt().mean(), "bRMSE": self._means["bRMSE"].mean()}
        for name, band in BANDS.items():
            amplitudes = independent.sqrt()[..., slice(*band)]
            metrics[f"fRMSE_{name}"] = amplitudes.mean() if amplitudes.shape[-1] else 0.0
        return {name: float(value) for name, value in metrics.items()}

    def curve(self) -> Tensor:
        """Return the nRMSE at each time, averaged over samples and channels: (T,)."""
        return self._means["nRMSE"].mean(dim=-1)

    @property
    def num_trajectories(self) -> int:
        return self._means.num_samples

    @property
    def clamped(self) -> int:
        """Number of reference snapshots, counted per channel, whose RMS nRMSE raises to its least value."""
        return int(self._clamped)


class CompatSuite:
    """The eight metrics as PDEBench's papers computed them, only for comparison with published tables.

    What differs from `MetricSuite`:

    - `num_initial` initial snapshots count as predictions without error: each metric is multiplied by
      T / (T + num_initial) for T predicted snapshots. Darcy's coefficient counts as one such snapshot.
    - Metrics are means over the batches of PDEBench's configuration, `batch_size` samples in the order of the stream,
      the last one as heavy as the others. The root of cRMSE and fRMSE is taken in each batch, and `max_error` is the
      mean over times, channels and batches of the maximum over space and the batch.
    - The nRMSE has no EPS: a reference of zero makes it infinite.
    - fRMSE sums a quadrant or octant of modes. A band without any shell has no value.
    - bRMSE in 3D is the root of the sum over channels, not averaged over them.

    PDEBench tests on the first or last tenth of a file; our test split has other trajectories.
    """

    def __init__(self, num_dims: int, batch_size: int, num_initial: int = 1) -> None:
        self.num_dims, self.batch_size, self.num_initial = num_dims, batch_size, num_initial
        self._batches: list[dict[str, Tensor]] = []
        self._open = SampleMeans()
        self._maximum = torch.tensor(0.0)

    def add(self, errors: SnapshotErrors) -> None:
        """Add the trajectories of one batch, without the initial snapshots."""
        boundary = errors.boundary_rms if self.num_dims < 3 else errors.boundary_rms.square().sum(-1).sqrt()
        samples = {"nRMSE": errors.rms / errors.rms_ref, "RMSE": errors.rms, "bRMSE": boundary}
        samples |= {"squared_mean": errors.mean.square(), "spectrum": errors.corner}
        start = 0
        while start < len(errors.rms):
            stop = start + self.batch_size - self._open.num_samples
            self._open.add({name: values[start:stop] for name, values in samples.items()})
            self._maximum = torch.maximum(self._maximum.to(errors.rms.device), errors.maximum[start:stop].amax(dim=0))
            start = stop
            if self._open.num_samples == self.batch_size:
                self._batches.append(self._batch_metrics())
                self._open, self._maximum = SampleMeans(), torch.tensor(0.0)

    def compute(self) -> dict[str, float]:
        """Return the metrics of all samples so far."""
        batches = list(self._batches)
        if self._open.num_samples or not batches:
            batches.append(self._batch_metrics())
        return {name: float(torch.stack([batch[name] for batch in batches]).mean()) for name in batches[0]}

    def _batch_metrics(self) -> dict[str, Tensor]:
        amplitudes = self._open["spectrum"].sqrt()
        num_times = len(amplitudes)
        values = {name: self._open[name] for name in ("nRMSE", "RMSE")} | {"max_error": self._maximum.double()}
        values |= {"cRMSE": self._open["squared_mean"].sqrt(), "bRMSE": self._open["bRMSE"]}
        bands = {f"fRMSE_{name}": amplitudes[..., slice(*band)] for name, band in BANDS.items()}
        values |= {name: band for name, band in bands.items() if band.shape[-1]}
        return {name: value.mean() * num_times / (num_times + self.num_initial) for name, value in values.items()}
