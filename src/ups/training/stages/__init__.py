"""The training stages: the function `build` of each module makes model, loss and samples from configuration and run.

`STAGES` lists them with the properties that other modules need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ups.config import CodecConfig, ConsistencyConfig, DiffusionConfig, OperatorConfig, SteadyConfig
from ups.config.baselines import BaselineConfig
from ups.config.training import TrainingSection
from ups.runs.run import Run
from ups.training.stage import Stage
from ups.training.stages import baseline, codec, consistency, diffusion, operator, steady


@dataclass(frozen=True)
class StageEntry:
    """A row of `STAGES`.

    `config` is the type of the stage's section of parameters, `build` makes the stage. `needs` names the receipts that
    it is trained from: stages and data. It is trained where there are datasets of `families`.
    """

    config: type[TrainingSection]
    build: Callable[[Any, Run], Stage]
    needs: tuple[str, ...]
    families: Literal["transient", "steady", "all"]


STAGES = {
    "codec": StageEntry(CodecConfig, codec.build, ("datasets", "normalization"), "all"),
    "operator": StageEntry(OperatorConfig, operator.build, ("latent_cache",), "transient"),
    "steady": StageEntry(SteadyConfig, steady.build, ("latent_cache",), "steady"),
    "diffusion": StageEntry(DiffusionConfig, diffusion.build, ("latent_cache", "operator", "steady"), "all"),
    "consistency": StageEntry(
        ConsistencyConfig, consistency.build, ("latent_cache", "operator", "steady", "diffusion"), "all"
    ),
    "baseline": StageEntry(BaselineConfig, baseline.build, ("latent_cache",), "all"),
}


def stages_behind(stage: str) -> set[str]:
    """The stage and all stages whose weights it is trained from, directly or through others."""
    needed = ("codec" if name == "latent_cache" else name for name in STAGES[stage].needs)
    return {stage}.union(*(stages_behind(name) for name in needed if name in STAGES))
