"""Stacks of blocks, one after the other or in a U-shape, and variants of the blocks.

The stacks hold nearly all of a model's parameters and activations, so training compiles, shards and recomputes them.
The variants are attention over the whole grid or in shifted windows, and separate tokens for each field.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ups.models.sizes import Domain

LARGEST_FREQUENCY = 32  # of rotary positions, in periods (periodic axis) or half-periods per axis

Result = TypeVar("Result")


def constant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of `function`, and have the compiler insert them as constants: it cannot trace `lru_cache`.

    The attribute is that of `torch.compiler.assume_constant_result`, which would import the whole compiler. Torch 2.13
    gives all results in a graph one name, and refuses a second tensor of that name: a function that is called more than
    once in a model, or beside another, returns a tuple.
    """

    @lru_cache(maxsize=64)
    def cached(*arguments: Any) -> Result:
        with torch.inference_mode(False):  # tensors made in inference mode could not be used with gradients later
            return function(*arguments)

    @wraps(function)
    def constant_function(*arguments: Any) -> Result:
        return cached(*arguments)

    constant_function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant_function


class Blocks(nn.ModuleList):
    """Blocks applied one after the other, x <- block(x, *context).

    With `recompute` the backward pass computes the activations of a block again instead of storing them (Chen et al.
    2016, arXiv:1604.06174). `keep` (B, blocks) are factors on the residual branch of each block for each sample: 0 or
    1 / (1 - drop_path), which training sets at random at every step (stochastic depth, Huang et al. 2016,
    arXiv:1603.09382). None outside of training: every block counts in full.
    """

    recompute = False
    keep: Tensor | None = None

    def __init__(self, blocks: Iterable[nn.Module], drop_path: float = 0.0) -> None:
        super().__init__(blocks)
        self.drop_path = drop_path

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Apply all blocks to x (B, *grid, C); the result has the same shape."""
        keeps = [()] * len(self) if self.keep is None else [(keep,) for keep in self.keep.unbind(1)]
        for block, keep in zip(self, keeps, strict=True):
            if self.recompute and torch.is_grad_enabled():  # without gradients nothing is stored anyway
                x = checkpoint(block, x, *context, *keep, use_reentrant=False)
            else:
                x = block(x, *context, *keep)
        return x


class UShape(nn.Module):
    """x <- before(x), then x <- after(x + up(inner(down(x)))) with `inner` on a grid of half the points per axis.

    `down` averages pairs of tokens along each axis, then maps them linearly; `up` maps tokens linearly, then repeats
    them. An axis with an odd number of tokens, or with only two, is not halved. Ronneberger et al. 2015,
    arXiv:1505.04597.
    """

    def __init__(self, before: Blocks, inner: "Blocks | UShape", after: Blocks, channels: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = before, inner, after
        self.down, self.up = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Apply all blocks to x (B, *grid, C); the result has the same shape."""
        x = self.before(x, condition, domain)
        axes = [axis for axis, n in enumerate(domain.grid, start=1) if n % 2 == 0 and n > 2]
        coarse = x
        for axis in axes:
            coarse = coarse.unflatten(axis, (-1, 2)).mean(axis + 1)
        half = replace(domain, grid=tuple(coarse.shape[1:-1]))
        coarse = self.up(self.inner(self.down(coarse), condition, half))
        for axis in axes:
            coarse = coarse.repeat_interleave(2, axis)
        return self.after(x + coarse, condition, domain)


@constant
def rotary_angles(
    grid: tuple[int, ...], periodic: tuple[bool, ...], num_pairs: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (*grid, 1, num_pairs) of the angles by which rotary positions rotate each pair of channels.

    Pair j encodes the position along axis j modulo the number of axes. At the cell centre x = (i + 1/2) / n its angle
    is 2 pi m x on a periodic axis, so that both ends coincide, and pi m x on another, with an integer m. The m of the
    pairs of an axis lie evenly in log(1 + m) from 0 to min(n // 2, `LARGEST_FREQUENCY`).
    """
    angles = torch.zeros(*grid, num_pairs, dtype=torch.float64, device=device)
    for axis, (n, is_periodic) in enumerate(zip(grid, periodic, strict=True)):
        pairs = angles[..., axis :: len(grid)]
        exponents = torch.linspace(0, 1, max(2, pairs.shape[-1]), dtype=torch.float64, device=device)
        m = ((1 + min(LARGEST_FREQUENCY, n // 2)) ** exponents - 1).round()[-pairs.shape[-1] :]
        x = (torch.arange(n, device=device, dtype=torch.float64) + 0.5) / n
        shape = [n if a == axis else 1 for a in range(len(grid))]
        pairs.copy_(((2 if is_periodic else 1) * torch.pi * torch.outer(x, m)).view(*shape, -1).expand_as(pairs))
    return angles.cos().float().unsqueeze(-2), angles.sin().float().unsqueeze(-2)


@constant
def attention_mask(
    domain: Domain, windows: tuple[int, ...], shifts: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Which of the T tokens of a shifted window attend to which, (windows, T, T); None where all attend to all.

    The cyclic shift puts the two ends of an axis into one window. Tokens of opposite ends attend to each other only on
    a periodic axis, because elsewhere they are far apart.
    """
    side = torch.zeros(*domain.grid, 1, dtype=torch.long, device=device)
    for axis, (n, shift, is_periodic) in enumerate(zip(domain.grid, shifts, domain.periodic, strict=True)):
        is_wrapped = (torch.arange(n, device=device) >= n - shift).long() * (not is_periodic)
        side += 2**axis * is_wrapped.view([n if a == axis else 1 for a in range(len(domain.grid) + 1)])
    if not side.any():
        return None
    side = to_windows(side[None], windows).squeeze(-1)
    return side.unsqueeze(1) == side.unsqueeze(2)


class AttentionMixing(nn.Module):
    """softmax(q k^T / sqrt(E)) v per head of E channels, over all tokens or those of a window.

    q and k are rotated by `rotary_angles` (Su et al. 2021, arXiv:2104.09864), so that their product depends on the
    distance of two tokens. With `qk_norm` they are first divided by their RMS and multiplied by a trained gain (Henry
    et al. 2020, arXiv:2010.04245). A window has `window_of` tokens along each axis; with `shifted` the windows are
    displaced by half a window (Liu et al. 2021, arXiv:2103.14030).

    FlexAttention of torch 2.13 with a mask of windows gives the same within 3e-7, is slower on a CPU (forward pass of 8
    x 32 x 32 tokens of 128 channels, windows of 8 x 8, compiled, one core: 30 ms against 19 ms), and has no backward
    pass there.
    """

    def __init__(
        self, channels: int, head_channels: int, *, window: int | None = None, shifted: bool = False, qk_norm: bool
    ) -> None:
        super().__init__()
        self.head_channels, self.window, self.shifted = head_channels, window, shifted
        self.project = nn.Linear(channels, 3 * channels, bias=False)
        self.merge = nn.Linear(channels, channels, bias=False)
        self.query_norm = nn.RMSNorm(head_channels) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_channels) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, domain: Domain) -> Tensor:
        """Mix x of shape (B, *grid, C); the result has the same shape."""
        windows = tuple(window_of(n, self.window) for n in domain.grid)
        shifts = tuple(w // 2 if self.shifted and w < n else 0 for n, w in zip(domain.grid, windows, strict=True))
        axes = tuple(range(1, x.ndim - 1))
        back = tuple(-shift for shift in shifts)
        q, k, v = (to_windows(part.roll(back, axes), windows).transpose(1, 2) for part in self.heads(x, domain))
        mask = attention_mask(domain, windows, shifts, x.device) if any(shifts) else None
        if mask is not None:
            mask = mask.repeat(x.shape[0], 1, 1).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = from_windows(mixed.transpose(1, 2).flatten(2), domain.grid, windows).roll(shifts, axes)
        return self.merge(mixed)

    def heads(self, x: Tensor, domain: Domain) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both with rotary positions) and values of all heads, each (B, *grid, heads, E)."""
        q, k, v = self.project(x).unflatten(-1, (3, -1, self.head_channels)).unbind(-3)
        cos, sin = rotary_angles(domain.grid, domain.periodic, self.head_channels // 2, x.device)
        rotated = (_rotate(part, cos, sin).type_as(v) for part in (self.query_norm(q), self.key_norm(k)))
        return *rotated, v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def window_of(num_points: int, window: int | None) -> int:
    """Tokens of a window along an axis of n: n without `window`, else the largest divisor of n that is <= `window`."""
    if window is None:
        return num_points
    return max(w for w in range(1, min(window, num_points) + 1) if num_points % w == 0)


def to_windows(x: Tensor, windows: tuple[int, ...]) -> Tensor:
    """Tokens (B, *grid, ...) to the T tokens of each of W windows, (B W, T, ...)."""
    d = len(windows)
    for axis, w in reversed(list(enumerate(windows))):
        x = x.unflatten(axis + 1, (-1, w))
    across, within = [1 + 2 * axis for axis in range(d)], [2 + 2 * axis for axis in range(d)]
    return x.permute(0, *across, *within, *range(2 * d + 1, x.ndim)).flatten(d + 1, 2 * d).flatten(0, d)


def from_windows(x: Tensor, grid: tuple[int, ...], windows: tuple[int, ...]) -> Tensor:
    """Tokens of windows (B W, T, C) to tokens (B, *grid, C), the inverse of `to_windows`."""
    d = len(grid)
    counts = tuple(n // w for n, w in zip(grid, windows, strict=True))
    x = x.unflatten(1, windows).unflatten(0, (-1, *counts))
    axes = [axis for a in range(1, d + 1) for axis in (a, a + d)]
    return x.permute(0, *axes, 2 * d + 1).reshape(-1, *grid, x.shape[-1])


def split_fields(x: Tensor, num_states: int, num_fields: int, components: int) -> Tensor:
    """One token per field and grid point: (B, ..., P F K + S) to (B F, ..., P K + S), fields consecutive in the batch.

    The first channels are P states of F fields of K components. The other S, coefficients, are copied to every field.
    """
    size = num_states * num_fields * components
    states, coefficients = x[..., :size], x[..., size:]
    states = states.unflatten(-1, (num_states, num_fields, components)).movedim(-2, 1).flatten(-2)
    return torch.cat([states, coefficients.unsqueeze(1).expand(*states.shape[:-1], -1)], -1).flatten(0, 1)


def join_fields(x: Tensor, num_fields: int) -> Tensor:
    """One token per grid point with the channels of all fields: (B F, N, K) to (B, N, F K)."""
    return x.unflatten(0, (-1, num_fields)).movedim(1, 2).flatten(-2)


class FieldExchange(nn.Module):
    """Attention among the field tokens of one grid point: softmax(q k^T / sqrt(E)) v per head of E channels."""

    def __init__(self, channels: int, head_channels: int) -> None:
        super().__init__()
        self.head_channels = head_channels
        self.project = nn.Linear(channels, 3 * channels, bias=False)
        self.merge = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor, num_fields: int) -> Tensor:
        """Mix x of shape (B F, *grid, C) over its F fields; the result has the same shape."""
        points = x.flatten(1, -2).unflatten(0, (-1, num_fields)).transpose(1, 2)  # (B, N, F, C)
        heads = self.project(points).unflatten(-1, (3, -1, self.head_channels)).transpose(2, 4)
        q, k, v = heads.unbind(3)  # (B, N, heads, F, E)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(-2)
        return self.merge(mixed).transpose(1, 2).flatten(0, 1).view(x.shape)
