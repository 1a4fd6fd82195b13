"""Pipeline `evaluation`: choice of the corrector, scores in physical units, figures, gates on the scores, grades."""

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.pipeline import Pipeline
from rich import get_console

from ups.config import CorrectorConfig, EvaluationConfig, JudgeConfig, LaunchConfig, SubsampleConfig
from ups.data.layouts import digests_of
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.trajectories import find_files
from ups.errors import GateFailed
from ups.files import place_of
from ups.pipelines import cached, step
from ups.runs.machine import limit_threads
from ups.runs.stage_cache import Receipt, trained_receipts

if TYPE_CHECKING:
    from ups.surrogate.trained import Trained

STAGES = {stage: f"{stage}_receipt" for stage in ("codec", "operator", "steady", "diffusion", "consistency")}
TRAINED = STAGES | {"latent_cache": "latent_cache"}
SURROGATE = TRAINED | {"corrector": "corrector"}
EXTERNAL = ("external_verdict", "external_metrics")
WITHOUT_CORRECTOR = ("codec", "operator", "steady")


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates has written scores, figures and verdict before.

    `stop_if_hopeless` follows the operator and the steady model, before the correctors are trained.
    """
    plain = {name: TRAINED[name] for name in ("latent_cache", *WITHOUT_CORRECTOR)}
    steps = [
        step(evaluate_few, plain | {"config": "params:evaluation", "limits": "params:judge"}, "first_verdict"),
        step(stop_if_hopeless, ["first_verdict"], None),
        step(
            choose_corrector,
            TRAINED | {"first_verdict": "first_verdict", "config": "params:corrector"},
            ["corrector", "corrector_report"],
            tags=["diffusion", "consistency"],
        ),
        step(evaluate, SURROGATE | {"config": "params:evaluation"}, ["metrics", "rollouts"]),
        step(
            evaluate_external,
            SURROGATE | {"config": "params:evaluation", "subsample": "params:subsample", "limits": "params:judge"},
            ["external_metrics", "external_verdict", "external_table", "external_figures"],
        ),
        step(plot, ["rollouts"], "figures"),
        step(
            judge, ["metrics", "latent_cache", "params:judge", "baseline_metrics_if_any", "champion_metrics"], "verdict"
        ),
        step(
            require_pass,
            ["params:evaluation", "params:judge", "verdict", "metrics", "figures", *EXTERNAL],
            None,
        ),
    ]
    return Pipeline(steps, tags="evaluation")


log = logging.getLogger(__name__)

MAX_REASONS = 3  # in the line of a failed run


def trained_stages(inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> "Trained":
    """The stages that were trained; torch in this process then uses as many threads as in a training process.

    `inputs` are the receipts of stages by name and that of the latent cache, `latent_cache`.
    """
    from ups.surrogate.trained import Trained

    limit_threads(launch)
    stages = {name: receipt for name, receipt in inputs.items() if name != "latent_cache"}
    return Trained(inputs["latent_cache"], trained_receipts(stages), data_root)


def evaluate_few(
    latent_cache: Receipt,
    config: EvaluationConfig,
    limits: JudgeConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> dict[str, Any]:
    """The verdict on the first test trajectories of each dataset, by the gates that can make it unusable."""
    from ups.evaluation.gates import UNUSABLE
    from ups.evaluation.gates import judge as judge_records
    from ups.evaluation.scores import score_test_split

    count, place = limits.first_trajectories, "07_model_output/first"
    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    inputs["first_trajectories"] = count
    scored = cached("evaluate_few", data_root, place, "ups.evaluation.scores", config, inputs)
    receipt = scored(lambda folder: score_test_split(folder, trained, config, launch, raw, count))
    gates = [gate for gate in limits.gates if gate.otherwise == UNUSABLE]
    return judge_records(receipt["records"], gates, _families(latent_cache))


def stop_if_hopeless(first_verdict: dict[str, Any]) -> None:
    """Stop before correctors are trained and all trajectories are scored.

    Raises:
        GateFailed: the verdict on a few trajectories leaves no hope for that on all.
    """
    from ups.evaluation.gates import why_hopeless

    if reasons := why_hopeless(first_verdict):
        raise GateFailed(f"stopped after a few trajectories: {_some(reasons)}; see first_verdict.json")


def choose_corrector(
    latent_cache: Receipt,
    first_verdict: dict[str, Any],
    config: CorrectorConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[Receipt, dict[str, Any]]:
    """Choose on the validation split, per family and method, how residuals are added to predictions, if at all.

    Raises:
        GateFailed: see `stop_if_hopeless`.
    """
    from ups.evaluation.corrector import choose

    stop_if_hopeless(first_verdict)
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
    limits: JudgeConfig,
    launch: LaunchConfig,
    data_root: Path,
    **stages: Receipt,
) -> tuple[list[dict[str, Any]], dict[str, Any], str, dict[str, bytes]]:
    """Score what `subsample` leaves of the files in `evaluation.folder`: records, verdict, table and figures.

    All are empty if no folder is named. Baselines and champion have no scores of these files.
    """
    if config.folder is None:
        return [], {}, "", {}
    from ups.evaluation.external import external_sets, score_external
    from ups.evaluation.figures import draw_figures
    from ups.evaluation.gates import judge as judge_records
    from ups.evaluation.tables import verdict_text

    if not config.folder_correctors:
        stages = {name: stages[name] for name in WITHOUT_CORRECTOR}
    inputs = {"latent_cache": latent_cache, **stages}
    folder, trained = Path(config.folder).resolve(), trained_stages(inputs, launch, data_root)
    names = find_files(folder)
    inputs["subsample"] = subsample.of(digests_of(names))
    sets = external_sets(folder, names, inputs["subsample"], trained)
    inputs["files"] = list_files(folder, data_root / "01_raw" / "checksums.json")
    module = "ups.evaluation.external"
    scored = cached("evaluate_external", data_root, "07_model_output/external", module, config, inputs)
    receipt = scored(lambda place: score_external(place, trained, sets, config, launch))
    records, families = receipt["records"], {each.dataset.family: FAMILIES[each.dataset.family].steady for each in sets}
    verdict = judge_records(records, limits.gates, families)
    figures = draw_figures(place_of(data_root, receipt), {each.dataset.name: each.dataset.family for each in sets})
    return records, verdict, verdict_text(records, "nRMSE", f"all of {folder}", verdict), figures


def plot(rollouts: Receipt, data_root: Path) -> dict[str, bytes]:
    """Error over time, spectra, and snapshots of truth, prediction and error, as PNG pages."""
    from ups.evaluation.figures import draw_figures

    return draw_figures(place_of(data_root, rollouts), rollouts["datasets"])


def judge(
    metrics: list[dict[str, Any]],
    latent_cache: Receipt,
    config: JudgeConfig,
    baseline_metrics: list[dict[str, Any]] | None,
    champion_metrics: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Compare the scores with the limits of the gates, and grade every dataset; a missing score is a failed gate."""
    from ups.evaluation.gates import judge as judge_records

    others = (baseline_metrics or [], champion_metrics or [])
    return judge_records(metrics, config.gates, _families(latent_cache), *others)


def _families(latent_cache: Receipt) -> dict[str, bool]:
    """The families of a latent cache, and whether they are steady."""
    return {name: FAMILIES[name].steady for name in latent_cache["transient"] + latent_cache["steady"]}


def require_pass(
    config: EvaluationConfig,
    limits: JudgeConfig,
    verdict: dict[str, Any],
    metrics: list[dict[str, Any]],
    figures: dict[str, bytes],
    external_verdict: dict[str, Any] | None,
    external_metrics: list[dict[str, Any]] | None,
) -> None:
    """Print scores and grades, and fail the run if its gates fail, after everything else is written.

    With `evaluation.folder` these are the scores and the verdict of its files.

    Raises:
        GateFailed: naming the datasets that fail the run, and why.
    """
    from ups.evaluation.tables import GRADES, score_table

    scored, where = "the test split", "verdict.json"
    if config.folder is not None:
        assert external_verdict is not None and external_metrics is not None
        verdict, metrics = external_verdict, external_metrics
        scored, where = f"all of {config.folder}", "external/verdict.json"
    grades = verdict["grades"]
    get_console().print(score_table(metrics, "nRMSE", scored, grades))
    binding = {gate.name for gate in limits.gates if gate.otherwise != "weak"}
    missed = [line for line in verdict["gates"] if not line["passed"]]
    missed.sort(key=lambda line: line["name"] not in binding)
    reasons = [f"{line['dataset']}: {line['name']}: {line['comparison']}" for line in missed]
    failing = [] if verdict["passed"] else reasons[: sum(line["name"] in binding for line in missed)]
    for reason in reasons[min(len(failing), MAX_REASONS) :]:  # the others are in the line of the fault
        log.warning(reason)
    counts = Counter(entry["grade"] for entry in grades.values())
    summary = ", ".join(f"{counts[grade]} {grade}" for grade in GRADES if counts[grade])
    if not verdict["passed"]:
        raise GateFailed(f"datasets: {summary}; {_some(failing)}; see {where}")
    num_gates = len(verdict["gates"])
    held = num_gates - len(missed)
    log.info("passed; datasets: %s; %d of %d gates hold; figures: %d", summary, held, num_gates, len(figures))


def _some(reasons: list[str]) -> str:
    """The first reasons, and the number of the others."""
    rest = len(reasons) - MAX_REASONS
    return "; ".join(reasons[:MAX_REASONS]) + (f"; and {rest} more" if rest > 0 else "")
