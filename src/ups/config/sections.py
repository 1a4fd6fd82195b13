"""Base types of all sections of the parameters: no unknown keys, no defaults, no type conversion."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0)]
Steps = PositiveInt
PerDimensionFloat = Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], Field(strict=False)]


class Section(BaseModel):
    """A section: no unknown keys, no defaults, finite numbers; text or a truth value is not accepted as a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
