"""A stack of blocks, the part of a model that training may compile, shard or compute twice."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.ModuleList):
    """Blocks applied in turn, x <- block(x, *context).

    With `recompute` they are computed again in the backward pass instead of kept in memory (Chen et al. 2016,
    arXiv:1604.06174).
    """

    recompute = False

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Apply all blocks to x; the shape stays."""
        for block in self:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, *context, use_reentrant=False)
            else:
                x = block(x, *context)
        return x
