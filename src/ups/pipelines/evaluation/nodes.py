"""Nodes of pipeline `evaluation`: scores, figures, verdict."""

import logging
from pathlib import Path
from typing import Any

from rich import get_console

from ups.config import EvaluationConfig, JudgeConfig, LaunchConfig
from ups.data.pdebench import FAMILIES
from ups.errors import GateFailed
from ups.evaluation.judge import judge as judge_records
from ups.evaluation.table import score_table
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads
from ups.receipts import Receipt, once

log = logging.getLogger(__name__)


def evaluate(
    latent_cache: Receipt,
    codec: Receipt,
    operator: Receipt,
    diffusion: Receipt,
    consistency: Receipt,
    steady: Receipt,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> tuple[list[dict[str, Any]], Receipt]:
    """Score every method on the test split, in physical units."""
    from ups.evaluation.score import score

    stages = {
        "codec": codec,
        "operator": operator,
        "diffusion": diffusion,
        "consistency": consistency,
        "steady": steady,
    }
    limit_threads(launch)
    identity = fingerprint("ups.evaluation.score", config, {"latent_cache": latent_cache, **stages})
    receipt = once(
        "evaluate",
        data_root / "07_model_output",
        identity,
        lambda folder: score(folder, latent_cache, stages, config, device(launch), raw, data_root),
        root=data_root,
    )
    return receipt["records"], {key: receipt[key] for key in ("path", "fingerprint", "datasets")}


def plot(rollouts: Receipt, data_root: Path) -> dict[str, bytes]:
    """Error over time, spectra, and snapshots of truth, prediction and error, as PNG pages."""
    from ups.evaluation.figures import draw_figures

    return draw_figures(data_root / rollouts["path"], rollouts["datasets"])


def judge(metrics: list[dict[str, Any]], latent_cache: Receipt, config: JudgeConfig) -> dict[str, Any]:
    """Hold the scores against the gates; a missing score is a failed gate."""
    families = {name: FAMILIES[name].steady for name in latent_cache["transient"] + latent_cache["steady"]}
    return judge_records(metrics, config.gates, families)


def require_pass(verdict: dict[str, Any], metrics: list[dict[str, Any]], figures: dict[str, bytes]) -> None:
    """Show the scores, and fail the run if a gate failed, after everything else is written."""
    get_console().print(score_table(metrics, "nRMSE"))
    failed = [f"{gate['name']} on {gate['family']}: {gate['value']}" for gate in verdict["gates"] if not gate["passed"]]
    if not verdict["passed"]:
        raise GateFailed(
            f"{len(failed)} of {len(verdict['gates'])} gates failed ({'; '.join(failed)}); see verdict.json"
        )
    log.info("passed all %d gates; figures: %d", len(verdict["gates"]), len(figures))
