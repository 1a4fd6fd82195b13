"""Steady Darcy flow by cell-centred finite volumes and a sparse direct solver."""

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers.numerics import Box, aligned
from ups.solvers.random_fields import Sample

# Mean over the unit square, over x_m ~ U(0,1)^2 and s_m ~ U(0,0.5), of the sum of five bumps exp(-|x - x_m|^2 / s_m).
# PDEBench takes the mean over the trajectories of one batch; its expectation keeps trajectories independent.
BUMPS_MEAN = 1.852145330065209


def permeability(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """1 where five random bumps exp(-|x - x_m|^2 / s_m) sum to more than their mean, 0.1 elsewhere."""
    x, y = box.centres
    x_m, y_m = generator.uniform(0.0, 1.0, (2, 5))
    s_m = generator.uniform(0.0, 0.5, 5)
    distance = (x[:, None, None] - x_m) ** 2 + (y[None, :, None] - y_m) ** 2
    return None, {"nu": np.where(np.exp(-distance / s_m).sum(axis=2) > BUMPS_MEAN, 1.0, 0.1)}


def darcy_matrix(nu: np.ndarray, dx: float, dy: float) -> sparse.csc_array:
    """-div(nu grad .) on the cells of `nu` (X, Y), row-major.

    A face has the arithmetic mean of its two cells. Outside the walls nu continues, and u = 0 at the centre of the
    ghost cell, half a cell outside, as PDEBench does it.
    """
    padded = np.pad(nu, 1, mode="edge")
    face_x = 0.5 * (padded[1:, 1:-1] + padded[:-1, 1:-1]) / dx**2
    face_y = 0.5 * (padded[1:-1, 1:] + padded[1:-1, :-1]) / dy**2
    diagonal = face_x[1:] + face_x[:-1] + face_y[:, 1:] + face_y[:, :-1]
    coupling_x = -face_x[1:-1].ravel()
    coupling_y = np.pad(-face_y[:, 1:-1], ((0, 0), (0, 1))).ravel()[:-1]
    diagonals = [coupling_x, coupling_y, diagonal.ravel(), coupling_y, coupling_x]
    return sparse.diags_array(diagonals, offsets=[-nu.shape[1], -1, 0, 1, nu.shape[1]], format="csc")


def darcy(nu: np.ndarray, beta: np.ndarray | float, length: float) -> np.ndarray:
    """Solve -div(nu grad u) = beta for one permeability `nu` (X, Y); `beta` is a number or a field (X, Y)."""
    points_x, points_y = nu.shape
    matrix = darcy_matrix(nu, length / points_x, length / points_y)
    forcing = np.broadcast_to(beta, nu.shape).astype(float).ravel()
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return factors.solve(forcing).reshape(nu.shape)


def darcy_solutions(c: dict[str, float | Tensor], length: float) -> Tensor:
    """Solutions (B, 1, X, Y) for permeabilities `nu` (B, X, Y) or (X, Y) and forcings `beta`, numbers or (B,)."""
    nu = torch.as_tensor(c["nu"])
    if nu.ndim not in (2, 3):
        raise ConfigFault(f"darcy_2d needs a permeability nu of shape (X, Y) or (B, X, Y), got {tuple(nu.shape)}")
    if not nu.is_floating_point() or not nu.isfinite().all():
        raise ConfigFault(f"darcy_2d needs finite floating-point numbers as its permeability nu, got {nu.dtype}")
    beta = torch.as_tensor(c["beta"])
    fields = nu.reshape(-1, 1, *nu.shape[-2:])
    if len(fields) == 1 and beta.ndim == 1:
        fields = fields.expand(len(beta), -1, -1, -1)
    beta = aligned("beta", beta, fields, is_field=False).flatten().expand(len(fields))
    pairs = zip(fields[:, 0].double().cpu().numpy(), beta.tolist(), strict=True)
    return torch.stack([torch.from_numpy(darcy(nu_i, beta_i, length)) for nu_i, beta_i in pairs])[:, None].to(nu)
