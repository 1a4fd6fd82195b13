"""Pipelines `tune`, `profile` and `benchmark`: memory and time of training steps, and their speed in other setups."""

from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline

from ups.config import (
    NONE_ADDED,
    WHOLE,
    BenchmarkConfig,
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    ProfileConfig,
    SplitConfig,
    SteadyConfig,
)
from ups.config.training import TrainingSection
from ups.files import num_cores, read_json
from ups.pipelines import step
from ups.pipelines.data import describe_datasets, fit_normalization, simulate_pdebench
from ups.pipelines.training import codec_rates, encode_latents, no_datasets, train_codec
from ups.runs import machine
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, trained_receipts
from ups.runs.torchrun import run_query

TUNE_WORKER = "ups.performance.tune"
PROFILE_WORKER = "ups.performance.profile"
ALONE = {"num_processes": 1, "num_nodes": 1, "sharding": "ddp"}
BENCHMARK = "benchmark"  # the data root of the benchmark, below that of the run


def create_tune() -> Pipeline:
    """Needs `--pipeline data` before, and `--pipeline training` for the stages that are trained on other stages."""
    codec = {"datasets": "datasets", "normalization": "normalization"}
    cache = {"latent_cache": "latent_cache_if_any"}
    operators = cache | {"operator": "operator_receipt_if_any", "steady": "steady_receipt_if_any"}
    denoiser = operators | {"diffusion": "diffusion_receipt_if_any"}
    steps = [
        step(tune_codec, codec | {"config": "params:codec"}, "codec_micro_batch"),
        step(tune_operator, cache | {"config": "params:operator"}, "operator_micro_batch"),
        step(tune_diffusion, operators | {"config": "params:diffusion"}, "diffusion_micro_batch"),
        step(tune_consistency, denoiser | {"config": "params:consistency"}, "consistency_micro_batch"),
        step(tune_steady, cache | {"config": "params:steady"}, "steady_micro_batch"),
    ]
    return Pipeline(steps, tags="tune")


def create_profile() -> Pipeline:
    """Needs the latents of `kedro run --pipeline training`, or of `kedro run --to-nodes encode_latents`."""
    inputs = ["latent_cache", "params:operator", "params:profile"]
    outputs = ["profile_trace", "profile_text", "profile_figure"]
    return Pipeline([step(profile_operator, inputs, outputs)], tags="profile")


def create_benchmark() -> Pipeline:
    """Simulates data of its own: no other pipeline has to run before."""
    sections = ["params:benchmark", "params:split", "params:codec", "params:latents"]
    steps = [
        step(prepare_benchmark, sections, "benchmark_data"),
        step(measure_speed, ["benchmark_data", "params:operator", "params:benchmark"], "benchmark"),
        step(report_benchmark, ["benchmark"], ["benchmark_text", "benchmark_figure"]),
    ]
    return Pipeline(steps, tags="benchmark")


Inputs = Receipt | None  # None: the node that makes it has not been run yet


def tune_codec(
    config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path, **inputs: Inputs
) -> dict[str, Any]:
    """Find the largest micro-batch of the codec that fits into memory."""
    present = {name: receipt for name, receipt in inputs.items() if receipt is not None}
    if len(present) == len(inputs):
        inputs |= codec_rates(config, present, raw, data_root)
    return _tune("codec", config, launch, data_root, inputs, raw)


def tune_operator(config: OperatorConfig, launch: LaunchConfig, data_root: Path, **inputs: Inputs) -> dict[str, Any]:
    """Find the largest micro-batch of the operator that fits into memory."""
    return _tune("operator", config, launch, data_root, inputs)


def tune_diffusion(config: DiffusionConfig, launch: LaunchConfig, data_root: Path, **inputs: Inputs) -> dict[str, Any]:
    """Find the largest micro-batch of the denoiser that fits into memory."""
    return _tune("diffusion", config, launch, data_root, inputs)


def tune_consistency(
    config: ConsistencyConfig, launch: LaunchConfig, data_root: Path, **inputs: Inputs
) -> dict[str, Any]:
    """Find the largest micro-batch of the consistency distillation that fits into memory."""
    return _tune("consistency", config, launch, data_root, inputs)


def tune_steady(config: SteadyConfig, launch: LaunchConfig, data_root: Path, **inputs: Inputs) -> dict[str, Any]:
    """Find the largest micro-batch of the steady model that fits into memory."""
    return _tune("steady", config, launch, data_root, inputs)


def _tune(
    stage: str,
    config: TrainingSection,
    launch: LaunchConfig,
    data_root: Path,
    inputs: dict[str, Inputs],
    raw: Path | None = None,
) -> dict[str, Any]:
    """The largest micro-batch and the device and processes it was measured on; or why the stage cannot be tuned."""
    if missing := _missing(stage, inputs):
        return {"stage": stage, "untuned": missing}
    where = machine.training_device(launch, stage, config.precision)
    folder = data_root / "06_models" / stage / "tuning"
    section = config.model_dump(mode="json")
    run = Run(folder, stage, "tuning", section, trained_receipts(inputs), launch, where, data_root, raw)
    found = run_query(TUNE_WORKER, run, {})
    # A whole share that fits is remembered as well: without a number the launcher would cut it by an estimate.
    machine.save_micro_batch(launch, stage, section, where, data_root, found["tokens"] or found["whole"])
    return {"stage": stage, "place": machine.tuning_key(launch, stage, section, where), **found}


def _missing(stage: str, inputs: dict[str, Inputs]) -> str | None:
    """The first input whose node has not been run, or the kind of datasets that the stage would be trained on."""
    for name, receipt in inputs.items():
        if receipt is None:
            return f"there is no {name} yet"
    kind = no_datasets(stage, inputs["latent_cache"]) if "latent_cache" in inputs else None
    return kind and f"there is no {kind} dataset"


def profile_operator(
    latent_cache: Receipt, operator: OperatorConfig, config: ProfileConfig, launch: LaunchConfig, data_root: Path
) -> tuple[dict[str, Any], str, Any]:
    """Trace, table and Matplotlib figure of some training steps of the operator."""
    from ups.performance.profile import TRACE
    from ups.performance.report import profile_figure, profile_text

    folder, section = data_root / "06_models/operator/profile", operator.model_dump(mode="json")
    inputs, where = {"latent_cache": latent_cache}, machine.training_device(launch, "operator", operator.precision)
    run = Run(folder, "operator", "profile", section, inputs, launch, where, data_root)
    found = run_query(PROFILE_WORKER, run, config.model_dump(mode="json"))
    return read_json(folder / TRACE), profile_text(found, "operator"), profile_figure(found, "operator")


def prepare_benchmark(
    config: BenchmarkConfig,
    split: SplitConfig,
    codec: CodecConfig,
    latents: LatentsConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> dict[str, Receipt]:
    """Simulate and encode the data of the benchmark, in a data root of their own, unless they are up to date."""
    root = data_root / BENCHMARK
    raw = root / "01_raw"
    launch = launch.model_copy(update=ALONE | {"latent_store": None})
    wanted = [*config.datasets, *config.loading_datasets]
    simulated = NONE_ADDED.model_copy(update={"seed": config.seed, "datasets": wanted})
    files = simulate_pdebench("simulate", simulated, raw)
    datasets = describe_datasets(files, {}, {}, split, WHOLE, simulated, raw, root)
    normalization = fit_normalization(datasets, raw, root)
    short = codec.model_copy(update={"steps": config.codec_steps})
    trained = train_codec(datasets, normalization, short, launch, raw, root)
    cache = encode_latents(datasets, trained, latents, launch, raw, root)
    return {"datasets": datasets, "codec": trained, "latent_cache": cache}


def measure_speed(
    data: dict[str, Receipt], operator: OperatorConfig, config: BenchmarkConfig, launch: LaunchConfig, data_root: Path
) -> dict[str, Any]:
    """Compare the setups on this machine; `num_processes` and `num_nodes` of `launch` are ignored."""
    import torch

    from ups.performance.benchmark import measure
    from ups.performance.exported import export_records
    from ups.performance.storage import storage_records

    # One process, as in the reference setups; whole batches, because accumulation would change the measured time.
    launch = launch.model_copy(update=ALONE | {"micro_batch_tokens": None})
    machine.compute_as_in_training(launch)
    where, root = machine.training_device(launch, "operator", operator.precision), data_root / BENCHMARK
    section = operator.model_dump(mode="json")
    run = Run(root / "06_models/operator", "operator", "benchmark", section, data, launch, where, root, root / "01_raw")
    described = machine.describe_machine(where, launch.threads_per_process or num_cores(), config.seed)
    exported = export_records(run, config)  # first, because it may fail for want of a package
    records = [*measure(run, config, torch.cuda.device_count()), *storage_records(run, config), *exported]
    return {"machine": described, "records": records}


def report_benchmark(benchmark: dict[str, Any]) -> tuple[str, Any]:
    """Table and Matplotlib figure of the measurements."""
    from ups.performance.report import benchmark_figure, benchmark_text

    return benchmark_text(benchmark), benchmark_figure(benchmark)
