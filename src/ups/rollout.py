"""Autoregressive prediction with any step function: a solver, the operator, the corrected operator."""

from collections.abc import Callable

import torch
from torch import Tensor


def rollout(step: Callable[[Tensor], Tensor], u_0: Tensor, num_steps: int) -> Tensor:
    """Apply `step` repeatedly to u_0 (B, ...); returns u_0 and the predictions, (B, num_steps + 1, ...)."""
    states = [u_0]
    for _ in range(num_steps):
        states.append(step(states[-1]))
    return torch.stack(states, 1)
