"""States of two snapshots, for families in which one snapshot does not determine the next one."""

import torch
from torch import Tensor

from ups.models.sizes import Domain, Sizes, row_of


class History:
    """Of some families a state (B, N, 2 D) is the latents z (B, N, D) of a snapshot, then those of the snapshot before.

    Their data lack a field of the PDE: a wave equation of which u alone is stored is of second order in time and needs
    u_t, shallow water of which the height alone is stored needs the velocity. The change since the snapshot before
    stands for it. A state (B, N, D) of such a family is at rest: its own predecessor. Of the other families a
    snapshot is the whole state, and what follows its D channels is ignored.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.rows, self.channels, self.families = sizes.rows, tuple(sizes.latent_channels), frozenset(sizes.history)

    def has(self, family: str) -> bool:
        """Whether a state of the family is two snapshots."""
        return family in self.families

    def split(self, state: Tensor, domain: Domain) -> tuple[Tensor, Tensor | None]:
        """The latents (B, N, D) of a state's snapshot, and of the one before; None where a snapshot is the state."""
        channels = self.channels[row_of(self.rows, domain.family)]
        z = state[..., :channels]
        if not self.has(domain.family):
            return z, None
        return z, state[..., channels:] if state.shape[-1] > channels else z

    def join(self, z_next: Tensor, state: Tensor, domain: Domain) -> Tensor:
        """The state whose snapshot is z_next (B, N, D), after `state`."""
        return torch.cat([z_next, self.split(state, domain)[0]], -1) if self.has(domain.family) else z_next
