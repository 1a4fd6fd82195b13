"""Parameters of the data: source of the raw files, splits, storage of latents."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
    field_validator,
    model_validator,
)

from ups.config.sections import Fraction, Section, Seed, section_of
from ups.data import families
from ups.data.pdebench import FAMILIES
from ups.data.published import ALIASES, check_address, shown
from ups.errors import ConfigFault, nearest

FamilyName = Literal[tuple(FAMILIES)]  # type: ignore[valid-type]
SourceName = Literal[(*FAMILIES, *ALIASES)]  # type: ignore[valid-type]


def _expect_family(name: str) -> str:
    if families.base_of(name) not in FAMILIES:
        raise ValueError(f"{name!r} is no family: {', '.join(FAMILIES)} (others are defined in families.yml)")
    return name


def families_of(section: dict[str, Any]) -> list[families.Family]:
    """The families that `families*.yml` define by name; names with a leading underscore are YAML anchors.

    Raises:
        ConfigFault: naming each wrong key and value of the first wrong definition.
    """
    defined = []
    for name, entry in section.items():
        place = f"families.yml, {name}"
        if not isinstance(entry, dict) or entry.get("name", name) != name:
            raise ConfigFault(f"{place}: expected a section with equation, fields, axes, boundary and parameters")
        if not str(name).startswith("_"):
            text = json.dumps(entry | {"name": str(name)}, default=str)
            defined.append(families.Family.from_json(text, place))
    return defined


VariantName = Annotated[str, AfterValidator(_expect_family)]
"""A family, or a variant of one such as `compressible_ns_2d-512x512`."""


class SimulatedDataset(Section):
    """One file to simulate: `duration` in the time unit of the PDE, `resolution` in grid points per axis."""

    family: FamilyName
    parameters: dict[str, float]
    num_trajectories: Annotated[int, Field(ge=3)]
    resolution: Annotated[int, Field(ge=8)]
    num_snapshots: PositiveInt
    duration: PositiveFloat


class SimulateConfig(Section):
    """What `source: simulate` writes; and of any source, which training splits are filled up, and how far."""

    seed: Seed
    fill_below: NonNegativeInt
    fill_to: NonNegativeInt
    datasets: list[SimulatedDataset]

    @model_validator(mode="after")
    def _check_fill(self) -> Self:
        if self.fill_to < self.fill_below:
            raise ValueError(f"fill_to is {self.fill_to}, below fill_below, which is {self.fill_below}")
        return self


class DownloadConfig(Section):
    """What `source: pdebench` fetches: files of families (or `ALIASES` of them), files by name.

    `parameters`, `kind`, `resolution`, `files_per_family` and `max_gigabytes` choose among the files of `families`;
    `trajectories` fetches the first of each file only, `base_url` names a mirror with PDEBench's folders.
    """

    families: list[SourceName]
    files: list[str]
    parameters: dict[str, list[float]]
    kind: Literal["train", "test", "all"]
    resolution: PositiveInt | None
    files_per_family: PositiveInt | None
    max_gigabytes: PositiveFloat | None
    trajectories: Annotated[int, Field(ge=3)] | None
    base_url: str | None
    parallel: Annotated[int, Field(ge=1, le=16)]

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, base_url: str | None) -> str | None:
        if base_url is None:
            return None
        try:
            check_address(base_url)
        except ValueError as error:
            raise ValueError(f"{shown(base_url)}: {error}") from None
        if "?" in base_url or "#" in base_url:
            raise ValueError(f"{shown(base_url)}: a query or fragment cannot be followed by the name of a file")
        return base_url


class SplitConfig(Section):
    """Fractions of the initial conditions held out for validation and test; the rest is for training."""

    seed: Seed
    valid_fraction: Fraction
    test_fraction: Fraction


def _expect_families(place: str, section: Any) -> Any:
    for name in section if isinstance(section, dict) else ():
        if name != "default" and name not in FAMILIES:
            remedy = f"{nearest(str(name), ['default', *FAMILIES])} (others are defined in families.yml)"
            raise ValueError(f"unknown parameter {place}.{name}{remedy}")
    return section


class Subsample(section_of(families.Subsample)):
    """The options of `ups.data.families.Subsample`."""


def _optional(section: type[Section]) -> dict[str, Any]:
    """The fields of a section with their bounds, none of them required."""
    return {name: (Annotated[field.annotation, *field.metadata], None) for name, field in section.model_fields.items()}


class Overrides(create_model("Overrides", __base__=Section, **_optional(Subsample))):
    """What differs from `subsample.default` for a family; options that are not set have no meaning here."""


class SubsampleConfig(Section):
    """Which points, snapshots and trajectories of the raw files are used: `default`, and overrides by family."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Overrides]

    default: Subsample

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, section: Any) -> Any:
        return _expect_families("subsample", section)

    def of(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """All options of these families."""
        return {name: self._merged(name) for name in sorted(names)}

    @model_validator(mode="after")
    def _check_families(self) -> Self:
        for name in FAMILIES:
            try:
                families.Subsample(**self._merged(name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return self

    def _merged(self, name: str) -> dict[str, Any]:
        overrides = (self.model_extra or {}).get(name, Overrides())
        return self.default.model_dump() | overrides.model_dump(exclude_unset=True)


NONE_ADDED = SimulateConfig(seed=0, fill_below=0, fill_to=0, datasets=[])
WHOLE = SubsampleConfig(default=asdict(families.Subsample()))
"""All points, snapshots and trajectories of every family."""


class Tolerance(Section):
    """Largest RMS of the rounding error, in units of a field's standard deviation: `default`, and that of families.

    None: no rounding. Variants of a family have its tolerance.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PositiveFloat | None]

    default: PositiveFloat | None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, section: Any) -> Any:
        if not isinstance(section, dict | Tolerance):
            raise ValueError(f"one for all families is {{default: 0.001}}, got {section!r}")
        return _expect_families("latents.tolerance", section)

    def of(self, names: Iterable[str]) -> dict[str, float | None]:
        """The tolerances of these families."""
        return {name: (self.model_extra or {}).get(families.base_of(name), self.default) for name in sorted(names)}


class LatentsConfig(Section):
    """How `encode_latents` stores latents: rounded by `tolerance` and compressed, or as float32 where it is None.

    Without `on_disk` there is no cache on disk: training reads the raw files and encodes them itself, which is slower.
    """

    tolerance: Tolerance | None
    on_disk: bool

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """The options of these families: `tolerance` by family and `on_disk`."""
        tolerance = Tolerance(default=None) if self.tolerance is None else self.tolerance
        return {"tolerance": tolerance.of(names), "on_disk": self.on_disk}
