"""Nodes of pipeline `selection`: what choosing gains and costs, a report."""

from pathlib import Path
from typing import Any

from ups.config import LaunchConfig, SelectionConfig
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads
from ups.receipts import Receipt, once, only_trained


def select(
    latent_cache: Receipt,
    config: SelectionConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> dict[str, Any]:
    """Measure every way to choose on the validation split, decide per family, confirm on the test split."""
    from ups.evaluation.score import Trained
    from ups.evaluation.select import select_all

    limit_threads(launch)
    trained = Trained(latent_cache, only_trained(stages), data_root)
    receipt = once(
        "select",
        data_root / "07_model_output",
        fingerprint("ups.evaluation.select", config, {"latent_cache": latent_cache, **stages}),
        lambda _: select_all(trained, config, device(launch), raw),
        root=data_root,
    )
    return {name: receipt[name] for name in ("families", "datasets", "records")}


def report_selection(selection: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Tables and the compute-accuracy curves."""
    from ups.evaluation.selection_report import selection_figure, selection_text

    return selection_text(selection), {"selection.png": selection_figure(selection["records"])}
