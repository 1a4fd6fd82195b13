"""What the card of a model says about a family: which one a name means, its datasets, parameters and time steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from ups.data.families import Dataset, Family, base_of
from ups.data.pdebench import FAMILIES
from ups.errors import SIMILARITY, ConfigFault, most_similar
from ups.models.sizes import Domain
from ups.surrogate.arrays import Array, grid_of

TOLERANCE = 1e-4  # relative, of time steps that count as equal


@dataclass(frozen=True)
class FamilyCard:
    """What the card of a model says about one family."""

    name: str
    family: Family
    datasets: tuple[Dataset, ...]
    domain: Domain

    @classmethod
    def of(cls, name: str, entry: dict[str, Any]) -> "FamilyCard":
        """The family `name` of a card."""
        datasets = [{key: value for key, value in each.items() if key != "split"} for each in entry["datasets"]]
        domain = Domain(name, tuple(entry["token_grid"]), tuple(entry["periodic"]))
        return cls(name, FAMILIES[name], tuple(map(Dataset.from_json, datasets)), domain)

    @property
    def grid(self) -> tuple[int, ...]:
        """Points per axis, the same in all datasets."""
        return self.datasets[0].grid

    @property
    def time_steps(self) -> list[float]:
        """Every dt of the datasets, in units of the PDE; none for steady families."""
        return sorted({_dt(dataset) for dataset in self.datasets}) if not self.family.steady else []

    def values(self, parameter: str) -> list[float]:
        """The trained values of a parameter, ascending."""
        return sorted({dataset.parameters[parameter] for dataset in self.datasets})


def _dt(dataset: Dataset) -> float:
    return float(f"{dataset.times[1] - dataset.times[0]:.7g}")  # times are stored as float32


def find_family(name: str, cards: Mapping[str, FamilyCard], given: Array | None) -> str:
    """A family of the model by its name; of several grids or boundaries the variant with the grid of `given`.

    Raises:
        ConfigFault: the model was not trained on it, or several variants fit.
    """
    if isinstance(name, str) and name in cards:
        return name
    variants = {variant: card for variant, card in cards.items() if base_of(variant) == name}
    fitting = [variant for variant, card in variants.items() if grid_of(given, card.family) == card.grid]
    if len(fitting) == 1:
        return fitting[0]
    if variants:
        raise ConfigFault(f"there are several models of {name}: choose {' or '.join(fitting or variants)}")
    near = most_similar(str(name), cards, SIMILARITY)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigFault(f"the model was not trained on {name!r}, only on {', '.join(cards)}{hint}")


def first_coefficient(name: str, cards: Mapping[str, FamilyCard], arguments: dict[str, Any]) -> Array | None:
    """The first argument that is a coefficient of a family, or of its variants; None without coefficients."""
    of_name = [card.family for variant, card in cards.items() if name in (variant, base_of(variant))]
    known = {coefficient for family in of_name for coefficient in family.coefficients}
    return next((value for argument, value in arguments.items() if argument in known), None)


def with_time_step(card: FamilyCard, dt: float | None) -> tuple[Dataset, float, int]:
    """A dataset of training with the operator's time step, time between results, and how many steps that takes.

    Raises:
        ConfigFault: `dt` is no multiple of a time step of training, or None where there are several.
    """
    step, substeps = _time_step(card, dt)
    dataset = card.datasets[0]
    return dataset if card.family.steady else replace(dataset, times=(0.0, step / substeps)), step, substeps


def _time_step(card: FamilyCard, dt: float | None) -> tuple[float, int]:
    """Time between results, and how many steps of the operator it takes."""
    known = card.time_steps
    if not known:
        if dt is not None:
            raise ConfigFault(f"{card.name} is steady and has no time step: leave out dt")
        return 1.0, 1
    listed = " or ".join(f"{each:g}" for each in known)
    if dt is None:
        if len(known) > 1:
            raise ConfigFault(f"dt is missing: the model of {card.name} was trained with {listed}")
        return known[0], 1
    if not isinstance(dt, Real) or not math.isfinite(dt / min(known)):
        raise ConfigFault(f"dt of {card.name} must be a number, {listed} or a multiple of it, not {dt!r}")
    for each in reversed(known):
        substeps = round(dt / each)
        if substeps >= 1 and abs(dt - substeps * each) <= TOLERANCE * each:
            return dt, substeps
    raise ConfigFault(f"dt = {dt:g} of {card.name} must be {listed}, with which it was trained, or a multiple of it")
