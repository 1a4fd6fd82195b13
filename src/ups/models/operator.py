"""The operator: one time step in latent space, told the PDE's parameters, boundaries, family and time step."""

import torch
from torch import Tensor, nn

from ups.models.mixing import Domain, TokenMixer


class Operator(nn.Module):
    """z_next = clip(z + change * F(z, coefficients; condition), -bound, bound).

    `change` (families, D) is the RMS of one step's change per latent channel, so that F has unit scale everywhere;
    `bound` (families, D) keeps a rollout inside a multiple of what training showed, hence finite for any horizon.
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
        self.mixer = TokenMixer(
            num_families=num_families,
            in_channels=latent_channels + coefficient_channels,
            out_channels=latent_channels,
            num_conditions=num_conditions,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            modes=modes,
        )
        self.register_buffer("change", torch.ones(num_families, latent_channels))
        self.register_buffer("bound", torch.ones(num_families, latent_channels))

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance z (B, N, D) by one time step; coefficients (B, N, D_c), condition (B, K)."""
        channels = z.shape[-1]
        change, bound = self.change[domain.family, :channels], self.bound[domain.family, :channels]
        step = self.mixer(torch.cat([z, coefficients], -1), condition, domain, channels)
        return torch.clamp(z + change * step, -bound, bound)
