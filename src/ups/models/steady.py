"""The steady model: coefficient fields to the steady solution, in latent space."""

import torch
from torch import Tensor, nn

from ups.models.mixing import Domain, TokenMixer


class SteadyModel(nn.Module):
    """z = bound-clipped F(coefficients; condition); deterministic, for the solution is a function of its inputs."""

    def __init__(
        self,
        *,
        num_families: int,
        latent_channels: int,
        coefficient_channels: int,
        num_conditions: int,
        hidden_channels: int,
        num_layers: int,
        modes: int,
    ) -> None:
        super().__init__()
        self.mixer = TokenMixer(
            num_families=num_families,
            in_channels=coefficient_channels,
            out_channels=latent_channels,
            num_conditions=num_conditions,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            modes=modes,
        )
        self.register_buffer("bound", torch.ones(num_families, latent_channels))

    def forward(self, coefficients: Tensor, condition: Tensor, domain: Domain, latent_channels: int) -> Tensor:
        """Solutions z (B, N, D) for coefficients (B, N, D_c)."""
        bound = self.bound[domain.family, :latent_channels]
        return torch.clamp(self.mixer(coefficients, condition, domain, latent_channels), -bound, bound)
