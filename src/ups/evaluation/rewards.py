"""What physics says of predicted snapshots without knowing the truth: violations, 0 where there is none.

Every violation is dimensionless, (B, T, C_r): one number per trajectory, predicted snapshot, and field or equation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ups.data.dataset import Dataset
from ups.data.pdebench import FAMILIES, Family
from ups.metrics.errors import EPS, conservation_drift, rms
from ups.solvers.residual import law_of, wall_divergence
from ups.solvers.sorption import INFLOW, D


@dataclass(frozen=True)
class Physics:
    """What the rewards have to know of a dataset; `boundary` and `spacing` have one entry per axis."""

    family: Family
    parameters: dict[str, float]
    boundary: tuple[str, ...]
    spacing: tuple[float, ...]
    dt: float

    @classmethod
    def of(cls, dataset: Dataset) -> "Physics":
        spacing = tuple(length / points for length, points in zip(dataset.lengths, dataset.grid, strict=True))
        dt = dataset.times[1] - dataset.times[0]
        return cls(FAMILIES[dataset.family], dataset.parameters, dataset.boundary, spacing, dt)

    @property
    def conserved(self) -> list[int]:
        """Channels whose integral does not change: none where a boundary is not the family's own."""
        is_closed = all(boundary == self.family.boundary for boundary in self.boundary)
        return [self.family.fields.index(name) for name in self.family.conserved] if is_closed else []

    @property
    def non_negative(self) -> list[int]:
        """Channels that cannot fall below zero."""
        return [self.family.fields.index(name) for name in (*self.family.positive, *self.family.non_negative)]


def violations(physics: Physics, u: Tensor, u_0: Tensor) -> dict[str, Tensor]:
    """Violations of T predicted snapshots, given after the state they start from: u (B, T + 1, C, *grid).

    Those that apply to the family, relative to the initial state u_0 (B, C, *grid) of the trajectory:

    - `conservation`: |sum over space of u - u_0| / sum of |u_0|, of fields that boundaries and equation conserve
    - `positivity`: mean over space of max(-u, 0) / RMS of u_0, of fields that cannot be negative
    - `boundary`: see `boundary_mismatch`; nothing can be wrong at a periodic boundary
    - `residual`: dt RMS of the equation's residual / RMS of the initial quantity, see `ups.solvers.residual`
    - `divergence`: longest cell edge times RMS of div v / RMS of v_0, of incompressible flow
    """
    found: dict[str, Tensor] = {}
    if physics.conserved:
        found["conservation"] = conservation_drift(u[:, 1:, physics.conserved], u_0[:, physics.conserved])
    if physics.non_negative:
        negative = (-u[:, 1:, physics.non_negative]).clamp(min=0).flatten(3).mean(-1)
        found["positivity"] = negative / _size(u_0[:, physics.non_negative])
    if any(boundary != "periodic" for boundary in physics.boundary):
        found["boundary"] = boundary_mismatch(physics, u[:, 1:]) / _size(u_0)
    law = law_of(physics.family.name, physics.parameters, physics.spacing, physics.boundary[0])
    if law is not None:
        found["residual"] = physics.dt * rms(law.residual(u, physics.dt)) / _size(law.quantity(u_0))
    if physics.family.name == "incompressible_ns_2d":
        divergence = wall_divergence(u[:, 1:, :2].flatten(0, 1), physics.spacing).unflatten(0, (len(u), -1))
        speed = u_0[:, :2].square().sum(1).flatten(1).mean(-1).sqrt()
        found["divergence"] = max(physics.spacing) * rms(divergence[:, :, None]) / speed.clamp_min(EPS)[:, None, None]
    return found


def boundary_mismatch(physics: Physics, u: Tensor) -> Tensor:
    """RMS over the faces of (extrapolated - required) value of the cell beyond the wall: (B, T, C, *grid) -> (B, T, C).

    Extrapolated by the parabola through the last three cells, 3 u_1 - 3 u_2 + u_3; required by the family's condition:
    u_1 (zero gradient), -u_1 (zero on the wall), PDEBench's ghost values of diffusion-sorption.
    """
    faces = []
    for axis, boundary in enumerate(physics.boundary):
        for line in (u, u.flip(axis + 3)):
            if boundary != "periodic":
                cells = [line.select(axis + 3, i)[..., None] for i in range(3)]
                required = _ghost(physics, axis, cells[0], cells[1], is_low=line is u)
                faces.append((3 * cells[0] - 3 * cells[1] + cells[2] - required).flatten(3))
    return rms(torch.cat(faces, dim=-1))


def _ghost(physics: Physics, axis: int, first: Tensor, second: Tensor, *, is_low: bool) -> Tensor:
    """Value that the boundary condition asks for beyond the `first` cell, which the `second` follows inwards."""
    match physics.boundary[axis]:
        case "cauchy":
            return torch.full_like(first, INFLOW) if is_low else D * (second - first) / physics.spacing[axis]
        case "dirichlet":
            return -first
        case "wall":  # velocities are zero, what is carried has no gradient
            signs = [-1.0 if name.startswith("V") else 1.0 for name in physics.family.fields]
            return first * first.new_tensor(signs).reshape(-1, *[1] * (first.ndim - 3))
    return first


def _size(u_0: Tensor) -> Tensor:
    """RMS over space of an initial state, (B, C, *grid) -> (B, 1, C)."""
    return rms(u_0[:, None]).clamp_min(EPS)
