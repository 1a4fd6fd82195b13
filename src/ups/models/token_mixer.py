"""The token mixer behind operator, denoiser and steady model: stem, blocks and head, of each family or shared."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ups.models.domain import Domain
from ups.models.fields import apart, together
from ups.models.mixing import make_stack
from ups.models.sizes import Backbone, Sizes


class FamilyLinear(nn.Module):
    """A linear map per family, each as large as the largest; surplus rows and columns are unused.

    At first the weights of each have its own `stds`: that of a few inputs must not depend on what others have.
    """

    def __init__(self, in_channels: int, out_channels: int, stds: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(in_channels, out_channels) * std for std in stds)
        self.biases = nn.ParameterList(torch.zeros(out_channels) for _ in stds)

    def forward(self, x: Tensor, family: int, out_channels: int) -> Tensor:
        """Map x (..., in) of a family to (..., out)."""
        return x @ self.weights[family][: x.shape[-1], :out_channels] + self.biases[family][:out_channels]


class Trunk(nn.Module):
    """The blocks, what they are told, and a last norm."""

    def __init__(self, backbone: Backbone, num_axes: int, num_conditions: int) -> None:
        super().__init__()
        self.channels = channels = backbone.channels(num_axes)
        self.condition = nn.Sequential(nn.Linear(num_conditions, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.blocks = make_stack(backbone, num_axes)
        self.norm = nn.RMSNorm(channels) if backbone.norm else nn.Identity()

    def forward(self, x: Tensor, summary: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance x (B, *grid, C) under a summary (B, C) and conditions (B, K); the shape stays."""
        told = nn.functional.silu(self.condition(condition) + summary)
        return self.norm(self.blocks(x, told, domain))


class TokenMixer(nn.Module):
    """Tokens (B, N, in) to tokens (B, N, out): family stem, trunk, family head (zero at first).

    Tokens hold `num_states` latents and the coefficients. The trunk is told the condition (B, K) and a summary (B, S),
    which each family reads in its own way: two numbers per latent channel, or without states one per coefficient.
    With `experts` every family has a trunk of its own, and a batch uses that of its family alone: a mixture of experts
    with a router that knows. Otherwise all families share one. With `separate_fields` tokens in the trunk hold one
    field each, and are told which.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes, num_states: int, num_conditions: int) -> None:
        super().__init__()
        channels, families = max(backbone.hidden_channels), range(sizes.num_families)
        latents, coefficients = max(sizes.latent_channels), max(sizes.coefficient_channels)
        summary_channels = 2 * latents if num_states else coefficients
        self.conditioning, self.num_states = backbone.conditioning, num_states
        self.num_fields = tuple(sizes.num_fields) if backbone.separate_fields else None
        if self.num_fields is not None:
            num_conditions += max(self.num_fields)
        stds = [_num_inputs(sizes, family, num_states, backbone) ** -0.5 for family in families]
        self.stem = FamilyLinear(num_states * latents + coefficients, channels, stds)
        self.summary = FamilyLinear(summary_channels, channels, [0.1 for _ in families])
        axes = sizes.num_axes if backbone.experts else (max(sizes.num_axes),)
        self.trunks = nn.ModuleList(Trunk(backbone, n, num_conditions) if n else nn.Identity() for n in axes)
        self.head = FamilyLinear(channels, latents, [0.0 for _ in families])

    def told(self, condition: Tensor) -> Tensor:
        """What a model tells of the PDE's conditions (B, K): all, or zeros without `conditioning`."""
        return condition if self.conditioning else torch.zeros_like(condition)

    def forward(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, out_channels: int) -> Tensor:
        """Map tokens (B, N, in) to (B, N, out)."""
        if self.num_fields is None:
            return self._mix(tokens, summary, condition, domain, out_channels)
        num_fields = self.num_fields[domain.family]
        components = out_channels // num_fields
        number = torch.eye(max(self.num_fields), device=tokens.device)[:num_fields].repeat(len(tokens), 1)
        output = self._mix(
            apart(tokens, self.num_states, num_fields, components),
            apart(summary, 2 if self.num_states else 0, num_fields, components),
            torch.cat([condition.repeat_interleave(num_fields, 0), number], -1),
            replace(domain, num_fields=num_fields),
            components,
        )
        return together(output, num_fields)

    def _mix(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, out_channels: int) -> Tensor:
        family, trunk = domain.family, self.trunks[domain.family if len(self.trunks) > 1 else 0]
        x = self.stem(tokens, family, trunk.channels).unflatten(1, domain.grid)
        x = trunk(x, self.summary(summary, family, trunk.channels), condition, domain)
        return self.head(x.flatten(1, -2), family, out_channels)


def _num_inputs(sizes: Sizes, family: int, num_states: int, backbone: Backbone) -> int:
    """Numbers that a token of a family holds; 1 for those without data."""
    latents = sizes.latent_channels[family]
    if backbone.separate_fields:
        latents //= sizes.num_fields[family]
    return max(1, num_states * latents + sizes.coefficient_channels[family])
