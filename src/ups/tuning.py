"""Micro-batches that fit: found by `kedro run --pipeline tune` or the hard way, kept where the next run looks."""

from pathlib import Path
from typing import Any

from ups.config import LaunchConfig
from ups.files import read_json, write_json

TUNING = "tuning.json"


def apply(launch: LaunchConfig, stage: str, device: str, data_root: Path) -> LaunchConfig:
    """`launch` with the micro-batch that was found for this stage, device and number of processes, if any."""
    path = data_root / "06_models" / TUNING
    if launch.micro_batch_tokens is not None or not path.is_file():
        return launch
    found: dict[str, Any] = read_json(path)
    return launch.model_copy(update={"micro_batch_tokens": found.get(place_of(launch, stage, device))})


def remember(launch: LaunchConfig, stage: str, device: str, data_root: Path, tokens: int | None) -> None:
    """Keep the largest micro-batch that fits; None: everything does."""
    path = data_root / "06_models" / TUNING
    found = read_json(path) if path.is_file() else {}
    write_json(path, found | {place_of(launch, stage, device): tokens})


def place_of(launch: LaunchConfig, stage: str, device: str) -> str:
    """What a micro-batch was measured for."""
    return f"{stage} on {launch.world_size} x {device}, {launch.sharding}"
