"""Values of patches on the grid, fields on another grid, and the Fourier modes of its axes as matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.models.blocks import constant
from ups.models.sizes import Domain

MAX_POINTS = 2048  # of an axis: its modes are a matrix


def patch_edge(components: int, num_axes: int) -> int:
    """Edge of the patches of a codec that keeps all components, 0 if no edge has as many points."""
    edge = round(components ** (1 / num_axes))
    return edge if edge**num_axes == components else 0


def to_grid(values: Tensor, num_fields: int, domain: Domain) -> Tensor:
    """Values of patches (B, N, C P) as fields on the grid, (C, B, *grid)."""
    num_axes = len(domain.grid)
    patch = patch_edge(values.shape[-1] // num_fields, num_axes)
    u = values.unflatten(2, (num_fields, *[patch] * num_axes)).unflatten(1, domain.grid)
    pairs = (axis for a in range(num_axes) for axis in (1 + a, 2 + num_axes + a))
    u = u.permute(1 + num_axes, 0, *pairs)
    return u.reshape(num_fields, -1, *(n * patch for n in domain.grid))


def to_tokens(u: Tensor, domain: Domain) -> Tensor:
    """Fields on the grid (C, B, *grid) as values of patches (B, N, C P)."""
    num_axes = len(domain.grid)
    for axis in reversed(range(num_axes)):
        u = u.unflatten(2 + axis, (domain.grid[axis], -1))
    u = u.permute(1, *(2 + 2 * a for a in range(num_axes)), 0, *(3 + 2 * a for a in range(num_axes)))
    return u.flatten(1 + num_axes).flatten(1, -2)


def along_axes(u: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply fields u (C, B, *grid) along each axis by its matrix (n, n)."""
    for matrix in reversed(matrices):  # each product has its axis last, and moves it to the front
        u = (u @ matrix.mT.to(u.dtype)).movedim(-1, 2)
    return u


def resampled(u: Tensor, grid: tuple[int, ...], boundary: tuple[str, ...]) -> Tensor:
    """Fields (..., *n) of cell values on another `grid` of the same domain; `boundary` has the condition of each axis.

    Along an axis with fewer points they are averages over the new cells, which keeps integrals; along an axis with more
    points they are interpolated linearly, at ends that are not periodic constantly.
    """
    for axis, (new, condition) in enumerate(zip(grid, boundary, strict=True), start=u.ndim - len(grid)):
        old = u.shape[axis]
        if new != old:
            weights = _averaging(old, new) if new < old else _interpolation(old, new, condition == "periodic")
            u = torch.tensordot(u, weights.to(u), dims=([axis], [1])).movedim(-1, axis)
    return u


def _averaging(old: int, new: int) -> Tensor:
    """Weights (new, old) of the mean over each new cell: the share of it that an old cell covers."""
    edges, new_edges = torch.arange(old + 1) * new, torch.arange(new + 1) * old  # of a domain of old * new units
    start = torch.maximum(edges[:-1], new_edges[:-1, None])
    stop = torch.minimum(edges[1:], new_edges[1:, None])
    return (stop - start).clamp(min=0).double() / old


def _interpolation(old: int, new: int, periodic: bool) -> Tensor:
    """Weights (new, old) of the linear interpolation between the two old cell centres beside each new one."""
    place = (torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5
    left = place.floor()
    neighbours = torch.stack([left, left + 1], 1).long()
    neighbours = neighbours % old if periodic else neighbours.clamp(0, old - 1)
    shares = torch.stack([1 - (place - left), place - left], 1)
    return torch.zeros(new, old, dtype=torch.float64).scatter_add(1, neighbours, shares)


@constant
def axis_modes(num_points: int, periodic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Orthonormal Fourier modes of an axis (n, n) in its rows, and the wavenumber of each in waves per domain (n,).

    Cosines and sines of whole waves at cell centres on a periodic axis, else cosines of half waves.
    """
    row = torch.arange(num_points, dtype=torch.float64)
    k = ((row + 1) / 2).floor() if periodic else row / 2
    angle = 2 * torch.pi * torch.outer(k, (row + 0.5) / num_points)
    is_sine = periodic & (row % 2 == 1)
    modes = torch.where(is_sine[:, None], angle.sin(), angle.cos())
    return (modes / modes.norm(dim=1, keepdim=True)).float().to(device), k.float().to(device)


def sine_modes(num_points: int) -> Tensor:
    """Orthonormal sines of 1 to n half waves at the cell centres of an axis, (n, n) in its rows: 0 at both walls."""
    place = torch.arange(num_points, dtype=torch.float64)
    modes = (torch.pi * torch.outer(place + 1, place + 0.5) / num_points).sin()
    return (modes / modes.norm(dim=1, keepdim=True)).float()
