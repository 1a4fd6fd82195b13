"""Pipeline `evaluation`: choice of the corrector, scores in physical units, figures, and gates on the scores."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.pipeline import Pipeline
from rich import get_console

from ups.config import CorrectorConfig, EvaluationConfig, JudgeConfig, LaunchConfig, ReportConfig, SubsampleConfig
from ups.data.layouts import digests_of
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.trajectories import find_files
from ups.errors import GateFailed
from ups.files import place_of
from ups.pipelines import cached, step
from ups.runs.machine import describe_machine, device, limit_threads
from ups.runs.progress import ProgressBar
from ups.runs.stage_cache import Receipt, trained_receipts

if TYPE_CHECKING:
    from ups.surrogate.trained import Trained

STAGES = {stage: f"{stage}_receipt" for stage in ("codec", "operator", "steady", "diffusion", "consistency")}
TRAINED = STAGES | {"latent_cache": "latent_cache"}
SURROGATE = TRAINED | {"corrector": "corrector"}
REPORT = STAGES | {name: name for name in ("metrics", "verdict", "rollouts", "corrector_report", "datasets")}
REPORT |= {"normalization": "normalization", "config": "params:report"}
REPORT |= {name: f"params:{name}" for name in ("source", "seed")}
OF_BASELINES = ("baseline_metrics", "baseline_rollouts", "costs")


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates has written scores, figures and verdict before."""
    steps = [
        step(
            choose_corrector,
            TRAINED | {"config": "params:corrector"},
            ["corrector", "corrector_report"],
            tags=["diffusion", "consistency"],
        ),
        step(evaluate, SURROGATE | {"config": "params:evaluation"}, ["metrics", "rollouts"]),
        step(
            evaluate_external,
            SURROGATE | {"config": "params:evaluation", "subsample": "params:subsample"},
            "external_metrics",
        ),
        step(plot, ["rollouts"], "figures"),
        step(judge, ["metrics", "latent_cache", "params:judge"], "verdict"),
        step(report, REPORT | {name: f"{name}_if_any" for name in OF_BASELINES}, "report"),
        step(require_pass, ["verdict", "metrics", "figures", "report"], None),
    ]
    return Pipeline(steps, tags="evaluation")


log = logging.getLogger(__name__)


def trained_stages(inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> "Trained":
    """The stages that were trained; torch in this process then uses as many threads as in a training process.

    `inputs` are the receipts of stages by name and that of the latent cache, `latent_cache`.
    """
    from ups.surrogate.trained import Trained

    limit_threads(launch)
    stages = {name: receipt for name, receipt in inputs.items() if name != "latent_cache"}
    return Trained(inputs["latent_cache"], trained_receipts(stages), data_root)


def choose_corrector(
    latent_cache: Receipt, config: CorrectorConfig, launch: LaunchConfig, raw: Path, data_root: Path, **stages: Receipt
) -> tuple[Receipt, dict[str, Any]]:
    """Choose on the validation split, per family and method, how residuals are added to predictions, if at all."""
    from ups.evaluation.corrector import choose

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    chosen = cached("choose_corrector", data_root, "06_models/corrector", "ups.evaluation.corrector", config, inputs)
    receipt = chosen(lambda _: choose(trained, config, launch, raw))
    return {key: receipt[key] for key in ("path", "fingerprint", "families")}, receipt["report"]


def evaluate(
    latent_cache: Receipt, config: EvaluationConfig, launch: LaunchConfig, raw: Path, data_root: Path, **stages: Receipt
) -> tuple[list[dict[str, Any]], Receipt]:
    """Score every method on the test split, in physical units."""
    from ups.evaluation.scores import score_test_split

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    scored = cached("evaluate", data_root, "07_model_output", "ups.evaluation.scores", config, inputs)
    receipt = scored(lambda folder: score_test_split(folder, trained, config, launch, raw))
    return receipt["records"], {key: receipt[key] for key in ("path", "fingerprint", "datasets")}


def evaluate_external(
    latent_cache: Receipt,
    config: EvaluationConfig,
    subsample: SubsampleConfig,
    launch: LaunchConfig,
    data_root: Path,
    **stages: Receipt,
) -> list[dict[str, Any]]:
    """Score what `subsample` leaves of the files in `evaluation.folder`; no records if no folder is named."""
    if config.folder is None:
        return []
    from ups.evaluation.external import external_sets, score_external
    from ups.evaluation.tables import score_table
    from ups.surrogate.trained import PLAIN_STAGES

    if not config.folder_correctors:
        stages = {name: stages[name] for name in PLAIN_STAGES}
    inputs = {"latent_cache": latent_cache, **stages}
    folder, trained = Path(config.folder).resolve(), trained_stages(inputs, launch, data_root)
    names = find_files(folder)
    inputs["subsample"] = subsample.of(digests_of(names))
    sets = external_sets(folder, names, inputs["subsample"], trained)
    inputs["files"] = list_files(folder, data_root / "01_raw" / "checksums.json")
    module = "ups.evaluation.external"
    scored = cached("evaluate_external", data_root, "07_model_output/external", module, config, inputs)
    records = scored(lambda place: score_external(place, trained, sets, config, launch))["records"]
    get_console().print(score_table(records, "nRMSE", f"all of {folder}"))
    return records


def plot(rollouts: Receipt, data_root: Path) -> dict[str, bytes]:
    """Error over time, spectra, and snapshots of truth, prediction and error, as PNG pages."""
    from ups.evaluation.figures import draw_figures

    return draw_figures(place_of(data_root, rollouts), rollouts["datasets"])


def judge(metrics: list[dict[str, Any]], latent_cache: Receipt, config: JudgeConfig) -> dict[str, Any]:
    """Compare the scores with the thresholds of the gates; a missing score is a failed gate."""
    from ups.evaluation.gates import judge as judge_records

    families = {name: FAMILIES[name].steady for name in latent_cache["transient"] + latent_cache["steady"]}
    return judge_records(metrics, config.gates, families)


def report(
    config: ReportConfig, source: str, seed: int, launch: LaunchConfig, raw: Path, data_root: Path, **inputs: Any
) -> str:
    """One HTML page with everything above; `inputs` are those of `REPORT`, and of the baselines those that exist."""
    from ups.data.card_text import card_of
    from ups.evaluation.report import Results, render

    datasets, statistics = inputs["datasets"], inputs["normalization"]["statistics"]
    results = Results(
        metrics=inputs["metrics"],
        verdict=inputs["verdict"],
        corrector=inputs["corrector_report"],
        arrays=place_of(data_root, inputs["rollouts"]),
        cards={name: card_of(name, datasets, statistics, source, raw) for name in datasets["datasets"]},
        baseline_metrics=inputs["baseline_metrics"] or [],
        baseline_arrays=place_of(data_root, inputs["baseline_rollouts"]) if inputs["baseline_rollouts"] else None,
        costs=inputs["costs"] or {},
        stages={name: inputs[name] for name in STAGES},
        data_root=data_root,
        machine=describe_machine(device(launch), launch.threads_per_process or 0, seed),
        others=[Path(root) for root in config.compare],
    )
    with ProgressBar("report", len(results.cards), "datasets") as bar:
        return render(results, bar.advance)


def require_pass(
    verdict: dict[str, Any],
    metrics: list[dict[str, Any]],
    figures: dict[str, bytes],
    report: str,
    data_root: Path,
) -> None:
    """Print the scores and the place of the report, and fail the run if a gate failed, after all else is written.

    Raises:
        GateFailed: naming each failed gate, its family and value.
    """
    from ups.evaluation.tables import score_table

    get_console().print(score_table(metrics, "nRMSE", "the test split"))
    gates = verdict["gates"]
    failed = [f"{gate['name']} on {gate['family']}: {gate['value']}" for gate in gates if not gate["passed"]]
    page = data_root / "08_reporting" / "report.html"
    if not verdict["passed"]:
        raise GateFailed(f"{len(failed)} of {len(gates)} gates failed ({'; '.join(failed)}); see {page}")
    log.info("passed all %d gates; figures: %d", len(gates), len(figures))
    log.info("report, %.1f MB: %s", len(report) / 1e6, page)
