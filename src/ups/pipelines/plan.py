"""Pipeline `plan`: what a run will read, write and compute, before it does any of it."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline
from rich import box, get_console
from rich.table import Table
from rich.text import Text

from ups.config import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    DownloadConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SimulateConfig,
    SteadyConfig,
    SubsampleConfig,
)
from ups.config.training import TrainingSection
from ups.data.estimate import (
    Size,
    Tokens,
    bytes_per_value,
    expect_room,
    files_to_fetch,
    files_to_simulate,
    readable,
    size_of,
    sizes_of,
)
from ups.data.families import Dataset, Subsample
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.plan import make_plan, select
from ups.data.sources import find_families
from ups.files import read_json
from ups.pipelines import step
from ups.pipelines.training import dataset_families
from ups.runs.machine import device
from ups.runs.processes import memory_bytes
from ups.runs.run import RUN, metric_lines, training_seconds
from ups.runs.stage_cache import Receipt

log = logging.getLogger(__name__)

SHARDS = "04_feature/latents/*/*.zarr/*/c/*/*/0/0"
NAME_WIDTH, WIDTHS = 30, (15, 13, 10, 10)  # of the lines of sizes, together at most 80
CORRECTORS = ("diffusion", "consistency")
STAGES = ("codec", "operator", "steady", *CORRECTORS)
# Options that do not change how long a training step takes.
ANY_LENGTH = ("steps", "warmup_steps", "seed", "learning_rate", "validate_every", "log_every", "patience")


def create_pipeline() -> Pipeline:
    """Nothing is simulated, fetched or trained; of files that exist only shapes, times and coordinates are read."""
    data = ["params:source", "params:simulate", "params:download", "params:subsample"]
    steps = [
        step(find_sizes, [*data, "params:codec", "params:latents"], "planned_sizes"),
        step(show_plan, ["planned_sizes", *(f"params:{stage}" for stage in STAGES)], "plan"),
    ]
    return Pipeline(steps, tags="plan")


def create_check() -> Pipeline:
    """The node that stops `data`, and so `full`, before all values are read and anything is trained."""
    return Pipeline([step(check_sizes, ["datasets", "params:codec", "params:latents"], "sizes")], tags="data")


def find_sizes(
    source: str,
    simulate: SimulateConfig,
    download: DownloadConfig,
    subsample: SubsampleConfig,
    codec: CodecConfig,
    latents: LatentsConfig,
    raw: Path,
) -> Receipt:
    """Sizes of the datasets of the source, whether its files exist already or not."""
    unknown: list[str] = []
    if source == "folder":
        datasets = _read_shapes(raw, list(find_families(raw, FAMILIES.given)))
    elif source == "simulate":
        datasets = files_to_simulate(raw, [entry.model_dump() | {"seed": 0} for entry in simulate.datasets])
    else:
        place, choice = {"base_url", "parallel"}, {"families", "files"}
        files = select(download.families, download.files, **download.model_dump(exclude=place | choice))
        plan = make_plan(raw, files, download.trajectories)
        datasets, unknown = files_to_fetch(plan)
        if all(planned.is_complete for planned in plan.files):
            datasets, unknown = _read_shapes(raw, [planned.name for planned in plan.files]), []
    if simulate.fill_below:
        log.info("this plan is without the trajectories that simulate.fill_to = %d adds", simulate.fill_to)
    missing = frozenset(name for dataset in datasets.values() for name in dataset.files if not (raw / name).exists())
    families = {dataset.family for dataset in datasets.values()}
    sizes = sizes_of(raw, datasets, subsample.of(families), _tokens(codec, latents, families), missing)
    return {"sizes": [asdict(size) for size in sizes], "unknown": unknown}


def show_plan(
    sizes: Receipt,
    codec: CodecConfig,
    operator: OperatorConfig,
    steady: SteadyConfig,
    diffusion: DiffusionConfig,
    consistency: ConsistencyConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> Receipt:
    """Print sizes and times; then refuse a run whose latents or snapshots cannot fit."""
    datasets = [Size(**entry | {"grid": tuple(entry["grid"])}) for entry in sizes["sizes"]]
    is_steady = {FAMILIES[size.family].steady for size in datasets}
    sections: dict[str, TrainingSection] = {"codec": codec}
    sections |= {"operator": operator} if False in is_steady else {}
    sections |= {"steady": steady} if True in is_steady else {}
    sections |= {"diffusion": diffusion, "consistency": consistency}
    where, stages = device(launch), {}
    for stage, section in sections.items():
        rate = seconds_per_step(data_root / "06_models" / stage, section, launch, where)
        stages[stage] = {"steps": section.steps, "seconds_per_step": rate}
    get_console().print(_lines_of_sizes(datasets), _table_of_stages(stages))
    for name in sizes["unknown"]:
        log.warning("%s is left out of this plan: its sizes are known only after the download", name)
    if datasets:
        _expect_room(datasets, launch, raw, data_root)
    return {"datasets": sizes["sizes"], "unknown": sizes["unknown"], "stages": stages}


def check_sizes(
    datasets: Receipt, codec: CodecConfig, latents: LatentsConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Refuse datasets whose latents do not fit onto the disk, or whose snapshots do not fit into memory."""
    tokens = _tokens(codec, latents, dataset_families(datasets))
    sizes = [size_of(Dataset.from_json(entry), tokens) for entry in datasets["datasets"].values()]
    _expect_room(sizes, launch, raw, data_root)
    return {"sizes": [asdict(size) for size in sizes]}


def seconds_per_step(folder: Path, section: TrainingSection, launch: LaunchConfig, device: str) -> float | None:
    """Measured by the latest run of a stage with the same options and processes; None if there was none.

    `folder` has the runs of the stage. Lengths and seeds may differ, and so may the data, which makes it an estimate.
    """
    runs = sorted(folder.glob(f"*/{RUN}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in runs:
        run = read_json(path)
        same = run["device"] == device and run["launch"]["num_processes"] == launch.num_processes
        steps = [line["step"] for line in map(json.loads, metric_lines(path.parent)) if "steps_per_second" in line]
        if same and steps and _speed_options(run["config"]) == _speed_options(section.model_dump(mode="json")):
            return training_seconds(path.parent) / steps[-1]
    return None


def _speed_options(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ANY_LENGTH}


def _read_shapes(raw: Path, names: list[str]) -> dict[str, Dataset]:
    whole = dict.fromkeys(FAMILIES, asdict(Subsample()))
    found = inspect("find", folder=raw, names=names, subsample=whole)
    return {name: Dataset.from_json(entry) for name, entry in found.items()}


def _tokens(codec: CodecConfig, latents: LatentsConfig, families: Iterable[str]) -> Tokens:
    tolerances = latents.of(families)["tolerance"].items()
    value_bytes = {family: bytes_per_value(each) if latents.on_disk else 0.0 for family, each in tolerances}
    return Tokens(**codec.model.model_dump(exclude={"tolerance"}), value_bytes=value_bytes)


def _budget(launch: LaunchConfig) -> int:
    import torch  # not at the start of every command

    return memory_bytes(launch, torch.device(device(launch)))


def _expect_room(sizes: list[Size], launch: LaunchConfig, raw: Path, data_root: Path) -> None:
    present = sum(path.stat().st_size for path in data_root.glob(SHARDS))
    if not raw.is_relative_to(data_root):  # perhaps on another disk; the download checks its own room
        sizes = [replace(size, missing_bytes=0) for size in sizes]
    budget, latents = _budget(launch), sum(size.latent_bytes for size in sizes)
    free = expect_room(data_root, sizes, present, budget)
    log.info("latents: about %s, there are %s already; disk: %s free", *map(readable, (latents, present, free)))
    largest = max(size.snapshot_bytes for size in sizes)
    log.info("memory: at most %s per process; one snapshot needs up to %s", readable(budget), readable(largest))


def _lines_of_sizes(sizes: list[Size]) -> Text:
    """A line per dataset; a long name has a line of its own, because tables of rich would break it."""
    shown = Text().append("Data that is used; raw: size of the whole files\n", style="italic")
    shown.append(_line("", ("trajectories", "", "", "")), style="bold")
    shown.append(_line("dataset", ("x snapshots", "grid", "raw", "latents")), style="bold")
    for size in sizes:
        counts = f"{size.num_trajectories} x {size.num_snapshots}"
        bytes_used = (readable(size.raw_bytes), readable(size.latent_bytes))
        shown.append(_line(size.name, (counts, "x".join(map(str, size.grid)), *bytes_used)))
    raw, latents = sum(size.raw_bytes for size in sizes), sum(size.latent_bytes for size in sizes)
    shown.append(_line("all", ("", "", readable(raw), readable(latents))))
    shown.no_wrap, shown.overflow = True, "ignore"
    return shown


def _line(name: str, cells: tuple[str, ...]) -> str:
    numbers = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f"{name}\n{'':{NAME_WIDTH}}{numbers}\n" if len(name) > NAME_WIDTH else f"{name:<{NAME_WIDTH}}{numbers}\n"


def _table_of_stages(stages: dict[str, dict[str, Any]]) -> Table:
    title = "Training; times as in earlier runs with these options"
    caption = "up to: fewer if families lack validation trajectories"
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("stage")
    for name in ("steps", "seconds per step", "estimated time"):
        shown.add_column(name, justify="right")
    for stage, entry in stages.items():
        rate = entry["seconds_per_step"]
        limit = "up to " if stage in CORRECTORS else ""
        whole = "not known" if rate is None else limit + _duration(rate * entry["steps"])
        shown.add_row(stage, f"{limit}{entry['steps']:,}", "not known" if rate is None else f"{rate:.3g}", whole)
    return shown


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
