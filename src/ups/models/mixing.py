"""The token mixer behind operator, denoiser and steady model: truncated Fourier mixing along each axis, or attention.

The transform is a real matrix product with sampled cosines and sines (no FFT, no complex numbers), so one block
serves 1D, 2D and 3D grids, periodic or not, and any number of points per axis.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from ups.models.attention import AttentionMixing
from ups.models.blocks import Blocks, UShape
from ups.models.domain import Domain
from ups.models.sizes import Backbone, Sizes


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
    """Spatial mixing, then a pointwise MLP; both modulated by the condition (adaLN-zero, Peebles & Xie 2022).

    Mixing is linear in x, so that a stack can learn linear PDEs exactly; only the MLP is not.
    """

    def __init__(self, backbone: Backbone, num_axes: int, *, shifted: bool) -> None:
        super().__init__()
        channels = backbone.channels(num_axes)
        self.norm = nn.RMSNorm(channels, elementwise_affine=False) if backbone.norm else nn.Identity()
        self.mixing = _mixing(backbone, num_axes, shifted)
        self.local = LocalMixing(channels, num_axes)
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
            kept = _over_grid(keep.unsqueeze(1), len(domain.grid))
            gain, gain_mlp = gain * kept, gain_mlp * kept
        h = torch.addcmul(shift, self.norm(x).type_as(scale), 1 + scale)
        x = x + gain * (self.mixing(h, domain) + self.local(h, domain))
        h = torch.addcmul(shift_mlp, self.norm(x).type_as(scale), 1 + scale_mlp)
        return x + gain_mlp * self.mlp(h)


def _over_grid(modulation: Tensor, num_axes: int) -> Tensor:
    return modulation.view(modulation.shape[0], *[1] * num_axes, -1)


def _mixing(backbone: Backbone, num_axes: int, shifted: bool) -> FourierMixing | AttentionMixing:
    if backbone.mixing == "fourier":
        return FourierMixing(backbone.channels(num_axes), backbone.modes, num_axes)
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


class FamilyLinear(nn.Module):
    """A linear map per family, each as large as the largest; surplus rows and columns are unused."""

    def __init__(self, num_families: int, in_channels: int, out_channels: int, std: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(in_channels, out_channels) * std for _ in range(num_families))
        self.biases = nn.ParameterList(torch.zeros(out_channels) for _ in range(num_families))

    def forward(self, x: Tensor, family: int, out_channels: int) -> Tensor:
        """Map x (..., in) of a family to (..., out)."""
        return x @ self.weights[family][: x.shape[-1], :out_channels] + self.biases[family][:out_channels]


class Trunk(nn.Module):
    """The blocks, what they are told, and a last norm."""

    def __init__(self, backbone: Backbone, num_axes: int, num_conditions: int) -> None:
        super().__init__()
        self.channels = channels = backbone.channels(num_axes)
        self.condition = nn.Sequential(nn.Linear(num_conditions, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.blocks = make_stack(backbone, num_axes)
        self.norm = nn.RMSNorm(channels) if backbone.norm else nn.Identity()

    def forward(self, x: Tensor, summary: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance x (B, *grid, C) under a summary (B, C) and conditions (B, K); the shape stays."""
        told = nn.functional.silu(self.condition(condition) + summary)
        return self.norm(self.blocks(x, told, domain))


class TokenMixer(nn.Module):
    """Tokens (B, N, in) to tokens (B, N, out): family stem, trunk, family head (zero at first).

    The trunk is told the condition (B, K) and a summary of the state (B, S), which each family reads in its own way.
    With `experts` every family has a trunk of its own, and a batch uses that of its family alone: a mixture of experts
    with a router that knows. Otherwise all families share one.
    """

    def __init__(
        self, backbone: Backbone, sizes: Sizes, in_channels: int, summary_channels: int, num_conditions: int
    ) -> None:
        super().__init__()
        channels, num_families = max(backbone.hidden_channels), sizes.num_families
        self.conditioning = backbone.conditioning
        self.stem = FamilyLinear(num_families, in_channels, channels, std=in_channels**-0.5)
        self.summary = FamilyLinear(num_families, summary_channels, channels, std=0.1)
        axes = sizes.num_axes if backbone.experts else (max(sizes.num_axes),)
        self.trunks = nn.ModuleList(Trunk(backbone, n, num_conditions) if n else nn.Identity() for n in axes)
        self.head = FamilyLinear(num_families, channels, sizes.latent_channels, std=0.0)

    def told(self, condition: Tensor) -> Tensor:
        """What a model tells of the PDE's conditions (B, K): all, or zeros without `conditioning`."""
        return condition if self.conditioning else torch.zeros_like(condition)

    def forward(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, out_channels: int) -> Tensor:
        """Map tokens (B, N, in) to (B, N, out)."""
        family, trunk = domain.family, self.trunks[domain.family if len(self.trunks) > 1 else 0]
        x = self.stem(tokens, family, trunk.channels).unflatten(1, domain.grid)
        x = trunk(x, self.summary(summary, family, trunk.channels), condition, domain)
        return self.head(x.flatten(1, -2), family, out_channels)
