"""Models of one family on its grid, to compare with: a U-Net and a linear stencil, and how a step is made of them.

They work on normalized fields point by point: latents of a codec whose patches are single points.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.models.amplitude import Amplitude
from ups.models.domain import Domain
from ups.models.fno import make_fno

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
GROUPS = 8
NUM_LEVELS = 3


class GridModel(nn.Module):
    """A network F on fields (B, C, *grid), and the statistics of `Amplitude`.

    The conditions `told`, places in what the operator is told, are constant channels of F's input.
    """

    def __init__(self, network: nn.Module, num_families: int, latent_channels: int, told: Sequence[int]) -> None:
        super().__init__()
        self.network, self.told = network, list(told)
        self.amplitude = Amplitude(num_families, latent_channels)

    def on_grid(self, given: list[Tensor], condition: Tensor, domain: Domain) -> Tensor:
        """F of tokens `given`, each (B, N, any), and of what is told of condition (B, K): (B, N, C)."""
        told = condition[:, None, self.told].expand(-1, given[0].shape[1], -1)
        u = torch.cat([*given, told], -1).mT.unflatten(-1, domain.grid)
        return self.network(u).flatten(2).mT


class GridOperator(GridModel):
    """z_next = clip(z + change * F(z, coefficients)).

    `change`, the limits of what F sees and the bound that keeps a rollout finite are those of `Amplitude`, as for the
    operator.
    """

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Advance z (B, N, C) by one time step; coefficients (B, N, C_c), condition (B, K)."""
        step = self.on_grid([self.amplitude.within(z, domain), coefficients], condition, domain)
        return self.amplitude.clip(z + self.amplitude.change[domain.family, : z.shape[-1]] * step, z, domain)


class GridSteadyModel(GridModel):
    """z = within(F(coefficients))."""

    def forward(self, z: Tensor, coefficients: Tensor, condition: Tensor, domain: Domain) -> Tensor:
        """Solutions (B, N, C) for coefficients (B, N, C_c) and condition (B, K), whatever z."""
        return self.amplitude.within(self.on_grid([coefficients], condition, domain), domain)


def grid_model(
    *,
    kind: str,
    steady: bool,
    num_families: int,
    in_channels: int,
    out_channels: int,
    grid: Sequence[int],
    periodic: Sequence[bool],
    told: Sequence[int],
    model: dict[str, Any],
) -> GridOperator | GridSteadyModel:
    """A model of one family: kind `fno`, `unet` or `linear`, with the sizes `model`; `told` are among its inputs."""
    in_channels += len(told)
    if kind == "fno":
        network = make_fno(in_channels, out_channels, grid=grid, periodic=periodic, **model)
    elif kind == "unet":
        network = UNet(in_channels, out_channels, grid=grid, periodic=periodic, **model)
    else:
        network = LinearStencil(in_channels, out_channels, periodic=periodic, **model)
    return (GridSteadyModel if steady else GridOperator)(network, num_families, out_channels, told)


class Convolution(nn.Module):
    """A convolution whose periodic axes wrap and whose others repeat the edge; the grid stays, for odd kernels."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        self.width, self.periodic = kernel_size // 2, tuple(periodic)
        self.convolution = CONVOLUTIONS[len(periodic)](in_channels, out_channels, kernel_size)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        for axis, periodic in enumerate(self.periodic):
            padding = [0] * (2 * len(self.periodic))
            place = 2 * (len(self.periodic) - 1 - axis)
            padding[place : place + 2] = [self.width, self.width]
            u = nn.functional.pad(u, padding, mode="circular" if periodic else "replicate")
        return self.convolution(u)


class LinearStencil(nn.Module):
    """One convolution, zero at first: what any linear scheme with constant coefficients of that width can do."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        self.stencil = Convolution(in_channels, out_channels, kernel_size, periodic)
        nn.init.zeros_(self.stencil.convolution.weight)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        return self.stencil(u)


class ResidualBlock(nn.Module):
    """u + conv(GELU(norm(conv(GELU(norm(u)))))), the block of the modern U-Net of PDEArena (arXiv:2209.15616)."""

    def __init__(self, in_channels: int, out_channels: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(min(GROUPS, in_channels), in_channels),
            nn.GELU(),
            Convolution(in_channels, out_channels, 3, periodic),
        )
        self.second = nn.Sequential(
            nn.GroupNorm(min(GROUPS, out_channels), out_channels),
            nn.GELU(),
            Convolution(out_channels, out_channels, 3, periodic),
        )
        pointwise = CONVOLUTIONS[len(periodic)](in_channels, out_channels, 1)
        self.skip = pointwise if in_channels != out_channels else nn.Identity()

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        return self.skip(u) + self.second(self.first(u))


class UNet(nn.Module):
    """Residual blocks on `NUM_LEVELS` grids, each half as fine with twice the channels, and back with skips.

    A grid that cannot be halved evenly, or has fewer than eight points per axis, ends the descent.
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
        self.lift = Convolution(in_channels, hidden_channels, 3, periodic)
        self.encode, self.decode = nn.ModuleList(), nn.ModuleList()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        pointwise = CONVOLUTIONS[len(periodic)]
        for fine, coarse in zip(widths[:-1], widths[1:], strict=True):
            self.encode.append(ResidualBlock(fine, fine, periodic))
            self.down.append(pointwise(fine, coarse, 2, stride=2))
            self.up.append(pointwise(coarse, fine, 1))
            self.decode.append(ResidualBlock(2 * fine, fine, periodic))
        self.middle = nn.Sequential(*(ResidualBlock(widths[-1], widths[-1], periodic) for _ in range(2)))
        self.project = nn.Sequential(
            nn.GroupNorm(min(GROUPS, hidden_channels), hidden_channels),
            nn.GELU(),
            pointwise(hidden_channels, out_channels, 1),
        )

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, out, *grid)."""
        u, skips = self.lift(u), []
        for encode, down in zip(self.encode, self.down, strict=True):
            u = encode(u)
            skips.append(u)
            u = down(u)
        u = self.middle(u)
        for up, decode in zip(reversed(self.up), reversed(self.decode), strict=True):
            u = nn.functional.interpolate(up(u), scale_factor=2.0)
            u = decode(torch.cat([u, skips.pop()], 1))
        return self.project(u)


def _num_levels(grid: Sequence[int]) -> int:
    """Grids in all: halved while every axis stays even and keeps four points."""
    levels, size = 1, list(grid)
    while levels < NUM_LEVELS and all(n % 2 == 0 and n >= 8 for n in size):
        levels, size = levels + 1, [n // 2 for n in size]
    return levels
