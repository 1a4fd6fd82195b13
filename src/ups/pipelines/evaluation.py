"""Pipeline `evaluation`: how the corrector is used, scores in physical units, figures, and the gates they must pass."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.pipeline import Pipeline, node
from rich import get_console

from ups.config import CorrectorConfig, EvaluationConfig, JudgeConfig, LaunchConfig
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.trajectories import find_files
from ups.errors import GateFailed
from ups.evaluation.gates import judge as judge_records
from ups.runs.machine import device, limit_threads
from ups.runs.stage_cache import Receipt, cached_step, fingerprint, trained_receipts

if TYPE_CHECKING:
    from ups.surrogate.trained import Trained

STAGES = {stage: f"{stage}_receipt" for stage in ("codec", "operator", "steady", "diffusion", "consistency")}
SURROGATE = STAGES | {"latent_cache": "latent_cache", "corrector": "corrector"}
OPTIONS = {"launch": "params:launch", "data_root": "params:data_root"}
RAW = {"raw": "params:raw_root"}


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates has written scores, figures and verdict before."""
    return Pipeline(
        [
            node(
                choose_corrector,
                inputs=STAGES | {"latent_cache": "latent_cache", "config": "params:corrector"} | OPTIONS | RAW,
                outputs=["corrector", "corrector_report"],
                name="choose_corrector",
                tags=["diffusion", "consistency"],
            ),
            node(
                evaluate,
                inputs=SURROGATE | {"config": "params:evaluation"} | OPTIONS | RAW,
                outputs=["metrics", "rollouts"],
                name="evaluate",
            ),
            node(
                evaluate_external,
                inputs=SURROGATE | {"config": "params:evaluation"} | OPTIONS,
                outputs="external_metrics",
                name="evaluate_external",
            ),
            node(plot, inputs=["rollouts", "params:data_root"], outputs="figures", name="plot"),
            node(judge, inputs=["metrics", "latent_cache", "params:judge"], outputs="verdict", name="judge"),
            node(require_pass, inputs=["verdict", "metrics", "figures"], outputs=None, name="require_pass"),
        ],
        tags="evaluation",
    )


log = logging.getLogger(__name__)


def trained_stages(
    latent_cache: Receipt, stages: dict[str, Receipt], launch: LaunchConfig, data_root: Path
) -> "Trained":
    """The stages that were trained, for work in this process with the threads of a training process."""
    from ups.surrogate.trained import Trained

    limit_threads(launch)
    return Trained(latent_cache, trained_receipts(stages), data_root)


def choose_corrector(
    latent_cache: Receipt,
    config: CorrectorConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[Receipt, dict[str, Any]]:
    """Choose on the validation split, per family and denoiser, how residuals are added to predictions, if at all."""
    from ups.evaluation.corrector import choose

    trained = trained_stages(latent_cache, stages, launch, data_root)
    receipt = cached_step(
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
    from ups.evaluation.scores import score_test_split

    trained = trained_stages(latent_cache, stages, launch, data_root)
    receipt = cached_step(
        "evaluate",
        data_root / "07_model_output",
        fingerprint("ups.evaluation.scores", config, {"latent_cache": latent_cache, **stages}),
        lambda folder: score_test_split(folder, trained, config, device(launch), raw),
        root=data_root,
    )
    return receipt["records"], {key: receipt[key] for key in ("path", "fingerprint", "datasets")}


def evaluate_external(
    latent_cache: Receipt, config: EvaluationConfig, launch: LaunchConfig, data_root: Path, **stages: Receipt
) -> list[dict[str, Any]]:
    """Score all trajectories of the files in `evaluation.folder`; no records if no folder is named."""
    if config.folder is None:
        return []
    from ups.evaluation.external import external_sets, score_external
    from ups.evaluation.tables import score_table
    from ups.surrogate.trained import PLAIN_STAGES

    if not config.folder_correctors:
        stages = {name: stages[name] for name in PLAIN_STAGES}
    folder, trained = Path(config.folder).resolve(), trained_stages(latent_cache, stages, launch, data_root)
    sets = external_sets(folder, find_files(folder), trained)
    files = list_files(folder, data_root / "01_raw" / "checksums.json")
    receipt = cached_step(
        "evaluate_external",
        data_root / "07_model_output" / "external",
        fingerprint("ups.evaluation.external", config, {"files": files, "latent_cache": latent_cache, **stages}),
        lambda place: score_external(place, trained, sets, config, device(launch)),
        root=data_root,
    )
    get_console().print(score_table(receipt["records"], "nRMSE", f"all of {folder}"))
    return receipt["records"]


def plot(rollouts: Receipt, data_root: Path) -> dict[str, bytes]:
    """Error over time, spectra, and snapshots of truth, prediction and error, as PNG pages."""
    from ups.evaluation.figures import draw_figures

    return draw_figures(data_root / rollouts["path"], rollouts["datasets"])


def judge(metrics: list[dict[str, Any]], latent_cache: Receipt, config: JudgeConfig) -> dict[str, Any]:
    """Compare the scores with the thresholds of the gates; a missing score is a failed gate."""
    families = {name: FAMILIES[name].steady for name in latent_cache["transient"] + latent_cache["steady"]}
    return judge_records(metrics, config.gates, families)


def require_pass(verdict: dict[str, Any], metrics: list[dict[str, Any]], figures: dict[str, bytes]) -> None:
    """Print the scores, and fail the run if a gate failed, after everything else is written.

    Raises:
        GateFailed: naming each failed gate, its family and value.
    """
    from ups.evaluation.tables import score_table

    get_console().print(score_table(metrics, "nRMSE", "the test split"))
    failed = [f"{gate['name']} on {gate['family']}: {gate['value']}" for gate in verdict["gates"] if not gate["passed"]]
    if not verdict["passed"]:
        raise GateFailed(
            f"{len(failed)} of {len(verdict['gates'])} gates failed ({'; '.join(failed)}); see verdict.json"
        )
    log.info("passed all %d gates; figures: %d", len(verdict["gates"]), len(figures))
