"""PDEBench's metrics as its papers computed them (arXiv:2210.07182), written from their formulas."""

import torch
from torch import Tensor

from ups.metrics.pdebench import BANDS, SnapshotErrors, snapshot_errors
from ups.metrics.running import SampleMeans


class CompatSuite:
    """The eight metrics as PDEBench's papers computed them, to compare with published tables only.

    What differs from `MetricSuite`:

    - `num_initial` initial snapshots count as predictions without error: each metric is multiplied by
      T / (T + num_initial) for T predicted snapshots. Darcy's coefficient counts as one such snapshot.
    - Metrics are means over the batches of PDEBench's configuration, `batch_size` samples in the order of the stream,
      the last one as heavy as the others. The root of cRMSE and fRMSE is taken in each batch, and `max_error` is the
      mean over times, channels and batches of the maximum over space and the batch.
    - The nRMSE has no EPS: a reference of zero makes it infinite.
    - fRMSE sums a quadrant or octant of modes. A band without any shell has no value.
    - bRMSE in 3D is the root of the sum over channels, not averaged over them.

    PDEBench takes the first or last tenth of a file for its test; which samples come here is not its choice.
    """

    def __init__(self, num_dims: int, batch_size: int, num_initial: int = 1) -> None:
        self.num_dims, self.batch_size, self.num_initial = num_dims, batch_size, num_initial
        self._batches: list[dict[str, Tensor]] = []
        self._open = SampleMeans()
        self._maximum = torch.tensor(0.0)

    def update(self, u_pred: Tensor, u_ref: Tensor) -> None:
        """Add samples (B, T, C, *grid), without the initial snapshots."""
        self.add(snapshot_errors(u_pred, u_ref))

    def add(self, errors: SnapshotErrors) -> None:
        """Add samples that have been reduced over space."""
        boundary = errors.boundary_rms
        samples = {
            "nRMSE": errors.rms / errors.rms_ref,
            "RMSE": errors.rms,
            "bRMSE": boundary if self.num_dims < 3 else boundary.square().sum(-1).sqrt(),
            "squared_mean": errors.mean.square(),
            "spectrum": errors.corner,
        }
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
        bands = {f"fRMSE_{name}": amplitudes[..., slice(*band)] for name, band in BANDS.items()}
        values = {
            "nRMSE": self._open["nRMSE"],
            "RMSE": self._open["RMSE"],
            "max_error": self._maximum.double(),
            "cRMSE": self._open["squared_mean"].sqrt(),
            "bRMSE": self._open["bRMSE"],
        } | {name: band for name, band in bands.items() if band.shape[-1]}
        return {name: value.mean() * num_times / (num_times + self.num_initial) for name, value in values.items()}
