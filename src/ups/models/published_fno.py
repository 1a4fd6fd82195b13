"""The FNO of PDEBench's paper: given snapshots and coordinates of the points in, the next snapshot out."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn

PADDING = 2  # points of zeros after the last one of every axis; the published 3D network has 6 after one axis
PROJECTION_CHANNELS = 128


class SpectralConvolution(nn.Module):
    """v_hat(k) = W(k) u_hat(k) for the `modes` lowest frequencies of each sign on every axis, 0 for all others.

    Li et al. 2020, arXiv:2010.08895, equation 5.
    """

    def __init__(self, channels: int, modes: int, num_dims: int) -> None:
        super().__init__()
        self.modes, self.num_dims = modes, num_dims
        shape = (2 ** (num_dims - 1), channels, channels, *[modes] * num_dims, 2)
        self.weight = nn.Parameter(torch.rand(shape) / channels**2)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, C, *grid)."""
        axes = tuple(range(2, 2 + self.num_dims))
        u_hat = torch.fft.rfftn(u, dim=axes)
        v_hat = torch.zeros_like(u_hat)
        low, high = slice(None, self.modes), slice(-self.modes, None)
        # The last axis of the transform of a real field has frequencies >= 0 only.
        for signs, weight in zip(product((low, high), repeat=self.num_dims - 1), self.weight, strict=True):
            block = (slice(None), slice(None), *signs, low)
            v_hat[block] = torch.einsum("bi...,io...->bo...", u_hat[block], torch.view_as_complex(weight))
        return torch.fft.irfftn(v_hat, s=u.shape[2:], dim=axes)


class PublishedFNO(nn.Module):
    """Lift, `num_layers` times v <- GELU(spectral(v) + pointwise(v)) (the last without GELU), project."""

    def __init__(
        self, in_channels: int, out_channels: int, *, num_dims: int, modes: int, hidden_channels: int, num_layers: int
    ) -> None:
        super().__init__()
        self.lift = nn.Linear(in_channels + num_dims, hidden_channels)
        self.spectral = nn.ModuleList(SpectralConvolution(hidden_channels, modes, num_dims) for _ in range(num_layers))
        self.pointwise = nn.ModuleList(nn.Linear(hidden_channels, hidden_channels) for _ in range(num_layers))
        self.project = nn.Sequential(
            nn.Linear(hidden_channels, PROJECTION_CHANNELS), nn.GELU(), nn.Linear(PROJECTION_CHANNELS, out_channels)
        )

    def forward(self, window: Tensor, points: Tensor) -> Tensor:
        """Snapshots (B, T, C, *grid) and coordinates (*grid, axes) to the next snapshot (B, C, *grid)."""
        u = torch.cat([window.flatten(1, 2).movedim(1, -1), points.expand(len(window), *points.shape)], -1)
        v = nn.functional.pad(self.lift(u).movedim(-1, 1), [0, PADDING] * (points.ndim - 1))
        for layer, (spectral, pointwise) in enumerate(zip(self.spectral, self.pointwise, strict=True)):
            v = spectral(v) + pointwise(v.movedim(1, -1)).movedim(-1, 1)
            v = nn.functional.gelu(v) if layer < len(self.spectral) - 1 else v
        inner = v[(..., *[slice(None, -PADDING)] * (points.ndim - 1))]
        return self.project(inner.movedim(1, -1)).movedim(-1, 1)


def grid_points(grid: Sequence[int], lengths: Sequence[float]) -> Tensor:
    """Coordinates of the cell centres of a domain that begins at 0: (*grid, axes)."""
    axes = [(torch.arange(n) + 0.5) * length / n for n, length in zip(grid, lengths, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def predict_from(model: nn.Module, u: Tensor, points: Tensor, initial_step: int) -> Tensor:
    """Predict the snapshots after the first `initial_step` of u (B, T, C, *grid): (B, T - initial_step, C, *grid).

    Each is predicted from the `initial_step` before it, the given ones first and then predictions.
    """
    window, predicted = u[:, :initial_step], []
    for _ in range(u.shape[1] - initial_step):
        predicted.append(model(window, points))
        window = torch.cat([window[:, 1:], predicted[-1][:, None]], 1)
    return torch.stack(predicted, 1)
