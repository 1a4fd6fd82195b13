"""Token mixing by attention: rotary positions on physical coordinates, over the whole grid or in shifted windows."""

from functools import lru_cache

import torch
from torch import Tensor, nn

from ups.models.domain import Domain

LARGEST_FREQUENCY = 32


@lru_cache(maxsize=64)
def rotary_angles(
    grid: tuple[int, ...], periodic: tuple[bool, ...], num_pairs: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (*grid, 1, num_pairs) of the angles that turn pairs of channels with the position of a token.

    Pair j belongs to axis j modulo the number of axes. With x = (i + 1/2) / n and an integer m its angle is 2 pi m x
    where the axis is periodic, so that the wrap is exact, and pi m x where it is not. The m of an axis go from 0 to
    what the grid resolves, at most `LARGEST_FREQUENCY`, evenly in log(1 + m).
    """
    angles = torch.zeros(*grid, num_pairs, dtype=torch.float64, device=device)
    for axis, (n, wraps) in enumerate(zip(grid, periodic, strict=True)):
        pairs = angles[..., axis :: len(grid)]
        exponents = torch.linspace(0, 1, max(2, pairs.shape[-1]), dtype=torch.float64, device=device)
        m = ((1 + min(LARGEST_FREQUENCY, n // 2)) ** exponents - 1).round()[-pairs.shape[-1] :]
        x = (torch.arange(n, device=device, dtype=torch.float64) + 0.5) / n
        shape = [n if a == axis else 1 for a in range(len(grid))]
        pairs.copy_(((2 if wraps else 1) * torch.pi * torch.outer(x, m)).view(*shape, -1).expand_as(pairs))
    return angles.cos().float().unsqueeze(-2), angles.sin().float().unsqueeze(-2)


@lru_cache(maxsize=64)
def neighbours(
    domain: Domain, windows: tuple[int, ...], shifts: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Who attends to whom in each window (windows, T, T) after a shift; None where all do.

    A shift brings the two ends of an axis into one window; they are neighbours only where the axis is periodic.
    """
    side = torch.zeros(*domain.grid, 1, dtype=torch.long, device=device)
    for axis, (n, shift, wraps) in enumerate(zip(domain.grid, shifts, domain.periodic, strict=True)):
        is_wrapped = (torch.arange(n, device=device) >= n - shift).long() * (not wraps)
        side += 2**axis * is_wrapped.view([n if a == axis else 1 for a in range(len(domain.grid) + 1)])
    if not side.any():
        return None
    inside = to_windows(side[None], windows).squeeze(-1)
    return inside.unsqueeze(1) == inside.unsqueeze(2)


def _angles(
    grid: tuple[int, ...], periodic: tuple[bool, ...], num_pairs: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    return rotary_angles(grid, periodic, num_pairs, device)


def _mask(domain: Domain, windows: tuple[int, ...], shifts: tuple[int, ...], device: torch.device) -> Tensor | None:
    return neighbours(domain, windows, shifts, device)


# Compiled blocks take their results as constants, for they would trace through the caches.
for _cached in (_angles, _mask):
    _cached._dynamo_marked_constant = True  # type: ignore[attr-defined]


class AttentionMixing(nn.Module):
    """softmax(q k^T / sqrt(E)) v per head of E channels, over all tokens or those of a window.

    q and k are turned by `rotary_angles` (Su et al. 2021, arXiv:2104.09864), so that attention depends on distances.
    With `qk_norm` they have an RMS of one before, times a learned gain (Henry et al. 2020, arXiv:2010.04245). `window`
    is a number of tokens per axis, or the largest divisor of the axis below it; `shifted` moves windows by half of one
    (Liu et al. 2021, arXiv:2103.14030).
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
        inside = [to_windows(part.roll(back, axes), windows).transpose(1, 2) for part in self.heads(x, domain)]
        mask = _mask(domain, windows, shifts, x.device) if any(shifts) else None
        if mask is not None:
            mask = mask.repeat(len(x), 1, 1).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(*inside, attn_mask=mask)
        mixed = from_windows(mixed.transpose(1, 2).flatten(2), domain.grid, windows).roll(shifts, axes)
        return self.merge(mixed)

    def heads(self, x: Tensor, domain: Domain) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all heads, (B, *grid, heads, E)."""
        q, k, v = self.project(x).unflatten(-1, (3, -1, self.head_channels)).unbind(-3)
        cos, sin = _angles(domain.grid, domain.periodic, self.head_channels // 2, x.device)
        turned = (_turn(part, cos, sin).type_as(v) for part in (self.query_norm(q), self.key_norm(k)))
        return *turned, v


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def window_of(num_points: int, window: int | None) -> int:
    """Tokens of a window along an axis: all, or the largest divisor of their number that is at most `window`."""
    if window is None:
        return num_points
    return max(w for w in range(1, min(window, num_points) + 1) if num_points % w == 0)


def to_windows(x: Tensor, windows: tuple[int, ...]) -> Tensor:
    """Tokens (B, *grid, ...) to tokens of each window (B W, T, ...)."""
    d = len(windows)
    for axis, w in reversed(list(enumerate(windows))):
        x = x.unflatten(axis + 1, (-1, w))
    across, within = [1 + 2 * axis for axis in range(d)], [2 + 2 * axis for axis in range(d)]
    return x.permute(0, *across, *within, *range(2 * d + 1, x.ndim)).flatten(d + 1, 2 * d).flatten(0, d)


def from_windows(x: Tensor, grid: tuple[int, ...], windows: tuple[int, ...]) -> Tensor:
    """Tokens of each window (B W, T, C) to tokens (B, *grid, C), the inverse of `to_windows`."""
    d = len(grid)
    counts = tuple(n // w for n, w in zip(grid, windows, strict=True))
    x = x.unflatten(1, windows).unflatten(0, (-1, *counts))
    return x.permute(0, *[axis for a in range(1, d + 1) for axis in (a, a + d)], 2 * d + 1).reshape(
        -1, *grid, x.shape[-1]
    )
