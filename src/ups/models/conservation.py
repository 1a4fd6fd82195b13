"""What an equation demands of every predicted state: conserved integrals, no divergence, kept mirror symmetry."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.models.blocks import constant
from ups.models.grid import MAX_POINTS, along_axes, axis_modes, patch_edge, sine_modes, to_grid, to_tokens
from ups.models.sizes import Domain, Sizes, row_of

HEAT_CAPACITY_RATIO = 5 / 3  # of PDEBench's gas
LARGEST_ASYMMETRY = 1e-4  # of a state that counts as its own mirror image: far above rounding, far below model errors
LARGEST_FACTOR = 2.0  # by which density and pressure are rescaled: a network that was hardly trained may be far off


class Constraint(nn.Module, ABC):
    """Moves predicted states of some families to what their equation demands.

    - `units` (families, 2, C): standard deviation and mean of the normalization of each field; 0 where nothing is moved
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.rows, self.num_fields = sizes.rows, tuple(sizes.num_fields)
        self.register_buffer("units", torch.zeros(len(sizes.families), 2, max(sizes.num_fields)))
        self.is_on = [False] * len(sizes.families)  # plain values, so that nothing is computed where nothing is moved
        self.register_load_state_dict_post_hook(_after_loading)

    def find_on(self) -> None:
        """Which families have units; loading a state calls this, another change of `units` must."""
        self.is_on = [bool(units.any()) for units in self.units]

    def forward(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain) -> Tensor:
        """The state z_next (B, N, D) after z (B, N, D), moved; as it is where nothing is demanded.

        `bases` (D, D) map the latents of a token to the values of its patch, field by field.
        """
        row = row_of(self.rows, domain.family)
        if not self.is_on[row]:
            return z_next
        num_fields = self.num_fields[row]
        patch = patch_edge(z.shape[-1] // num_fields, len(domain.grid))
        if not self.holds([n * patch for n in domain.grid], domain.periodic):
            return z_next
        with torch.autocast(z.device.type, enabled=False):
            std, mean = self.units[row, :, :num_fields]
            return z_next + self.move(z_next, z, bases, domain, std, mean)

    @abstractmethod
    def holds(self, grid: Sequence[int], periodic: Sequence[bool]) -> bool:
        """Whether it is meant for a grid with these numbers of points, whose axes are periodic or not."""

    @abstractmethod
    def move(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain, std: Tensor, mean: Tensor) -> Tensor:
        """What is added to z_next (B, N, D); `std` and `mean` (C,) are the units of the fields."""


class GasIntegrals(Constraint):
    """Mass, momentum and energy of compressible flow stay as they are in a step.

    They are the means over the grid of rho, rho v and p / (gamma - 1) + rho |v|^2 / 2, for fields density rho, pressure
    p and velocity v in this order, of which the first two are encoded by their logarithm. Density and pressure get a
    factor, and each velocity a summand, that is the same for the whole grid: a constant on the fields as encoded.
    """

    def holds(self, grid: Sequence[int], periodic: Sequence[bool]) -> bool:
        """See `Constraint`: nothing leaves a periodic domain."""
        return all(periodic)

    def move(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain, std: Tensor, mean: Tensor) -> Tensor:
        """See `Constraint`."""
        by_field = bases.unflatten(1, (len(std), -1))
        mass_0, momentum_0, kinetic_0, pressure_0 = _gas_means(z, by_field, std, mean)
        mass, momentum, kinetic, pressure = _gas_means(z_next, by_field, std, mean)
        thicker = _factor(mass_0, mass)
        mass, momentum, kinetic = thicker * mass, thicker[:, None] * momentum, thicker * kinetic
        faster = (momentum_0 - momentum) / mass[:, None]
        kinetic = kinetic + (faster * momentum).sum(1) + faster.square().sum(1) * mass / 2
        hotter = _factor(pressure_0 + (HEAT_CAPACITY_RATIO - 1) * (kinetic_0 - kinetic), pressure)
        added = torch.cat([torch.stack([thicker, hotter], 1).log(), faster], 1)
        return ((added / std) @ by_field.sum(2).mT).unsqueeze(1)


class WallBoundedFlow(Constraint):
    """Velocities without divergence, and without flow through the walls around the domain.

    The velocities are the first fields, one per axis. Each is a sum of sines along its own axis and of cosines along
    the others; in these modes the part with divergence, a gradient of cosines, is removed (Leray projection). All axes
    have the same length.
    """

    def holds(self, grid: Sequence[int], periodic: Sequence[bool]) -> bool:
        """See `Constraint`: walls everywhere, and modes of an axis that are no larger a matrix than elsewhere."""
        return not any(periodic) and max(grid) <= MAX_POINTS

    def move(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain, std: Tensor, mean: Tensor) -> Tensor:
        """See `Constraint`."""
        fields, num_axes = to_grid(z_next @ bases, len(std), domain), len(domain.grid)
        scale = (-1, *[1] * (num_axes + 1))
        std, mean = std[:num_axes].view(scale), mean[:num_axes].view(scale)
        added = -gradient_part(fields[:num_axes] * std + mean) / std
        return to_tokens(torch.cat([added, torch.zeros_like(fields[num_axes:])]), domain) @ bases.mT


class MirrorImages(Constraint):
    """A state that is its own mirror image along an axis is so after a step too: of the prediction the even part stays.

    For scalar fields of an isotropic equation: the radial dams of shallow water begin in the centre of the domain. A
    state is its own mirror image if its odd part has an RMS below `LARGEST_ASYMMETRY` of its fluctuation's.
    """

    def holds(self, grid: Sequence[int], periodic: Sequence[bool]) -> bool:
        """See `Constraint`: both ends of an axis have the same boundary."""
        return True

    def move(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain, std: Tensor, mean: Tensor) -> Tensor:
        """See `Constraint`."""
        u, u_next = (to_grid(states @ bases, len(std), domain) for states in (z, z_next))
        space = tuple(range(2, u.ndim))
        fluctuation = (u - u.mean(space, keepdim=True)).square().sum((0, *space), keepdim=True)
        added = torch.zeros_like(u)
        for axis in space:
            odd_before, odd = ((states - states.flip(axis)) / 2 for states in (u, u_next + added))
            is_even = odd_before.square().sum((0, *space), keepdim=True) <= LARGEST_ASYMMETRY**2 * fluctuation
            added = added - is_even * odd
        return to_tokens(added, domain) @ bases.mT


class Constraints(nn.ModuleList):
    """All constraints on predicted states; the steps that train a network meet none.

    The noise on their states has momentum and energy of its own. Validation in between, without gradients, meets them.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__([GasIntegrals(sizes), WallBoundedFlow(sizes), MirrorImages(sizes)])

    def forward(self, z_next: Tensor, z: Tensor, bases: Tensor, domain: Domain) -> Tensor:
        """See `Constraint`."""
        for constraint in [] if self.training and torch.is_grad_enabled() else self:
            z_next = constraint(z_next, z, bases, domain)
        return z_next


def gradient_part(v: Tensor) -> Tensor:
    """The part with divergence of velocities v (d, B, *grid) between walls, of which there is one per axis."""
    num_axes = len(v)
    modes, k, inverse = _wall_modes(v.shape[2:], v.device)
    spectra = []
    for own, matrices in enumerate(modes):
        padding = [size for a in reversed(range(num_axes)) for size in ((1, 0) if a == own else (0, 1))]
        spectra.append(nn.functional.pad(along_axes(v[own : own + 1], matrices)[0], padding))
    potential = inverse * (k.unsqueeze(1) * torch.stack(spectra)).sum(0)
    parts = []
    for own, matrices in enumerate(modes):
        inside = [slice(1, None) if a == own else slice(None, -1) for a in range(num_axes)]
        part = (k[own] * potential)[(slice(None), *inside)]
        parts.append(along_axes(part[None], [matrix.mT for matrix in matrices]))
    return torch.cat(parts)


@constant
def _wall_modes(grid: Sequence[int], device: torch.device) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """The modes of each velocity along each axis, and on one grid of wavenumbers for all velocities k and 1 / |k|^2.

    The modes are sines along a velocity's own axis and cosines along the others. The wavenumbers k (d, *(grid + 1)) are
    0 to n per axis: there is no sine of wavenumber 0 and no cosine of wavenumber n, where the inverse is 0.
    """
    cosines = [axis_modes(n, False, device)[0] for n in grid]
    modes = [[sine_modes(n) if a == own else cosines[a] for a, n in enumerate(grid)] for own in range(len(grid))]
    k = torch.stack(torch.meshgrid(*(torch.arange(n + 1.0) for n in grid), indexing="ij"))
    is_whole = torch.stack([axis < n for axis, n in zip(k, grid, strict=True)]).all(0)
    inverse = is_whole / k.square().sum(0).clamp(min=1.0)
    return [[matrix.to(device) for matrix in of_one] for of_one in modes], k.to(device), inverse.to(device)


def _gas_means(z: Tensor, by_field: Tensor, std: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means over the grid of mass (B,), momentum (B, d), kinetic energy (B,) and pressure (B,)."""
    values = torch.tensordot(z, by_field, 1) * std[:, None] + mean[:, None]  # (B, N, C, points of a token)
    density, pressure, velocity = values[:, :, 0].exp(), values[:, :, 1].exp(), values[:, :, 2:]
    flux = density[:, :, None] * velocity
    kinetic = (flux * velocity).sum(2) / 2
    return density.mean((1, 2)), flux.mean((1, 3)), kinetic.mean((1, 2)), pressure.mean((1, 2))


def _factor(wanted: Tensor, found: Tensor) -> Tensor:
    return (wanted / found).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _after_loading(constraint: Constraint, _: object) -> None:
    constraint.find_on()
