"""Errors of predicted snapshots and trajectories beside the truth, each defined once."""

import torch
from torch import Tensor

EPS = 1e-6  # the float32 round-off of a field of order ten: a weaker reference holds no signal
VARIANCE_EPS = 1e-7  # of The Well


def RMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """Root of the mean over space of (u_pred - u_ref)^2: (B, T, C, *grid) -> (B, T, C)."""
    return rms(u_pred - u_ref)


def nRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE / max(RMS over space of u_ref, EPS) of each sample, time and channel: (B, T, C, *grid) -> (B, T, C)."""
    return rms(u_pred - u_ref) / rms(u_ref).clamp_min(EPS)


def MAE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """Mean over space of |u_pred - u_ref|: (B, T, C, *grid) -> (B, T, C); the CRPS of a single prediction."""
    return _spatial_mean((u_pred - u_ref).abs())


def VRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE / sqrt(variance over space of u_ref + 1e-7): (B, T, C, *grid) -> (B, T, C); 1 predicts the mean.

    The Well (arXiv:2412.00568). Of little use where the truth is constant in space.
    """
    return rms(u_pred - u_ref) / (rms(centred(u_ref)).square() + VARIANCE_EPS).sqrt()


def L2RE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """||u_pred - u_ref|| / ||u_ref|| over space and time together: (B, T, C, *grid) -> (B, C).

    DPOT (arXiv:2403.03542). The RMS of the reference is at least EPS, as in nRMSE.
    """
    return over_time(rms(u_pred - u_ref)) / over_time(rms(u_ref)).clamp_min(EPS)


def bRMSE(u_pred: Tensor, u_ref: Tensor) -> Tensor:  # noqa: N802
    """RMSE over the first and last cells of every axis: (B, T, C, *grid) -> (B, T, C).

    The faces are joined, so a cell on an edge or corner counts once for each face it lies on.
    """
    return boundary_rms(u_pred - u_ref)


def correlation(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """Pearson correlation over space, averaged over channels: (B, T, C, *grid) -> (B, T).

    Channels whose truth varies less than EPS of its RMS do not count; where no channel counts the correlation is 1.
    A prediction that is constant in space correlates with nothing; one that is not finite has no correlation, NaN.
    """
    deviation, deviation_ref = centred(u_pred), centred(u_ref)
    std, std_ref = rms(deviation), rms(deviation_ref)
    covariance = _spatial_mean(deviation * deviation_ref)
    varies = std_ref > EPS * rms(u_ref).clamp_min(EPS)
    rho = torch.where(varies, covariance / (std * std_ref).clamp_min(torch.finfo(std.dtype).tiny), 0.0).sum(-1)
    num_varying = varies.sum(-1)
    rho = torch.where(num_varying > 0, rho / num_varying.clamp_min(1), 1.0)
    return torch.where(std.isfinite().all(-1), rho, torch.nan)


def correlation_time(u_pred: Tensor, u_ref: Tensor, threshold: float = 0.8) -> Tensor:
    """Number of the first step, counted from 1, whose correlation is below `threshold`: (B, T, C, *grid) -> (B,).

    The unit is the time between two stored snapshots. A rollout that stays correlated has T, a lower bound.
    """
    rho = correlation(u_pred, u_ref)
    has_fallen = ~(rho >= threshold)  # a NaN has fallen
    first = has_fallen.int().argmax(dim=1) + 1
    return torch.where(has_fallen.any(dim=1), first, rho.shape[1]).to(u_ref.dtype)


def conservation_drift(u: Tensor, u_0: Tensor) -> Tensor:
    """|sum over space of u - u_0| / sum over space of |u_0|: (B, T, C, *grid), (B, C, *grid) -> (B, T, C).

    For fields whose integral the equation and its boundaries conserve.
    """
    change = _spatial_mean(u - u_0[:, None]).abs()
    return change / u_0.abs().flatten(2).mean(-1).clamp_min(EPS)[:, None]


def rms(u: Tensor) -> Tensor:
    """Root mean square over space: (B, T, C, *grid) -> (B, T, C)."""
    return _spatial_mean(u.square()).sqrt()


def boundary_rms(u: Tensor) -> Tensor:
    """Root mean square over the faces of the grid, joined: (B, T, C, *grid) -> (B, T, C)."""
    faces = [u.narrow(axis, start, 1).flatten(3) for axis in range(3, u.ndim) for start in (0, -1)]
    return rms(torch.cat(faces, dim=-1))


def centred(u: Tensor) -> Tensor:
    """Snapshots (B, T, C, *grid) without their mean over space."""
    return u - u.mean(dim=tuple(range(3, u.ndim)), keepdim=True)


def over_time(values: Tensor) -> Tensor:
    """Root mean square over time: (B, T, C) -> (B, C)."""
    return values.square().mean(dim=1).sqrt()


def _spatial_mean(u: Tensor) -> Tensor:
    return u.mean(dim=tuple(range(3, u.ndim)))
