"""Pipelines `ablation`, `finetune`, `selection` and `seeds`: effects of model and training choices on the error."""

from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline, node
from rich import get_console

from ups.config import (
    AblationConfig,
    EvaluationConfig,
    FinetuneConfig,
    LaunchConfig,
    OperatorConfig,
    SeedsConfig,
    SelectionConfig,
)
from ups.errors import ConfigFault
from ups.pipelines.evaluation import OPTIONS, RAW, SURROGATE, trained_stages
from ups.runs.launcher import train_stage
from ups.runs.machine import device
from ups.runs.stage_cache import Receipt, cached_step, fingerprint


def create_ablation() -> Pipeline:
    """It needs the codec and the latents that `--pipeline training` makes, or `--to-nodes encode_latents`."""
    train = ["latent_cache", "params:operator", "params:ablation", "params:launch", "params:data_root"]
    return Pipeline(
        [
            node(train_variants, inputs=train, outputs="ablation_variants", name="train_variants"),
            node(measure_variants, inputs=train, outputs="ablation_pace", name="measure_variants"),
            node(
                score_variants,
                inputs=["ablation_variants", "latent_cache", "codec_receipt"]
                + ["params:evaluation", "params:launch", "params:raw_root", "params:data_root"],
                outputs="ablation_scores",
                name="score_variants",
            ),
            node(
                compare_variants,
                inputs=["ablation_scores", "ablation_pace"],
                outputs=["ablation", "ablation_text"],
                name="compare_variants",
            ),
        ],
        tags="ablation",
    )


def create_finetune() -> Pipeline:
    """It needs the operator that `--pipeline training` makes."""
    return Pipeline(
        [
            node(
                train_finetune,
                inputs=["latent_cache", "operator_receipt", "params:finetune", "params:launch", "params:data_root"],
                outputs="finetune_receipt",
                name="train_finetune",
            ),
            node(
                score_finetuned,
                inputs=["latent_cache", "codec_receipt", "operator_receipt", "finetune_receipt", "params:finetune"]
                + ["params:evaluation", "params:launch", "params:raw_root", "params:data_root"],
                outputs="finetune_metrics",
                name="score_finetuned",
            ),
        ],
        tags="finetune",
    )


def create_selection() -> Pipeline:
    """Decided on the validation split, confirmed once on the test split; `evaluate` uses none of it."""
    return Pipeline(
        [
            node(
                select,
                inputs=SURROGATE | {"config": "params:selection"} | OPTIONS | RAW,
                outputs="selection",
                name="select",
            ),
            node(
                report_selection,
                inputs="selection",
                outputs=["selection_text", "selection_figure"],
                name="report_selection",
            ),
        ],
        tags="selection",
    )


def create_seeds() -> Pipeline:
    """Run `full` and `baselines` before it, for every seed in a data root of its own."""
    return Pipeline([node(compare_seeds, "params:seeds", "seeds_text", name="compare_seeds")], tags="seeds")


def train_variants(
    latent_cache: Receipt, operator: OperatorConfig, config: AblationConfig, launch: LaunchConfig, data_root: Path
) -> list[dict[str, Any]]:
    """Train the operator of every variant and seed, each in a run folder of its own."""
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
    """Seconds per training step of every variant, measured alternately, so that other load slows all alike."""
    from ups.performance.pace import seconds_per_step

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
    from ups.evaluation.studies import score_variant

    rows = []
    for variant in variants:
        stages = {"codec": codec, "operator": variant["operator"]}
        trained = trained_stages(latent_cache, stages, launch, data_root)
        scored = cached_step(
            f"score_{variant['variant']}",
            data_root / "07_model_output" / "ablation",
            fingerprint("ups.evaluation.studies", config, {"latent_cache": latent_cache, **stages}),
            lambda folder, trained=trained: score_variant(folder, trained, config, device(launch), raw),
            root=data_root,
        )
        rows.append({key: variant[key] for key in ("variant", "seed", "overrides")} | scored["row"])
    return rows


def compare_variants(scores: list[dict[str, Any]], pace: Receipt) -> tuple[list[dict[str, Any]], str]:
    """Errors and times of every variant relative to `base`, as records and as a table."""
    from ups.evaluation.studies import ablation_text, compare

    rows = compare(scores, pace["seconds_per_step"])
    return rows, ablation_text(rows)


def train_finetune(
    latent_cache: Receipt, operator: Receipt, config: FinetuneConfig, launch: LaunchConfig, data_root: Path
) -> Receipt:
    """Go on training the operator on the datasets of one family."""
    if config.family not in latent_cache["transient"]:
        known = ", ".join(latent_cache["transient"]) or "none"
        raise ConfigFault(
            f"finetune.family = {config.family}: choose a family that the operator was trained on: {known}"
        )
    return train_stage("finetune", config, {"latent_cache": latent_cache, "operator": operator}, launch, data_root)


def score_finetuned(
    latent_cache: Receipt,
    codec: Receipt,
    operator: Receipt,
    finetune: Receipt,
    chosen: FinetuneConfig,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Score the operator before and after on the family's test split."""
    from ups.evaluation.external import score_operators
    from ups.evaluation.scores import held_out
    from ups.evaluation.tables import score_table

    operators = {
        method: trained_stages(latent_cache, {"codec": codec, "operator": receipt}, launch, data_root)
        for method, receipt in {"operator": operator, "finetuned": finetune}.items()
    }
    cache = operators["operator"].cache()
    sets = [each for each in held_out(cache, raw) if each.dataset.family == chosen.family]
    receipt = cached_step(
        "score_finetuned",
        data_root / "07_model_output" / "finetune",
        fingerprint(
            "ups.evaluation.external",
            config,
            {"latent_cache": latent_cache, "codec": codec, "operator": operator, "finetune": finetune},
        ),
        lambda folder: score_operators(folder, operators, sets, config, device(launch)),
        root=data_root,
    )
    get_console().print(score_table(receipt["records"], "nRMSE", f"the test split of {chosen.family}"))
    return receipt["records"]


def select(
    latent_cache: Receipt,
    config: SelectionConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> dict[str, Any]:
    """Score every way to select among members on validation data, choose one per family, confirm it on test data."""
    from ups.evaluation.selection import select_all

    trained = trained_stages(latent_cache, stages, launch, data_root)
    receipt = cached_step(
        "select",
        data_root / "07_model_output",
        fingerprint("ups.evaluation.selection", config, {"latent_cache": latent_cache, **stages}),
        lambda _: select_all(trained, config, device(launch), raw),
        root=data_root,
    )
    return {name: receipt[name] for name in ("families", "datasets", "records")}


def report_selection(selection: dict[str, Any]) -> tuple[str, Any]:
    """Tables, and a Matplotlib figure of error over network evaluations."""
    from ups.evaluation.selection import selection_figure, selection_text

    return selection_text(selection), selection_figure(selection["records"])


def compare_seeds(config: SeedsConfig) -> str:
    """The nRMSE over seeds, and the ratio of ours to the better baseline for each seed.

    Raises:
        ConfigFault: fewer than two data roots.
        DataFault: one of them has no comparison yet, or one of other datasets, or that of another root.
    """
    from ups.evaluation.studies import errors_in, seeds_text

    if len(config.data_roots) < 2:
        raise ConfigFault(
            "seeds.data_roots must name at least two data roots: the same comparison was run in each, with another seed"
        )
    return seeds_text({root: errors_in(Path(root)) for root in config.data_roots})
