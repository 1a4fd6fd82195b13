"""Nodes of pipeline `ablation`: operators that differ in one thing, their scores, the comparison."""

from pathlib import Path
from typing import Any

from ups.config import AblationConfig, EvaluationConfig, LaunchConfig, OperatorConfig
from ups.errors import ConfigFault
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads, train_stage
from ups.pacing import seconds_per_step
from ups.receipts import Receipt, once


def train_variants(
    latent_cache: Receipt, operator: OperatorConfig, config: AblationConfig, launch: LaunchConfig, data_root: Path
) -> list[dict[str, Any]]:
    """Train the operator of every variant and seed, each in its own run folder; base as it is would be up to date."""
    if not latent_cache["transient"]:
        raise ConfigFault("--pipeline ablation compares operators: it needs a dataset of a transient family")
    return [
        {
            "variant": variant.name,
            "seed": seed,
            "overrides": variant.overrides,
            "operator": train_stage(
                "operator", config.section(variant, seed, operator), {"latent_cache": latent_cache}, launch, data_root
            ),
        }
        for variant in config.variants
        for seed in config.seeds
    ]


def measure_variants(
    latent_cache: Receipt, operator: OperatorConfig, config: AblationConfig, launch: LaunchConfig, data_root: Path
) -> Receipt:
    """Seconds per training step of every variant, in turns on this machine."""
    inputs = {"latent_cache": latent_cache}
    sections = {variant.name: config.section(variant, config.seeds[0], operator) for variant in config.variants}
    stages = {
        name: {"stage": "operator", "config": section.model_dump(mode="json"), "inputs": inputs}
        for name, section in sections.items()
    }
    return seconds_per_step("measure_variants", stages, config, launch, data_root)


def score_variants(
    variants: list[dict[str, Any]],
    latent_cache: Receipt,
    codec: Receipt,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Score every variant on the validation split, in physical units, with the evaluator of the full pipeline."""
    from ups.evaluation.ablation import score_variant
    from ups.evaluation.score import Trained

    limit_threads(launch)
    rows = []
    for variant in variants:
        stages = {"codec": codec, "operator": variant["operator"]}
        trained = Trained(latent_cache, stages, data_root)
        scored = once(
            f"score_{variant['variant']}",
            data_root / "07_model_output" / "ablation",
            fingerprint("ups.evaluation.ablation", config, {"latent_cache": latent_cache, **stages}),
            lambda folder, trained=trained: score_variant(folder, trained, config, device(launch), raw),
            root=data_root,
        )
        rows.append({key: variant[key] for key in ("variant", "seed", "overrides")} | scored["row"])
    return rows


def compare_variants(scores: list[dict[str, Any]], pace: Receipt) -> tuple[list[dict[str, Any]], str]:
    """Every variant relative to base, for machines and for people."""
    from ups.evaluation.ablation import ablation_text, compare

    rows = compare(scores, pace["seconds_per_step"])
    return rows, ablation_text(rows)
