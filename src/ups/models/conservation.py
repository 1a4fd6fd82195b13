"""Integrals that compressible flow conserves, and states that keep them."""

import torch
from torch import Tensor, nn

from ups.models.sizes import Domain, Sizes, row_of

HEAT_CAPACITY_RATIO = 5 / 3  # of PDEBench's gas
LARGEST_FACTOR = 2.0  # by which density and pressure are rescaled: a network that was hardly trained may be far off


class GasIntegrals(nn.Module):
    """Mass, momentum and energy of compressible flow, which a prediction keeps: they are not linear in the latents.

    They are the means over the grid of rho, rho v and p / (gamma - 1) + rho |v|^2 / 2, for fields density rho, pressure
    p and velocity v in this order, of which the first two are encoded by their logarithm. Density and pressure get a
    factor, and each velocity a summand, that is the same for the whole grid: a constant on the fields as encoded.

    - `units` (families, 2, C): standard deviation and mean of the normalization of each field; 0 where nothing is kept
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.rows, self.num_fields = sizes.rows, tuple(sizes.num_fields)
        self.register_buffer("units", torch.zeros(len(sizes.families), 2, max(sizes.num_fields)))
        self.is_kept = [False] * len(sizes.families)  # plain values, so that nothing is computed where nothing is kept
        self.register_load_state_dict_post_hook(_after_loading)

    def find_kept(self) -> None:
        """Which families have units; loading a state calls this, another change of `units` must."""
        self.is_kept = [bool(units.any()) for units in self.units]

    def forward(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain) -> Tensor:
        """The state z_next (B, N, D) with the integrals of z (B, N, D).

        `bases` (D, D) map the latents of a token to the values of its patch, field by field.
        """
        row = row_of(self.rows, domain.family)
        if not self.is_kept[row]:
            return z_next
        with torch.autocast(z.device.type, enabled=False):
            by_field = bases.unflatten(1, (self.num_fields[row], -1))
            mass_0, momentum_0, kinetic_0, pressure_0 = self._means(z, by_field, row)
            mass, momentum, kinetic, pressure = self._means(z_next, by_field, row)
            thicker = _factor(mass_0, mass)
            mass, momentum, kinetic = thicker * mass, thicker[:, None] * momentum, thicker * kinetic
            faster = (momentum_0 - momentum) / mass[:, None]
            kinetic = kinetic + (faster * momentum).sum(1) + faster.square().sum(1) * mass / 2
            hotter = _factor(pressure_0 + (HEAT_CAPACITY_RATIO - 1) * (kinetic_0 - kinetic), pressure)
            added = torch.cat([torch.stack([thicker, hotter], 1).log(), faster], 1)
            std = self.units[row, 0, : self.num_fields[row]]
            return z_next + ((added / std) @ by_field.sum(2).mT).unsqueeze(1)

    def _means(self, z: Tensor, by_field: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means over the grid of mass (B,), momentum (B, d), kinetic energy (B,) and pressure (B,)."""
        std, mean = self.units[row, :, : self.num_fields[row], None]
        values = torch.tensordot(z, by_field, 1) * std + mean  # (B, N, C, points of a token)
        density, pressure, velocity = values[:, :, 0].exp(), values[:, :, 1].exp(), values[:, :, 2:]
        flux = density[:, :, None] * velocity
        kinetic = (flux * velocity).sum(2) / 2
        return density.mean((1, 2)), flux.mean((1, 3)), kinetic.mean((1, 2)), pressure.mean((1, 2))


def _factor(wanted: Tensor, found: Tensor) -> Tensor:
    return (wanted / found).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _after_loading(gas: GasIntegrals, _: object) -> None:
    gas.find_kept()
