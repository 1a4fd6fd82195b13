"""The operator: one time step in latent space, told the PDE's parameters, boundaries, family and time step."""

import torch
from torch import Tensor, nn

from ups.models.amplitude import Amplitude
from ups.models.domain import Domain
from ups.models.sizes import Backbone, Sizes
from ups.models.token_mixer import TokenMixer


class Operator(nn.Module):
    """z_next = clip(z + change * a * F(z, z / a, coefficients; a, condition)).

    F sees the state as it is and at unit amplitude, and has unit scale itself; `change` and the amplitude a are those
    of `Amplitude`, and so are the limits of what F sees and the bound that keeps any rollout finite. No step changes
    the integral of a field that the PDE conserves: `conserved` (families, D) is the direction of that integral in the
    mean over tokens, of unit length per field, zero where nothing is conserved.
    """

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.amplitude = Amplitude(sizes.num_families, max(sizes.latent_channels))
        self.register_buffer("conserved", torch.zeros(sizes.num_families, max(sizes.latent_channels)))
        self.mixer = TokenMixer(
            backbone,
            sizes,
            num_states=2,
            num_conditions=sizes.num_conditions,
        )

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance z (B, N, D) by one time step; coefficients (B, N, D_c), condition (B, K)."""
        seen = self.amplitude.within(z, domain)
        x, summary = self.amplitude.standardize(seen, domain)
        tokens, told = torch.cat([seen, x, coefficients], -1), self.mixer.told(condition)
        step = self.mixer(tokens, summary, told, domain, z.shape[-1])
        change = self._conserving(self.amplitude.unit(z, domain) * step, domain)
        return self.amplitude.clip(z + change, z, domain)

    def _conserving(self, change: Tensor, domain: Domain) -> Tensor:
        """The change without its part that would change conserved integrals."""
        channels = change.shape[-1]
        direction = self.conserved[domain.family, :channels]
        same_field = self.amplitude.pool[domain.family, :channels, :channels] > 0
        # Not a matrix product: autocast would take it to bfloat16.
        along = ((change.mean(1) * direction).unsqueeze(-1) * same_field).sum(1)
        return change - (along * direction).unsqueeze(1)
