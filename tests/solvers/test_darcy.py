from math import log2, pi

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers import sample_initial_states, solve
from ups.solvers.darcy import darcy, darcy_matrix


def extended(num_points: int) -> tuple[np.ndarray, float]:
    """Cell centres on (0, 1) as fractions of the interval between the two ghost centres, and that interval's length."""
    length = 1 + 1 / num_points
    return (np.arange(num_points) + 1) / num_points / length, length


def manufactured(num_points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nu = 2 + cos(pi s) cos(pi r), u = sin(pi s) sin(pi r) and beta = -div(nu grad u) in fractions s, r."""
    fraction, length = extended(num_points)
    s, r = fraction[:, None], fraction[None, :]
    sin_s, cos_s, sin_r, cos_r = np.sin(pi * s), np.cos(pi * s), np.sin(pi * r), np.cos(pi * r)
    nu = 2 + cos_s * cos_r
    beta = (pi / length) ** 2 * (2 * nu * sin_s * sin_r + 2 * sin_s * cos_s * sin_r * cos_r)
    return nu, sin_s * sin_r, beta


def test_darcy_converges_at_second_order():
    """The largest error against a manufactured solution with a smooth permeability falls by four per halving."""
    errors = []
    for num_points in (16, 32, 64):
        nu, u, beta = manufactured(num_points)
        errors.append(np.abs(darcy(nu, beta, 1.0) - u).max())
    assert log2(errors[0] / errors[1]) > 1.8
    assert log2(errors[1] / errors[2]) > 1.8


def test_darcy_of_constant_permeability_is_poisson():
    """With nu = a the solution is the discrete Poisson solution, by sine transform, times beta / a."""
    num_points, a, beta = 12, 0.1, 3.0
    m = np.arange(1, num_points + 1)
    sine = np.sin(pi * np.outer(m, m) / (num_points + 1)) * np.sqrt(2 / (num_points + 1))
    eigenvalue = 4 * num_points**2 * np.sin(pi * m / 2 / (num_points + 1)) ** 2
    poisson = sine @ ((sine @ np.ones((num_points, num_points)) @ sine) / (eigenvalue[:, None] + eigenvalue)) @ sine
    np.testing.assert_allclose(darcy(np.full((12, 12), a), beta, 1.0), beta / a * poisson, rtol=1e-12)


@pytest.mark.parametrize("nu", [torch.ones(8, 8, dtype=torch.int64), torch.full((8, 8), torch.nan)])
def test_darcy_needs_real_numbers(nu: Tensor):
    """Solutions have the type of the permeability: of integers all would be zero."""
    with pytest.raises(ConfigFault, match="darcy_2d needs finite floating-point numbers as its permeability nu"):
        solve("darcy_2d", None, {"nu": nu, "beta": 1.0}, [0.0])


def test_darcy_at_the_middle_of_the_square():
    """Unit permeability and forcing give 0.07367 L^2 in the middle of a square of width L."""
    num_points = 63
    middle = darcy(np.ones((num_points, num_points)), 1.0, 1.0)[num_points // 2, num_points // 2]
    assert middle == pytest.approx(0.0736713 * extended(num_points)[1] ** 2, rel=1e-3)


def test_darcy_matrix_is_symmetric_and_positive():
    """What leaves a cell enters its neighbour, and the operator can be inverted, for permeabilities that jump."""
    nu = np.where(np.random.default_rng(0).random((6, 8)) > 0.5, 1.0, 0.1)
    matrix = darcy_matrix(nu, 1 / 6, 1 / 8).toarray()
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > 0


def test_darcy_mirrors_with_its_permeability():
    """A mirrored or transposed permeability gives the mirrored or transposed solution."""
    nu = np.where(np.random.default_rng(1).random((8, 8)) > 0.5, 1.0, 0.1)
    u = darcy(nu, 1.0, 1.0)
    np.testing.assert_allclose(darcy(nu[::-1], 1.0, 1.0), u[::-1], rtol=1e-12)
    np.testing.assert_allclose(darcy(nu.T, 1.0, 1.0), u.T, rtol=1e-12)


def test_permeability_is_one_or_a_tenth():
    """Permeabilities are 0.1 or 1, each on about half of the area, and 1 rather in the middle, where bumps overlap."""
    _, coefficients = sample_initial_states("darcy_2d", range(300), (16, 16), seed=0)
    assert set(coefficients["nu"].unique().tolist()) == {torch.tensor(0.1).item(), 1.0}
    assert (coefficients["nu"] == 1).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert coefficients["nu"][:, 8, 8].mean() > 2 * coefficients["nu"][:, 0, 0].mean()
