"""Stacks of blocks, one after the other or in a U-shape.

They hold nearly all of a model's parameters and activations, so training compiles, shards and recomputes these classes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ups.models.sizes import Domain

Result = TypeVar("Result")


def constant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of `function`, and have the compiler insert them as constants: it cannot trace `lru_cache`.

    The attribute is that of `torch.compiler.assume_constant_result`, which would import the whole compiler.
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
