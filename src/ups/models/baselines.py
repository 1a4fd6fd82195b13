"""FNO, U-Net, transformer and linear stencil of one family on its grid: the baselines.

They get normalized fields: latents of the identity codec, whose patches are single grid points.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.models.conservation import Constraints
from ups.models.fno import make_fno
from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import StateStatistics

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
GROUPS, NUM_LEVELS = 8, 3


class GridModel(nn.Module):
    """A network F on the fields (B, C, *grid) of one family, with the statistics and limits of the operator.

    The condition features with the indices `condition_channels` are appended to F's input as constant channels.
    """

    def __init__(self, network: nn.Module, sizes: Sizes, condition_channels: Sequence[int]) -> None:
        super().__init__()
        self.network, self.condition_channels = network, list(condition_channels)
        self.statistics = StateStatistics(sizes)

    def on_grid(self, inputs: list[Tensor], condition: Tensor, domain: Domain) -> Tensor:
        """F of the tokens `inputs`, each (B, N, any), and of the condition (B, K): (B, N, C)."""
        features = condition[:, None, self.condition_channels].expand(-1, inputs[0].shape[1], -1)
        u = torch.cat([*inputs, features], -1).mT.unflatten(-1, domain.grid)
        return self.network(u).flatten(2).mT


class GridOperator(GridModel):
    """z_next = limit_step(z + step_rms * F(clamp_state(z), coefficients, condition)); see `StateStatistics`."""

    def forward(self, state: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance a state (B, N, C), see `History`, by one step; coefficients (B, N, C_c), condition (B, K)."""
        z, before = self.statistics.history.split(state, domain)
        step_rms, clamped = self.statistics.of("step_rms", domain, z.shape[-1]), self.statistics.clamp_state(z, domain)
        earlier = [] if before is None else [(clamped - self.statistics.clamp_state(before, domain)) / step_rms]
        change = step_rms * self.on_grid([clamped, *earlier, coefficients], condition, domain)
        return self.statistics.history.join(self.statistics.limit_step(z + change, z, domain), state, domain)


class NormalizedGridOperator(GridModel):
    """`Operator` with another network F and no filter: its inputs, the unit of its output, its conserved integrals."""

    def __init__(self, network: nn.Module, sizes: Sizes, condition_channels: Sequence[int]) -> None:
        super().__init__(network, sizes, condition_channels)
        self.register_buffer("conserved", torch.zeros(1, max(sizes.latent_channels)))
        self.constraints = Constraints(sizes)

    def forward(self, state: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance a state (B, N, C), see `History`, by one step; coefficients (B, N, C_c), condition (B, K)."""
        z, before = self.statistics.history.split(state, domain)
        clamped = self.statistics.clamp_state(z, domain)
        x, summary = self.statistics.standardize(clamped, domain)
        earlier = [] if before is None else [self.statistics.last_change(clamped, before, domain)]
        inputs = [clamped, x, *earlier, coefficients, summary[:, None].expand(-1, z.shape[1], -1)]
        change = self.statistics.expected_change(z, domain) * self.on_grid(inputs, condition, domain)
        change = self.statistics.without_conserved(change, self.conserved, domain)
        z_next = self.statistics.limit_step(z + change, z, domain)
        z_next = self.constraints(z_next, z, torch.eye(z.shape[-1], dtype=z.dtype, device=z.device), domain)
        return self.statistics.history.join(z_next, state, domain)


class GridSteadyModel(GridModel):
    """z = limit_solution(F(coefficients, condition)); see `StateStatistics`."""

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Solutions (B, N, C) for coefficients (B, N, C_c) and condition (B, K); z is ignored."""
        return self.statistics.limit_solution(self.on_grid([coefficients], condition, domain), domain)


def grid_model(
    *,
    kind: str,
    normalized: bool,
    family: str,
    steady: bool,
    in_channels: int,
    out_channels: int,
    grid: Sequence[int],
    periodic: Sequence[bool],
    condition_channels: Sequence[int],
    history: bool = False,
    model: dict[str, Any],
) -> GridOperator | NormalizedGridOperator | GridSteadyModel:
    """A baseline of one family: kind `fno`, `unet`, `transformer` or `linear` with the sizes `model`."""
    more = 3 * normalized + history  # states in other units, statistics, and the change before
    num_inputs = in_channels + len(condition_channels) + more * out_channels
    if kind == "fno":
        network = make_fno(num_inputs, out_channels, grid=grid, periodic=periodic, **model)
    elif kind == "unet":
        network = UNet(num_inputs, out_channels, grid=grid, periodic=periodic, **model)
    elif kind == "transformer":
        network = Transformer(num_inputs, out_channels, grid=grid, **model)
    else:
        network = LinearStencil(num_inputs, out_channels, periodic=periodic, **model)
    counts = (len(grid),), (out_channels,), (out_channels,), (in_channels,), len(condition_channels)
    sizes = Sizes((family,), *counts, (family,) if history else ())
    model_class = GridSteadyModel if steady else NormalizedGridOperator if normalized else GridOperator
    return model_class(network, sizes, condition_channels)


class Convolution(nn.Module):
    """A convolution with circular padding along periodic axes and edge values elsewhere; odd kernels keep the grid."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        self.width, self.periodic = kernel_size // 2, tuple(periodic)
        self.convolution = CONVOLUTIONS[len(periodic)](in_channels, out_channels, kernel_size)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        for axis, periodic in enumerate(self.periodic):  # `pad` has one mode for all axes of a call
            later = len(self.periodic) - 1 - axis  # `pad` counts axes from the last
            padding = [0, 0] * later + [self.width] * 2 + [0, 0] * axis
            u = nn.functional.pad(u, padding, mode="circular" if periodic else "replicate")
        return self.convolution(u)


class LinearStencil(Convolution):
    """One convolution with zero initial weights: an explicit, linear finite-difference scheme with trained weights."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int, periodic: Sequence[bool]) -> None:
        super().__init__(in_channels, out_channels, kernel_size, periodic)
        nn.init.zeros_(self.convolution.weight)


def _normed(channels: int, convolution: nn.Module) -> nn.Sequential:
    """A convolution of normalized, activated fields."""
    return nn.Sequential(nn.GroupNorm(math.gcd(GROUPS, channels), channels), nn.GELU(), convolution)


class ResidualBlock(nn.Module):
    """u + conv(GELU(norm(conv(GELU(norm(u)))))), the block of the modern U-Net of PDEArena.

    Gupta & Brandstetter 2022, arXiv:2209.15616. Where the number of channels changes, u passes a pointwise convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        self.first = _normed(in_channels, Convolution(in_channels, out_channels, 3, periodic))
        self.second = _normed(out_channels, Convolution(out_channels, out_channels, 3, periodic))
        pointwise = CONVOLUTIONS[len(periodic)](in_channels, out_channels, 1)
        self.skip = pointwise if in_channels != out_channels else nn.Identity()

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        return self.skip(u) + self.second(self.first(u))


class UNet(nn.Module):
    """Residual blocks on up to `NUM_LEVELS` grids, with skip connections between the two blocks of a level.

    Coarser grids have half the points per axis and twice the channels, down to an odd number or fewer than 8 points.
    Coordinates of axes that are not periodic are inputs: a constant state alone cannot tell one end from the other.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        grid: Sequence[int],
        periodic: Sequence[bool],
    ) -> None:
        super().__init__()
        widths = [hidden_channels * 2**level for level in range(_num_levels(grid))]
        axes = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
        bounded = [axis for axis, wraps in enumerate(periodic) if not wraps]
        self.register_buffer("coordinates", torch.stack(axes)[bounded], persistent=False)
        self.lift = Convolution(in_channels + len(self.coordinates), hidden_channels, 3, periodic)
        self.encode, self.decode, self.down, self.up = (nn.ModuleList() for _ in range(4))
        pointwise = CONVOLUTIONS[len(periodic)]
        for fine, coarse in zip(widths[:-1], widths[1:], strict=True):
            self.encode.append(ResidualBlock(fine, fine, periodic))
            self.down.append(pointwise(fine, coarse, 2, stride=2))
            self.up.append(pointwise(coarse, fine, 1))
            self.decode.append(ResidualBlock(2 * fine, fine, periodic))
        self.middle = nn.Sequential(*(ResidualBlock(widths[-1], widths[-1], periodic) for _ in range(2)))
        self.project = _normed(hidden_channels, pointwise(hidden_channels, out_channels, 1))

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        position = self.coordinates.expand(len(u), *self.coordinates.shape)
        u, skips = self.lift(torch.cat([u, position], 1)), []
        for encode, down in zip(self.encode, self.down, strict=True):
            u = encode(u)
            skips.append(u)
            u = down(u)
        u = self.middle(u)
        for up, decode in zip(reversed(self.up), reversed(self.decode), strict=True):
            u = decode(torch.cat([nn.functional.interpolate(up(u), scale_factor=2.0), skips.pop()], 1))
        return self.project(u)


def _num_levels(grid: Sequence[int]) -> int:
    """Number of grids, the given one included."""
    levels, size = 1, list(grid)
    while levels < NUM_LEVELS and all(n % 2 == 0 and n >= 8 for n in size):
        levels, size = levels + 1, [n // 2 for n in size]
    return levels


class Transformer(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): global attention between patches of the grid.

    Patches have `patch_size` points per axis of 1D, 2D and 3D grids, or one point on axes that it does not divide.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_layers: int,
        head_channels: int,
        patch_size: Sequence[int],
        grid: Sequence[int],
    ) -> None:
        super().__init__()
        edge = patch_size[len(grid) - 1]
        patch = tuple(edge if n % edge == 0 else 1 for n in grid)
        self.patches = CONVOLUTIONS[len(grid)](in_channels, hidden_channels, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(math.prod(grid) // math.prod(patch), hidden_channels))
        heads = math.gcd(hidden_channels, max(1, hidden_channels // head_channels))
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(hidden_channels, heads, 4 * hidden_channels, 0.0, **options)
        norm = nn.LayerNorm(hidden_channels)
        self.blocks = nn.TransformerEncoder(block, num_layers, norm, enable_nested_tensor=False)
        self.fields = TRANSPOSED[len(grid)](hidden_channels, out_channels, patch, stride=patch)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        patches = self.patches(u)
        tokens = self.blocks(patches.flatten(2).mT + self.position)
        return self.fields(tokens.mT.unflatten(2, patches.shape[2:]))
