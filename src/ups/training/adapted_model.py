"""A loaded model adapted to arrays: the side of `Model.adapt` that trains."""

from dataclasses import asdict, replace
from typing import Any

import torch

from ups.config import packaged
from ups.config.studies import AdaptConfig
from ups.data.families import Dataset, Family, base_of
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.surrogate.arrays import Array, as_tensor, check_finite
from ups.surrogate.bundle import Bundle
from ups.surrogate.problem import FamilyCard
from ups.training.adaptation import adapt
from ups.training.examples import Trajectories, encode


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
    trajectories = _trajectories(bundle.card, family, u, dt, lengths, arguments, device)
    dataset, name = trajectories.dataset, trajectories.family.name
    config = AdaptConfig.model_validate(packaged("adapt") | {"steps": steps})
    gain = adapt(bundle.surrogate, trajectories, config)
    surrogate = replace(gain.surrogate, codec=gain.surrogate.codec.on_grid(name, dataset.grid))
    domain = encode(surrogate.codec, trajectories.of(slice(1))).domain
    stage = "steady" if trajectories.family.steady else "operator"
    groups = {name: asdict(group) for name, group in surrogate.codec.groups.items()}
    entry = {
        "datasets": [asdict(dataset) | {"split": {"train": list(range(len(u))), "valid": [], "test": []}}],
        "token_grid": list(domain.grid),
        "periodic": list(domain.periodic),
        "scores": [],
        "coverage": None,
        "definition": trajectories.family.definition,
        "adapted": {"donor": gain.donor, "learning_rate": gain.learning_rate, "over_scratch": gain.over_scratch},
    }
    settings = {"codec": {"groups": groups}, stage: gain.settings}
    card = {"settings": settings, "corrections": [], "latent_scale": None, "families": {name: entry}}
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
    if family not in card["families"] and base_of(family) not in FAMILIES:
        raise ConfigFault(f"there is no family {family!r}: give a ups.Family, or choose {', '.join(card['families'])}")
    known = FamilyCard.of(family, card["families"][family]).datasets[0] if family in card["families"] else None
    spec = FAMILIES[family]
    missing = [name for name in (*spec.parameters, *spec.coefficients) if name not in arguments]
    if unknown := [name for name in arguments if name not in (*spec.parameters, *spec.coefficients)]:
        raise ConfigFault(f"{family} has no parameter {unknown[0]!r}")
    if missing:
        raise ConfigFault(f"{', '.join(missing)} of {family} is missing: give it by name, as {missing[0]}=...")
    fields = as_tensor(u, "u", device)
    if spec.steady:
        fields = fields[:, None]
    if len(spec.fields) == 1 and fields.ndim == 2 + len(spec.axes):
        fields = fields[:, :, None]
    if fields.ndim != 3 + len(spec.axes) or fields.shape[2] != len(spec.fields) or (known is None and lengths is None):
        expected = f"(B, {'' if spec.steady else 'T, '}{len(spec.fields)}, {', '.join(spec.axes)})"
        raise ConfigFault(f"u of {family} must be {expected}, with lengths of the axes, but has shape {tuple(u.shape)}")
    check_finite(fields, "u")
    step = dt if dt is not None else (None if known is None or spec.steady else known.times[1] - known.times[0])
    if step is None and not spec.steady:
        raise ConfigFault(f"dt of {family} is missing: the time between two snapshots")
    count, times, grid = len(fields), fields.shape[1], tuple(fields.shape[3:])
    dataset = Dataset(
        name=family,
        family=family,
        files=(),
        counts=(count,),
        times=(0.0,) if step is None else tuple(step * number for number in range(times)),
        grid=grid,
        lengths=tuple(lengths) if lengths is not None else known.lengths,
        boundary=known.boundary if known is not None else spec.boundaries,
        parameters={name: float(arguments[name]) for name in spec.parameters},
    )
    given = [as_tensor(arguments[name], name, device).expand(count, *grid) for name in spec.coefficients]
    return Trajectories(dataset, fields, torch.stack(given, 1) if given else fields.new_zeros(count, 0, *grid))
