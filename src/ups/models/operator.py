"""The operator, which advances a latent state by one time step, and the steady model, which predicts a solution."""

import torch
from torch import Tensor, nn

from ups.models.backbone import TokenMixer
from ups.models.sizes import Backbone, Domain, Sizes
from ups.models.state_statistics import StateStatistics


class Operator(nn.Module):
    """z_next = limit_step(z + s * F(z, (z - mean) / (f a), coefficients; mean, log a, condition)).

    F, the token mixer, gets the state as it is and at zero mean and unit amplitude a, with f = `fluctuation_rms`; its
    output has unit scale, s is the `expected_change` of a step; statistics and limits are those of `StateStatistics`.
    No step changes the integral of a field that the PDE conserves, see `StateStatistics.without_conserved`.
    """

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.sizes, self.backbone, self.rows = sizes, backbone, sizes.rows
        self.statistics = StateStatistics(sizes)
        self.register_buffer("conserved", torch.zeros(len(sizes.families), max(sizes.latent_channels)))
        self.mixer = TokenMixer(backbone, sizes, num_states=2, num_conditions=sizes.num_conditions)

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance z (B, N, D) by one time step; coefficients (B, N, D_c), condition (B, K)."""
        clamped = self.statistics.clamp_state(z, domain)
        x, summary = self.statistics.standardize(clamped, domain)
        tokens = torch.cat([clamped, x, coefficients], -1)
        step = self.mixer(tokens, summary, self.mixer.visible(condition), domain, z.shape[-1])
        change = self.statistics.expected_change(z, domain) * step
        change = self.statistics.without_conserved(change, self.conserved, domain)
        return self.statistics.limit_step(z + change, z, domain)


class SteadyModel(nn.Module):
    """z = limit_solution(F(coefficients; mean of coefficients, condition)): coefficient fields to the solution."""

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.sizes, self.backbone, self.rows = sizes, backbone, sizes.rows
        self.mixer = TokenMixer(backbone, sizes, num_states=0, num_conditions=sizes.num_conditions)
        self.statistics = StateStatistics(sizes)

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Solutions (B, N, D) for coefficients (B, N, D_c); z (B, N, D) gives the number of channels only."""
        summary = coefficients.mean(1)
        solution = self.mixer(coefficients, summary, self.mixer.visible(condition), domain, z.shape[-1])
        return self.statistics.limit_solution(solution, domain)
