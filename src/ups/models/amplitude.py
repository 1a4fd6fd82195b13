"""Scales of latents: a state's own amplitude, in which networks see it and in which its change is predicted."""

import torch
from torch import Tensor, nn

from ups.models.domain import Domain

SMALLEST, LARGEST = 0.2, 20.0
SMALLEST_FLUCTUATION = 1e-3
UNLIMITED = 1e6


class Amplitude(nn.Module):
    """Statistics of the training split per family and latent channel, and what follows from them for a given state.

    - `fluctuation`: RMS of z minus its mean over tokens, `change`: RMS of one step's change, per field;
    - `bound`, `spread`: the largest magnitude that the mean over tokens and the rest of a prediction may have, so that
      any rollout stays finite and of the size that training showed;
    - `growth`: the largest factor by which one step may raise the RMS of the rest: no faster than training showed;
    - `largest`: the RMS that the rest may have, per field: much less than `spread` where peaks are rare;
    - `pool` (families, D, D): averages over the channels of each field;
    - `error` (families): what the model last missed in validation, in units of a step's change, 0 before the first;
      training noise follows it.

    The amplitude a (B, 1, D) of a state is the RMS of its fluctuation over `fluctuation`, one value per field, kept in
    [0.2, 20]. Decaying and scaled solutions then look alike to a network (reversible instance normalization as in
    McCabe et al. 2023, arXiv:2310.02994, section 4.1).
    """

    def __init__(self, num_families: int, latent_channels: int) -> None:
        super().__init__()
        for name in ("fluctuation", "change", "bound", "spread"):
            self.register_buffer(name, torch.ones(num_families, latent_channels))
        for name in ("growth", "largest"):
            self.register_buffer(name, torch.full((num_families, latent_channels), UNLIMITED))
        self.register_buffer("error", torch.zeros(num_families))
        self.register_buffer("pool", torch.eye(latent_channels).repeat(num_families, 1, 1))

    def measure(self, z: Tensor, domain: Domain) -> Tensor:
        """Amplitude a (B, 1, D) of states z (B, N, D)."""
        rms = self.field_rms(z - z.mean(1, keepdim=True), domain)
        return (rms / self.fluctuation[domain.family, : z.shape[-1]]).clamp(SMALLEST, LARGEST)

    def field_rms(self, x: Tensor, domain: Domain) -> Tensor:
        """RMS of latents x (B, N, D) over the tokens and the channels of each field, (B, 1, D)."""
        pool = self.pool[domain.family, : x.shape[-1], : x.shape[-1]]
        # Not a matrix product: autocast would take it to bfloat16.
        return (x.square().mean(1).unsqueeze(-1) * pool).sum(1, keepdim=True).sqrt()

    def unit(self, z: Tensor, domain: Domain) -> Tensor:
        """What one step is expected to change in states z: `change` times the RMS of a over fields, (B, 1, D).

        One amplitude for all fields, for they drive each other: density changes as velocity tells it to.
        """
        amplitude = self.measure(z, domain).square().mean(-1, keepdim=True).sqrt()
        return self.change[domain.family, : z.shape[-1]] * amplitude

    def standardize(self, z: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
        """States of zero mean and unit amplitude (B, N, D), and what that took away: means and log a, (B, 2 D)."""
        a, mean = self.measure(z, domain), z.mean(1, keepdim=True)
        x = (z - mean) / (self.fluctuation[domain.family, : z.shape[-1]] * a)
        return x, torch.cat([mean, a.log()], -1).squeeze(1)

    def clip(self, z: Tensor, before: Tensor, domain: Domain) -> Tensor:
        """The state z (B, N, D) after a step from `before`: within limits, grown by `growth` and to `largest` at most.

        What grows too fast, or above `largest` and the state before, is made smaller as a whole, field by field: an
        instability then ends as large as solutions are, and not as large as their peaks everywhere.
        """
        z = self.within(z, domain, before)
        mean, rest = _split(z)
        with torch.no_grad():  # the root has no gradient where a field is constant
            floor = SMALLEST_FLUCTUATION * self.fluctuation[domain.family, : z.shape[-1]]
            rms_before = torch.maximum(self.field_rms(_split(before)[1], domain), floor)
            grown = self.growth[domain.family, : z.shape[-1]] * rms_before
            largest = torch.maximum(self.largest[domain.family, : z.shape[-1]], rms_before)
            kept = torch.minimum(grown, largest) / torch.maximum(self.field_rms(rest, domain), 1e-6 * floor)
        return torch.where(kept >= 1, z, mean + kept.clamp(max=1.0) * rest)

    def within(self, z: Tensor, domain: Domain, before: Tensor | None = None) -> Tensor:
        """Keep the mean of z (B, N, D) over tokens within `bound` and the rest within `spread`, or the state before.

        After a step from `before` a state outside what training showed keeps its size, and no step leads further out:
        by induction a rollout is bounded by its initial state and the limits. What a network is shown has the limits
        alone: outside, the largest state that it knows is a better guess than an extrapolation.
        """
        mean, rest = _split(z)
        channels = z.shape[-1]
        bound, spread = self.bound[domain.family, :channels], self.spread[domain.family, :channels]
        if before is not None:
            mean_before, rest_before = _split(before)
            bound = torch.maximum(bound, mean_before.abs())
            spread = torch.maximum(spread, rest_before.abs().amax(1, keepdim=True))
        limited = torch.clamp(mean, -bound, bound) + torch.clamp(rest, -spread, spread)
        return torch.where((mean.abs() <= bound) & (rest.abs() <= spread), z, limited)


def _split(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over tokens and the rest."""
    mean = z.mean(1, keepdim=True)
    return mean, z - mean
