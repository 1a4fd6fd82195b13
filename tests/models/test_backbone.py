"""Blocks of the backbone by hand."""

import torch
from torch import Tensor, nn

from tests.backbones import small
from ups.models.backbone import Block
from ups.models.sizes import Domain

DOMAIN = Domain("advection_1d", (4,), (True,))


class Passes(nn.Module):
    """Takes the place of a mixing or an MLP: gives back its input."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def block(*modulation: float) -> Block:
    """A block that mixes nothing, with this shift, scale and gain before its mixing, and those before its MLP."""
    made = Block(small(), 1, shifted=False)
    made.mixing, made.local, made.mlp = Passes(), None, Passes()
    with torch.no_grad():
        made.modulation.bias.copy_(torch.tensor(modulation).repeat_interleave(8))
    return made


def signs() -> Tensor:
    """Channels +1 and -1, one sample of four tokens: a state of RMS 1."""
    return torch.tensor([1.0, -1.0]).repeat(4).expand(1, 4, 8)


def test_a_block_normalizes_shifts_and_scales_what_it_mixes():
    """With x = 3 s of RMS 3 the first half adds 0.5 (0.25 + (1 + 1) s) and the second, of gain 0, nothing."""
    x = block(0.25, 1.0, 0.5, 0.0, 0.0, 0.0)(3 * signs(), torch.zeros(1, 8), DOMAIN)
    torch.testing.assert_close(x, 4 * signs() + 0.125)


def test_a_block_normalizes_shifts_and_scales_what_its_mlp_gets():
    """With x = 3 s the first half, of gain 0, adds nothing and the second adds -2 (0.25 + (1 - 0.5) s)."""
    x = block(0.0, 0.0, 0.0, 0.25, -0.5, -2.0)(3 * signs(), torch.zeros(1, 8), DOMAIN)
    torch.testing.assert_close(x, 2 * signs() - 0.5)


def test_the_mlp_gets_what_was_mixed():
    """Untrained gains are 1: x = 3 s becomes 4 s by mixing and 5 s by the MLP."""
    made = Block(small(), 1, shifted=False)
    made.mixing, made.local, made.mlp = Passes(), None, Passes()
    torch.testing.assert_close(made(3 * signs(), torch.randn(1, 8), DOMAIN), 5 * signs())
