"""Terms that can be added to the operator's training loss: errors of predicted fields and violations of physical laws.

Each term is a pure function that returns one value per sample (B,), 0 for a perfect prediction, and one entry of
`TERMS`. Fields u are (B, C, *grid). Errors are relative to the magnitude of the true field; `floor` (C,) is the
smallest such magnitude, so that a field that is almost zero does not dominate the loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ups.config.training import Query, Term, Terms
from ups.data.families import Family, boundary_feature
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch
from ups.metrics.spectra import log_bands
from ups.models.codec import Codec, group_name
from ups.training.distributed import Draw

SMALLEST_FIELD = 1e-3  # smallest denominator of an error, relative to the typical magnitude of the field
EPS = 1e-12  # added under the root of a mean square: the gradient of sqrt at 0 is infinite
SMALLEST_BAND = 1e-2  # smallest denominator of the error of a band, relative to the expected change of one step


def query_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor, points: Tensor) -> Tensor:
    """RMSE at `points` (B, P), flat indices of grid points, over the RMS of u_ref on the grid; mean over fields."""
    error = (u_pred - u_ref).flatten(2).gather(2, points[:, None].expand(-1, u_ref.shape[1], -1))
    return (_rms(error) / _reference_rms(u_ref, floor)).mean(1)


def spectral_error(change_pred: Tensor, change_ref: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """Relative error of Fourier amplitudes along space of changes (B, C, K, *grid), C fields of K components each.

    With A = |rfftn| it is sqrt(sum (A_pred - A_ref)^2 / sum A_ref^2), with sums over the components and the modes of a
    band, and the mean over bands and fields. There are up to four bands, equally wide in log |k|. Axes that are not
    periodic are extended by their mirror image, as in the backbone's Fourier mixing. Changes are in units of the
    expected change of one step; the denominator is at least (1e-2)^2, and at least (1e-2)^2 of the sum over all bands,
    because relative errors of bands without energy are noise.
    """
    bands = _bands(tuple(change_ref.shape[3:]), periodic, change_ref.device)
    amplitude_pred, amplitude_ref = (_amplitudes(change, periodic) for change in (change_pred, change_ref))
    error, energy = (amplitude_pred - amplitude_ref).square().sum(2) @ bands, amplitude_ref.square().sum(2) @ bands
    floor = SMALLEST_BAND**2 * energy.sum(-1, keepdim=True).clamp(min=1.0)
    return (error / torch.maximum(energy, floor) + EPS).sqrt().mean((1, 2))


def conservation_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor, is_closed: Tensor) -> Tensor:
    """|mean over space of u_pred - u_ref| / mean of |u_ref|; mean over fields, whose integrals the PDE conserves.

    `is_closed` (B,) is 1 for samples whose boundaries conserve the integrals too, and 0 for others (outflow).
    """
    change = (u_pred - u_ref).flatten(2).mean(2).abs()
    return is_closed * (change / torch.maximum(u_ref.abs().flatten(2).mean(2), floor)).mean(1)


def positivity_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of min(u_pred, 0) over the RMS of u_ref; mean over fields, which must not be negative."""
    return (_rms(u_pred.clamp(max=0.0)) / _reference_rms(u_ref, floor)).mean(1)


def boundary_error(u_pred: Tensor, u_ref: Tensor, floor: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """RMSE of the first and last cells of axes that are not periodic, over the RMS of u_ref; mean over fields."""
    error, axes = u_pred - u_ref, [axis for axis, wraps in enumerate(periodic, start=2) if not wraps]
    faces = [error.narrow(axis, start, 1).flatten(2) for axis in axes for start in (0, error.shape[axis] - 1)]
    return (_rms(torch.cat(faces, 2)) / _reference_rms(u_ref, floor)).mean(1)


def divergence_error(v_pred: Tensor, v_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of div v_pred - div v_ref over the RMS of all d v_i / d x_i of v_ref; velocities (B, d, *grid), unit cube.

    Central differences in the interior. The reference is div v_ref and not 0, because PDEBench stores velocities at
    points other than those where its solver makes the divergence vanish.
    """
    derivatives_pred, derivatives_ref = _diagonal_derivatives(v_pred), _diagonal_derivatives(v_ref)
    size = _reference_rms(derivatives_ref.flatten(1)[:, None], floor.amax())
    return (_rms((derivatives_pred - derivatives_ref).sum(1, keepdim=True)) / size)[:, 0]


def _diagonal_derivatives(v: Tensor) -> Tensor:
    """The derivatives d v_i / d x_i in the interior by central differences, (B, d, *interior)."""
    derivatives = []
    for axis, num_points in enumerate(v.shape[2:]):
        ahead, behind = ([slice(1, -1)] * v.shape[1] for _ in range(2))
        ahead[axis], behind[axis] = slice(2, None), slice(-2)
        derivatives.append((v[:, axis, *ahead] - v[:, axis, *behind]) * (num_points / 2))
    return torch.stack(derivatives, 1)


def _rms(error: Tensor) -> Tensor:
    """RMS over space, (B, C); its gradient is 0, not undefined, where the error is 0."""
    return (error.flatten(2).square().mean(2) + EPS).sqrt()


def _reference_rms(u_ref: Tensor, floor: Tensor) -> Tensor:
    """RMS of the true field over space, but at least `floor`, (B, C)."""
    return torch.maximum(u_ref.flatten(2).square().mean(2).sqrt(), floor)


def _amplitudes(change: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """|rfftn| of changes (B, C, K, *grid) over space, axes that are not periodic mirrored, (B, C, K, modes)."""
    for axis, wraps in enumerate(periodic, start=3):
        change = change if wraps else torch.cat([change, change.flip(axis)], axis)
    u_hat = torch.fft.rfftn(change, dim=tuple(range(3, change.ndim)), norm="forward").flatten(3)
    return (u_hat.real.square() + u_hat.imag.square() + EPS).sqrt()


@lru_cache(maxsize=32)
def _bands(grid: tuple[int, ...], periodic: tuple[bool, ...], device: torch.device) -> Tensor:
    """Weight of each mode of `_amplitudes` in each band, (modes, bands).

    |k| is in periods per domain; modes of a mirrored axis are half periods. The weight is 2 for modes whose complex
    conjugate rfftn leaves out. The mean (k = 0) belongs to the first band; modes with |k| beyond the Nyquist frequency
    of the coarsest axis belong to no band.
    """
    points = [n if wraps else 2 * n for n, wraps in zip(grid, periodic, strict=True)]
    halves = [1.0 if wraps else 0.5 for wraps in periodic]
    axes = [torch.fft.fftfreq(n, 1 / n) for n in points[:-1]] + [torch.fft.rfftfreq(points[-1], 1 / points[-1])]
    k = torch.meshgrid(*(half * axis for half, axis in zip(halves, axes, strict=True)), indexing="ij")
    shell = torch.stack(k).square().sum(0).sqrt().floor().flatten()
    twice = 1.0 + ((k[-1] > 0) & (2 * k[-1] < grid[-1])).float().flatten()
    num_shells = (min(grid) + 1) // 2
    edges = [0, *(stop for _, stop in log_bands(num_shells).values())] if num_shells > 1 else [0, 1]
    parts = [(shell >= start) & (shell < stop) for start, stop in pairwise(edges)]
    return (torch.stack(parts, 1) * twice[:, None]).to(device)


@dataclass(frozen=True)
class Transition:
    """One time step of a batch: latents before it, after it and as predicted (B, N, D).

    `unit` (B, 1, D) is the expected change of the latents in one step. Fields are decoded when first used.
    """

    z: Tensor
    z_ref: Tensor
    z_pred: Tensor
    unit: Tensor
    batch: LatentBatch
    codec: Codec

    @cached_property
    def family(self) -> Family:
        return FAMILIES[self.batch.domain.family]

    @cached_property
    def decoded(self) -> tuple[Tensor, Tensor]:
        """Predicted and true fields (B, C, *grid), both decoded: without the components that the codec drops."""
        codec, group = self.codec.to(self.z.device), group_name(self.family.name, "fields")
        return codec.decode(self.z_pred.float(), group), codec.decode(self.z_ref.float(), group)

    @cached_property
    def floor(self) -> Tensor:
        """A thousandth of the typical magnitude of each field in the training split, (C,)."""
        group = self.codec.groups[group_name(self.family.name, "fields")]
        statistics = zip(group.log, group.mean, group.std, strict=True)
        sizes = [math.exp(mean) if log else math.hypot(mean, std) for log, mean, std in statistics]
        return SMALLEST_FIELD * torch.tensor(sizes, device=self.z.device)

    @property
    def changes(self) -> list[Tensor]:
        """Predicted and true change of the latents in units of the expected one, (B, C, K, *token_grid)."""
        grid, fields = self.batch.domain.grid, (len(self.family.fields), -1)
        changes = [(z - self.z) / self.unit for z in (self.z_pred, self.z_ref)]
        return [change.mT.unflatten(2, grid).unflatten(1, fields) for change in changes]

    @property
    def is_closed(self) -> Tensor:
        """1 for samples with the boundary under which the family's PDE conserves on all axes, else 0; (B,)."""
        features = [boundary_feature(axis, boundary) for axis, boundary in enumerate(self.family.boundaries)]
        return self.batch.condition[:, features].amin(1)

    def error(self, function: Callable[..., Tensor], names: tuple[str, ...], *arguments: object) -> Tensor | None:
        """`function`(u_pred, u_ref, floor, *arguments) of the fields `names`; None if there are none."""
        if not names:
            return None
        channels = [self.family.fields.index(name) for name in names]
        u_pred, u_ref = self.decoded
        return function(u_pred[:, channels], u_ref[:, channels], self.floor[channels], *arguments)


# A term of the loss: its name in `ups.config.Terms`, and its value per sample (B,), None for families without it.
TERMS: dict[str, Callable[[Transition, Any, Draw], Tensor | None]] = {
    "query": lambda step, config, draw: step.error(
        query_error, step.family.fields, draw.integers(math.prod(step.decoded[0].shape[2:]), config.num_points) - 1
    ),
    "spectral": lambda step, config, draw: spectral_error(*step.changes, step.batch.domain.periodic),
    "conservation": lambda step, config, draw: step.error(conservation_error, step.family.conserved, step.is_closed),
    # Not of `Family.positive` fields: the codec encodes their logarithm, so that they are positive in any case.
    "positivity": lambda step, config, draw: step.error(positivity_error, step.family.non_negative),
    "boundary": lambda step, config, draw: step.error(
        boundary_error, () if all(step.batch.domain.periodic) else step.family.fields, step.batch.domain.periodic
    ),
    "divergence": lambda step, config, draw: step.error(divergence_error, step.family.divergence_free),
}


class TermSum:
    """Weighted sum of the terms of `config` with a weight above 0.

    `values` has the latest batch mean of each in its phase, without its weight, as 0-d tensors for logging.
    """

    def __init__(self, config: Terms, codec: Codec, steps: int) -> None:
        self.configs: dict[str, Term] = {name: term for name, term in config if term.weight > 0}
        self.codec, self.steps = codec, steps
        self.values: dict[str, Tensor] = {}

    def active(self, step: int) -> tuple[str, ...]:
        """Names of the terms that training step `step` computes."""
        return tuple(name for name, config in self.configs.items() if term_weight(config, step, self.steps) > 0)

    def __call__(self, transition: Transition, draw: Draw) -> Tensor:
        """The sum for each sample of a training step, (B,)."""
        assert draw.step is not None, "terms are part of the training loss only"
        total = torch.zeros(len(transition.z), device=transition.z.device)
        # Fourier transforms and differences of nearly equal fields lose too many digits in bfloat16.
        with torch.autocast(transition.z.device.type, enabled=False):
            for name, config in self.configs.items():
                if not in_phase(config, draw.step, self.steps):
                    self.values.pop(name, None)
                weight = term_weight(config, draw.step, self.steps)
                values = TERMS[name](transition, config, draw) if weight > 0 else None
                if values is not None:
                    total = total + weight * values
                    self.values[name] = values.detach().mean()
        return total


def in_phase(config: Term, step: int, steps: int) -> bool:
    """Whether step `step` of `steps` is in the `phase` of a term."""
    start, end = config.phase
    return start <= step / steps < end


def term_weight(config: Term, step: int, steps: int) -> float:
    """Weight of a term in step `step` of `steps`: 0 outside of its `phase`; `Query` has a warm-up and pauses too."""
    if not in_phase(config, step, steps):
        return 0.0
    if not isinstance(config, Query):
        return config.weight
    if step % config.every:
        return 0.0
    return config.weight * min(1.0, (step + 1) / max(1, config.warmup_steps))
