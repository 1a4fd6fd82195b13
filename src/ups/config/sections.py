"""What every section of the parameters is made of: closed, typed, without defaults."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0)]
Steps = PositiveInt
PerDimension = Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field(strict=False)]  # YAML knows lists only
PerDimensionFloat = Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], Field(strict=False)]


class Section(BaseModel):
    """A closed section: no unknown keys, no defaults, finite numbers; text or a truth value is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
