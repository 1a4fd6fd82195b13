"""The steady model: coefficient fields to the steady solution, in latent space."""

from torch import Tensor, nn

from ups.models.amplitude import Amplitude
from ups.models.domain import Domain
from ups.models.sizes import Backbone, Sizes
from ups.models.token_mixer import TokenMixer


class SteadyModel(nn.Module):
    """z = within(F(coefficients; condition)); deterministic, for the solution is a function of its inputs."""

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.mixer = TokenMixer(backbone, sizes, num_states=0, num_conditions=sizes.num_conditions)
        self.amplitude = Amplitude(sizes.num_families, max(sizes.latent_channels))

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Solutions (B, N, D) for coefficients (B, N, D_c); of z (B, N, D) only the size counts."""
        summary = coefficients.mean(1)
        solution = self.mixer(coefficients, summary, self.mixer.told(condition), domain, z.shape[-1])
        return self.amplitude.within(solution, domain)
