"""Nodes of pipeline `benchmark`: data of its own, measurements, a report."""

import os
from pathlib import Path
from typing import Any

from ups.config import (
    BenchmarkConfig,
    CodecConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SimulateConfig,
    SplitConfig,
)
from ups.launch import device, limit_threads
from ups.pipelines.data.nodes import describe_datasets, fit_normalization, simulate_pdebench
from ups.pipelines.training.nodes import encode_latents, train_codec
from ups.receipts import Receipt
from ups.run import Run


def prepare_benchmark(
    config: BenchmarkConfig,
    split: SplitConfig,
    codec: CodecConfig,
    latents: LatentsConfig,
    launch: LaunchConfig,
    benchmark_root: Path,
) -> dict[str, Receipt]:
    """Simulate and encode what is measured on, in a data root of its own; up to date where nothing has changed."""
    raw = benchmark_root / "01_raw"
    launch = launch.model_copy(update={"num_processes": 1, "num_nodes": 1})
    simulated = SimulateConfig(seed=config.seed, datasets=[*config.datasets, config.fields])
    files = simulate_pdebench("simulate", simulated, raw)
    datasets = describe_datasets(files, {}, {}, split, raw, benchmark_root)
    normalization = fit_normalization(datasets, raw, benchmark_root)
    short = codec.model_copy(update={"steps": config.codec_steps})
    trained = train_codec(datasets, normalization, short, launch, raw, benchmark_root)
    cache = encode_latents(datasets, trained, latents, launch, raw, benchmark_root)
    return {"datasets": datasets, "codec": trained, "latent_cache": cache}


def measure_speed(
    data: dict[str, Receipt],
    operator: OperatorConfig,
    config: BenchmarkConfig,
    launch: LaunchConfig,
    benchmark_root: Path,
) -> dict[str, Any]:
    """Measure on one machine, whatever `launch` says of processes and nodes."""
    import torch

    from ups.benchmark.machine import describe_machine
    from ups.benchmark.measure import measure

    launch = launch.model_copy(update={"num_processes": 1, "num_nodes": 1, "micro_batch_tokens": None})
    limit_threads(launch)
    where, folder = device(launch), benchmark_root / "06_models" / "operator"
    section, raw = operator.model_dump(mode="json"), benchmark_root / "01_raw"
    run = Run(folder, "operator", "benchmark", section, data, launch, where, benchmark_root, raw)
    machine = describe_machine(where, launch.threads_per_process or os.cpu_count() or 1, config.seed)
    return {"machine": machine, "records": measure(run, config, torch.cuda.device_count())}


def report_benchmark(benchmark: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Table and figure."""
    from ups.benchmark.report import benchmark_figure, benchmark_text

    return benchmark_text(benchmark), {"benchmark.png": benchmark_figure(benchmark)}
