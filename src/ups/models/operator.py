"""The operator: one time step in latent space, told the PDE's parameters, boundaries, family and time step."""

import torch
from torch import Tensor, nn

from ups.models.amplitude import Amplitude
from ups.models.domain import Domain
from ups.models.mixing import TokenMixer


class Operator(nn.Module):
    """z_next = clip(z + change * a * F(z / a, coefficients; a, condition)).

    F sees the state at unit amplitude and has unit scale itself; `change` and the amplitude a are those of `Amplitude`,
    and so is the bound that keeps any rollout finite.
    """

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
        self.amplitude = Amplitude(num_families, latent_channels)
        self.mixer = TokenMixer(
            num_families=num_families,
            in_channels=latent_channels + coefficient_channels,
            out_channels=latent_channels,
            summary_channels=2 * latent_channels,
            num_conditions=num_conditions,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            modes=modes,
        )

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance z (B, N, D) by one time step; coefficients (B, N, D_c), condition (B, K)."""
        x, summary = self.amplitude.standardize(z, domain)
        step = self.mixer(torch.cat([x, coefficients], -1), summary, condition, domain, z.shape[-1])
        return self.amplitude.clip(z + self.amplitude.unit(z, domain) * step, z, domain)
