"""Pipelines `tune`, `profile` and `benchmark`: memory and time of training steps, and their speed in other setups."""

import os
from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline, node

from ups.config import (
    BenchmarkConfig,
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    ProfileConfig,
    SimulateConfig,
    SplitConfig,
    SteadyConfig,
)
from ups.config.training import TrainingSection
from ups.files import read_json
from ups.pipelines.data import describe_datasets, fit_normalization, simulate_pdebench
from ups.pipelines.training import encode_latents, no_datasets, stage_options, train_codec
from ups.runs import machine
from ups.runs.machine import device, limit_threads
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, trained_receipts
from ups.runs.torchrun import run_query

TUNE_WORKER = "ups.performance.tune"
PROFILE_WORKER = "ups.performance.profile"
BENCHMARK = "benchmark"  # the data root of the benchmark, below that of the run


def create_tune() -> Pipeline:
    """Run `--pipeline data` before it, and `--pipeline training` for the stages that are trained on other stages."""
    cache = {"latent_cache": "latent_cache_if_any"}
    operators = cache | {name: f"{name}_receipt_if_any" for name in ("operator", "steady")}
    codec = {"datasets": "datasets", "normalization": "normalization", "raw": "params:raw_root"}
    nodes = {
        tune_codec: stage_options("codec") | codec,
        tune_operator: stage_options("operator") | cache,
        tune_diffusion: stage_options("diffusion") | operators,
        tune_consistency: stage_options("consistency") | operators | {"diffusion": "diffusion_receipt_if_any"},
        tune_steady: stage_options("steady") | cache,
    }
    return Pipeline(
        [
            node(tune, inputs=inputs, outputs=f"{tune.__name__.removeprefix('tune_')}_micro_batch", name=tune.__name__)
            for tune, inputs in nodes.items()
        ],
        tags="tune",
    )


def create_profile() -> Pipeline:
    """It needs the latents that `--pipeline training` makes, or `--to-nodes encode_latents`."""
    return Pipeline(
        [
            node(
                profile_operator,
                inputs=["latent_cache", "params:operator", "params:profile", "params:launch", "params:data_root"],
                outputs=["profile_trace", "profile_text", "profile_figure"],
                name="profile_operator",
            )
        ],
        tags="profile",
    )


def create_benchmark() -> Pipeline:
    """It simulates its own data, so that it needs no other pipeline before it."""
    sections = ["params:benchmark", "params:split", "params:codec", "params:latents", "params:launch"]
    return Pipeline(
        [
            node(
                prepare_benchmark,
                inputs=[*sections, "params:data_root"],
                outputs="benchmark_data",
                name="prepare_benchmark",
            ),
            node(
                measure_speed,
                inputs=["benchmark_data", "params:operator", "params:benchmark", "params:launch", "params:data_root"],
                outputs="benchmark",
                name="measure_speed",
            ),
            node(
                report_benchmark,
                inputs="benchmark",
                outputs=["benchmark_text", "benchmark_figure"],
                name="report_benchmark",
            ),
        ],
        tags="benchmark",
    )


Inputs = Receipt | None  # None: its node has not been run yet


def tune_codec(
    config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path, **inputs: Inputs
) -> dict[str, Any]:
    """Find the largest micro-batch of the codec that fits into memory."""
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
    where = device(launch)
    folder = data_root / "06_models" / stage / "tuning"
    section = config.model_dump(mode="json")
    run = Run(folder, stage, "tuning", section, trained_receipts(inputs), launch, where, data_root, raw)
    found = run_query(TUNE_WORKER, run, {})
    machine.save_micro_batch(launch, stage, where, data_root, found["tokens"])
    return {"stage": stage, "place": machine.tuning_key(launch, stage, where), **found}


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
    inputs = {"latent_cache": latent_cache}
    found = run_query(
        PROFILE_WORKER,
        Run(folder, "operator", "profile", section, inputs, launch, device(launch), data_root),
        config.model_dump(mode="json"),
    )
    return read_json(folder / TRACE), profile_text(found, "operator"), profile_figure(found, "operator")


def prepare_benchmark(
    config: BenchmarkConfig,
    split: SplitConfig,
    codec: CodecConfig,
    latents: LatentsConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> dict[str, Receipt]:
    """Simulate and encode what is measured on, in a data root of its own, unless it is up to date."""
    root = data_root / BENCHMARK
    raw = root / "01_raw"
    launch = launch.model_copy(update={"num_processes": 1, "num_nodes": 1})
    simulated = SimulateConfig(seed=config.seed, datasets=[*config.datasets, config.loading_dataset])
    files = simulate_pdebench("simulate", simulated, raw)
    datasets = describe_datasets(files, {}, {}, split, raw, root)
    normalization = fit_normalization(datasets, raw, root)
    short = codec.model_copy(update={"steps": config.codec_steps})
    trained = train_codec(datasets, normalization, short, launch, raw, root)
    cache = encode_latents(datasets, trained, latents, launch, raw, root)
    return {"datasets": datasets, "codec": trained, "latent_cache": cache}


def measure_speed(
    data: dict[str, Receipt],
    operator: OperatorConfig,
    config: BenchmarkConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> dict[str, Any]:
    """Measure on one machine, whatever `launch` gives as processes and nodes."""
    import torch

    from ups.performance.benchmark import measure
    from ups.runs.machine import describe_machine

    # One process, as in the reference setups; whole batches, because accumulation would change the measured time.
    launch = launch.model_copy(update={"num_processes": 1, "num_nodes": 1, "micro_batch_tokens": None})
    limit_threads(launch)
    where, root = device(launch), data_root / BENCHMARK
    section = operator.model_dump(mode="json")
    run = Run(root / "06_models/operator", "operator", "benchmark", section, data, launch, where, root, root / "01_raw")
    machine = describe_machine(where, launch.threads_per_process or os.cpu_count() or 1, config.seed)
    return {"machine": machine, "records": measure(run, config, torch.cuda.device_count())}


def report_benchmark(benchmark: dict[str, Any]) -> tuple[str, Any]:
    """Table and Matplotlib figure of the measurements."""
    from ups.performance.report import benchmark_figure, benchmark_text

    return benchmark_text(benchmark), benchmark_figure(benchmark)
