"""The operator, which advances a latent state by one time step, and the steady model, which predicts a solution."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.backbone import TokenMixer
from ups.models.blocks import constant
from ups.models.conservation import Constraints
from ups.models.grid import MAX_POINTS, along_axes, axis_modes, patch_edge, to_grid, to_tokens
from ups.models.sizes import Backbone, Domain, Sizes, row_of
from ups.models.state_statistics import StateStatistics

NUM_GAINS, PER_OCTAVE = 96, 8  # places for wavenumbers k, at PER_OCTAVE * log2(1 + k): up to 4095
TINY = 1e-20  # smallest energy


class DampedPersistence(nn.Module):
    """The change of a state, filtered by wavenumber of the grid: (P - 1) z + R / (R + e^2 / n) change.

    P is the share of a Fourier mode that persists in a step, R the energy of the rest over the number n of grid points,
    in units of the expected change. A step keeps the share P, and lets the predicted change through a Wiener filter for
    white noise of RMS e. Large wavenumbers of a smooth solution depend on the smaller ones and not on their own past: a
    small P forgets the errors of earlier steps, and a small R stops the noise of the network, whose tokens are coarser
    than the grid.

    - `bases` (families, D, D): latents of a token to the values of its patch, field by field; 0 where nothing is
      filtered, for example because the codec drops components
    - `gains` (families, 2, C, NUM_GAINS): P and R by field and length k of the wave vector, in waves per domain
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.rows, self.num_fields = sizes.rows, tuple(sizes.num_fields)
        families, channels = len(sizes.families), max(sizes.latent_channels)
        self.register_buffer("bases", torch.zeros(families, channels, channels))
        self.register_buffer("gains", torch.ones(families, 2, max(sizes.num_fields), NUM_GAINS))
        self.is_fitted = [False] * families  # plain values, so that nothing is computed where nothing is filtered
        self.register_load_state_dict_post_hook(_after_loading)

    def find_fitted(self) -> None:
        """Which families have bases; loading a state calls this, another change of `bases` must."""
        self.is_fitted = [bool(basis.any()) for basis in self.bases]

    def forward(self, z: Tensor, change: Tensor, noise: Tensor, domain: Domain) -> Tensor:
        """The filtered change (B, N, D) of states z (B, N, D), from a change (B, N, D) with noise of RMS `noise` ()."""
        row, channels = row_of(self.rows, domain.family), z.shape[-1]
        num_fields = self.num_fields[row]
        patch = patch_edge(channels // num_fields, len(domain.grid))
        if not (patch and self.is_fitted[row]) or patch * max(domain.grid) > MAX_POINTS:
            return change
        # bfloat16 has errors far above the energies at large wavenumbers.
        with torch.autocast(z.device.type, enabled=False):
            z_hat, change_hat = self.spectrum(z, domain), self.spectrum(change, domain)
            grid = z_hat.shape[2:]
            place = mode_places(grid, domain.periodic, z.device)
            below = place.long().clamp(max=NUM_GAINS - 2)
            # Linear in between: a step at some wavenumber would ring through the whole domain.
            gains = self.gains[row, :, :num_fields]
            persistent, rest = (
                gains[..., below].lerp(gains[..., below + 1], (place - below).to(gains.dtype)).unsqueeze(2)
            )
            noise = noise.square() / math.prod(grid)  # its energy in a mode, as R per point of the grid
            stopped = noise / (rest + noise).clamp(min=TINY)
            modes = [modes.mT for modes in _modes(grid, domain, z.device)]
            u = along_axes((persistent - 1) * z_hat - stopped * change_hat, modes)
            return change + to_tokens(u, domain) @ self.bases_of(domain, channels).mT

    def bases_of(self, domain: Domain, channels: int) -> Tensor:
        """Those of the domain's family for its latent channels, (channels, channels)."""
        return self.bases[row_of(self.rows, domain.family), :channels, :channels]

    def spectrum(self, z: Tensor, domain: Domain) -> Tensor:
        """Coefficients (C, B, *grid) of states z (B, N, D) in the Fourier modes of the grid."""
        num_fields = self.num_fields[row_of(self.rows, domain.family)]
        u = to_grid(z @ self.bases_of(domain, z.shape[-1]), num_fields, domain)
        return along_axes(u, _modes(u.shape[2:], domain, z.device))


def _after_loading(filters: DampedPersistence, _: object) -> None:
    filters.find_fitted()


def _modes(grid: Sequence[int], domain: Domain, device: torch.device) -> list[Tensor]:
    return [axis_modes(n, wraps, device)[0] for n, wraps in zip(grid, domain.periodic, strict=True)]


@constant
def mode_places(grid: Sequence[int], periodic: Sequence[bool], device: torch.device) -> Tensor:
    """The place among `NUM_GAINS` gains of each Fourier mode of a grid, between two of them, (*grid)."""
    axes = [axis_modes(n, wraps, device)[1] for n, wraps in zip(grid, periodic, strict=True)]
    k = torch.meshgrid(*axes, indexing="ij")
    return (PER_OCTAVE * (1 + torch.stack(k).square().sum(0).sqrt()).log2()).clamp(max=NUM_GAINS - 1)


class Operator(nn.Module):
    """z_next = limit_step(z + filter(s * F(z, (z - mean) / (f a), coefficients; mean, log a, condition))).

    F, the token mixer, gets the state as it is and at zero mean and unit amplitude a, with f = `fluctuation_rms`, and
    of families with a `History` the change since the snapshot before, over s; its output has unit scale, s is the
    `expected_change` of a step; statistics and limits are those of `StateStatistics`, the filter is
    `DampedPersistence`, with the latest validation error of the family for the noise of the network. No step changes
    the integral of a field that the PDE conserves, see `StateStatistics.without_conserved`, as long as no mean of a
    latent channel is limited, and predictions meet the `Constraints` of their equation.
    """

    def __init__(self, sizes: Sizes, backbone: Backbone) -> None:
        super().__init__()
        self.sizes, self.backbone, self.rows = sizes, backbone, sizes.rows
        self.statistics = StateStatistics(sizes)
        self.register_buffer("conserved", torch.zeros(len(sizes.families), max(sizes.latent_channels)))
        self.persistence = DampedPersistence(sizes)
        self.constraints = Constraints(sizes)
        self.mixer = TokenMixer(backbone, sizes, num_states=2, num_conditions=sizes.num_conditions)

    def forward(self, state: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance a state (B, N, D), see `History`, by one time step; coefficients (B, N, D_c), condition (B, K)."""
        z, before = self.statistics.history.split(state, domain)
        clamped = self.statistics.clamp_state(z, domain)
        x, summary = self.statistics.standardize(clamped, domain)
        inputs = [clamped, x] if before is None else [clamped, x, self.statistics.last_change(clamped, before, domain)]
        tokens = torch.cat([*inputs, coefficients], -1)
        step = self.mixer(tokens, summary, self.mixer.visible(condition), domain, z.shape[-1])
        noise = self.statistics.validation_error[row_of(self.rows, domain.family)]
        change = self.persistence(z, self.statistics.expected_change(z, domain) * step, noise, domain)
        change = self.statistics.without_conserved(change, self.conserved, domain)
        return self.constrained(z + change, state, domain)

    def constrained(self, z_next: Tensor, state: Tensor, domain: Domain) -> Tensor:
        """The state after `state` with the snapshot z_next (B, N, D), within limits and moved to the constraints."""
        z, _ = self.statistics.history.split(state, domain)
        z_next = self.statistics.limit_step(z_next, z, domain)
        z_next = self.constraints(z_next, z, self.persistence.bases_of(domain, z.shape[-1]), domain)
        return self.statistics.history.join(z_next, state, domain)

    def wanted_output(self, z: Tensor, z_next: Tensor, domain: Domain) -> Tensor:
        """Output (B, N, D) of the mixer with which a step leads from z to z_next (B, N, D), if no noise is filtered."""
        persisting = self.persistence(z, torch.zeros_like(z), z.new_zeros(()), domain)
        return (z_next - z - persisting) / self.statistics.expected_change(z, domain)


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

    def constrained(self, z_next: Tensor, z: Tensor, domain: Domain) -> Tensor:
        """A solution z_next (B, N, D) with a sampled residual within the limits of a step from z = 0."""
        return self.statistics.limit_step(z_next, z, domain)
