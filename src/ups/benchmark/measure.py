"""Ask the workers everything, one job after the other, and put the records together."""

import logging
import os
from dataclasses import replace
from statistics import median

from ups.benchmark import pairs
from ups.benchmark.pairs import ALL_SWITCHES, CACHE, CACHED_TRAINING, CHECKPOINTING, CHECKPOINTS, Pair
from ups.benchmark.records import Record, Sides, loop_records, memory, record, throughput
from ups.benchmark.spectra import spectra_records
from ups.benchmark.starts import FOREVER, import_seconds, start_seconds
from ups.config import BenchmarkConfig
from ups.jobs import ask
from ups.run import Run

log = logging.getLogger(__name__)

WORKER = "ups.benchmark.rounds"
WORLD_SIZES = (2, 4)


def measure(run: Run, config: BenchmarkConfig, num_gpus: int) -> list[Record]:
    """All records; `run` is the operator as it is trained by default, on one process and all cores."""
    families = [dataset.family for dataset in config.datasets]
    threads = run.launch.threads_per_process or os.cpu_count() or 1
    run = replace(run, config=run.config | FOREVER | {"learning_rate": 1e-4, "log_every": run.config["log_every"]})
    single = pairs.switch_pairs(families) | pairs.loop_pair(families, threads)
    wide = pairs.all_switches_pair(families, config.wide.model_dump(), config.wide_batch_tokens)
    found = _ask(run, "single", config, single | pairs.data_pairs(config.fields.family, threads) | wide)

    records = loop_records(CHECKPOINTS, found.pop(CHECKPOINTS), run.launch.checkpoint_steps)
    records += [*_scaling(run, families, config, num_gpus), *_starts(run, config)]
    records += [throughput(name, found[name]) for name in (CACHE, CACHED_TRAINING, ALL_SWITCHES)]
    records += [throughput(name, sides) for name, sides in found.items() if name in single]
    records += spectra_records(config.rounds, config.seed)
    return [*records, memory("activation_checkpointing_memory_over_plain", found[CHECKPOINTING])]


def _scaling(run: Run, families: list[str], config: BenchmarkConfig, num_gpus: int) -> list[Record]:
    """Two and four ranks against one; on GPUs as many as there are."""
    records = []
    for world_size in WORLD_SIZES:
        if run.device == "cpu" or world_size <= num_gpus:
            launch = run.launch.model_copy(update={"num_processes": world_size, "threads_per_process": 1})
            contenders = pairs.scaling_pairs(families, world_size, run.config["batch_tokens"])
            found = _ask(replace(run, launch=launch), f"ranks{world_size}", config, contenders)
            oversubscribed = run.device == "cpu" and world_size > (os.cpu_count() or 1)
            remark = "oversubscribed" if oversubscribed else ""
            records += [throughput(name, sides, remark) for name, sides in found.items()]
    return records


def _starts(run: Run, config: BenchmarkConfig) -> list[Record]:
    """Launches and resumes in turns with plain imports of torch."""
    run = replace(run, folder=run.folder / "start", config=run.config | FOREVER)
    imports, firsts, resumes = [], [], []
    for _ in range(config.launches):
        imports.append(import_seconds())
        first, resumed = start_seconds(run)
        firsts.append(first)
        resumes.append(resumed)
    return [
        record("first_step_over_import_torch", median(firsts), "s", median(imports)),
        record("resume_seconds", median(resumes), "s", median(firsts)),
    ]


def _ask(run: Run, name: str, config: BenchmarkConfig, contenders: dict[str, Pair]) -> dict[str, Sides]:
    log.info("benchmark: %s", ", ".join(contenders))
    question = {"pairs": contenders, "rounds": config.rounds, "seconds": config.seconds}
    return ask(WORKER, replace(run, folder=run.folder / name), question)
