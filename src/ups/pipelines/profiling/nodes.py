"""Nodes of pipeline `profile`: where the time of a training step goes."""

from pathlib import Path
from typing import Any

from ups.config import LaunchConfig, OperatorConfig, ProfileConfig
from ups.files import read_json
from ups.jobs import ask
from ups.launch import device
from ups.receipts import Receipt
from ups.run import Run

WORKER = "ups.training.profile"
STAGE = "operator"


def profile_operator(
    latent_cache: Receipt, operator: OperatorConfig, config: ProfileConfig, launch: LaunchConfig, data_root: Path
) -> tuple[dict[str, Any], str, dict[str, bytes]]:
    """Trace, table and figure of some steps of the operator."""
    from ups.benchmark.profiled import profile_figure, profile_text
    from ups.training.profile import TRACE

    folder, section = data_root / "06_models" / STAGE / "profile", operator.model_dump(mode="json")
    run = Run(folder, STAGE, "profile", section, {"latent_cache": latent_cache}, launch, device(launch), data_root)
    found = ask(WORKER, run, config.model_dump(mode="json"))
    figures = {"step.png": profile_figure(found, STAGE)}
    return read_json(folder / TRACE), profile_text(found, STAGE), figures
