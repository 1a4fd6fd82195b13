"""Fields on another grid of the same domain."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models.test_mixing import normal
from ups.models.grid import resampled


def wave(num_points: int) -> Tensor:
    """One sine wave at the cell centres of a periodic axis."""
    return torch.sin(2 * math.pi * (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points)


@pytest.mark.parametrize("grid", [(64, 7), (99, 5), (100, 3), (1, 12)])
def test_averages_keep_integrals(grid: tuple[int, int]):
    """On fewer points, also where these do not divide the old ones."""
    u = normal(2, 3, 100, 12).double()
    found = resampled(u, grid, ("periodic", "wall"))
    assert found.shape == (2, 3, *grid)
    assert torch.allclose(found.mean((-2, -1)), u.mean((-2, -1)), atol=1e-12)


def test_averages_are_those_of_whole_cells_where_points_divide():
    """A quarter of the points along one axis, a half along the other: as PyTorch's pooling has it."""
    u = normal(2, 3, 16, 12)
    expected = functional.interpolate(u, (4, 6), mode="area")
    assert torch.allclose(resampled(u, (4, 6), ("periodic", "periodic")), expected, atol=1e-6)


def test_finer_grids_are_interpolated_as_pytorch_does_it():
    """Linear between cell centres, constant at ends that are not periodic."""
    u = normal(2, 3, 8, 6)
    expected = functional.interpolate(u, (20, 6 * 3), mode="bilinear", align_corners=False)
    assert torch.allclose(resampled(u, (20, 18), ("wall", "wall")), expected, atol=1e-6)


def test_periodic_ends_are_as_exact_as_the_middle():
    """Twice the points of a sine wave: the error of linear interpolation, (2 pi / 32)^2 / 8 at most, everywhere."""
    error = (resampled(wave(32), (64,), ("periodic",)) - wave(64)).abs()
    assert error.max() < (2 * math.pi / 32) ** 2 / 8
    assert (resampled(wave(32), (64,), ("outflow",)) - wave(64)).abs().max() > 0.04


def test_the_same_grid_changes_nothing():
    """Not even by rounding."""
    u = normal(2, 3, 8, 6)
    assert resampled(u, (8, 6), ("wall", "wall")) is u
