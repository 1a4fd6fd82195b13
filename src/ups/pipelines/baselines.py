"""Pipeline `baselines`: FNO, U-Net and other models, one per family, at the training cost of ours."""

import logging
import math
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from kedro.pipeline import Pipeline

from ups.config import BaselinesConfig, EvaluationConfig, LaunchConfig, OperatorConfig, SteadyConfig
from ups.config.baselines import NORMALIZED, BaselineConfig, Candidate, Kind, Trial, neighbours, next_candidate
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.errors import Diverged, GateFailed
from ups.files import place_of
from ups.pipelines import STAGES, cached, on_raw_files, step
from ups.pipelines.evaluation import SURROGATE, trained_stages
from ups.pipelines.reporting import JUDGE, OF_BASELINES, REPORT, judge, report
from ups.pipelines.training import encode_latents
from ups.runs.launcher import train_stage
from ups.runs.machine import compute_as_in_training, device
from ups.runs.run import Run, logged_training, saved_validation, trained_steps, training_cpu_seconds
from ups.runs.stage_cache import Receipt, trained_receipts

KINDS: tuple[Kind, ...] = get_args(Kind)
MODELS = {kind: f"{kind}_receipts" for kind in KINDS}
OURS = {stage: STAGES[stage] for stage in ("codec", "operator", "steady")}
SCORES = {name: name for name in ("metrics", "baseline_metrics", "costs", "datasets")} | {"seconds": "budget"}
GRID = {"fields": "fields", "identity_codec": "identity_codec_receipt"}


def create_pipeline() -> Pipeline:
    """Run `--pipeline full` before it: it needs its data, receipts and scores."""
    configs = {"config": "params:baselines", "transient": "params:operator", "still": "params:steady"}
    train = {"fields": "fields", "pace": "pace", "seconds": "budget"} | configs
    steps = [
        step(make_identity_codec, ["datasets", "normalization"], "identity_codec_receipt"),
        step(encode_latents, ["datasets", "identity_codec_receipt", "params:latents"], "fields", name="lay_out_fields"),
        step(measure_pace, OURS | configs | {"fields": "fields"}, "pace"),
        step(budget, OURS | {"pace": "pace", "latent_cache": "latent_cache"}, "budget"),
        *(step(baseline_trainer(kind), train, f"{kind}_receipts", name=f"train_{kind}", tags=kind) for kind in KINDS),
        step(
            evaluate_baselines,
            MODELS | GRID | {"config": "params:evaluation"},
            ["baseline_metrics", "baseline_rollouts"],
        ),
        step(measure_costs, SURROGATE | MODELS | GRID, "costs"),
        step(compare, SCORES | MODELS | {"config": "params:baselines"}, ["table", "comparison"]),
        step(judge, JUDGE | {"baseline_metrics": "baseline_metrics"}, "verdict", name="judge_with_baselines"),
        step(report, REPORT | {name: name for name in OF_BASELINES}, "report", name="report_with_baselines"),
        step(require_equal_time, ["costs", "params:baselines", "table", "report"], None),
    ]
    return Pipeline(steps, tags="baselines")


log = logging.getLogger(__name__)

LOWER_RATES: list[Candidate] = [{}, {"learning_rate": -1}, {"learning_rate": -2}]  # instead of chosen ones that diverge
# Steps assumed for a baseline before its budget is known: unrolled steps get slower in the course of the training.
PACED_STEPS = 1000


def make_identity_codec(datasets: Receipt, normalization: Receipt, data_root: Path) -> Receipt:
    """The identity codec of models on the grid: every grid point is a token, every field a latent channel."""
    from ups.training.stages.codec import write_identity_codec

    inputs = {"datasets": datasets, "normalization": normalization}
    written = cached("identity_codec", data_root, "06_models/identity_codec", "ups.training.stages.codec", None, inputs)
    return written(lambda folder: write_identity_codec(folder, datasets, normalization))


def measure_pace(
    fields: Receipt,
    config: BaselinesConfig,
    transient: OperatorConfig,
    still: SteadyConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **ours: Receipt,
) -> Receipt:
    """Seconds per training step of our stages and every baseline, alternating, so that other load slows all alike."""
    from ups.performance.pace import pace_name, seconds_per_step

    runs = _runs(ours, data_root)
    asked = {run.stage: {"stage": run.stage, "config": run.config, "inputs": run.inputs} for run in runs}
    stages = {run.stage: asked[run.stage] | logged_training(run.folder) for run in runs}
    for kind in config.time_shares:
        for family in _families(fields, kind):
            start = config.start(kind, family)
            for candidate in (start, *neighbours(start)):
                # Every rate takes the same time: the names of those candidates are that of the start.
                section = config.section(kind, family, PACED_STEPS, candidate | {"learning_rate": 0}, transient, still)
                content, inputs = section.model_dump(mode="json"), {"latent_cache": fields}
                stages[pace_name(kind, family, candidate)] = {"stage": "baseline", "config": content, "inputs": inputs}
    return seconds_per_step("pace", stages, config, launch, data_root, raw)


def budget(pace: Receipt, latent_cache: Receipt, data_root: Path, **ours: Receipt) -> dict[str, float]:
    """Training seconds per family: those of our codec, operator and steady model, shared evenly by their families."""
    runs = _runs(ours, data_root)
    seconds = {run.stage: trained_steps(run.folder) * pace["seconds_per_step"][run.stage] for run in runs}
    transient, still = latent_cache["transient"], latent_cache["steady"]
    shared = seconds["codec"] / len(transient + still)
    result = {family: shared + seconds["operator"] / len(transient) for family in transient}
    return result | {family: shared + seconds["steady"] / len(still) for family in still}


def _runs(ours: dict[str, Receipt], data_root: Path) -> list[Run]:
    """The runs that trained our stages."""
    return [Run.read(place_of(data_root, receipt)) for receipt in trained_receipts(ours).values()]


def baseline_trainer(kind: Kind) -> Callable[..., dict[str, Receipt]]:
    """The node that trains models of one kind."""

    def train(
        fields: Receipt,
        pace: Receipt,
        seconds: dict[str, float],
        config: BaselinesConfig,
        transient: OperatorConfig,
        still: SteadyConfig,
        launch: LaunchConfig,
        data_root: Path,
    ) -> dict[str, Receipt]:
        """Train one model per family for the steps its budget allows, with what was best in short trials.

        Where that diverges, the next best is trained. No model is trained where `time_shares` does not have the kind.
        """
        from ups.performance.pace import pace_name

        receipts, inputs = {}, {"latent_cache": fields}
        for family in _families(fields, kind) if kind in config.time_shares else ():
            allowed = config.time_shares[kind] * seconds[family]
            num_steps = {name: allowed / each for name, each in pace["seconds_per_step"].items()}
            start, trials = config.start(kind, family), list[Trial]()
            while start and (candidate := next_candidate(trials, start, config.max_trials)) is not None:
                steps = round(config.trial_share * num_steps[pace_name(kind, family, candidate)])
                short = config.section(kind, family, steps, candidate, transient, still)
                trials.append((candidate, _validated(short, inputs, launch, data_root)))
                log.info("%s of %s: validation loss %.3g in trial %d", kind, family, trials[-1][1], len(trials))
            ranked = [each for each, loss in sorted(trials, key=itemgetter(1)) if math.isfinite(loss)]
            for best in ranked if start else LOWER_RATES:  # a rate that was best in a short trial may diverge later
                steps = round(num_steps[pace_name(kind, family, best)])
                section = config.section(kind, family, steps, best, transient, still)
                if (trained := _attempted(section, inputs, launch, data_root)) is not None:
                    break
            else:
                raise Diverged(f"{kind} of {family}: every training diverged; lower baselines.learning_rate")
            settled = all(each in map(itemgetter(0), trials) for each in neighbours(best))
            found = {"values": config.values(kind, family, best), "trials": len(trials), "settled": settled}
            receipts[family] = trained | found
        return receipts

    train.__name__ = f"train_{kind}"
    return train


def _train(section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> Receipt:
    log.info("%s of %s: learning rate %g, %s", section.kind, section.family, section.learning_rate, section.model)
    return train_stage("baseline", section, inputs, launch, data_root)


def _attempted(
    section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path
) -> Receipt | None:
    """The receipt of a training; None if it diverged."""
    try:
        return _train(section, inputs, launch, data_root)
    except Diverged as fault:
        log.warning("%s of %s: learning rate %g: %s", section.kind, section.family, section.learning_rate, fault)
        return None


def _validated(section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> float:
    """The validation loss after a trial; infinite if the training diverged."""
    trial = _attempted(section, inputs, launch, data_root)
    return math.inf if trial is None else saved_validation(place_of(data_root, trial), section.patience)


def evaluate_baselines(
    fields: Receipt,
    identity_codec: Receipt,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **baselines: dict[str, Receipt],
) -> tuple[list[dict[str, Any]], Receipt]:
    """Score every baseline on the test split, in physical units, with the evaluator of the full pipeline."""
    from ups.data.latent_cache import LatentCache
    from ups.evaluation.entries import with_digests
    from ups.evaluation.external import score_baselines

    compute_as_in_training(launch)
    inputs, module = {"fields": fields, "identity_codec": identity_codec, **baselines}, "ups.evaluation.external"
    cache = LatentCache.open(place_of(data_root, fields), fields["key"])

    def work(folder: Path) -> Receipt:
        return {"records": score_baselines(folder, cache, baselines, identity_codec, config, launch, raw, data_root)}

    receipt = cached("evaluate_baselines", data_root, "07_model_output/baselines", module, config, inputs)(
        on_raw_files(work, fields, raw, data_root)
    )
    return with_digests(receipt["records"], cache), {key: receipt[key] for key in ("path", "fingerprint")}


def measure_costs(
    fields: Receipt, identity_codec: Receipt, launch: LaunchConfig, raw: Path, data_root: Path, **models: Receipt
) -> dict[str, Any]:
    """Training seconds, parameters and milliseconds per snapshot of every method and of the numerical solver.

    `models` are the latent cache, our stages, and for each kind of baseline the receipts by family.
    """
    from ups.data.latent_cache import LatentCache
    from ups.evaluation.costs import total_costs

    baselines = {kind: models[kind] for kind in KINDS if models[kind]}
    ours = {name: receipt for name, receipt in models.items() if name not in KINDS}
    trained = trained_stages(ours, launch, data_root)

    def work(_: Path) -> Receipt:
        cache, where = LatentCache.open(place_of(data_root, fields), fields["key"]), device(launch)
        compiled = launch.compile and _compiles(where)
        return total_costs(trained, baselines, identity_codec, cache, where, raw, compiled=compiled)

    receipts = [*trained_receipts(ours).values(), *(each for kind in baselines.values() for each in kind.values())]
    # Seconds are no part of a receipt: those of a model that was trained again, by launch.force, are others.
    seconds = [training_cpu_seconds(place_of(data_root, receipt)) for receipt in receipts]
    inputs = {"fields": fields, **models, "compile": launch.compile, "seconds": seconds}
    receipt = cached("measure_costs", data_root, "07_model_output/costs", "ups.evaluation.costs", None, inputs)(work)
    return {name: receipt[name] for name in ("methods", "training", "milliseconds_per_snapshot", "compiled")}


def _compiles(where: str) -> bool:
    """Whether this machine can compile models; if not, the reason is logged."""
    import torch

    from ups.training.update import why_not_compiled

    if (reason := why_not_compiled(torch.device(where))) is not None:
        log.warning("snapshots are timed with models that are not compiled: %s", reason)
    return reason is None


def compare(
    metrics: list[dict[str, Any]],
    baseline_metrics: list[dict[str, Any]],
    costs: dict[str, Any],
    seconds: dict[str, float],
    datasets: Receipt,
    config: BaselinesConfig,
    **models: dict[str, Receipt],
) -> tuple[str, Any]:
    """The tables, and a Matplotlib figure of the errors; refused if a baseline is missing."""
    from ups.data.card_text import titles_of
    from ups.evaluation import comparison

    errors = comparison.errors_of(metrics, baseline_metrics)
    logged = comparison.training_time_text(costs["training"])
    note = (
        f"Training time of a baseline: that of our codec and of our operator or steady model, each divided by its "
        f"number of families, {min(seconds.values()):.0f} to {max(seconds.values()):.0f} s (linear: a fraction). It "
        f"sets the number of steps by the seconds per step (on a CPU of CPU time), measured alternately for all models "
        f"on one machine, without trials and compilation of our models. Logged for all families, without both: "
        f"{logged}; other programs slow down the seconds on the clock more than those of the CPU. Error: mean nRMSE "
        f"over test trajectories and times."
    )
    text = comparison.comparison_text(errors, costs, note)
    intervals = comparison.intervals_text(metrics, baseline_metrics)
    limits = comparison.limits_text([*metrics, *baseline_metrics])
    parts = [text, intervals, limits, comparison.trials_text(models, config), comparison.uncertainty_text(metrics)]
    titles = titles_of(map(Dataset.from_json, datasets["datasets"].values()))
    return "\n".join(parts), comparison.draw_comparison(errors, titles)


def require_equal_time(costs: dict[str, Any], config: BaselinesConfig, table: str, report: str) -> None:
    """Fail the run, after table and report are written, if our models and the baselines had different training times.

    Raises:
        GateFailed: their times differ by more than `max_time_ratio`.
    """
    from ups.evaluation.costs import ratio_of_times

    ratio = ratio_of_times(costs["training"], config.time_shares)
    if ratio > config.max_time_ratio:
        times = "; ".join(f"{name} {time['cpu']:.0f} s" for name, time in costs["training"].items())
        raise GateFailed(
            f"the comparison is not at equal training time: CPU seconds differ by a factor of {ratio:.2f}, more than "
            f"baselines.max_time_ratio ({times}); on a quiet machine run `full` and `baselines` again, both with "
            "launch.force=true"
        )


def _families(fields: Receipt, kind: Kind) -> list[str]:
    """The families that a kind of model predicts: steady ones have no states that could be normalized."""
    return FAMILIES.in_order(fields["transient"] + ([] if kind.startswith(NORMALIZED) else fields["steady"]))
