"""Types of all parameters; an unknown key, a wrong type or an impossible value is an error before any work."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from ups.config.baselines import BaselinesConfig
from ups.config.data import NONE_ADDED as NONE_ADDED
from ups.config.data import WHOLE as WHOLE
from ups.config.data import DownloadConfig, LatentsConfig, SimulateConfig, SplitConfig, SubsampleConfig
from ups.config.data import families_of as families_of
from ups.config.evaluation import (
    CorrectorConfig,
    EvaluationConfig,
    JudgeConfig,
    LeaderboardConfig,
    PredictConfig,
    ProtocolConfig,
    RegistrationConfig,
    ReportConfig,
    SeedsConfig,
    SelectionConfig,
    ShiftsConfig,
)
from ups.config.launch import BenchmarkConfig, LaunchConfig, ProfileConfig, SubmitConfig
from ups.config.sections import Section, Seed, expect_remote
from ups.config.studies import AblationConfig, AdaptConfig, CompressionConfig, Variant
from ups.config.training import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    OperatorConfig,
    SteadyConfig,
    expect_float8_channels,
)

FROM_ENVIRONMENT: set[str] = set()
"""Values that parameters took from the environment by `${oc.env:NAME}`; messages must not have them."""
MIN_SECRET_CHARACTERS = 4  # a shorter value is hidden where it stands alone


def masked_value(value: Any) -> str:
    """A value for a message, without what came from the environment and the user and password of an address."""
    if any(text in FROM_ENVIRONMENT or masked(text) != text for text in _texts(value)):
        return "(a value of the environment)"
    return without_logins(repr(value))


def without_logins(text: str) -> str:
    """A text whose addresses have no user and password."""
    return re.sub(r"//[^\s'\"]*@", "//***@", text)


def masked(message: str) -> str:
    """A message without the values that came from the environment."""
    for secret in FROM_ENVIRONMENT:
        if len(secret) >= MIN_SECRET_CHARACTERS:
            message = message.replace(secret, "***").replace(repr(secret)[1:-1], "***")
    return message


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in value.items() if isinstance(value, dict) else value:
            yield from _texts(list(part) if isinstance(part, tuple) else part)
    else:
        yield str(value)


class Parameters(Section):
    """All sections of `conf`; a misspelt section name is an error."""

    source: Literal["simulate", "folder", "pdebench"]
    data_root: str
    raw_root: str | None
    seed: Seed
    simulate: SimulateConfig
    download: DownloadConfig
    subsample: SubsampleConfig
    split: SplitConfig
    codec: CodecConfig
    latents: LatentsConfig
    operator: OperatorConfig
    diffusion: DiffusionConfig
    consistency: ConsistencyConfig
    steady: SteadyConfig
    baselines: BaselinesConfig
    ablation: AblationConfig
    compression: CompressionConfig
    adapt: AdaptConfig
    launch: LaunchConfig
    submit: SubmitConfig
    profile: ProfileConfig
    benchmark: BenchmarkConfig
    corrector: CorrectorConfig
    evaluation: EvaluationConfig
    predict: PredictConfig
    selection: SelectionConfig
    shifts: ShiftsConfig
    protocol: ProtocolConfig
    seeds: SeedsConfig
    leaderboard: LeaderboardConfig
    report: ReportConfig
    judge: JudgeConfig
    registration: RegistrationConfig

    @model_validator(mode="after")
    def _check_sections_together(self) -> "Parameters":
        if self.source == "folder" and self.raw_root is None:
            raise ValueError("source = folder needs the folder of PDEBench files: --params raw_root=DIR")
        if (self.raw_root or "").startswith("s3:"):
            self._check_remote(self.raw_root)
        if self.split.valid_fraction + self.split.test_fraction >= 1:
            raise ValueError("split.valid_fraction + split.test_fraction must stay below 1: the rest is for training")
        if self.seed not in (self.simulate.seed, self.split.seed, self.operator.seed):
            raise ValueError(
                f"seed = {self.seed} reaches no section: set it by --params seed={self.seed}, or in globals.yml of conf"
            )
        expect_float8_channels("consistency.precision", self.consistency.precision, self.diffusion.model)
        for variant in self.ablation.variants:
            self._check_variant(variant)
        return self

    def _check_remote(self, place: str) -> None:
        expect_remote(place)
        if self.source != "folder":
            raise ValueError(
                f"source = {self.source} writes raw files, which raw_root on S3 does not take: name a folder"
            )

    def _check_variant(self, variant: Variant) -> None:
        try:
            self.ablation.section(variant, self.ablation.seeds[0], self.operator)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise ValueError(f"ablation, variant {variant.name}: {place}: {problem['msg']}") from None


def fields_at(place: tuple[int | str, ...]) -> list[str]:
    """Names of the parameters in the section at a place, given by keys and positions in lists."""
    section: Any = Parameters
    for part in place:
        if get_origin(section) in (list, dict):
            section = get_args(section)[-1]
        elif part in section.model_fields:
            section = section.model_fields[part].annotation
        else:
            section = get_args(get_type_hints(section)["__pydantic_extra__"])[1]
        if isinstance(section, UnionType):  # a section, or null
            section = next(kind for kind in get_args(section) if kind is not NoneType)
    assert issubclass(section, BaseModel)
    return list(section.model_fields)


def packaged(section: str) -> dict[str, Any]:
    """A section of the parameters of `conf/base` as it comes with the package, with the seed 0."""
    for path in sorted((Path(__file__).parents[1] / "conf" / "base").glob("parameters*.yml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8").replace("${seed}", "0"))
        if section in content:
            return content[section]
    raise KeyError(section)
