"""Blocks that mix tokens: truncated Fourier mixing along each axis, or attention, then a pointwise MLP.

The transform is a real matrix product with sampled cosines and sines (no FFT, no complex numbers), so one block
serves 1D, 2D and 3D grids, periodic or not, and any number of points per axis.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from ups.models.attention import AttentionMixing
from ups.models.blocks import Blocks, UShape
from ups.models.domain import Domain
from ups.models.fields import FieldExchange
from ups.models.sizes import Backbone


@lru_cache(maxsize=64)
def fourier_basis(num_points: int, modes: int, periodic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Analysis (4M, n) and synthesis (n, 2M) matrices of cosines and sines at cell centres x = (i + 1/2) / n.

    Frequencies are k = 0..M-1 turns per axis where it is periodic, k half-turns where it is not, so that a function
    with different values at the two ends is represented too. M = min(modes, n // 2), at least 1. With the mode
    u_hat = c + i s, the rows of the analysis are c, -s, s, c per mode: both factors that `FourierMixing` multiplies by
    the real and imaginary part of its matrix. The columns of the synthesis are cosine, sine per mode.
    """
    num_modes = max(1, min(modes, num_points // 2))
    x = (torch.arange(num_points, device=device, dtype=torch.float64) + 0.5) / num_points
    angle = (2 if periodic else 1) * torch.pi * torch.outer(torch.arange(num_modes, device=device), x)
    cos, sin = angle.cos(), angle.sin()
    norm = torch.full((num_modes, 1, 1), 2.0 / num_points, device=device, dtype=torch.float64)
    norm[0] = 1.0 / num_points
    analysis = (norm * torch.stack([cos, -sin, sin, cos], 1)).flatten(0, 1)
    return analysis.float(), torch.stack([cos, sin], 1).flatten(0, 1).T.float().contiguous()


def constant_basis(num_points: int, modes: int, periodic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """`fourier_basis`; compiled blocks take its result as a constant, for they would trace through the cache."""
    return fourier_basis(num_points, modes, periodic, device)


# What torch.compiler.assume_constant_result does, without its import of the compiler.
constant_basis._dynamo_marked_constant = True  # type: ignore[attr-defined]


class FourierMixing(nn.Module):
    """Sum over axes of: transform along the axis, multiply each mode by a complex C x C matrix, transform back.

    Li et al. 2020 (arXiv:2010.08895), eq. 4, factorised over axes as in Tran et al. 2021 (arXiv:2111.13802).
    """

    def __init__(self, channels: int, modes: int, num_axes: int) -> None:
        super().__init__()
        self.modes = modes
        std = (0.5 / channels) ** 0.5 * 0.5
        self.weights = nn.ParameterList(torch.randn(modes, 2, channels, channels) * std for _ in range(num_axes))

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Mix x of shape (B, *grid, C); the result has the same shape."""
        return sum(self._along(x, self.weights[axis], axis, periodic) for axis, periodic in enumerate(domain.periodic))

    def _along(self, x: Tensor, weight: Tensor, axis: int, periodic: bool) -> Tensor:
        analysis, synthesis = constant_basis(x.shape[axis + 1], self.modes, periodic, x.device)
        num_modes, channels = synthesis.shape[1] // 2, x.shape[-1]
        lines = x.flatten(0, axis).flatten(2)  # (L, n, R C): L lines before the axis, R after it
        num_lines = lines.shape[0]
        # bmm, not @: matmul would first transpose the whole state to fold it into one matrix.
        x_hat = torch.bmm(analysis.expand(num_lines, -1, -1), lines).view(num_lines, num_modes, 2, 2, -1, channels)
        x_hat = x_hat.permute(1, 0, 2, 4, 3, 5).reshape(num_modes, -1, 2 * channels)  # (M, L 2 R, 2 C)
        x_hat = torch.bmm(x_hat, weight[:num_modes].flatten(1, 2)).view(num_modes, num_lines, 2, -1)
        x_hat = x_hat.transpose(0, 1).reshape(num_lines, 2 * num_modes, -1)
        return torch.bmm(synthesis.expand(num_lines, -1, -1), x_hat).view(x.shape)


class LocalMixing(nn.Module):
    """A depthwise 3-point convolution along each axis, summed; periodic axes wrap, others repeat the edge."""

    def __init__(self, channels: int, num_axes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3, channels) * 0.3 for _ in range(num_axes))

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Mix x of shape (B, *grid, C); the result has the same shape."""
        weights = [self.weights[axis].type_as(x) for axis in range(len(domain.grid))]
        mixed = sum(weight[1] for weight in weights) * x
        for axis, (weight, periodic) in enumerate(zip(weights, domain.periodic, strict=True)):
            before, after = _neighbours(x, axis + 1, periodic)
            mixed = mixed + weight[0] * before + weight[2] * after
        return mixed


def _neighbours(x: Tensor, axis: int, periodic: bool) -> tuple[Tensor, Tensor]:
    if periodic:
        return x.roll(1, axis), x.roll(-1, axis)
    last = x.shape[axis] - 1
    before = torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 0, last)], axis)
    after = torch.cat([x.narrow(axis, 1, last), x.narrow(axis, last, 1)], axis)
    return before, after


class MLP(nn.Module):
    """Pointwise, C -> 2 C -> C."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)))


class Block(nn.Module):
    """Mixing of tokens, then a pointwise MLP; both modulated by the condition (adaLN-zero, Peebles & Xie 2022).

    Mixing is linear in x, so that a stack can learn linear PDEs exactly; only the MLP is not.
    """

    def __init__(self, backbone: Backbone, num_axes: int, *, shifted: bool) -> None:
        super().__init__()
        channels = backbone.channels(num_axes)
        self.norm = nn.RMSNorm(channels, elementwise_affine=False) if backbone.norm else nn.Identity()
        self.mixing = _mixing(backbone, num_axes, shifted)
        self.local = LocalMixing(channels, num_axes)
        self.exchange = FieldExchange(channels, backbone.head_channels) if backbone.separate_fields else None
        self.mlp = MLP(channels)
        self.modulation = nn.Linear(channels, 6 * channels)
        nn.init.zeros_(self.modulation.weight)
        with torch.no_grad():
            self.modulation.bias.copy_(torch.tensor([0.0, 0.0, 1.0]).repeat(2).repeat_interleave(channels))

    def forward(self, x: Tensor, condition: Tensor, domain: Domain, keep: Tensor | None = None) -> Tensor:
        """Mix x (B, *grid, C) under conditions (B, C); `keep` (B,) multiplies what is added to each sample."""
        modulation = self.modulation(condition).unflatten(-1, (6, -1)).unbind(1)
        shift, scale, gain, shift_mlp, scale_mlp, gain_mlp = (_over_grid(m, len(domain.grid)) for m in modulation)
        if keep is not None:
            kept = _over_grid(keep.repeat_interleave(domain.num_fields).unsqueeze(1), len(domain.grid))
            gain, gain_mlp = gain * kept, gain_mlp * kept
        h = torch.addcmul(shift, self.norm(x).type_as(scale), 1 + scale)
        mixed = self.mixing(h, domain) + self.local(h, domain)
        if self.exchange is not None:
            mixed = mixed + self.exchange(h, domain.num_fields)
        x = x + gain * mixed
        h = torch.addcmul(shift_mlp, self.norm(x).type_as(scale), 1 + scale_mlp)
        return x + gain_mlp * self.mlp(h)


def _over_grid(modulation: Tensor, num_axes: int) -> Tensor:
    return modulation.view(modulation.shape[0], *[1] * num_axes, -1)


def _mixing(backbone: Backbone, num_axes: int, shifted: bool) -> FourierMixing | AttentionMixing:
    if backbone.mixing == "fourier":
        return FourierMixing(backbone.channels(num_axes), backbone.modes[num_axes - 1], num_axes)
    return AttentionMixing(
        backbone.channels(num_axes),
        backbone.head_channels,
        window=backbone.window,
        shifted=shifted,
        qk_norm=backbone.qk_norm,
    )


def make_stack(backbone: Backbone, num_axes: int) -> Blocks | UShape:
    """All blocks: one after the other, or equally many on each side of every level and the rest on the coarsest."""
    blocks = [Block(backbone, num_axes, shifted=position % 2 == 1) for position in range(backbone.num_layers)]
    aside = backbone.num_layers // (2 * backbone.levels - 1)

    def stack(blocks: list[Block], levels: int) -> Blocks | UShape:
        if levels == 1:
            return Blocks(blocks, backbone.drop_path)
        before, inner, after = blocks[:aside], blocks[aside:-aside], blocks[-aside:]
        sides = (Blocks(side, backbone.drop_path) for side in (before, after))
        return UShape(next(sides), stack(inner, levels - 1), next(sides), backbone.channels(num_axes))

    return stack(blocks, backbone.levels)
