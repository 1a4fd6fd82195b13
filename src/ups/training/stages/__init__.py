"""The training stages.

One module per stage has the function `build`, which makes the stage's model, loss and samples from its configuration
and a run folder. `STAGES` lists them with the properties that other modules need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ups.config import CodecConfig, ConsistencyConfig, DiffusionConfig, FinetuneConfig, OperatorConfig, SteadyConfig
from ups.config.baselines import BaselineConfig
from ups.config.training import TrainingSection
from ups.models.baselines import grid_model
from ups.runs.run import Run
from ups.surrogate.trained import MODELS
from ups.training.stage import Stage
from ups.training.stages import baseline, codec, consistency, diffusion, finetune, operator, steady


@dataclass(frozen=True)
class StageEntry:
    """A row of `STAGES`.

    `config` is the type of the stage's section of parameters, `build` makes the stage, `model` rebuilds its model from
    the settings saved with the weights. `needs` names the receipts that it is trained from: stages and data. It is
    trained where there are datasets of `families`.
    """

    config: type[TrainingSection]
    build: Callable[[Any, Run], Stage]
    model: Callable[..., nn.Module]
    needs: tuple[str, ...]
    families: Literal["transient", "steady", "all"]


STAGES = {
    "codec": StageEntry(CodecConfig, codec.build, MODELS["codec"], ("datasets", "normalization"), "all"),
    "operator": StageEntry(OperatorConfig, operator.build, MODELS["operator"], ("latent_cache",), "transient"),
    "steady": StageEntry(SteadyConfig, steady.build, MODELS["steady"], ("latent_cache",), "steady"),
    "diffusion": StageEntry(
        DiffusionConfig, diffusion.build, MODELS["diffusion"], ("latent_cache", "operator", "steady"), "all"
    ),
    "consistency": StageEntry(
        ConsistencyConfig,
        consistency.build,
        MODELS["consistency"],
        ("latent_cache", "operator", "steady", "diffusion"),
        "all",
    ),
    "finetune": StageEntry(
        FinetuneConfig, finetune.build, MODELS["operator"], ("latent_cache", "operator"), "transient"
    ),
    "baseline": StageEntry(BaselineConfig, baseline.build, grid_model, ("latent_cache",), "all"),
}


def stages_behind(stage: str) -> set[str]:
    """The stage and all stages whose weights it is trained from, directly or through others."""
    found = {stage}
    for name in STAGES[stage].needs:
        if name == "latent_cache":
            found |= {"codec"}
        elif name in STAGES:
            found |= stages_behind(name)
    return found
