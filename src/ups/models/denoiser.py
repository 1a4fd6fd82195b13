"""The denoiser of residuals (truth minus the operator's step or the steady model's solution), and its losses.

The losses take any denoiser D(x, sigma) of data of unit variance: x (B, ...) at noise levels sigma (B,).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.models.backbone import TokenMixer
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Backbone, Domain, Sizes, row_of

Denoise = Callable[[Tensor, Tensor], Tensor]  # D(x, sigma)

NUM_NOISE_FEATURES = 8
SMALLEST_CHANGE = 0.05  # of the expected change of a step


def precondition(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """EDM coefficients c_skip, c_out, c_in, c_noise for noise levels (B,) and data of unit variance.

    Karras et al. 2022 (arXiv:2206.00364), Table 1 with sigma_data = 1.
    """
    norm = (sigma**2 + 1).sqrt()
    return 1 / norm**2, sigma / norm, 1 / norm, sigma.log() / 4


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step, and its description as input of the denoiser.

    - `z_pred` (B, N, D): the predicted state
    - `tokens` (B, N, 2 D + D_c): state at zero mean and unit amplitude, predicted change / `change_rms`, coefficients
    - `summary` (B, 2 D): means and log amplitudes of the state
    - `change_rms` (B, 1, D): RMS of the predicted change per field, the unit of residuals: a model errs more where the
      state changes more
    """

    z_pred: Tensor
    tokens: Tensor
    summary: Tensor
    change_rms: Tensor


def predict_step(
    model: Operator | SteadyModel, state: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain
) -> PredictedStep:
    """Advance a state (B, N, D) by one step and describe the step; a steady solution is a step from 0.

    Of states of two snapshots (`History`) the description has the later one alone.
    """
    statistics, state_next = model.statistics, model(state, coefficients, condition, domain)
    z, z_pred = (statistics.history.split(each, domain)[0] for each in (state, state_next))
    x, summary = statistics.standardize(statistics.clamp_state(z, domain), domain)
    change = z_pred - z
    smallest = SMALLEST_CHANGE * statistics.expected_change(z, domain)
    change_rms = torch.maximum(statistics.field_rms(change, domain), smallest)
    return PredictedStep(z_pred, torch.cat([x, change / change_rms, coefficients], -1), summary, change_rms)


class Denoiser(nn.Module):
    """D(y + sigma n; sigma) = c_skip x + c_out F(c_in x; c_noise, prediction) for x = y + sigma n.

    y = (z_next - z_pred) / (residual_rms * change_rms) is the standardized residual of a model's step; `residual_rms`
    (families, D) is the median over validation samples, one value per field. The context is its `PredictedStep`.
    """

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.rows = sizes.rows
        num_conditions = sizes.num_conditions + NUM_NOISE_FEATURES
        self.mixer = TokenMixer(backbone, sizes, num_states=3, num_conditions=num_conditions)
        self.register_buffer("residual_rms", torch.ones(len(sizes.families), max(sizes.latent_channels)))

    def forward(self, x: Tensor, sigma: Tensor, context: PredictedStep, condition: Tensor, domain: Domain) -> Tensor:
        """Denoise x (B, N, D) at noise levels sigma (B,)."""
        c_skip, c_out, c_in, c_noise = precondition(sigma)
        frequencies = 2.0 ** torch.arange(NUM_NOISE_FEATURES // 2, device=x.device) / 2
        angle = c_noise[:, None] * frequencies
        condition = torch.cat([self.mixer.visible(condition), angle.sin(), angle.cos()], -1)
        tokens = torch.cat([c_in[:, None, None] * x, context.tokens], -1)
        F = self.mixer(tokens, context.summary, condition, domain, x.shape[-1])
        return c_skip[:, None, None] * x + c_out[:, None, None] * F

    def residual_unit(self, context: PredictedStep, domain: Domain) -> Tensor:
        """The latent change (B, 1, D) that corresponds to a standardized residual y = 1."""
        row = row_of(self.rows, domain.family)
        return self.residual_rms[row, : context.z_pred.shape[-1]] * context.change_rms


def denoising_loss(denoise: Denoise, y: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """lambda(sigma) |D(y + sigma n; sigma) - y|^2 per sample (B,), with lambda = (sigma^2 + 1) / sigma^2.

    Karras et al. 2022 (arXiv:2206.00364), eq. 8 and Table 1 with sigma_data = 1.
    """
    error = denoise(y + _like(sigma, y) * noise, sigma) - y
    return (sigma**2 + 1) / sigma**2 * error.square().flatten(1).mean(1)


def next_sigma(sigma: Tensor, q: float, k: float, b: float) -> Tensor:
    """The adjacent smaller noise level s of the level t = sigma (B,).

    s = max(0, t (1 - n(t) / q)) with n(t) = 1 + k / (1 + e^(b t)); Geng et al. 2024 (arXiv:2406.14548), whose later
    stages have higher powers of q.
    """
    return (sigma * (1 - (1 + k * torch.sigmoid(-b * sigma)) / q)).clamp(min=0.0)


def consistency_loss(denoise: Denoise, y: Tensor, noise: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """|D(y + t n; t) - stopgrad D(y + s n; s)|^2 / (t - s) per sample (B,) for t = sigma > s = sigma_next.

    The target is y itself where s = 0; elsewhere the student's own output at the lower level, with the same noise and
    without gradient. Easy consistency tuning, Geng et al. 2024 (arXiv:2406.14548).
    """
    student = denoise(y + _like(sigma, y) * noise, sigma)
    with torch.no_grad():
        floor = sigma_next.clamp(min=torch.finfo(y.dtype).eps)
        target = torch.where(_like(sigma_next, y) > 0, denoise(y + _like(floor, y) * noise, floor), y)
    return (student - target).square().flatten(1).mean(1) / (sigma - sigma_next)


def _like(sigma: Tensor, y: Tensor) -> Tensor:
    return sigma.view(-1, *[1] * (y.ndim - 1))
