"""A denoiser of the standardised residual of operator or steady model, with EDM's preconditioning for unit variance."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.models.domain import Domain
from ups.models.operator import Operator
from ups.models.sizes import Backbone, Sizes
from ups.models.steady import SteadyModel
from ups.models.token_mixer import TokenMixer

NUM_NOISE_FEATURES = 8
SMALLEST_STEP = 0.05


def precondition(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """EDM coefficients c_skip, c_out, c_in, c_noise for noise levels (B,) and data of unit variance.

    Karras et al. 2022 (arXiv:2206.00364), Table 1 with sigma_data = 1.
    """
    norm = (sigma**2 + 1).sqrt()
    return 1 / norm**2, sigma / norm, 1 / norm, sigma.log() / 4


@dataclass(frozen=True)
class Prediction:
    """A model's step and what a denoiser is told about it.

    z_pred (B, N, D); tokens (B, N, 2 D + D_c): the state at unit amplitude, the predicted change in units of its own
    RMS, the coefficients; summary (B, 2 D); unit (B, 1, D): that RMS, one per field, in which residuals are measured,
    for a model misses more where more happens.
    """

    z_pred: Tensor
    tokens: Tensor
    summary: Tensor
    unit: Tensor


def predict(
    model: Operator | SteadyModel, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain
) -> Prediction:
    """Advance z (B, N, D) by one step and describe the step; a steady solution is a step from zero."""
    z_pred, amplitude = model(z, coefficients, condition, domain), model.amplitude
    x, summary = amplitude.standardize(amplitude.within(z, domain), domain)
    change = z_pred - z
    unit = torch.maximum(amplitude.field_rms(change, domain), SMALLEST_STEP * amplitude.unit(z, domain))
    return Prediction(z_pred, torch.cat([x, change / unit, coefficients], -1), summary, unit)


class Denoiser(nn.Module):
    """D(y + sigma n; sigma) = c_skip x + c_out F(c_in x; c_noise, context) for x = y + sigma n.

    y = (z_next - z_pred) / (scale * unit) is the residual of a model's step; `scale` (families, D) is its median RMS
    on the validation split, one value per field. The context is the model's `Prediction`.
    """

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.mixer = TokenMixer(
            backbone,
            sizes,
            num_states=3,
            num_conditions=sizes.num_conditions + NUM_NOISE_FEATURES,
        )
        self.register_buffer("scale", torch.ones(sizes.num_families, max(sizes.latent_channels)))

    def forward(self, x: Tensor, sigma: Tensor, context: Prediction, condition: Tensor, domain: Domain) -> Tensor:
        """Denoise x (B, N, D) at levels sigma (B,)."""
        c_skip, c_out, c_in, c_noise = precondition(sigma)
        frequencies = 2.0 ** torch.arange(NUM_NOISE_FEATURES // 2, device=x.device) / 2
        angle = c_noise[:, None] * frequencies
        condition = torch.cat([self.mixer.told(condition), angle.sin(), angle.cos()], -1)
        tokens = torch.cat([c_in[:, None, None] * x, context.tokens], -1)
        F = self.mixer(tokens, context.summary, condition, domain, x.shape[-1])
        return c_skip[:, None, None] * x + c_out[:, None, None] * F

    def units(self, context: Prediction, domain: Domain) -> Tensor:
        """What a residual of one is in latents, (B, 1, D)."""
        return self.scale[domain.family, : context.z_pred.shape[-1]] * context.unit
