"""The network of operator, denoiser and steady model: a stem and a head per family, and a trunk of blocks between them.

Blocks mix tokens by truncated Fourier mixing along each axis, or by attention (`ups.models.blocks`), then apply an
MLP to each token and its neighbours. The Fourier transform is a real matrix product with sampled cosines and sines (no
FFT, no complex numbers): one block serves 1D, 2D and 3D grids, periodic or not, with any number of points per axis.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ups.models.blocks import AttentionMixing, Blocks, FieldExchange, UShape, constant, join_fields, split_fields
from ups.models.sizes import Backbone, Domain, Sizes, row_of


class FamilyLinear(nn.Module):
    """One linear map per family, all of the size of the largest family; surplus rows and columns are unused.

    Initial weights have the standard deviation `stds[row]`, because families differ in their number of inputs.
    """

    def __init__(self, in_channels: int, out_channels: int, stds: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(in_channels, out_channels) * std for std in stds)
        self.biases = nn.ParameterList(torch.zeros(out_channels) for _ in stds)

    def forward(self, x: Tensor, row: int, out_channels: int) -> Tensor:
        """Map x (..., in) of the family in `row` to (..., out)."""
        return x @ self.weights[row][: x.shape[-1], :out_channels] + self.biases[row][:out_channels]


class Trunk(nn.Module):
    """All blocks, the embedding of the condition that modulates them, and a last norm."""

    def __init__(self, backbone: Backbone, num_axes: int, num_conditions: int) -> None:
        super().__init__()
        self.channels = channels = backbone.channels(num_axes)
        self.condition = nn.Sequential(nn.Linear(num_conditions, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.blocks = make_stack(backbone, num_axes)
        self.norm = nn.RMSNorm(channels) if backbone.norm else nn.Identity()

    def forward(self, x: Tensor, summary: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Transform x (B, *grid, C), given a summary of the state (B, C) and the condition (B, K); the shape stays."""
        embedding = nn.functional.silu(self.condition(condition) + summary)
        return self.norm(self.blocks(x, embedding, domain))


class TokenMixer(nn.Module):
    """Tokens (B, N, in) to tokens (B, N, out): stem of the family, trunk, head of the family (zero at first).

    A token holds `num_states` latents, one more of families with history, and the coefficients. Blocks are modulated by
    the condition (B, K) and a summary of the state (B, S): two numbers per latent channel, or without states one per
    coefficient channel. With `separate_fields` every token of the trunk holds one field, whose number is part of the
    condition.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes, num_states: int, num_conditions: int) -> None:
        super().__init__()
        channels, rows = max(backbone.hidden_channels), range(len(sizes.families))
        latents, coefficients = max(sizes.latent_channels), max(sizes.coefficient_channels)
        summary_channels = 2 * latents if num_states else coefficients
        self.rows, self.conditioning = sizes.rows, backbone.conditioning
        self.num_states = [num_states + (name in sizes.history) for name in sizes.families]
        self.num_fields = tuple(sizes.num_fields) if backbone.separate_fields else None
        if self.num_fields is not None:
            num_conditions += max(self.num_fields)
        stds = [_num_inputs(sizes, row, self.num_states[row], backbone) ** -0.5 for row in rows]
        self.stem = FamilyLinear(max(self.num_states) * latents + coefficients, channels, stds)
        self.summary = FamilyLinear(summary_channels, channels, [0.1 for _ in rows])
        axes = sizes.num_axes if backbone.separate_trunks else (max(sizes.num_axes),)
        self.trunks = nn.ModuleList(Trunk(backbone, n, num_conditions) if n else nn.Identity() for n in axes)
        self.head = FamilyLinear(channels, latents, [0.0 for _ in rows])

    def visible(self, condition: Tensor) -> Tensor:
        """The condition (B, K) as model input: zeros without `conditioning`."""
        return condition if self.conditioning else torch.zeros_like(condition)

    def forward(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, out_channels: int) -> Tensor:
        """Map tokens (B, N, in) to (B, N, out)."""
        if self.num_fields is None:
            return self._mix(tokens, summary, condition, domain, out_channels)
        row = row_of(self.rows, domain.family)
        num_fields, num_states = self.num_fields[row], self.num_states[row]
        components = out_channels // num_fields
        number = torch.eye(max(self.num_fields), device=tokens.device)[:num_fields].repeat(tokens.shape[0], 1)
        output = self._mix(
            split_fields(tokens, num_states, num_fields, components),
            split_fields(summary, 2 if num_states else 0, num_fields, components),
            torch.cat([condition.repeat_interleave(num_fields, 0), number], -1),
            replace(domain, num_fields=num_fields),
            components,
        )
        return join_fields(output, num_fields)

    def _mix(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, out_channels: int) -> Tensor:
        row = row_of(self.rows, domain.family)
        trunk = self.trunks[row if len(self.trunks) > 1 else 0]
        x = self.stem(tokens, row, trunk.channels).unflatten(1, domain.grid)
        x = trunk(x, self.summary(summary, row, trunk.channels), condition, domain)
        return self.head(x.flatten(1, -2), row, out_channels)


def _num_inputs(sizes: Sizes, row: int, num_states: int, backbone: Backbone) -> int:
    """Numbers that a token of a family holds; 1 for a family without data."""
    latents = sizes.latent_channels[row]
    if backbone.separate_fields:
        latents //= sizes.num_fields[row]
    return max(1, num_states * latents + sizes.coefficient_channels[row])


@constant
def fourier_basis(num_points: int, modes: int, periodic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Analysis (4M, n) and synthesis (n, 2M) matrices of cosines and sines at cell centres x = (i + 1/2) / n.

    Frequencies are k = 0..M-1 periods per axis if it is periodic, k half-periods if not, so that different values at
    the two ends are represented too. M = min(modes, n // 2), at least 1. Rows of the analysis per mode u_hat = c + i s:
    c, -s, s, c, which `FourierMixing` multiplies by real and imaginary part of its matrix; columns of the synthesis:
    cosine, sine.
    """
    num_modes = max(1, min(modes, num_points // 2))
    x = (torch.arange(num_points, device=device, dtype=torch.float64) + 0.5) / num_points
    angle = (2 if periodic else 1) * torch.pi * torch.outer(torch.arange(num_modes, device=device), x)
    cos, sin = angle.cos(), angle.sin()
    norm = torch.full((num_modes, 1, 1), 2.0 / num_points, device=device, dtype=torch.float64)
    norm[0] = 1.0 / num_points
    analysis = (norm * torch.stack([cos, -sin, sin, cos], 1)).flatten(0, 1)
    return analysis.float(), torch.stack([cos, sin], 1).flatten(0, 1).T.float().contiguous()


class FourierMixing(nn.Module):
    """Sum over axes of: transform along the axis, multiply each mode by a complex C x C matrix, transform back.

    Li et al. 2020 (arXiv:2010.08895), eq. 4, factorised over axes as in Tran et al. 2021 (arXiv:2111.13802).
    """

    def __init__(self, channels: int, modes: int, num_axes: int) -> None:
        super().__init__()
        self.modes = modes
        # Real and imaginary parts of variance 0.5 / C preserve the variance of a mode; their std is half of that.
        std = (0.5 / channels) ** 0.5 * 0.5
        self.weights = nn.ParameterList(torch.randn(modes, 2, channels, channels) * std for _ in range(num_axes))

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Mix x of shape (B, *grid, C); the result has the same shape."""
        return sum(self._along(x, self.weights[axis], axis, periodic) for axis, periodic in enumerate(domain.periodic))

    def _along(self, x: Tensor, weight: Tensor, axis: int, periodic: bool) -> Tensor:
        bases = fourier_basis(x.shape[axis + 1], self.modes, periodic, x.device)
        analysis, synthesis = (basis.to(torch.promote_types(x.dtype, basis.dtype)) for basis in bases)
        num_modes, channels = synthesis.shape[1] // 2, x.shape[-1]
        lines = x.flatten(0, axis).flatten(2)  # (L, n, R C): L lines before the axis, R after it
        num_lines = lines.shape[0]
        # bmm, not @: matmul would first transpose the whole state to fold it into one matrix.
        x_hat = torch.bmm(analysis.expand(num_lines, -1, -1), lines).view(num_lines, num_modes, 2, 2, -1, channels)
        x_hat = x_hat.permute(1, 0, 2, 4, 3, 5).reshape(num_modes, -1, 2 * channels)  # (M, L 2 R, 2 C)
        x_hat = torch.bmm(x_hat, weight[:num_modes].flatten(1, 2)).view(num_modes, num_lines, 2, -1)
        x_hat = x_hat.transpose(0, 1).reshape(num_lines, 2 * num_modes, -1)
        return torch.bmm(synthesis.expand(num_lines, -1, -1), x_hat).view(x.shape)


def neighbours(x: Tensor, axis: int, periodic: bool) -> tuple[Tensor, Tensor]:
    """Values of x at the previous and at the next point along an axis, each of the shape of x."""
    if periodic:
        return x.roll(1, axis), x.roll(-1, axis)
    last = x.shape[axis] - 1
    before = torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 0, last)], axis)
    after = torch.cat([x.narrow(axis, 1, last), x.narrow(axis, last, 1)], axis)
    return before, after


class LocalMixing(nn.Module):
    """A depthwise convolution of 3 points on a 1D grid; at an end that is not periodic a token is its own neighbour.

    Fourier mixing has fewer modes than such a grid: this is a linear map of its shorter waves. With nonlinear maps
    alone a rollout may diverge that begins with a steeper state than any of training.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.3 * torch.randn(3, channels))

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Mix x of shape (B, n, C); the result has the same shape."""
        before, after = neighbours(x, 1, domain.periodic[0])
        weights = self.weights.type_as(x)  # under autocast x is bfloat16, parameters are not
        return weights[0] * before + weights[1] * x + weights[2] * after


class LocalMLP(nn.Module):
    """A linear map of each token with its two neighbours along each axis, GELU, a linear map: (2 d + 1) C -> 2 C -> C.

    The first map is a convolution with 2 d + 1 points. At an end that is not periodic the token is its own neighbour.
    """

    def __init__(self, channels: int, num_axes: int) -> None:
        super().__init__()
        self.first = nn.Linear((2 * num_axes + 1) * channels, 2 * channels)
        self.second = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Map x of shape (B, *grid, C); the result has the same shape."""
        sides = [n for axis, periodic in enumerate(domain.periodic, start=1) for n in neighbours(x, axis, periodic)]
        h = torch.cat([x, *sides], -1)
        if missing := self.first.in_features - h.shape[-1]:  # a trunk of all families, on a grid of fewer axes
            h = nn.functional.pad(h, (0, missing))
        return self.second(nn.functional.gelu(self.first(h)))


class Block(nn.Module):
    """x <- x + gain * mix(h), then x <- x + gain * mlp(h), each with h = shift + (1 + scale) * norm(x).

    Shift, scale and gain (B, C) are linear in the condition (adaLN, Peebles & Xie 2022, arXiv:2212.09748). They start
    at 0, 0 and 1 for every condition; adaLN-zero would start with gain 0. Mixing is global (Fourier or attention), plus
    a convolution in 1D (`LocalMixing`), plus attention among fields if these are separate; the MLP sees the neighbours
    of a token too (`LocalMLP`). With Fourier mixing and without norm only the MLP is nonlinear in x, so that a stack
    can represent the solution operator of a linear PDE.
    """

    def __init__(self, backbone: Backbone, num_axes: int, *, shifted: bool) -> None:
        super().__init__()
        channels = backbone.channels(num_axes)
        self.norm = nn.RMSNorm(channels, elementwise_affine=False) if backbone.norm else nn.Identity()
        self.mixing = _mixing(backbone, num_axes, shifted)
        self.local = LocalMixing(channels) if num_axes == 1 else None
        self.exchange = FieldExchange(channels, backbone.head_channels) if backbone.separate_fields else None
        self.mlp = LocalMLP(channels, num_axes)
        self.modulation = nn.Linear(channels, 6 * channels)
        nn.init.zeros_(self.modulation.weight)
        with torch.no_grad():
            self.modulation.bias.copy_(torch.tensor([0.0, 0.0, 1.0]).repeat(2).repeat_interleave(channels))

    def forward(self, x: Tensor, condition: Tensor, domain: Domain, keep: Tensor | None = None) -> Tensor:
        """Transform x (B, *grid, C) under a condition (B, C); `keep` (B,) are factors on both gains (`Blocks.keep`).

        With separate fields x has F consecutive rows per sample, and so has the condition.
        """
        modulation = self.modulation(condition).unflatten(-1, (6, -1)).unbind(1)
        shift, scale, gain, shift_mlp, scale_mlp, gain_mlp = (_over_grid(m, len(domain.grid)) for m in modulation)
        if keep is not None:
            kept = _over_grid(keep.repeat_interleave(domain.num_fields).unsqueeze(1), len(domain.grid))
            gain, gain_mlp = gain * kept, gain_mlp * kept
        h = torch.addcmul(shift, self.norm(x).type_as(scale), 1 + scale)
        mixed = self.mixing(h, domain)
        if self.local is not None:
            mixed = mixed + self.local(h, domain)
        if self.exchange is not None:
            mixed = mixed + self.exchange(h, domain.num_fields)
        x = x + gain * mixed
        h = torch.addcmul(shift_mlp, self.norm(x).type_as(scale), 1 + scale_mlp)
        return x + gain_mlp * self.mlp(h, domain)


def _over_grid(modulation: Tensor, num_axes: int) -> Tensor:
    """(B, C) to (B, 1, ..., 1, C), which broadcasts over the grid."""
    return modulation.view(modulation.shape[0], *[1] * num_axes, -1)


def _mixing(backbone: Backbone, num_axes: int, shifted: bool) -> FourierMixing | AttentionMixing:
    channels, head_channels = backbone.channels(num_axes), backbone.head_channels
    if backbone.mixing == "fourier":
        return FourierMixing(channels, backbone.modes[num_axes - 1], num_axes)
    return AttentionMixing(channels, head_channels, window=backbone.window, shifted=shifted, qk_norm=backbone.qk_norm)


def make_stack(backbone: Backbone, num_axes: int) -> Blocks | UShape:
    """All blocks of a trunk: in a row for one level, else in a U-shape.

    Every level but the coarsest has equally many blocks before and after the coarser levels, the coarsest has the rest.
    Every other block shifts its attention windows.
    """
    # All blocks are created first, in order, so that the same seed gives the same blocks for any number of levels.
    blocks = [Block(backbone, num_axes, shifted=position % 2 == 1) for position in range(backbone.num_layers)]
    per_side = backbone.num_layers // (2 * backbone.levels - 1)

    def stack(blocks: list[Block], levels: int) -> Blocks | UShape:
        if levels == 1:
            return Blocks(blocks, backbone.drop_path)
        before, after = (Blocks(side, backbone.drop_path) for side in (blocks[:per_side], blocks[-per_side:]))
        return UShape(before, stack(blocks[per_side:-per_side], levels - 1), after, backbone.channels(num_axes))

    return stack(blocks, backbone.levels)
