"""What is read of a file besides its values: grid and lengths."""

from pathlib import Path

import pytest

from ups.data.pdebench import FAMILIES
from ups.data.trajectories import find_single_grid_datasets


@pytest.mark.parametrize("family", FAMILIES)
def test_a_domain_is_as_long_as_its_cells(family: str, write):
    """The centres of n cells of 1 / n span less than the domain, whose length is 1 along every axis."""
    path: Path = write(family)
    (dataset,) = find_single_grid_datasets(path.parent, [path.name]).values()
    assert dataset.lengths == (1.0,) * len(FAMILIES[family].axes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grid_has_its_points_in_the_order_of_the_axes(family: str, write):
    """On 8 x 6 x 4 points the grid is (8, 6, 4), whatever the order on disk."""
    path: Path = write(family)
    (dataset,) = find_single_grid_datasets(path.parent, [path.name]).values()
    assert dataset.grid == (8, 6, 4)[: len(FAMILIES[family].axes)]
