"""Stacks of blocks, flat or U-shaped: the part of a model that training may compile, shard, skip or compute twice."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ups.models.domain import Domain


class Blocks(nn.ModuleList):
    """Blocks applied in turn, x <- block(x, *context).

    With `recompute` they are computed again in the backward pass instead of kept in memory (Chen et al. 2016,
    arXiv:1604.06174). `keep` (B, blocks), where it is set, multiplies what each block adds to each sample: 0 or
    1 / (1 - drop_path), drawn anew for every training step (stochastic depth, Huang et al. 2016, arXiv:1603.09382).
    """

    recompute = False
    keep: Tensor | None = None

    def __init__(self, blocks: Iterable[nn.Module], drop_path: float = 0.0) -> None:
        super().__init__(blocks)
        self.drop_path = drop_path

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Apply all blocks to x; the shape stays."""
        keeps = [()] * len(self) if self.keep is None else [(keep,) for keep in self.keep.unbind(1)]
        for block, keep in zip(self, keeps, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, *context, *keep, use_reentrant=False)
            else:
                x = block(x, *context, *keep)
        return x


class UShape(nn.Module):
    """x <- before(x), then x <- after(x + up(inner(down(x)))) with `inner` on a grid of half the points per axis.

    Going down averages pairs of tokens, going up repeats them, each with a linear map. An axis that cannot be halved
    keeps its points. Ronneberger et al. 2015, arXiv:1505.04597.
    """

    def __init__(self, before: Blocks, inner: "Blocks | UShape", after: Blocks, channels: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = before, inner, after
        self.down, self.up = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Apply all blocks to x (B, *grid, C); the shape stays."""
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
