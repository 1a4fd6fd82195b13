"""Benchmark of training: which two setups are compared, start-up times, and the records of the results.

Every comparison has two setups (`ups.performance.timing_worker.Setup`), `value` and `baseline`. They are timed
alternately in one job, because the speed of a shared machine drifts. A record holds medians over rounds.
"""

import json
import logging
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ups.config import BenchmarkConfig
from ups.errors import LostWorker
from ups.files import num_cores, remove_leftovers
from ups.metrics.spectra import error_spectra
from ups.runs.machine import float8_needs, in_turns
from ups.runs.run import Run, metric_lines
from ups.runs.torchrun import WORKER, run_job, run_query

log = logging.getLogger(__name__)

Comparison = dict[str, dict[str, Any]]  # "value" and "baseline": arguments of `Setup`
Timings = dict[str, dict[str, Any]]  # "value" and "baseline": the result of `ups.performance.timing_worker`
Record = dict[str, Any]  # "name", "value", "unit", "baseline", "ratio"

TIMING_WORKER = "ups.performance.timing_worker"
WORLD_SIZES = (2, 4)
# A timed training never ends by itself, never validates and logs every step.
ENDLESS = {"steps": 10**6, "log_every": 1, "validate_every": 10**6, "patience": None, "schedule": "constant"}
PLAIN_CONFIG = {"precision": "float32", "optimizer": "adamw"}
PLAIN_LAUNCH = {"compile": False, "activation_checkpointing": False, "micro_batch_tokens": None}
ALL_SWITCHES, SCALING, CHECKPOINTS = "speed_switches_over_plain", "scaling_{}_over_1", "checkpoint_overhead"
CHECKPOINTING = "activation_checkpointing_over_plain"
CACHE, CACHED_TRAINING = "cache_over_on_the_fly", "cached_training_over_on_the_fly_training"
SPECTRUM_SHAPES = {"snapshot": (1, 1, 1, 128, 128), "trajectory": (1, 20, 2, 128, 128)}  # B T C H W


def measure(run: Run, config: BenchmarkConfig, num_gpus: int) -> list[Record]:
    """All records; `run` is the operator as it is trained by default, on one process and all cores."""
    families = [dataset.family for dataset in config.datasets]
    threads = run.launch.threads_per_process or num_cores()
    # The learning rate is low, so that no setup diverges in a million steps.
    run = replace(run, config=run.config | ENDLESS | {"learning_rate": 1e-4, "log_every": run.config["log_every"]})
    single = switch_comparisons(families) | {CHECKPOINTS: checkpoint_comparison(families, threads)}
    large = all_switches_comparison(families, config.large_model.model_dump(), config.large_batch_tokens)
    data = {n: both for each in config.loading_datasets for n, both in data_comparisons(each.family, threads).items()}
    if run.device == "cuda":
        large |= gpu_comparisons(families, config.large_model.model_dump(), config.large_batch_tokens)
    timings = _time(run, "single", config, single | data | large)

    records = loop_records(CHECKPOINTS, timings.pop(CHECKPOINTS), run.launch.checkpoint_steps)
    records += [*_scaling(run, families, config, num_gpus), *_starts(run, config)]
    records += [throughput(name, timings[name]) for name in (*data, *large)]
    records += [throughput(name, both) for name, both in timings.items() if name in single]
    records += spectra_records(config.rounds, config.seed)
    peaks = {side: timings[CHECKPOINTING][side]["peak_bytes"] for side in ("value", "baseline")}
    return [*records, record("activation_checkpointing_memory_over_plain", peaks["value"], "bytes", peaks["baseline"])]


def plain(families: list[str], threads: int) -> dict[str, Any]:
    """Float32, eager, fused AdamW: the setup that every switch is compared with."""
    return {"families": families, "threads": threads, "config": PLAIN_CONFIG, "launch": PLAIN_LAUNCH}


def switch_comparisons(families: list[str]) -> dict[str, Comparison]:
    """Each speed switch on and off, in one thread."""
    off = plain(families, 1)
    on = {
        "bfloat16_over_float32": {"config": PLAIN_CONFIG | {"precision": "bfloat16"}},
        "compile_over_eager": {"launch": PLAIN_LAUNCH | {"compile": True}},
        "muon_over_adamw": {"config": PLAIN_CONFIG | {"optimizer": "muon"}},
    }
    comparisons = {name: {"value": off | change, "baseline": off} for name, change in on.items()}
    measured, checkpointing = off | {"measure_memory": True}, PLAIN_LAUNCH | {"activation_checkpointing": True}
    comparisons[CHECKPOINTING] = {"value": measured | {"launch": checkpointing}, "baseline": measured}
    comparisons["fused_over_foreach"] = {"value": off, "baseline": off | {"foreach_adamw": True}}
    comparisons["prefetch_over_none"] = {"value": off, "baseline": off | {"prefetch": False}}
    return comparisons


def all_switches_comparison(families: list[str], model: dict[str, Any], batch_tokens: int) -> dict[str, Comparison]:
    """Bfloat16, compiled and fused against none of these, for a larger model, in one thread."""
    size = PLAIN_CONFIG | {"model": model, "batch_tokens": batch_tokens}
    off = plain(families, 1) | {"config": size}
    on = {"config": size | {"precision": "bfloat16"}, "launch": PLAIN_LAUNCH | {"compile": True}}
    return {ALL_SWITCHES: {"value": off | on, "baseline": off | {"foreach_adamw": True}}}


def gpu_comparisons(families: list[str], model: dict[str, Any], batch_tokens: int) -> dict[str, Comparison]:
    """CUDA graphs and float8 against bfloat16 without them, all of them compiled, for a larger model."""
    config = PLAIN_CONFIG | {"precision": "bfloat16", "model": model, "batch_tokens": batch_tokens}
    usual = plain(families, 1) | {"config": config, "launch": PLAIN_LAUNCH | {"compile": True}}
    graphs = usual | {"launch": PLAIN_LAUNCH | {"compile": "reduce-overhead"}}
    comparisons = {"cuda_graphs_over_compile": {"value": graphs, "baseline": usual}}
    if float8_needs(torch.cuda.device_count()) is None:
        comparisons["float8_over_bfloat16"] = {
            "value": usual | {"config": config | {"precision": "float8"}},
            "baseline": usual,
        }
    return comparisons


def checkpoint_comparison(families: list[str], threads: int) -> Comparison:
    """Training steps with and without the checkpoint and the metrics of one checkpoint interval."""
    usual = {"families": families, "threads": threads}
    return {"value": usual | {"save_and_log": True}, "baseline": usual}


def data_comparisons(family: str, threads: int) -> dict[str, Comparison]:
    """Batches from the latent cache against batches encoded from raw files: loaded by one thread, and trained on."""
    load = plain([family], 1) | {"train": False, "prefetch": False}
    train = plain([family], threads)
    return {
        f"{CACHE}_{family}": {"value": load, "baseline": load | {"encode_on_the_fly": True}},
        f"{CACHED_TRAINING}_{family}": {"value": train, "baseline": train | {"encode_on_the_fly": True}},
    }


def scaling_comparisons(families: list[str], world_size: int, config: dict[str, Any]) -> dict[str, Comparison]:
    """All ranks against rank 0 alone, one thread each: on the same global batch, and on the same batch per rank.

    `config` overrides the stage's section and holds `batch_tokens`. What the ranks would reach if they never
    communicated is a bound for any exchange of gradients: they share caches, memory and clock of the machine.
    """
    usual = plain(families, 1) | {"config": PLAIN_CONFIG | config}
    larger = usual | {"config": usual["config"] | {"batch_tokens": world_size * config["batch_tokens"]}}
    alone, rounded = usual | {"rank_0_only": True}, PLAIN_LAUNCH | {"exchange_precision": "bfloat16", "sharding": "ddp"}
    comparisons = {}
    for name, batch in (SCALING.format(world_size), usual), (f"weak_{SCALING.format(world_size)}", larger):
        comparisons[name] = {"value": batch, "baseline": alone}
        comparisons[f"{name}_bfloat16_exchange"] = {"value": batch | {"launch": rounded}, "baseline": alone}
        comparisons[f"{name}_without_exchange"] = {"value": batch | {"exchange": False}, "baseline": alone}
    return comparisons


def _scaling(run: Run, families: list[str], config: BenchmarkConfig, num_gpus: int) -> list[Record]:
    """Two and four ranks against one; on GPUs at most as many ranks as GPUs.

    The large model, with its memory and time, is left out where ranks outnumber cores.
    """
    large = {"model": config.large_model.model_dump(), "batch_tokens": config.large_batch_tokens}
    records = []
    for world_size in WORLD_SIZES:
        if run.device == "cpu" or world_size <= num_gpus:
            launch = run.launch.model_copy(update={"num_processes": world_size, "threads_per_process": 1})
            comparisons = scaling_comparisons(families, world_size, {"batch_tokens": run.config["batch_tokens"]})
            oversubscribed = run.device == "cpu" and world_size > num_cores()
            wide = {} if oversubscribed else scaling_comparisons(families, world_size, large)
            comparisons |= {f"large_model_{name}": both for name, both in wide.items()}
            timings = _time(replace(run, launch=launch), f"ranks{world_size}", config, comparisons)
            remark = "oversubscribed" if oversubscribed else ""
            records += [throughput(name, both, remark) for name, both in timings.items()]
            waits = data_wait(timings[SCALING.format(world_size)]["value"])
            records.append(record(f"data_wait_fraction_{world_size}_ranks", waits, "of step time"))
    return records


def _time(run: Run, name: str, config: BenchmarkConfig, comparisons: dict[str, Comparison]) -> dict[str, Timings]:
    log.info("benchmark: %s", ", ".join(comparisons))
    request = {"comparisons": comparisons, "rounds": config.rounds, "seconds_per_round": config.seconds_per_round}
    return run_query(TIMING_WORKER, replace(run, folder=run.folder / name), request)


class _FirstStepDone(Exception):
    """Ends the job whose first step was waited for; its argument is the time of that step."""


def _starts(run: Run, config: BenchmarkConfig) -> list[Record]:
    """Seconds from launch to the first step of a new and of a resumed job, alternating with imports of torch."""
    run = replace(run, folder=run.folder / "start", config=run.config | ENDLESS)
    imports, firsts, resumes = [], [], []
    for _ in range(config.num_launches):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - started)
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True)
        run.write()
        # The first job is asked to stop after its first step, which it saves; the second one resumes with the next.
        firsts.append(_seconds_to_next_step(run))
        resumes.append(_seconds_to_next_step(run))
    return [
        record("first_step_over_import_torch", median(firsts), "s", median(imports)),
        record("resume_seconds", median(resumes), "s", median(firsts)),
    ]


def _seconds_to_next_step(run: Run) -> float:
    """Seconds from the launch of a job to the end of its first step."""
    remove_leftovers(run.folder)
    started = time.time()

    def stop_after_step() -> None:
        for metrics in map(json.loads, metric_lines(run.folder)):
            if metrics["time"] > started:
                raise _FirstStepDone(metrics["time"])

    try:
        run_job(WORKER, run, stop_after_step)
    except _FirstStepDone as done:
        return done.args[0] - started
    raise LostWorker(f"a start of {run.stage} ended before its first step; its output is in {run.folder}")


def record(name: str, value: float, unit: str, baseline: float | None = None) -> Record:
    """A number, with its ratio to a baseline where there is one."""
    ratio = None if baseline is None else value / baseline
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


def throughput(name: str, timings: Timings, remark: str = "") -> Record:
    """Samples per second of both setups; a ratio above 1 means that `value` is faster."""
    value, baseline = (median_of(timings[side], samples_per_second) for side in ("value", "baseline"))
    reason = timings["value"]["eager_because"] if name == "compile_over_eager" else None
    remarks = ["samples/s", remark, f"not compiled: {reason}" if reason else ""]
    return record(name, value, ", ".join(filter(None, remarks)), baseline)


def loop_records(name: str, timings: Timings, checkpoint_steps: int) -> list[Record]:
    """Speed of plain steps, the fraction spent waiting for data, and the fraction that checkpoint and log add.

    Neighbouring rounds are subtracted, so that slow changes of the machine's speed cancel.
    """
    bare = timings["baseline"]
    step_seconds = median_of(bare, lambda r: r["seconds"] / r["steps"])
    rounds = zip(timings["value"]["rounds"], bare["rounds"], strict=True)
    extra = median(with_checkpoint["seconds"] - without["seconds"] for with_checkpoint, without in rounds)
    return [
        record("samples_per_second", median_of(bare, samples_per_second), "samples/s"),
        record("step_seconds", step_seconds, "s"),
        record("data_wait_fraction", data_wait(bare), "of step time"),
        record(name, extra / (checkpoint_steps * step_seconds), "of step time"),
    ]


def median_of(timing: dict[str, Any], quantity: Callable[[dict[str, float]], float]) -> float:
    """Median over the rounds of one setup."""
    return median(map(quantity, timing["rounds"]))


def data_wait(timing: dict[str, Any]) -> float:
    """The fraction of the time in which rank 0 waits for data."""
    return median_of(timing, lambda one: one["waited"] / one["seconds"])


def samples_per_second(one: dict[str, float]) -> float:
    """Samples of all ranks per second of a round."""
    return one["samples"] / one["seconds"]


def spectra_records(rounds: int, seed: int) -> list[Record]:
    """Spectra per second of `error_spectra` against PDEBench's loop over modes, timed alternately."""
    records = []
    for name, shape in SPECTRUM_SHAPES.items():
        error = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        functions = {"binned": lambda e=error: error_spectra(e), "loop": lambda e=error: looped_spectrum(e)}
        seconds = in_turns(functions, rounds, error.device)
        per_second = {function: math.prod(shape[:3]) / value for function, value in seconds.items()}
        records.append(record(f"fRMSE_of_{name}_over_loop", per_second["binned"], "spectra/s", per_second["loop"]))
    return records


def looped_spectrum(error: Tensor) -> Tensor:
    """Energy per shell of wavenumbers of one quadrant, mode by mode as in PDEBench: (..., n, n) -> (..., n / 2)."""
    num_shells = error.shape[-1] // 2
    error_hat = torch.fft.fftn(error, dim=(-2, -1), norm="forward")
    shells = error.new_zeros(*error.shape[:-2], num_shells)
    for k in product(range(num_shells), repeat=2):
        shell = math.isqrt(k[0] ** 2 + k[1] ** 2)
        if shell < num_shells:
            shells[..., shell] += error_hat[..., k[0], k[1]].abs().square()
    return shells
