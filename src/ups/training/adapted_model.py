"""A loaded model adapted to arrays: the side of `Model.adapt` that trains."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config import packaged
from ups.config.studies import AdaptConfig
from ups.data.axes import has_step
from ups.data.families import Dataset, Family, base_of
from ups.data.normalization import LARGEST, SMALLEST
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.surrogate.arrays import (
    Array,
    as_tensor,
    check_axes,
    check_finite,
    check_grid,
    check_positive,
    kind_of,
    variables,
)
from ups.surrogate.bundle import Bundle
from ups.surrogate.family_cards import FamilyCard, find_family
from ups.surrogate.problem import check_arguments, read_coefficients
from ups.training.adaptation import adapt
from ups.training.examples import Trajectories, encode


@torch.inference_mode(False)
@torch.enable_grad()
def adapt_bundle(
    bundle: Bundle,
    family: str | Family,
    u: Array,
    *,
    steps: int,
    dt: float | None,
    lengths: tuple[float, ...] | None,
    arguments: dict[str, Any],
    device: torch.device,
) -> Bundle:
    """The models of `Model.adapt`, by the recipe of `conf/base`; the card says under `adapted` what was gained.

    Raises as `adapt`; ConfigFault for arguments that do not suit the family.
    """
    arguments = {name: _trainable(value) for name, value in arguments.items()}
    trajectories = _trajectories(bundle.card, family, _trainable(u), dt, lengths, arguments, device)
    dataset, name = trajectories.dataset, trajectories.family.name
    config = AdaptConfig.model_validate(packaged("adapt") | {"steps": steps})
    gain = adapt(bundle.surrogate, trajectories, config)
    surrogate = replace(gain.surrogate, codec=gain.surrogate.codec.on_grid(name, dataset.grid))
    domain = encode(surrogate.codec, trajectories.of(slice(1))).domain
    stage = "steady" if trajectories.family.steady else "operator"
    groups = {name: asdict(group) for name, group in surrogate.codec.groups.items()}
    entry = {
        "datasets": [asdict(dataset) | {"split": {"train": list(range(len(trajectories.u))), "valid": [], "test": []}}],
        "token_grid": list(domain.grid),
        "periodic": list(domain.periodic),
        "scores": [],
        "coverage": None,
        "definition": trajectories.family.definition,
        "adapted": {"donor": gain.donor, "learning_rate": gain.learning_rate, "over_scratch": gain.over_scratch},
    }
    settings = {"codec": {"groups": groups}, stage: gain.settings}
    card = {"settings": settings, "corrections": [], "families": {name: entry}}
    return Bundle(surrogate, {key: bundle.card[key] for key in ("format", "ups")} | card)


def _trajectories(
    card: dict[str, Any],
    family: str | Family,
    u: Array,
    dt: float | None,
    lengths: tuple[float, ...] | None,
    arguments: dict[str, Any],
    device: torch.device,
) -> Trajectories:
    """The caller's arrays as trajectories; what is not given is that of the trained family."""
    if isinstance(family, Family):
        FAMILIES.define(family)
        family = family.name
    trained = {name: FamilyCard.of(name, entry) for name, entry in card["families"].items()}
    if family not in trained and base_of(family) not in FAMILIES:
        raise ConfigFault(f"there is no family {family!r}: give a ups.Family, or choose {', '.join(trained)}")
    if family in map(base_of, trained):
        family = find_family(family, trained, u)
    known = trained.get(family)
    spec = FAMILIES[family]
    check_arguments(spec, arguments)
    fields = _fields(u, spec, device)
    step = None if spec.steady else _time_step(dt, known, family)
    if kind_of(u) == "xarray" and "time" in u.coords and step is not None and dt is None:
        _expect_step(u.coords["time"].values, step)
    count, grid = len(fields), tuple(fields.shape[3:])
    if lengths is None and known is None:
        raise ConfigFault(f"lengths of {family} are missing: those of the domain along {', '.join(spec.axes)}")
    dataset = Dataset(
        name=family,
        family=family,
        files=(),
        counts=(count,),
        times=(0.0,) if step is None else tuple(step * n for n in range(fields.shape[1])),
        grid=grid,
        lengths=known.datasets[0].lengths if lengths is None else _lengths(lengths, spec),
        boundary=spec.boundaries if known is None else known.datasets[0].boundary,
        parameters={name: _number(arguments[name], name) for name in spec.parameters},
    )
    given = {name: arguments[name] for name in spec.coefficients}
    coefficients, _ = read_coefficients(spec, given, fields[:, 0], None, device)
    return Trajectories(dataset, fields, fields.new_zeros(count, 0, *grid) if coefficients is None else coefficients)


def _trainable(value: Any) -> Any:
    """A copy of a tensor that was made in inference mode, from which no gradient could be computed."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _fields(u: Array, family: Family, device: torch.device) -> Tensor:
    """The caller's fields as (B, T, C, *grid)."""
    fields, num_axes = as_tensor(_in_order(u, family), "u", device), len(family.axes)
    shape = tuple(fields.shape)
    if family.steady:
        fields = fields[:, None]
    if len(family.fields) == 1 and fields.ndim == 2 + num_axes:
        fields = fields[:, :, None]
    if fields.ndim != 3 + num_axes or fields.shape[2] != len(family.fields):
        expected = f"(B, {'' if family.steady else 'T, '}{len(family.fields)}, {', '.join(family.axes)})"
        raise ConfigFault(f"u of {family.name} must be {expected}, but has shape {shape}")
    if fields.shape[1] < 2 and not family.steady:
        raise ConfigFault(f"u of {family.name} has one snapshot: a time step needs at least 2")
    check_grid(tuple(fields.shape[3:]), family)
    check_finite(fields, "u")
    _expect_magnitude(fields, family)
    check_positive(fields[:, 0] if family.steady else fields.flatten(0, 1), family, "u")
    if bool((fields == fields[:1, :1]).all() if family.steady else (fields == fields[:, :1]).all()):
        same = "all solutions are the same" if family.steady else "it never changes in time"
        raise ConfigFault(f"there is nothing to learn from u of {family.name}: {same}")
    return fields


def _expect_magnitude(fields: Tensor, family: Family) -> None:
    """Refuse fields (B, T, C, *grid) whose squares leave float32."""
    for name, values in zip(family.fields, fields.unbind(2), strict=True):
        size = values.abs().max().item()
        if size > LARGEST or 0 < size < SMALLEST:
            what = f"u: {name} of {family.name} has the magnitude {size:.2g}, outside of {SMALLEST:g} to {LARGEST:g}"
            raise ConfigFault(f"{what}: choose other units")


def _in_order(u: Array, family: Family) -> Array:
    """The caller's fields, those of xarray in the order trajectory, time, field, axes by their names."""
    if kind_of(u) != "xarray":
        return u
    named = variables(u, family, "u")
    check_axes(u, family, "u")
    needed = (*["time"] * (not family.steady), *family.axes)
    others = [dim for dim in next(iter(named.values())).dims if dim not in needed]
    order = (*others, *needed)
    if len(others) != 1 or any(set(values.dims) != set(order) for values in named.values()):
        found = " and ".join(sorted({", ".join(map(str, values.dims)) for values in named.values()}))
        what = f"u of {family.name} must have the dimensions {', '.join(needed)} and one of trajectories, not {found}"
        raise ConfigFault(f"{what}: rename or add them")
    return np.stack([values.transpose(*order).values for values in named.values()], len(order) - len(family.axes))


def _lengths(lengths: Iterable[float], family: Family) -> tuple[float, ...]:
    axes = family.axes
    given = tuple(lengths) if isinstance(lengths, Iterable) else (lengths,)
    if len(given) != len(axes):
        raise ConfigFault(f"lengths of {family.name} must be {len(axes)} numbers, along {', '.join(axes)}: {lengths!r}")
    return tuple(_number(length, "each of lengths", positive=True) for length in given)


def _number(value: Any, name: str, *, positive: bool = False) -> float:
    """The finite number that the caller gave for all trajectories, also as an array without axes."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, Real) or not math.isfinite(number) or (positive and number <= 0):
        raise ConfigFault(f"{name} must be one {'positive' if positive else 'finite'} number, not {value!r}")
    return float(number)


def _time_step(dt: float | None, known: FamilyCard | None, family: str) -> float:
    if dt is not None:
        return _number(dt, "dt", positive=True)
    if known is None or len(known.time_steps) > 1:
        raise ConfigFault(f"dt of {family} is missing: the time between two snapshots")
    return known.time_steps[0]


def _expect_step(times: np.ndarray, step: float) -> None:
    """Refuse times of the caller, if they are numbers, that are not `step` apart."""
    if times.dtype.kind in "fiu" and not has_step(times, step):
        found = ", ".join(f"{time:g}" for time in times[:3])
        raise ConfigFault(f"the times {found}, ... of u are not dt = {step:g} apart: give dt, or other snapshots")
