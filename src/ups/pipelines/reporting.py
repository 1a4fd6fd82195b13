"""The last steps of pipeline `evaluation`: figures, verdict, report, and the end of a run by its gates."""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import asdict, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline
from rich import get_console

from ups.config import EvaluationConfig, JudgeConfig, LaunchConfig, ReportConfig
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.datasets import pages_in
from ups.errors import GateFailed
from ups.files import digest_of, from_here, place_of, publish
from ups.pipelines import STAGES, cached, step
from ups.runs.machine import describe_machine, device
from ups.runs.progress import ProgressBar
from ups.runs.run import Run, training_seconds
from ups.runs.stage_cache import Receipt, trained_receipts

EXTERNAL = ("external_verdict", "external_metrics", "external_report")
OF_MODELS = STAGES | {name: name for name in ("normalization", "corrector_report")} | {"seed": "params:seed"}
REPORT = OF_MODELS | {name: name for name in ("metrics", "verdict", "rollouts", "datasets")}
REPORT |= {"config": "params:report", "source": "params:source"}
EXTERNAL_REPORT = OF_MODELS | {name: f"external_{name}" for name in ("metrics", "verdict", "rollouts")}
EXTERNAL_REPORT |= {"config": "params:evaluation"}
JUDGE = {name: name for name in ("metrics", "latent_cache", "champion_metrics")} | {"config": "params:judge"}
OF_BASELINES = ("baseline_metrics", "baseline_rollouts", "costs")
MAX_REASONS = 3  # in the line of a failed run
PAGE, TEMPLATES = "report.html", ("report.css", "report.html.jinja", "report.js")

log = logging.getLogger(__name__)


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates has written figures, verdict and report before."""
    steps = [
        step(plot, ["rollouts"], "figures"),
        step(judge, JUDGE | {"baseline_metrics": "baseline_metrics_if_any"}, "verdict"),
        step(report, REPORT | {name: f"{name}_if_any" for name in OF_BASELINES}, "report"),
        step(report_external, EXTERNAL_REPORT, "external_report"),
        step(
            require_pass,
            ["params:evaluation", "params:judge", "verdict", "metrics", "figures", "report", *EXTERNAL],
            None,
        ),
    ]
    return Pipeline(steps, tags="evaluation")


def plot(rollouts: Receipt, data_root: Path) -> dict[str, bytes]:
    """Error over time, spectra, and snapshots of truth, prediction and error, as PNG pages."""
    return pages_of("plot", rollouts, rollouts["datasets"], data_root)


def pages_of(name: str, rollouts: Receipt, families: dict[str, str], data_root: Path) -> dict[str, bytes]:
    """The PNG pages of the step `name`, drawn once; `families` is that of each dataset."""

    def work(folder: Path) -> Receipt:
        from ups.evaluation.figures import draw_figures

        for page, content in draw_figures(place_of(data_root, rollouts), families).items():
            with publish(folder / page) as temporary:
                temporary.write_bytes(content)
        return {}

    inputs = {"rollouts": rollouts["fingerprint"], "families": families}
    inputs["shown"] = {family: FAMILIES[family].definition for family in families.values()}
    receipt = cached(name, data_root, f"07_model_output/{name}", "ups.evaluation.figures", None, inputs)(work)
    return pages_in(place_of(data_root, receipt))


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
    return judge_records(metrics, config.gates, steady_by_family(latent_cache), *others)


def steady_by_family(latent_cache: Receipt) -> dict[str, bool]:
    """Whether each family of a latent cache is steady."""
    return {name: FAMILIES[name].steady for name in latent_cache["transient"] + latent_cache["steady"]}


def report(
    config: ReportConfig, source: str, seed: int, launch: LaunchConfig, raw: Path, data_root: Path, **inputs: Any
) -> str:
    """One HTML page with everything above; `inputs` are those of `REPORT`, and of the baselines those that exist."""
    from ups.data.card_text import card_of

    datasets, statistics = inputs["datasets"], inputs["normalization"]["statistics"]
    own = {
        "cards": {name: card_of(name, datasets, statistics, source, raw) for name in datasets["datasets"]},
        "baseline_metrics": inputs["baseline_metrics"] or [],
        "baseline_arrays": place_of(data_root, inputs["baseline_rollouts"]) if inputs["baseline_rollouts"] else None,
        "costs": inputs["costs"] or {},
        "others": [Path(root) for root in config.compare],
        "folder": None,
    }
    return _page("report", launch, seed, data_root, inputs, own)


def report_external(config: EvaluationConfig, seed: int, launch: LaunchConfig, data_root: Path, **inputs: Any) -> str:
    """The same page of the files in `evaluation.folder`, empty if none is named; `inputs` as in `EXTERNAL_REPORT`."""
    if config.folder is None:
        return ""
    from ups.data.card_text import card_of

    folder, files = Path(config.folder).resolve(), inputs["rollouts"]
    statistics, scored = inputs["normalization"]["statistics"], {}
    for name, entry in files["datasets"].items():
        scored[name] = {"scored": list(range(Dataset.from_json(entry).num_trajectories))}
    cards = {name: card_of(name, files | {"splits": scored}, statistics, "folder", folder) for name in scored}
    own = {"cards": cards, "baseline_metrics": [], "baseline_arrays": None, "costs": {}, "others": [], "folder": folder}
    return _page("report_external", launch, seed, data_root, inputs, own)


def _page(
    name: str, launch: LaunchConfig, seed: int, data_root: Path, inputs: dict[str, Any], own: dict[str, Any]
) -> str:
    """The page of the step `name`, written once; `inputs` and `own` together are what `Results` needs."""
    machine = describe_machine(device(launch), launch.threads_per_process or 0, seed)

    def work(folder: Path) -> Receipt:
        from ups.evaluation.report import Results, render

        results = Results(
            metrics=inputs["metrics"],
            verdict=inputs["verdict"],
            corrector=inputs["corrector_report"],
            arrays=place_of(data_root, inputs["rollouts"]),
            stages={stage: inputs[stage] for stage in STAGES},
            rates=Run.read(place_of(data_root, inputs["codec"])).inputs.get("rates"),
            data_root=data_root,
            machine=machine,
            **own,
        )
        with ProgressBar(name, len(results.cards), "datasets") as bar, publish(folder / PAGE) as temporary:
            temporary.write_text(render(results, bar.advance), encoding="utf-8")
        return {}

    shown = inputs | {key: own[key] for key in ("cards", "folder")}
    trained = trained_receipts({stage: inputs[stage] for stage in STAGES})
    shown["seconds"] = [training_seconds(place_of(data_root, receipt)) for receipt in trained.values()]
    shown["machine"] = {key: value for key, value in machine.items() if key not in ("date", "load")}
    shown["families"] = [card.family.definition for card in own["cards"].values()]
    shown["others"] = {str(root): _digest_of_scores(root) for root in own["others"]}
    shown["templates"] = [(files("ups.evaluation") / template).read_text("utf-8") for template in TEMPLATES]
    # As a digest, because scores may be infinite, which a fingerprint refuses.
    key = hashlib.sha256(json.dumps(shown, sort_keys=True, default=_plain).encode()).hexdigest()
    place, module = f"07_model_output/{name}", "ups.evaluation.report"
    receipt = cached(name, data_root, place, module, None, {"shown": key})(work)
    return (place_of(data_root, receipt) / PAGE).read_text(encoding="utf-8")


def _digest_of_scores(root: Path) -> str:
    from ups.evaluation.report import scores_file

    return digest_of(scores_file(root))


def _plain(value: Any) -> Any:
    """A data card or a path as JSON."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def require_pass(
    config: EvaluationConfig,
    limits: JudgeConfig,
    verdict: dict[str, Any],
    metrics: list[dict[str, Any]],
    figures: dict[str, bytes],
    report: str,
    external_verdict: dict[str, Any] | None,
    external_metrics: list[dict[str, Any]] | None,
    external_report: str | None,
    data_root: Path,
) -> None:
    """Print scores, grades and the place of the report, and fail the run if its gates fail, after all else is written.

    With `evaluation.folder` these are the scores and the verdict of its files.

    Raises:
        GateFailed: naming the datasets that fail the run, and why.
    """
    from ups.evaluation.tables import GRADES, score_table

    scored, folder = "the test split", data_root / "08_reporting"
    if config.folder is not None:
        assert external_verdict is not None and external_metrics is not None and external_report is not None
        verdict, metrics, report = external_verdict, external_metrics, external_report
        scored, folder = f"all of {config.folder}", folder / "external"
    grades, page = verdict["grades"], folder / PAGE
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
    if not verdict["gates"]:
        raise GateFailed(f"datasets: {summary}; none of judge.gates applies to any of them: add one that does")
    if not verdict["passed"]:
        raise GateFailed(f"datasets: {summary}; {some_of(failing)}; see verdict.json and {page}")
    num_gates = len(verdict["gates"])
    held = num_gates - len(missed)
    log.info("passed; datasets: %s; %d of %d gates hold; figures: %d", summary, held, num_gates, len(figures))
    log.info("report, %.1f MB: %s", len(report) / 1e6, from_here(page))


def some_of(reasons: list[str]) -> str:
    """The first reasons, and the number of the others."""
    rest = len(reasons) - MAX_REASONS
    return "; ".join(reasons[:MAX_REASONS]) + (f"; and {rest} more" if rest > 0 else "")
