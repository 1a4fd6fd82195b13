"""Nodes of pipeline `tune`: the largest micro-batch of each stage, kept where the stage looks for it."""

from pathlib import Path
from typing import Any

from ups import tuning
from ups.config import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LaunchConfig,
    OperatorConfig,
    SteadyConfig,
    TrainingSection,
)
from ups.jobs import ask
from ups.launch import device
from ups.receipts import Receipt, only_trained
from ups.run import Run

WORKER = "ups.training.tune"
KIND_OF = {"operator": "transient", "steady": "steady"}


def tune_codec(
    datasets: Receipt, normalization: Receipt, config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> dict[str, Any]:
    """Tune the codec."""
    inputs = {"datasets": datasets, "normalization": normalization}
    return _tune("codec", config, inputs, launch, data_root, raw)


def tune_operator(
    latent_cache: Receipt | None, config: OperatorConfig, launch: LaunchConfig, data_root: Path
) -> dict[str, Any]:
    """Tune the operator."""
    return _tune("operator", config, {"latent_cache": latent_cache}, launch, data_root)


def tune_diffusion(
    latent_cache: Receipt | None,
    operator: Receipt | None,
    steady: Receipt | None,
    config: DiffusionConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> dict[str, Any]:
    """Tune the residual denoiser."""
    inputs = {"latent_cache": latent_cache, "operator": operator, "steady": steady}
    return _tune("diffusion", config, inputs, launch, data_root)


def tune_consistency(
    latent_cache: Receipt | None,
    operator: Receipt | None,
    steady: Receipt | None,
    diffusion: Receipt | None,
    config: ConsistencyConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> dict[str, Any]:
    """Tune the tuning of the denoiser."""
    inputs = {"latent_cache": latent_cache, "operator": operator, "steady": steady, "diffusion": diffusion}
    return _tune("consistency", config, inputs, launch, data_root)


def tune_steady(
    latent_cache: Receipt | None, config: SteadyConfig, launch: LaunchConfig, data_root: Path
) -> dict[str, Any]:
    """Tune the regression of steady solutions."""
    return _tune("steady", config, {"latent_cache": latent_cache}, launch, data_root)


def _tune(
    stage: str,
    config: TrainingSection,
    inputs: dict[str, Receipt | None],
    launch: LaunchConfig,
    data_root: Path,
    raw: Path | None = None,
) -> dict[str, Any]:
    """What was found, and for which number of processes; or what is missing."""
    missing = _missing(stage, inputs)
    if missing:
        return {"stage": stage, "untuned": missing}
    where = device(launch)
    folder = data_root / "06_models" / stage / "tuning"
    section = config.model_dump(mode="json")
    found = ask(WORKER, Run(folder, stage, "tuning", section, only_trained(inputs), launch, where, data_root, raw), {})
    tuning.remember(launch, stage, where, data_root, found["tokens"])
    return {"stage": stage, "place": tuning.place_of(launch, stage, where), **found}


def _missing(stage: str, inputs: dict[str, Receipt | None]) -> str | None:
    for name, receipt in inputs.items():
        if receipt is None:
            return f"there is no {name} yet"
    kind, cache = KIND_OF.get(stage), inputs.get("latent_cache")
    return f"there is no {kind} dataset" if kind and cache and not cache[kind] else None
