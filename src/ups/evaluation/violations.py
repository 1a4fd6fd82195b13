"""Violations of physics by predicted snapshots, measured without the reference, and a score fitted on them.

Every violation is dimensionless, at least 0 and of shape (B, T, C_r): one number per trajectory, predicted snapshot,
and field or equation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.data.families import Dataset, base_of
from ups.data.pdebench import FAMILIES
from ups.evaluation.tables import finite
from ups.metrics.errors import EPS, at_least_eps, conservation_drift, negative_part, rms
from ups.solvers.families import equation_of
from ups.solvers.numerics import wall_divergence
from ups.solvers.reaction import INFLOW, D


def conserved_channels(dataset: Dataset) -> list[int]:
    """Channels whose integral over space is constant; none where a boundary condition is not the family's own."""
    family = FAMILIES[dataset.family]
    is_closed = dataset.boundary == family.boundaries
    return [family.fields.index(name) for name in family.conserved] if is_closed else []


def non_negative_channels(dataset: Dataset) -> list[int]:
    """Channels that cannot be negative."""
    family = FAMILIES[dataset.family]
    return [family.fields.index(name) for name in (*family.positive, *family.non_negative)]


def violations(dataset: Dataset, u: Tensor, u_0: Tensor) -> dict[str, Tensor]:
    """Violations of the last T snapshots of u (B, T + 1, C, *grid), which begins with the state they start from.

    Those that apply to the dataset, by name, relative to the initial state u_0 (B, C, *grid) of the trajectory:

    - `conservation`: |sum over space of u - u_0| / sum of |u_0|, of fields that boundaries and equation conserve
    - `positivity`: mean over space of max(-u, 0) / RMS of u_0, of fields that cannot be negative
    - `boundary`: see `boundary_mismatch`; none at periodic boundaries
    - `residual`: dt RMS of the equation's residual / RMS of the initial quantity, see `ups.solvers.numerics.Evolution`
    - `divergence`: longest cell edge times RMS of div v / RMS of v_0, of incompressible flow
    """
    family, spacing, dt = FAMILIES[dataset.family], _spacing(dataset), dataset.times[1] - dataset.times[0]
    non_negative = non_negative_channels(dataset)
    conserved, velocity = conserved_channels(dataset), [family.fields.index(name) for name in family.divergence_free]
    found: dict[str, Tensor] = {}
    if conserved:
        found["conservation"] = conservation_drift(u[:, 1:, conserved], u_0[:, conserved])
    if non_negative:
        found["positivity"] = negative_part(u[:, 1:, non_negative], u_0[:, non_negative])
    if any(boundary != "periodic" for boundary in dataset.boundary):
        found["boundary"] = boundary_mismatch(dataset, u[:, 1:]) / _size(u_0)
    equation = equation_of(base_of(dataset.family), dataset.parameters, spacing, dataset.boundary[0])
    if equation is not None:
        found["residual"] = dt * rms(equation.residual(u, dt)) / _size(equation.quantity(u_0))
    if velocity:
        divergence = wall_divergence(u[:, 1:, velocity].flatten(0, 1), spacing).unflatten(0, (len(u), -1))
        speed = u_0[:, velocity].square().sum(1).flatten(1).mean(-1).sqrt()
        found["divergence"] = max(spacing) * rms(divergence[:, :, None]) / at_least_eps(speed[:, None, None])
    return found


def boundary_mismatch(dataset: Dataset, u: Tensor) -> Tensor:
    """RMS over the faces of (extrapolated - required) value of the ghost cell: (B, T, C, *grid) -> (B, T, C).

    Extrapolated by the parabola through the last three cells, 3 u_1 - 3 u_2 + u_3. Required by the boundary condition:
    u_1 (zero gradient), -u_1 (zero on the wall), or PDEBench's ghost values of diffusion-sorption.
    """
    faces = []
    for axis, boundary in enumerate(dataset.boundary):
        for line in (u, u.flip(axis + 3)):
            if boundary != "periodic":
                first, second, third = (line.select(axis + 3, i)[..., None] for i in range(3))
                required = _ghost(dataset, axis, first, second, is_low=line is u)
                faces.append((3 * first - 3 * second + third - required).flatten(3))
    return rms(torch.cat(faces, dim=-1))


def _ghost(dataset: Dataset, axis: int, first: Tensor, second: Tensor, *, is_low: bool) -> Tensor:
    """Value of the boundary condition's ghost cell, from the outermost cell (`first`) and its inner neighbour."""
    match dataset.boundary[axis]:
        case "cauchy":
            return torch.full_like(first, INFLOW) if is_low else D * (second - first) / _spacing(dataset)[axis]
        case "dirichlet":
            return -first
        case "wall":  # no slip for velocities, zero gradient for transported fields
            signs = [-1.0 if name.startswith("V") else 1.0 for name in FAMILIES[dataset.family].fields]
            return first * first.new_tensor(signs).reshape(-1, *[1] * (first.ndim - 3))
    return first


def _spacing(dataset: Dataset) -> tuple[float, ...]:
    """Length of a cell along each axis."""
    return tuple(length / points for length, points in zip(dataset.lengths, dataset.grid, strict=True))


def _size(u_0: Tensor) -> Tensor:
    """RMS over space of an initial state, (B, C, *grid) -> (B, 1, C)."""
    return at_least_eps(rms(u_0[:, None]))


Violations = dict[str, Tensor]  # name -> (B, T, C_r)


@dataclass(frozen=True)
class PhysicsScore:
    """S = sum_r w_r <log(1 + v_r / v_r*)>_c of violations v_r, mean over channels c: 0 is best.

    `reference` holds v_r* (T, C_r), the mean violation of reference trajectories at each step: discretisation makes it
    positive, and differences below it change S little. `weights` w_r >= 0, see `fit_weights`.
    """

    reference: Violations
    weights: dict[str, float]

    def __call__(self, values: Violations, start: int = 0) -> Tensor:
        """Scores (B, T) of the steps `start`, `start` + 1, ... with violations (B, T, C_r)."""
        terms = log_ratios(values, self.reference, start)
        return sum(self.weights[name] * term for name, term in terms.items())


def mean_reference(truth: Sequence[Violations]) -> Violations:
    """Mean violation of reference trajectories, given in batches, at each step: (T, C_r), at least EPS."""
    return {name: torch.cat([values[name] for values in truth]).mean(0).clamp_min(EPS) for name in truth[0]}


def log_ratios(values: Violations, reference: Violations, start: int = 0) -> dict[str, Tensor]:
    """<log(1 + v_r / v_r*)>_c of each violation: (..., T, C_r) -> (..., T)."""
    usual = {name: reference[name][start : start + value.shape[-2]] for name, value in values.items()}
    return {name: (value / usual[name]).log1p().mean(dim=-1) for name, value in values.items()}


def ratios_to_reference(values: Violations, reference: Violations) -> dict[str, float | None]:
    """Mean of v_r / v_r* over members (..., T, C_r), steps and channels.

    None where it is not finite, or where some v_r* is at its floor EPS: below round-off a ratio means nothing.
    """
    ratios = {}
    for name, value in values.items():
        ratios[name] = finite(float((value / reference[name]).mean())) if (reference[name] > EPS).all() else None
    return ratios


def fit_score(
    truth: Sequence[Violations], predicted: Violations, errors: Tensor
) -> tuple[PhysicsScore, dict[str, float | None]]:
    """The score fitted on violations (K, B, T, C_r) and errors (K, B) of members, and their `ratios_to_reference`."""
    reference = mean_reference(truth)
    terms = {name: term.mean(-1) for name, term in log_ratios(predicted, reference).items()}
    return PhysicsScore(reference, fit_weights(terms, errors)), ratios_to_reference(predicted, reference)


def fit_weights(terms: dict[str, Tensor], errors: Tensor) -> dict[str, float]:
    """w_r = max(0, rho_r) / s_r from log ratios (K, B) and errors (K, B) of K members of each trajectory.

    rho_r is the rank correlation with the error and s_r the standard deviation, both among the members of a trajectory,
    averaged over trajectories. A violation that does not rise with the error has weight 0.
    """
    weights = {}
    for name, term in terms.items():
        std = float(term.std(dim=0).nan_to_num(nan=0.0).mean())
        rho = float(rank_correlation(term, errors).mean())
        weights[name] = max(0.0, rho) / std if std > 0 else 0.0
    return weights


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation over the first axis, ties sharing their mean rank: (K, B), (K, B) -> (B,) on the CPU.

    NaN ranks last. The correlation is 0 where all values are equal, for which `scipy.stats.spearmanr` has none.
    """
    from scipy.stats import rankdata  # its import takes a second, in every command that scores

    ranks = (torch.from_numpy(rankdata(values.nan_to_num(nan=torch.inf).cpu(), axis=0)) for values in (a, b))
    x, y = (rank - (len(rank) + 1) / 2 for rank in ranks)
    scale = (x.square().sum(0) * y.square().sum(0)).sqrt()
    return torch.where(scale > 0, (x * y).sum(0) / scale.clamp_min(EPS), 0.0)
