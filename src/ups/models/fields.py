"""Tokens that hold one field each instead of all: taking tokens apart, and the exchange between the fields of a point.

The channel-separated form of Holzschuh et al. 2025 (PDE-Transformer, arXiv:2505.24717): the cost grows with the fields.
"""

from torch import Tensor, cat, nn


def apart(x: Tensor, num_states: int, num_fields: int, components: int) -> Tensor:
    """One token per field: (B, ..., P F K + S) to (B F, ..., P K + S), the fields of a sample one after the other.

    The first channels are P states of F fields of K components; all fields share the rest.
    """
    size = num_states * num_fields * components
    own, shared = x[..., :size], x[..., size:]
    own = own.unflatten(-1, (num_states, num_fields, components)).movedim(-2, 1).flatten(-2)
    return cat([own, shared.unsqueeze(1).expand(*own.shape[:-1], -1)], -1).flatten(0, 1)


def together(x: Tensor, num_fields: int) -> Tensor:
    """All fields in one token: (B F, N, K) to (B, N, F K)."""
    return x.unflatten(0, (-1, num_fields)).movedim(1, 2).flatten(-2)


class FieldExchange(nn.Module):
    """Attention among the fields of a point: softmax(q k^T / sqrt(E)) v per head of E channels."""

    def __init__(self, channels: int, head_channels: int) -> None:
        super().__init__()
        self.head_channels = head_channels
        self.project = nn.Linear(channels, 3 * channels, bias=False)
        self.merge = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor, num_fields: int) -> Tensor:
        """Mix x of shape (B F, *grid, C) over F; the result has the same shape."""
        points = x.flatten(1, -2).unflatten(0, (-1, num_fields)).transpose(1, 2)  # (B, N, F, C)
        heads = self.project(points).unflatten(-1, (3, -1, self.head_channels)).transpose(2, 4)
        q, k, v = heads.unbind(3)  # (B, N, heads, F, E)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(-2)
        return self.merge(mixed).transpose(1, 2).flatten(0, 1).view(x.shape)
