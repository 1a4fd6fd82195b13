"""Which further terms of the operator's loss apply to a predicted step, and how much they count."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ups.config import Terms
from ups.data.condition import boundary_feature
from ups.data.loader import LatentBatch
from ups.data.pdebench import FAMILIES, Family
from ups.models.codec import Codec, FieldGroup, group_name
from ups.training.distributed import Draw
from ups.training.terms import (
    boundary_error,
    conservation_error,
    divergence_error,
    positivity_error,
    query_error,
    spectral_error,
)

INCOMPRESSIBLE = {"incompressible_ns_2d": ("Vx", "Vy")}
SMALLEST_FIELD = 1e-3


@dataclass(frozen=True)
class Transition:
    """A step of a batch: true states before and after it, the predicted one, (B, N, D), and its unit (B, 1, D)."""

    z: Tensor
    z_ref: Tensor
    z_pred: Tensor
    unit: Tensor
    batch: LatentBatch
    codec: Codec

    @cached_property
    def family(self) -> Family:
        return list(FAMILIES.values())[self.batch.domain.family]

    @cached_property
    def group(self) -> FieldGroup:
        return self.codec.groups[group_name(self.family.name, "fields")]

    @cached_property
    def u_ref(self) -> Tensor:
        """The true fields (B, C, *grid), as the codec knows them."""
        return self._decode(self.z_ref)

    @cached_property
    def u_pred(self) -> Tensor:
        """The predicted fields (B, C, *grid)."""
        return self._decode(self.z_pred)

    @cached_property
    def floor(self) -> Tensor:
        """A thousandth of the usual magnitude of each field, (C,)."""
        statistics = zip(self.group.log, self.group.mean, self.group.std, strict=True)
        sizes = [math.exp(mean) if log else math.hypot(mean, std) for log, mean, std in statistics]
        return SMALLEST_FIELD * torch.tensor(sizes, device=self.z.device)

    def fields(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Prediction, truth and floor of some of the fields."""
        channels = [self.family.fields.index(name) for name in names]
        return self.u_pred[:, channels], self.u_ref[:, channels], self.floor[channels]

    def _decode(self, z: Tensor) -> Tensor:
        return self.codec.to(z.device).decode(z.float(), group_name(self.family.name, "fields"))


class WeightedTerms:
    """Sum of the terms of `config` whose weight is not 0; `values` keeps the latest of each, without its weight."""

    def __init__(self, config: Terms, codec: Codec) -> None:
        self.config, self.codec = config, codec
        functions = {
            "query": self._query,
            "spectral": _spectral,
            "conservation": _conservation,
            "positivity": _positivity,
            "boundary": _boundary,
            "divergence": _divergence,
        }
        self.functions = {name: functions[name] for name, term in config if term.weight > 0}
        self.values: dict[str, Tensor] = {}

    def __call__(self, transition: Transition, draw: Draw) -> Tensor:
        """What the terms add to the loss of each sample in a training step, (B,)."""
        total = torch.zeros(len(transition.z), device=transition.z.device)
        with torch.autocast(transition.z.device.type, enabled=False):
            for name, function in self.functions.items():
                values = function(transition, draw)
                if values is not None:
                    total = total + self._weight(name, draw) * values
                    self.values[name] = values.detach().mean()
        return total

    def _weight(self, name: str, draw: Draw) -> float:
        weight = getattr(self.config, name).weight
        if name == "query":
            weight *= min(1.0, (_step(draw) + 1) / max(1, self.config.query.warmup_steps))
        return weight

    def _query(self, step: Transition, draw: Draw) -> Tensor | None:
        if _step(draw) % self.config.query.every:
            return None
        points = draw.points(math.prod(step.group.grid), self.config.query.num_points)
        return query_error(*step.fields(step.family.fields), points)


def _spectral(step: Transition, draw: Draw) -> Tensor:
    domain, num_fields = step.batch.domain, len(step.family.fields)
    changes = [((z - step.z) / step.unit).mT.unflatten(2, domain.grid) for z in (step.z_pred, step.z_ref)]
    pred, ref = (change.unflatten(1, (num_fields, -1)) for change in changes)
    return spectral_error(pred, ref, domain.periodic)


def _conservation(step: Transition, draw: Draw) -> Tensor | None:
    """Only samples whose boundaries are the family's own: open ones let out what the equation conserves."""
    if not step.family.conserved:
        return None
    places = [boundary_feature(axis, step.family.boundary) for axis in range(len(step.family.axes))]
    is_closed = step.batch.condition[:, places].amin(1)
    return is_closed * conservation_error(*step.fields(step.family.conserved))


def _positivity(step: Transition, draw: Draw) -> Tensor | None:
    """Of fields that may vanish but not fall below zero; `Family.positive` ones are exponentials, thus positive."""
    names = step.family.non_negative
    return positivity_error(*step.fields(names)) if names else None


def _boundary(step: Transition, draw: Draw) -> Tensor | None:
    periodic = step.batch.domain.periodic
    return None if all(periodic) else boundary_error(*step.fields(step.family.fields), periodic)


def _divergence(step: Transition, draw: Draw) -> Tensor | None:
    velocities = INCOMPRESSIBLE.get(step.family.name)
    return divergence_error(*step.fields(velocities)) if velocities else None


def _step(draw: Draw) -> int:
    assert draw.step is not None, "terms count in training only"
    return draw.step
