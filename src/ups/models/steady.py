"""The steady model: coefficient fields to the steady solution, in latent space."""

import torch
from torch import Tensor, nn

from ups.models.amplitude import Amplitude
from ups.models.domain import Domain
from ups.models.mixing import TokenMixer


class SteadyModel(nn.Module):
    """z = clip(F(coefficients; condition)); deterministic, for the solution is a function of its inputs."""

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
            summary_channels=coefficient_channels,
            num_conditions=num_conditions,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            modes=modes,
        )
        self.amplitude = Amplitude(num_families, latent_channels)

    def forward(self, coefficients: Tensor, condition: Tensor, domain: Domain, latent_channels: int) -> Tensor:
        """Solutions z (B, N, D) for coefficients (B, N, D_c)."""
        summary = coefficients.mean(1)
        z = self.mixer(coefficients, summary, condition, domain, latent_channels)
        return self.amplitude.clip(z, torch.zeros_like(z), domain)
