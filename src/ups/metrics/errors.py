"""Errors of predicted snapshots and trajectories against the reference, each defined once.

RMSE, nRMSE, cRMSE, bRMSE, fRMSE and max error are those of PDEBench (Takamoto et al. 2022, arXiv:2210.07182): RMSE is
`rms` of u_pred - u_ref, bRMSE its `boundary_rms`, and `ups.metrics.pdebench` has cRMSE, fRMSE and max error. PDEBench's
code has no EPS and averages over batches; what else differs is listed at `ups.metrics.pdebench.CompatSuite`.
"""

import torch
from torch import Tensor

EPS = 1e-6  # ten times the round-off of float32: a reference that is weaker, relative to its scale, holds no signal
LEAST_STD = 1e-7**0.5  # The Well adds 1e-7 to variances of fields of order one


def scale_of(size: Tensor) -> Tensor:
    """The largest size of a reference over time, 1 where it is always zero: (B, T, ...) -> (B, 1, ...)."""
    largest = size.amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def at_least_eps(size: Tensor) -> Tensor:
    """The size of a reference, at least EPS of `scale_of`: (B, T, ...) -> (B, T, ...)."""
    return torch.maximum(size, EPS * scale_of(size))


def nRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE / max(RMS over space of u_ref, EPS U), per trajectory, time and channel: (B, T, C, *grid) -> (B, T, C).

    PDEBench (arXiv:2210.07182), with EPS against a division by zero where a field vanishes. U is the largest RMS over
    time, so that the unit of a field does not matter, and 1 for a field that is zero at all times.
    """
    return rms(u_pred - u_ref) / at_least_eps(rms(u_ref))


def MAE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """Mean over space of |u_pred - u_ref|: (B, T, C, *grid) -> (B, T, C); the CRPS of a single prediction."""
    return _spatial_mean((u_pred - u_ref).abs())


def VRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE / `variation` of u_ref: (B, T, C, *grid) -> (B, T, C); 1 predicts the mean.

    The Well (arXiv:2412.00568). Not meaningful where the reference is constant in space.
    """
    return rms(u_pred - u_ref) / variation(rms(centred(u_ref)), rms(u_ref))


def variation(std_ref: Tensor, rms_ref: Tensor) -> Tensor:
    """The standard deviation over space of a reference, at least LEAST_STD of its largest RMS over time: (B, T, C)."""
    return torch.maximum(std_ref, LEAST_STD * scale_of(rms_ref))


def L2RE(error: Tensor, reference: Tensor) -> Tensor:  # noqa: N802
    """||u_pred - u_ref|| / ||u_ref|| over space and time together, from the `rms` of both: (B, T, C) -> (B, C).

    DPOT (arXiv:2403.03542). The RMS of a reference that is zero at all times is EPS, as in nRMSE.
    """
    error, reference = (values.square().mean(dim=1, keepdim=True).sqrt() for values in (error, reference))
    return (error / at_least_eps(reference)).squeeze(1)


def correlation(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """Pearson correlation over space, averaged over channels: (B, T, C, *grid) -> (B, T).

    Channels whose reference varies by less than EPS of its RMS are left out; without any channel the correlation is 1.
    It is 0 for a prediction that is constant in space, and NaN for one that is not finite.
    """
    deviation, deviation_ref = centred(u_pred), centred(u_ref)
    std, std_ref = rms(deviation), rms(deviation_ref)
    covariance = _spatial_mean(deviation * deviation_ref)
    varies = std_ref > EPS * at_least_eps(rms(u_ref))
    rho = torch.where(varies, covariance / (std * std_ref).clamp_min(torch.finfo(std.dtype).tiny), 0.0).sum(-1)
    num_varying = varies.sum(-1)
    rho = torch.where(num_varying > 0, rho / num_varying.clamp_min(1), 1.0)
    return torch.where(std.isfinite().all(-1), rho, torch.nan)


def correlation_time(rho: Tensor, threshold: float = 0.8) -> Tensor:
    """First time step, counted from 1, whose `correlation` rho is below `threshold`: (B, T) -> (B,).

    The unit is the time between two stored snapshots. A rollout that stays correlated gets T, a lower bound.
    """
    has_fallen = ~(rho >= threshold)  # true for NaN too: a diverged rollout is not correlated
    first = has_fallen.int().argmax(dim=1) + 1
    return torch.where(has_fallen.any(dim=1), first, rho.shape[1]).to(rho.dtype)


def conservation_drift(u: Tensor, u_0: Tensor) -> Tensor:
    """|sum over space of u - u_0| / sum over space of |u_0|: (B, T, C, *grid), (B, C, *grid) -> (B, T, C).

    Zero for fields whose integral the equation and its boundary conditions conserve.
    """
    return _spatial_mean(u - u_0[:, None]).abs() / at_least_eps(_spatial_mean(u_0[:, None].abs()))


def negative_part(u: Tensor, u_0: Tensor) -> Tensor:
    """Mean over space of max(-u, 0) / RMS of u_0: (B, T, C, *grid), (B, C, *grid) -> (B, T, C).

    Zero for fields that are nowhere negative.
    """
    return _spatial_mean((-u).clamp(min=0)) / at_least_eps(rms(u_0[:, None]))


def rms(u: Tensor) -> Tensor:
    """Root mean square over space: (B, T, C, *grid) -> (B, T, C)."""
    return _spatial_mean(u.square()).sqrt()


def boundary_rms(u: Tensor) -> Tensor:
    """Root mean square over the first and last cells of every axis: (B, T, C, *grid) -> (B, T, C).

    Of u_pred - u_ref it is PDEBench's bRMSE. As there, a cell on an edge or corner counts once for each face it is on.
    """
    faces = [u.narrow(axis, start, 1).flatten(3) for axis in range(3, u.ndim) for start in (0, -1)]
    return rms(torch.cat(faces, dim=-1))


def centred(u: Tensor) -> Tensor:
    """Snapshots (B, T, C, *grid) without their mean over space."""
    return u - u.mean(dim=tuple(range(3, u.ndim)), keepdim=True)


def _spatial_mean(u: Tensor) -> Tensor:
    return u.mean(dim=tuple(range(3, u.ndim)))


class SampleMeans:
    """Running means over samples of named tensors (B, ...).

    Sums are kept in float64, so that the result does not depend on how the samples are split into batches.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, samples: dict[str, Tensor]) -> None:
        """Add the samples of one batch.

        Raises:
            ValueError: a sample has another shape than in the batches before.
        """
        for name, values in samples.items():
            total = values.double().sum(dim=0)
            before = self._sums.get(name, torch.zeros_like(total))
            if total.shape != before.shape:
                raise ValueError(f"{name}: expected samples of shape {tuple(before.shape)}, got {tuple(total.shape)}")
            self._sums[name] = before + total
        self.num_samples += len(next(iter(samples.values())))

    def __getitem__(self, name: str) -> Tensor:
        if not self.num_samples:
            raise ValueError("expected at least one trajectory, got none: add a batch before asking for metrics")
        return self._sums[name] / self.num_samples
