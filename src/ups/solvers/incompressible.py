"""Incompressible Navier-Stokes in a closed box: semi-Lagrangian steps on a staggered grid with an exact projection.

A state (B, 3, X, Y) holds v_x on the upper x faces of the cells, v_y on the upper y faces and the particle density c
at the centres. No flow crosses the walls: the last face of a row is always 0, the one before the first is not stored.
"""

from math import pi

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ups.solvers.numerics import Box, Stepper, central_difference
from ups.solvers.random_fields import Sample, gaussian_field

NU = 0.01
CELLS_PER_STEP = 0.12  # dt / dx at speed 1, as in a run of PDEBench's generator on 48 cells with dt = 0.0025
DIFFUSION_NUMBER = 0.2


def lower_neighbour(u: Tensor, axis: int) -> Tensor:
    """Neighbours at the lower side of `axis`, 0 beyond the wall."""
    return torch.cat((torch.zeros_like(u.narrow(axis, 0, 1)), u.narrow(axis, 0, u.shape[axis] - 1)), dim=axis)


def upper_neighbour(u: Tensor, axis: int) -> Tensor:
    """Neighbours at the upper side of `axis`, 0 beyond the wall."""
    return torch.cat((u.narrow(axis, 1, u.shape[axis] - 1), torch.zeros_like(u.narrow(axis, 0, 1))), dim=axis)


def to_faces(u: Tensor) -> Tensor:
    """State of velocities given at the cell centres, undoing `to_centres`.

    A centre is the mean of its two faces and the wall's face is 0, which makes the inner faces the solution of
    overdetermined linear equations; their least-squares solution is exact for any result of `to_centres`.
    """
    v_x, v_y, c = u.unbind(1)
    v_x = torch.einsum("fi,bij->bfj", _faces_of_centres(u.shape[2], u), v_x)
    v_y = torch.einsum("fj,bij->bif", _faces_of_centres(u.shape[3], u), v_y)
    return torch.stack((v_x, v_y, c), dim=1)


def _faces_of_centres(num_points: int, u: Tensor) -> Tensor:
    mean = 0.5 * (torch.eye(num_points) + torch.eye(num_points).roll(1, 0).tril())[:, :-1]
    faces = torch.linalg.pinv(mean.double())
    return torch.cat((faces, torch.zeros_like(faces[:1]))).to(u)


def to_centres(state: Tensor) -> Tensor:
    """Velocities at the cell centres, the means of their two faces, and c: what PDEBench stores."""
    v_x, v_y, c = state.unbind(1)
    return torch.stack((lower_mean(v_x, 1), lower_mean(v_y, 2), c), dim=1)


def lower_mean(u: Tensor, axis: int) -> Tensor:
    """Means of the values and their lower neighbours along `axis`."""
    return 0.5 * (u + lower_neighbour(u, axis))


def upper_mean(u: Tensor, axis: int) -> Tensor:
    """Means of the values and their upper neighbours along `axis`."""
    return 0.5 * (u + upper_neighbour(u, axis))


def advected(u: Tensor, moved_x: Tensor, moved_y: Tensor, padding: str) -> Tensor:
    """`u` (B, X, Y) at the points that are `moved_x`, `moved_y` cells upstream of its own, by linear interpolation."""
    _, X, Y = u.shape
    i = torch.arange(X, dtype=u.dtype, device=u.device)[:, None] - moved_x
    j = torch.arange(Y, dtype=u.dtype, device=u.device) - moved_y
    upstream = torch.stack(((2 * j + 1) / Y - 1, (2 * i + 1) / X - 1), dim=-1)
    return functional.grid_sample(u[:, None], upstream, padding_mode=padding, align_corners=False)[:, 0]


def laplacian(u: Tensor, dx: float, dy: float) -> Tensor:
    """5-point Laplacian of (B, X, Y) with the value 0 beyond the grid, as PDEBench's generator has it."""
    along_x, along_y = (lower_neighbour(u, axis) - 2 * u + upper_neighbour(u, axis) for axis in (1, 2))
    return along_x / dx**2 + along_y / dy**2


def cosine_transform(num_points: int, dx: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors (orthonormal, as columns) and eigenvalues of the second difference with zero flux at both ends."""
    k = torch.arange(num_points, dtype=torch.float64)
    vectors = torch.cos(pi * (k[:, None] + 0.5) * k / num_points)
    return vectors / vectors.norm(dim=0), -4 / dx**2 * torch.sin(0.5 * pi * k / num_points) ** 2


def divergence(v_x: Tensor, v_y: Tensor, dx: float, dy: float) -> Tensor:
    """Outflow of each cell through its faces."""
    return (v_x - lower_neighbour(v_x, 1)) / dx + (v_y - lower_neighbour(v_y, 2)) / dy


def incompressible(c: dict[str, Tensor], box: Box) -> Stepper:
    """v_t + v.grad v = -grad p + nu lap v + c f, div v = 0, c_t + v.grad c = 0 with v = 0 on the walls.

    One step, as in PDEBench's generator: velocity carried along itself, explicit diffusion, force, projection by cosine
    transforms, then c carried along the new velocity. Forces are fields (B, X, Y) at the centres.
    """
    force_x, force_y = c["force_x"][:, 0], c["force_y"][:, 0]
    dx, dy = box.spacing
    (C_x, lambda_x), (C_y, lambda_y) = cosine_transform(box.grid[0], dx), cosine_transform(box.grid[1], dy)
    eigenvalue = lambda_x[:, None] + lambda_y
    eigenvalue[0, 0] = torch.inf  # sets the mean of p to 0; only grad p is used

    def projected(v_x: Tensor, v_y: Tensor) -> tuple[Tensor, Tensor]:
        p = C_x @ ((C_x.T @ divergence(v_x, v_y, dx, dy) @ C_y) / eigenvalue) @ C_y.T
        v_x[:, :-1] -= p.diff(dim=1) / dx
        v_y[:, :, :-1] -= p.diff(dim=2) / dy
        return v_x, v_y

    def step(state: Tensor, dt: Tensor) -> Tensor:
        v_x, v_y, c = state.unbind(1)
        dt = dt[:, 0]
        to_x, to_y = dt / dx, dt / dy
        w_x = advected(v_x, to_x * v_x, to_y * upper_mean(lower_mean(v_y, 2), 1), "zeros")
        w_y = advected(v_y, to_x * upper_mean(lower_mean(v_x, 1), 2), to_y * v_y, "zeros")
        w_x = w_x + dt * (NU * laplacian(w_x, dx, dy) + upper_mean(c * force_x, 1))
        w_y = w_y + dt * (NU * laplacian(w_y, dx, dy) + upper_mean(c * force_y, 2))
        w_x[:, -1], w_y[:, :, -1] = 0, 0
        w_x, w_y = projected(w_x, w_y)
        c = advected(c, to_x * lower_mean(w_x, 1), to_y * lower_mean(w_y, 2), "border")
        return torch.stack((w_x, w_y, c), dim=1)

    def limit(state: Tensor) -> Tensor:
        dt = min(CELLS_PER_STEP * min(dx, dy), DIFFUSION_NUMBER * min(dx, dy) ** 2 / NU)
        return state.new_full((len(state), 1, 1, 1), dt)

    return step, limit


def particles(u: Tensor) -> Tensor:
    """Particle density (B, 1, X, Y) of stored fields."""
    return u[:, 2:]


def tracer_rate(u: Tensor, c: dict[str, float], spacing: tuple[float, ...], boundary: str) -> Tensor:
    """c_t = -v . grad c; v_t is left out, because the pressure it depends on is not stored."""
    gradient = [central_difference(particles(u), axis, dx, "zero_flux") for axis, dx in enumerate(spacing, start=2)]
    return -sum(u[:, a : a + 1] * slope for a, slope in enumerate(gradient))


def gaussian_state(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """Velocities on the faces of a closed box, particles and forces: Gaussian fields of mean 0 and deviation 1.

    The state holds the velocities at the centres of the cells, in float32, as PDEBench stores them.
    """
    X, Y = grid = box.grid
    v_x = np.pad(gaussian_field((X - 1, Y), generator, scale=0.4, smoothness=1.0), ((0, 1), (0, 0)))
    v_y = np.pad(gaussian_field((X, Y - 1), generator, scale=0.4, smoothness=1.0), ((0, 0), (0, 1)))
    c = gaussian_field(grid, generator, scale=0.4, smoothness=1.0)
    force_x, force_y = (gaussian_field(grid, generator, scale=0.15, smoothness=3.0) for _ in range(2))
    faces = torch.from_numpy(np.stack((v_x, v_y, c))).float()
    return to_centres(faces[None])[0].numpy(), {"force_x": force_x, "force_y": force_y}
