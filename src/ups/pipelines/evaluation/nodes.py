"""Nodes of pipeline `evaluation`: the corrector's mode, scores, figures, verdict."""

import logging
from pathlib import Path
from typing import Any

from rich import get_console

from ups.config import CorrectorConfig, EvaluationConfig, JudgeConfig, LaunchConfig
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.trajectories import find_files
from ups.errors import GateFailed
from ups.evaluation import PLAIN_STAGES
from ups.evaluation.judge import judge as judge_records
from ups.evaluation.table import score_table
from ups.files import write_json
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads
from ups.receipts import Receipt, once, only_trained

log = logging.getLogger(__name__)


def choose_corrector(
    latent_cache: Receipt,
    config: CorrectorConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[Receipt, dict[str, Any]]:
    """Decide on the validation split for which families residuals are drawn, and how; else the models have no help."""
    from ups.evaluation.corrector import choose
    from ups.evaluation.score import Trained

    limit_threads(launch)
    trained = Trained(latent_cache, only_trained(stages), data_root)
    receipt = once(
        "choose_corrector",
        data_root / "06_models" / "corrector",
        fingerprint("ups.evaluation.corrector", config, {"latent_cache": latent_cache, **stages}),
        lambda folder: choose(trained, config, device(launch), raw),
        root=data_root,
    )
    return {key: receipt[key] for key in ("path", "fingerprint", "families")}, receipt["report"]


def evaluate(
    latent_cache: Receipt,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[list[dict[str, Any]], Receipt]:
    """Score every method on the test split, in physical units."""
    from ups.evaluation.score import Trained, score

    limit_threads(launch)
    identity = fingerprint("ups.evaluation.score", config, {"latent_cache": latent_cache, **stages})
    trained = Trained(latent_cache, only_trained(stages), data_root)
    receipt = once(
        "evaluate",
        data_root / "07_model_output",
        identity,
        lambda folder: score(folder, trained, config, device(launch), raw),
        root=data_root,
    )
    return receipt["records"], {key: receipt[key] for key in ("path", "fingerprint", "datasets")}


def evaluate_external(
    latent_cache: Receipt,
    config: EvaluationConfig,
    launch: LaunchConfig,
    external: Path,
    data_root: Path,
    **stages: Receipt,
) -> None:
    """Score all trajectories of `evaluation.folder`, if one is named, into `external/metrics.json`."""
    if config.folder is None:
        return
    from ups.evaluation.external import find_subjects, score_external
    from ups.evaluation.score import Trained

    limit_threads(launch)
    if not config.folder_correctors:
        stages = {name: stages[name] for name in PLAIN_STAGES}
    folder, trained = Path(config.folder).resolve(), Trained(latent_cache, only_trained(stages), data_root)
    subjects = find_subjects(folder, find_files(folder), trained)
    files = list_files(folder, data_root / "01_raw" / "checksums.json")
    inputs = {"files": files, "latent_cache": latent_cache, **stages}
    receipt = once(
        "evaluate_external",
        data_root / "07_model_output" / "external",
        fingerprint("ups.evaluation.external", config, inputs),
        lambda place: score_external(place, trained, subjects, config, device(launch)),
        root=data_root,
    )
    write_json(external / "metrics.json", receipt["records"])
    get_console().print(score_table(receipt["records"], "nRMSE", f"all of {folder}"))


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
    get_console().print(score_table(metrics, "nRMSE", "the test split"))
    failed = [f"{gate['name']} on {gate['family']}: {gate['value']}" for gate in verdict["gates"] if not gate["passed"]]
    if not verdict["passed"]:
        raise GateFailed(
            f"{len(failed)} of {len(verdict['gates'])} gates failed ({'; '.join(failed)}); see verdict.json"
        )
    log.info("passed all %d gates; figures: %d", len(verdict["gates"]), len(figures))
