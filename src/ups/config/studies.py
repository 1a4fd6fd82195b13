"""Parameters of the ablation: variants of the operator, compared with a base variant."""

from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ups.config.sections import Section, Seed, Steps
from ups.config.training import OperatorConfig

BASE = "base"


class Variant(Section):
    """A row of the ablation, with its changes to the section `operator`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    overrides: dict[str, Any]

    @field_validator("overrides")
    @classmethod
    def _check_overrides(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for name in {"steps", "seed"} & overrides.keys():
            raise ValueError(f"{name} is the same for all variants")
        return overrides


class AblationConfig(Section):
    """`--pipeline ablation`: the operator of every variant is trained for `steps` steps, once per seed.

    The time of a training step is measured in `pace_rounds` rounds, in each for about `pace_seconds` per variant.
    """

    steps: Steps
    seeds: Annotated[list[Seed], Field(min_length=1)]
    pace_seconds: PositiveFloat
    pace_rounds: PositiveInt
    variants: list[Variant]

    def section(self, variant: Variant, seed: int, operator: OperatorConfig) -> OperatorConfig:
        """The section `operator` with the overrides of a variant.

        Raises:
            ValidationError: a key that the section does not have, or a wrong value.
        """
        overrides = variant.overrides | {"steps": self.steps, "seed": seed}
        return OperatorConfig(**_merged(operator.model_dump(), overrides))

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [variant.name for variant in self.variants]
        if BASE not in names or len(set(names)) < len(names):
            raise ValueError(f"variants need different names, and one of them is {BASE}: found {', '.join(names)}")
        return self


def _merged(section: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`section` with `overrides`, merged recursively: an override of one key keeps the others of its section."""
    inner = {
        name: _merged(section[name], value)
        for name, value in overrides.items()
        if isinstance(value, dict) and isinstance(section.get(name), dict)
    }
    return section | overrides | inner
