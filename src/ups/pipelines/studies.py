"""Pipelines `ablation`, `compression`, `selection`, `coverage`, `seeds`, `leaderboard`: effects of choices."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline
from rich import get_console

from ups.config import (
    AblationConfig,
    CodecConfig,
    CompressionConfig,
    EvaluationConfig,
    LatentsConfig,
    LaunchConfig,
    LeaderboardConfig,
    OperatorConfig,
    RegistrationConfig,
    SeedsConfig,
    SelectionConfig,
    ShiftsConfig,
    SteadyConfig,
)
from ups.data.families import Dataset
from ups.errors import ConfigFault
from ups.pipelines import cached, on_raw_files, step
from ups.pipelines.evaluation import PLAIN, SURROGATE, trained_stages
from ups.pipelines.training import encode_latents, train_codec, train_operator, train_steady
from ups.runs.launcher import train_stage
from ups.runs.stage_cache import Receipt

EVALUATION = "ups.evaluation.studies"


def create_ablation() -> Pipeline:
    """Needs codec and latents of `kedro run --pipeline training`, or of `kedro run --to-nodes encode_latents`."""
    train = ["latent_cache", "params:operator", "params:ablation"]
    score = ["ablation_variants", "latent_cache", "codec_receipt", "params:evaluation"]
    steps = [
        step(train_variants, train, "ablation_variants"),
        step(measure_variants, train, "ablation_pace"),
        step(score_variants, score, "ablation_scores"),
        step(compare_variants, ["ablation_scores", "ablation_pace"], ["ablation", "ablation_text"]),
    ]
    return Pipeline(steps, tags="ablation")


def create_compression() -> Pipeline:
    """Needs `kedro run --pipeline data`; each variant has codec, latents and models of its own."""
    sections = ["codec", "operator", "steady", "evaluation"]
    inputs = {name: name for name in ("datasets", "normalization")} | {name: f"params:{name}" for name in sections}
    steps = [
        step(score_compressed, inputs | {"config": "params:compression"}, "compression"),
        step(report_compression, ["compression"], "compression_text"),
    ]
    return Pipeline(steps, tags="compression")


def create_selection() -> Pipeline:
    """Choose a way to select members on validation data, confirm it on test data; the next `evaluate` applies it."""
    steps = [
        step(select, SURROGATE | {"config": "params:selection"}, "selection"),
        step(report_selection, ["selection", "datasets"], ["selection_text", "selection_figure"]),
    ]
    return Pipeline(steps, tags="selection")


def create_coverage() -> Pipeline:
    """Needs the coverage that `kedro run --pipeline full` measures."""
    inputs = PLAIN | {"coverage": "coverage", "config": "params:shifts"}
    return Pipeline([step(score_shifts, inputs, ["shifts", "shifts_text"])], tags="coverage")


def create_seeds() -> Pipeline:
    """Needs the results of `full` and `baselines` for every seed, each in a data root of its own."""
    return Pipeline([step(compare_seeds, ["params:seeds"], ["seeds_text", "seeds_figure"])], tags="seeds")


def create_leaderboard() -> Pipeline:
    """Needs the results of `full` in every data root that is compared."""
    inputs = ["params:leaderboard", "params:registration"]
    return Pipeline([step(rank_models, inputs, ["leaderboard_text", "leaderboard"])], tags="leaderboard")


def train_variants(
    latent_cache: Receipt, operator: OperatorConfig, config: AblationConfig, launch: LaunchConfig, data_root: Path
) -> list[dict[str, Any]]:
    """Train the operator of every variant and seed, each in a run folder of its own."""
    if not latent_cache["transient"]:
        raise ConfigFault("--pipeline ablation compares operators: it needs a dataset of a transient family")
    trained = []
    for variant, seed in product(config.variants, config.seeds):
        section = config.section(variant, seed, operator)
        receipt = train_stage("operator", section, {"latent_cache": latent_cache}, launch, data_root)
        trained.append({"variant": variant.name, "seed": seed, "overrides": variant.overrides, "operator": receipt})
    return trained


def measure_variants(
    latent_cache: Receipt, operator: OperatorConfig, config: AblationConfig, launch: LaunchConfig, data_root: Path
) -> Receipt:
    """Seconds per training step of every variant, measured alternately, so that other load slows all alike."""
    from ups.performance.pace import seconds_per_step

    stages = {}
    for variant in config.variants:
        section = config.section(variant, config.seeds[0], operator).model_dump(mode="json")
        stages[variant.name] = {"stage": "operator", "config": section, "inputs": {"latent_cache": latent_cache}}
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

    rows, shared, config = [], {"latent_cache": latent_cache, "codec": codec}, config.scores_only
    for variant in variants:
        name, inputs = f"score_{variant['variant']}", shared | {"operator": variant["operator"]}
        trained = trained_stages(inputs, launch, data_root)
        scored = cached(name, data_root, "07_model_output/ablation", EVALUATION, config, inputs)
        work = partial(score_variant, trained=trained, config=config, launch=launch, raw=raw)
        receipt = scored(on_raw_files(work, latent_cache, raw, data_root))
        rows.append({key: variant[key] for key in ("variant", "seed", "overrides")} | receipt["row"])
    return rows


def compare_variants(scores: list[dict[str, Any]], pace: Receipt) -> tuple[list[dict[str, Any]], str]:
    """Errors and times of every variant relative to `base`, as records and as a table."""
    from ups.evaluation.studies import ablation_text, compare

    rows = compare(scores, pace["seconds_per_step"])
    return rows, ablation_text(rows)


def score_compressed(
    datasets: Receipt,
    normalization: Receipt,
    codec: CodecConfig,
    operator: OperatorConfig,
    steady: SteadyConfig,
    evaluation: EvaluationConfig,
    config: CompressionConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Train on the latents of every variant; bytes, decoding speed and errors on the validation split, by family."""
    from ups.evaluation.studies import score_compression

    rows, evaluation = [], evaluation.scores_only
    for variant in config.variants:
        section = codec.model_copy(update={"model": codec.model.model_copy(update={"tolerance": variant.codec})})
        latents = LatentsConfig(tolerance=variant.latents, on_disk=True)
        trained = train_codec(datasets, normalization, section, launch, raw, data_root)
        cache = encode_latents(datasets, trained, latents, launch, raw, data_root)
        inputs = {"latent_cache": cache, "codec": trained}
        inputs["operator"] = train_operator(operator, launch, data_root, latent_cache=cache)
        inputs["steady"] = train_steady(steady, launch, data_root, latent_cache=cache)
        models, place, module = trained_stages(inputs, launch, data_root), "07_model_output/compression", EVALUATION
        scored = cached(f"score_{variant.name}", data_root, place, module, evaluation, inputs)
        work = partial(score_compression, trained=models, config=evaluation, launch=launch, raw=raw)
        receipt = scored(on_raw_files(work, cache, raw, data_root))
        rows += [{"name": variant.name, "codec": variant.codec} | row for row in receipt["rows"]]
    return rows


def report_compression(compression: list[dict[str, Any]]) -> str:
    """The table of all variants and families."""
    from ups.evaluation.studies import compression_text

    return compression_text(compression)


def select(
    latent_cache: Receipt, config: SelectionConfig, launch: LaunchConfig, raw: Path, data_root: Path, **stages: Receipt
) -> dict[str, Any]:
    """Score every way to select among members on validation data, choose one per family, confirm it on test data."""
    from ups.evaluation.selected import SELECTION_MODULE
    from ups.evaluation.selection import select_all

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    selected = cached("select", data_root, "07_model_output", SELECTION_MODULE, config, inputs)
    receipt = selected(on_raw_files(lambda _: select_all(trained, config, launch, raw), latent_cache, raw, data_root))
    return {name: receipt[name] for name in ("families", "datasets", "records", "choices", "fingerprint")}


def report_selection(selection: dict[str, Any], datasets: Receipt) -> tuple[str, Any]:
    """Tables, and a Matplotlib figure of error over network evaluations."""
    from ups.data.card_text import titles_of
    from ups.evaluation.selection import selection_figure, selection_text

    titles = titles_of(map(Dataset.from_json, datasets["datasets"].values()))
    return selection_text(selection), selection_figure(selection["records"], titles)


def score_shifts(
    latent_cache: Receipt,
    coverage: Receipt,
    config: ShiftsConfig,
    launch: LaunchConfig,
    data_root: Path,
    **stages: Receipt,
) -> tuple[dict[str, Any], str]:
    """Whether the warning outside what training covered foretells errors of simulated trajectories."""
    from ups.evaluation.shifts import score_shifts as score
    from ups.evaluation.shifts import shifts_text, summarize

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    inputs["coverage"] = coverage
    scored = cached("score_shifts", data_root, "07_model_output/shifts", "ups.evaluation.shifts", config, inputs)
    records = scored(lambda _: score(trained, coverage["families"], config, launch))["records"]
    summary = summarize(records)
    return {"summary": summary, "records": records}, shifts_text(summary)


def compare_seeds(config: SeedsConfig) -> tuple[str, str]:
    """The nRMSE over seeds, and the ratio of ours to the better baseline for each seed; its figure as SVG.

    Raises:
        ConfigFault: fewer than two data roots.
        DataFault: a data root has no scores yet, or other datasets than the first, or the same errors as another.
    """
    from ups.evaluation.comparison import errors_in
    from ups.evaluation.studies import draw_seeds, seed_ratios, seeds_text
    from ups.evaluation.styles import svg_file

    if len(config.data_roots) < 2:
        raise ConfigFault(
            "seeds.data_roots must name at least two data roots: the same comparison was run in each, with another seed"
        )
    runs = {root: errors_in(Path(root)) for root in config.data_roots}
    return seeds_text(runs), svg_file(draw_seeds(seed_ratios(list(runs.values()), "rollout")))


def rank_models(config: LeaderboardConfig, registration: RegistrationConfig, data_root: Path) -> tuple[str, str]:
    """Show the models of data roots, the versions in MLflow and other models, ranked; returns Markdown and CSV.

    Raises:
        DataFault: a data root or a file has no scores or is damaged.
    """
    from ups.evaluation.entries import entries_in, entries_of_version, entry_of_scores
    from ups.evaluation.leaderboard import leaderboard_csv, leaderboard_tables, leaderboard_text, ranked
    from ups.runs import registry

    roots = {str(root): root for root in _paths(config.data_roots)} or {data_root.name: data_root}
    entries = [entry for name, root in roots.items() for entry in entries_in(name, root)]
    errors = registry.versions(registration.name)
    champion = registry.version_of(registration.name, registration.alias) if errors else None
    for version, of_version in errors.items():
        mark = f" ({registration.alias})" if version == champion else ""
        entries += entries_of_version(f"{registration.name} version {version}{mark}", of_version)
    entries += [entry_of_scores(path, entries) for path in _paths(config.scores)]
    board = ranked(entries)
    get_console().print(leaderboard_tables(board))
    return leaderboard_text(board), leaderboard_csv(board)


def _paths(patterns: list[str]) -> list[Path]:
    """The paths that match, each once; a pattern that matches none stays, to be named as missing."""
    found = {path: sorted(path.parent.glob(path.name)) for path in map(Path, patterns) if not path.exists()}
    return list(dict.fromkeys(path for pattern in map(Path, patterns) for path in found.get(pattern) or [pattern]))
