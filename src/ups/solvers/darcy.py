"""Steady Darcy flow by cell-centred finite volumes and a sparse direct solver."""

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu


def darcy_matrix(nu: np.ndarray, dx: float, dy: float) -> sparse.csc_array:
    """-div(nu grad .) on the cells of `nu` (X, Y), row-major.

    A face has the arithmetic mean of its two cells. Outside the walls nu continues, and u = 0 at the centre of the
    ghost cell, half a cell outside, as PDEBench does it.
    """
    padded = np.pad(nu, 1, mode="edge")
    face_x = 0.5 * (padded[1:, 1:-1] + padded[:-1, 1:-1]) / dx**2
    face_y = 0.5 * (padded[1:-1, 1:] + padded[1:-1, :-1]) / dy**2
    diagonal = face_x[1:] + face_x[:-1] + face_y[:, 1:] + face_y[:, :-1]
    below = -face_x[1:-1].ravel()
    beside = np.pad(-face_y[:, 1:-1], ((0, 0), (0, 1))).ravel()[:-1]
    points_y = nu.shape[1]
    return sparse.diags_array(
        [below, beside, diagonal.ravel(), beside, below],
        offsets=[-points_y, -1, 0, 1, points_y],
        format="csc",
    )


def darcy(nu: np.ndarray, beta: np.ndarray | float, length: float) -> np.ndarray:
    """Solve -div(nu grad u) = beta for one permeability `nu` (X, Y); `beta` is a number or a field (X, Y)."""
    points_x, points_y = nu.shape
    matrix = darcy_matrix(nu, length / points_x, length / points_y)
    forcing = np.broadcast_to(beta, nu.shape).astype(float).ravel()
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return factors.solve(forcing).reshape(nu.shape)
