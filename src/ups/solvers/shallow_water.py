"""Shallow water over a flat floor: MUSCL finite volumes with the HLL flux and open walls."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ups.solvers.numerics import Box, Stepper, face_states, largest
from ups.solvers.random_fields import Sample

GRAVITY = 1.0
INNER_HEIGHT = 2.0


def dam(box: Box, generator: np.random.Generator, parameters: dict[str, float]) -> Sample:
    """Water of height 2 inside a circle of radius 0.3 to 0.7, 1 outside, as means over the cells.

    The circle cuts a cell as a straight line along the grid would. Heights at the cell centres would be the same for
    many radii: seven states in all on 32 x 32 cells.
    """
    radius = generator.uniform(0.3, 0.7)
    x, y = box.centres
    distance = np.hypot(x[:, None], y[None, :])
    height = 1.0 + np.clip((radius - distance) / (x[1] - x[0]) + 0.5, 0.0, 1.0)
    return height[None], {"dam_radius": np.float64(radius)}


def at_rest(height: Tensor) -> Tensor:
    """State h, hu, hv of water (B, 1, X, Y) that does not move."""
    return torch.cat((height, torch.zeros_like(height), torch.zeros_like(height)), dim=1)


def height_of(state: Tensor) -> Tensor:
    """The height alone, which is what PDEBench stores."""
    return state[:, :1]


def split(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Height and velocities (B, ...) of a state h, hu, hv (B, 3, ...)."""
    h = state[:, 0]
    return h, state[:, 1] / h, state[:, 2] / h


def flux(h: Tensor, normal: Tensor, tangential: Tensor) -> Tensor:
    """Flux of (h, h normal, h tangential) through a face across the normal velocity."""
    return torch.stack((h * normal, h * normal**2 + 0.5 * GRAVITY * h**2, h * normal * tangential), dim=1)


def hll(left: Tensor, right: Tensor) -> Tensor:
    """HLL flux between the primitive states h, normal, tangential (B, 3, ...) of the two sides."""
    c_left, c_right = (GRAVITY * left[:, 0]).sqrt(), (GRAVITY * right[:, 0]).sqrt()
    slowest = torch.minimum(left[:, 1] - c_left, right[:, 1] - c_right).clamp(max=0)[:, None]
    fastest = torch.maximum(left[:, 1] + c_left, right[:, 1] + c_right).clamp(min=0)[:, None]
    jump = conserved(right) - conserved(left)
    flux_left, flux_right = flux(*left.unbind(1)), flux(*right.unbind(1))
    return (fastest * flux_left - slowest * flux_right + fastest * slowest * jump) / (fastest - slowest)


def conserved(primitive: Tensor) -> Tensor:
    """h, hu, hv of h, u, v (B, 3, ...)."""
    return torch.cat((primitive[:, :1], primitive[:, :1] * primitive[:, 1:]), dim=1)


def divergence(state: Tensor, dx: float) -> Tensor:
    """(F_{i+1/2} - F_{i-1/2}) / dx along the last axis of h, h normal, h tangential, with zero-gradient walls."""
    primitive = torch.stack(split(functional.pad(state, (2, 2, 0, 0), mode="replicate")), dim=1)
    return hll(*face_states(primitive, -1)).diff(dim=-1) / dx


def shallow_water(c: dict[str, Tensor], box: Box) -> Stepper:
    """h_t + div(h v) = 0, (h v)_t + div(h v v) + grad(g h^2/2) = 0 with SSP-RK2, CFL number 0.4."""
    dx, dy = box.spacing
    swap = [0, 2, 1]

    def rate(state: Tensor) -> Tensor:
        along_x = divergence(state.transpose(-1, -2), dx).transpose(-1, -2)
        along_y = divergence(state[:, swap], dy)[:, swap]
        return -along_x - along_y

    def step(u: Tensor, dt: Tensor) -> Tensor:
        u_star = u + dt * rate(u)
        return 0.5 * (u + u_star + dt * rate(u_star))

    def limit(state: Tensor) -> Tensor:
        h, v_x, v_y = split(state)
        c = (GRAVITY * h).sqrt()
        return 0.4 / largest((v_x.abs() + c) / dx + (v_y.abs() + c) / dy)[:, None]

    return step, limit


def shallow_water_settings(duration: float, num_snapshots: int) -> dict[str, float]:
    """Settings that PDEBench's generator writes beside every trajectory."""
    return {"T_end": duration, "n_time_steps": num_snapshots - 1, "gravity": GRAVITY, "inner_height": INNER_HEIGHT}
