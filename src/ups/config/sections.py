"""Base types of all sections of the parameters: no unknown keys, no defaults, no type conversion."""

import re
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    create_model,
    model_validator,
)

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0)]
Steps = PositiveInt
PerDimension = Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field(strict=False)]  # YAML knows lists only
PerDimensionFloat = Annotated[tuple[PositiveFloat, PositiveFloat, PositiveFloat], Field(strict=False)]


class Section(BaseModel):
    """A section: no unknown keys, no defaults, finite numbers; text or a truth value is not accepted as a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def section_of(record: type[Any]) -> type[Section]:
    """A section with the fields and bounds of a dataclass, whose own checks run when the section is validated.

    So the options of a network are declared once, in a module that does not need pydantic.
    """

    def check(section: Section) -> Section:
        record(**section.model_dump())
        return section

    types = get_type_hints(record)
    return create_model(
        record.__name__,
        __base__=Section,
        __doc__=record.__doc__,
        __validators__={"check": model_validator(mode="after")(check)},
        **{field.name: (_bounded(types[field.name], dict(field.metadata)), ...) for field in fields(record)},
    )


def _bounded(kind: Any, bounds: dict[str, float]) -> Any:
    """A type whose numbers keep the bounds; YAML has lists where the record has tuples."""
    if get_origin(kind) is tuple:
        return Annotated[tuple[tuple(_bounded(item, bounds) for item in get_args(kind))], Field(strict=False)]
    return Annotated[kind, Field(**bounds)] if bounds else kind


def expect_remote(place: str) -> str:
    """Refuse an address that is not `s3://BUCKET/FOLDER`, for example one with a password in it."""
    if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[\w+.-]+)*/?", place, re.ASCII):
        raise ValueError("a place on S3 is s3://BUCKET/FOLDER; credentials belong into the environment alone")
    return place


RemoteFolder = Annotated[str, AfterValidator(expect_remote)]
