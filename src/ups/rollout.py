"""Autoregressive prediction with any step function: a solver, the operator, the corrected operator."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class NoisyStep(Protocol):
    """Map z -> z_next (B, ...) with noise that may remember that of the last call.

    Row i goes on with the noise of row i or, where states were picked or repeated since, of row `origins[i]`.
    """

    def __call__(self, z: Tensor, origins: Tensor | None = None) -> Tensor:
        """Advance z (B, ...); `origins` are B rows of the last call."""
        ...


def rollout(step: Callable[[Tensor], Tensor], u_0: Tensor, num_steps: int) -> Tensor:
    """Apply `step` repeatedly to u_0 (B, ...); returns u_0 and the predictions, (B, num_steps + 1, ...)."""
    states = [u_0]
    for _ in range(num_steps):
        states.append(step(states[-1]))
    return torch.stack(states, 1)
