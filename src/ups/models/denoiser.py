"""A denoiser of the operator's standardised residual, with EDM's preconditioning for unit variance."""

import torch
from torch import Tensor, nn

from ups.models.mixing import Domain, TokenMixer

NUM_NOISE_FEATURES = 8


def precondition(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """EDM coefficients c_skip, c_out, c_in, c_noise for noise levels (B,) and data of unit variance.

    Karras et al. 2022 (arXiv:2206.00364), Table 1 with sigma_data = 1.
    """
    norm = (sigma**2 + 1).sqrt()
    return 1 / norm**2, sigma / norm, 1 / norm, sigma.log() / 4


class Denoiser(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise, context) for x = y + sigma n.

    y = (z_next - z_operator) / scale is the residual of the operator in units of `scale` (families, D), its RMS on the
    validation split. The context is the state z, the operator's prediction, the coefficients and the condition.
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
            in_channels=3 * latent_channels + coefficient_channels,
            out_channels=latent_channels,
            num_conditions=num_conditions + NUM_NOISE_FEATURES,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            modes=modes,
        )
        self.register_buffer("scale", torch.ones(num_families, latent_channels))

    def forward(self, x: Tensor, sigma: Tensor, context: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Denoise x (B, N, D) at levels sigma (B,); context (B, N, ...) is stacked on the channels."""
        c_skip, c_out, c_in, c_noise = precondition(sigma)
        frequencies = 2.0 ** torch.arange(NUM_NOISE_FEATURES // 2, device=x.device) / 2
        angle = c_noise[:, None] * frequencies
        condition = torch.cat([condition, angle.sin(), angle.cos()], -1)
        tokens = torch.cat([c_in[:, None, None] * x, context], -1)
        F = self.mixer(tokens, condition, domain, x.shape[-1])
        return c_skip[:, None, None] * x + c_out[:, None, None] * F
