"""Pipeline `baselines`: FNO, U-Net and linear models, one per family, at the training cost of ours."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline

from ups.config import BaselinesConfig, EvaluationConfig, LaunchConfig
from ups.config.baselines import BaselineConfig
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.errors import Diverged, GateFailed
from ups.files import place_of
from ups.pipelines import STAGES, cached, step
from ups.pipelines.evaluation import SURROGATE, trained_stages
from ups.pipelines.reporting import OF_BASELINES, REPORT, report
from ups.pipelines.training import encode_latents
from ups.runs.launcher import train_stage
from ups.runs.machine import device, limit_threads
from ups.runs.run import Run, last_validation
from ups.runs.stage_cache import Receipt, trained_receipts

KINDS = ("fno", "unet", "linear")
MODELS = {kind: f"{kind}_receipts" for kind in KINDS}
OURS = {stage: STAGES[stage] for stage in ("codec", "operator", "steady")}
GRID = {"fields": "fields", "identity_codec": "identity_codec_receipt"}


def create_pipeline() -> Pipeline:
    """Run `--pipeline full` before it: it needs its data, receipts and scores."""
    train = ["fields", "pace", "budget", "params:baselines"]
    steps = [
        step(make_identity_codec, ["datasets", "normalization"], "identity_codec_receipt"),
        step(encode_latents, ["datasets", "identity_codec_receipt", "params:latents"], "fields", name="lay_out_fields"),
        step(measure_pace, OURS | {"fields": "fields", "config": "params:baselines"}, "pace"),
        step(budget, OURS | {"pace": "pace", "latent_cache": "latent_cache"}, "budget"),
        *(step(baseline_trainer(kind), train, f"{kind}_receipts", name=f"train_{kind}", tags=kind) for kind in KINDS),
        step(
            evaluate_baselines,
            MODELS | GRID | {"config": "params:evaluation"},
            ["baseline_metrics", "baseline_rollouts"],
        ),
        step(measure_costs, SURROGATE | MODELS | GRID, "costs"),
        step(compare, ["metrics", "baseline_metrics", "costs", "budget", "datasets"], ["table", "comparison"]),
        step(report, REPORT | {name: name for name in OF_BASELINES}, "report", name="report_with_baselines"),
        step(require_equal_time, ["costs", "params:baselines", "table", "report"], None),
    ]
    return Pipeline(steps, tags="baselines")


log = logging.getLogger(__name__)

# Steps assumed for a baseline before its budget is known: unrolled steps get slower in the course of the training.
PACED_STEPS = 1000


def make_identity_codec(datasets: Receipt, normalization: Receipt, data_root: Path) -> Receipt:
    """The identity codec of models on the grid: every grid point is a token, every field a latent channel."""
    from ups.training.stages.codec import write_identity_codec

    inputs = {"datasets": datasets, "normalization": normalization}
    written = cached("identity_codec", data_root, "06_models/identity_codec", "ups.training.stages.codec", None, inputs)
    return written(lambda folder: write_identity_codec(folder, datasets, normalization))


def measure_pace(
    fields: Receipt, config: BaselinesConfig, launch: LaunchConfig, raw: Path, data_root: Path, **ours: Receipt
) -> Receipt:
    """Seconds per training step of our stages and every baseline, alternating, so that other load slows all alike."""
    from ups.performance.pace import seconds_per_step

    runs = _runs(ours, data_root)
    stages = {run.stage: {"stage": run.stage, "config": run.config, "inputs": run.inputs} for run in runs}
    for kind in config.time_shares:
        for family in _families(fields):
            section = config.section(kind, family, PACED_STEPS, min(config.learning_rates))
            content = section.model_dump(mode="json")
            stages[f"{kind}/{family}"] = {"stage": "baseline", "config": content, "inputs": {"latent_cache": fields}}
    return seconds_per_step("pace", stages, config, launch, data_root, raw)


def budget(pace: Receipt, latent_cache: Receipt, data_root: Path, **ours: Receipt) -> dict[str, float]:
    """Training seconds per family: those of our codec, operator and steady model, shared evenly by their families."""
    runs = _runs(ours, data_root)
    seconds = {run.stage: run.config["steps"] * pace["seconds_per_step"][run.stage] for run in runs}
    transient, still = latent_cache["transient"], latent_cache["steady"]
    shared = seconds["codec"] / len(transient + still)
    result = {family: shared + seconds["operator"] / len(transient) for family in transient}
    return result | {family: shared + seconds["steady"] / len(still) for family in still}


def _runs(ours: dict[str, Receipt], data_root: Path) -> list[Run]:
    """The runs that trained our stages."""
    return [Run.read(place_of(data_root, receipt)) for receipt in trained_receipts(ours).values()]


def baseline_trainer(kind: str) -> Callable[..., dict[str, Receipt]]:
    """The node that trains models of one kind, `fno`, `unet` or `linear`."""

    def train(
        fields: Receipt,
        pace: Receipt,
        seconds: dict[str, float],
        config: BaselinesConfig,
        launch: LaunchConfig,
        data_root: Path,
    ) -> dict[str, Receipt]:
        """Train one model per family for the steps its budget allows, with the best learning rate of short trials."""
        receipts = {}
        inputs = {"latent_cache": fields}
        for family in _families(fields):
            allowed = config.time_shares[kind] * seconds[family] / pace["seconds_per_step"][f"{kind}/{family}"]
            trials: dict[float, float] = {}
            while (rate := next_rate(trials, config)) is not None:
                short = config.section(kind, family, round(config.trial_share * allowed), rate)
                trials[rate] = _validated(short, inputs, launch, data_root)
            best = min(trials, key=lambda rate: trials[rate])
            losses = ", ".join(f"{loss:.3g} with {rate:g}" for rate, loss in trials.items())
            log.info("%s of %s: validation loss %s", kind, family, losses)
            section = config.section(kind, family, round(allowed), best)
            receipts[family] = _train(section, inputs, launch, data_root) | {"learning_rate": best}
        return receipts

    train.__name__ = f"train_{kind}"
    return train


def next_rate(trials: dict[float, float], config: BaselinesConfig) -> float | None:
    """The next learning rate to try: those of the configuration, then beyond them while the best one is at the edge.

    `trials` are validation losses by learning rate. None: the best rate has worse ones on both sides, or
    `max_learning_rates` have been tried.
    """
    if left := [rate for rate in config.learning_rates if rate not in trials]:
        return left[0]
    rates = sorted(trials)
    best = min(rates, key=lambda rate: trials[rate])
    if len(rates) >= config.max_learning_rates or best not in (rates[0], rates[-1]):
        return None
    inner = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / inner:.2g}")


def _train(section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> Receipt:
    log.info("%s of %s: learning rate %g", section.kind, section.family, section.learning_rate)
    return train_stage("baseline", section, inputs, launch, data_root)


def _validated(section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> float:
    """The validation loss after a trial; infinite if the training diverged."""
    try:
        trial = _train(section, inputs, launch, data_root)
    except Diverged as fault:
        log.warning("%s of %s: learning rate %g: %s", section.kind, section.family, section.learning_rate, fault)
        return math.inf
    return last_validation(place_of(data_root, trial))


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
    from ups.evaluation.external import score_baselines

    limit_threads(launch)
    inputs, module = {"fields": fields, "identity_codec": identity_codec, **baselines}, "ups.evaluation.external"

    def work(folder: Path) -> Receipt:
        cache = LatentCache.open(place_of(data_root, fields), fields["key"])
        return {"records": score_baselines(folder, cache, baselines, identity_codec, config, launch, raw, data_root)}

    receipt = cached("evaluate_baselines", data_root, "07_model_output/baselines", module, config, inputs)(work)
    return receipt["records"], {key: receipt[key] for key in ("path", "fingerprint")}


def measure_costs(
    fields: Receipt, identity_codec: Receipt, launch: LaunchConfig, raw: Path, data_root: Path, **models: Receipt
) -> dict[str, Any]:
    """Training seconds, parameters and milliseconds per snapshot of every method and of the numerical solver.

    `models` are the latent cache, our stages, and for each kind of baseline the receipts by family.
    """
    from ups.data.latent_cache import LatentCache
    from ups.evaluation.costs import total_costs

    baselines = {kind: models[kind] for kind in KINDS}
    ours = {name: receipt for name, receipt in models.items() if name not in KINDS}
    trained = trained_stages(ours, launch, data_root)

    def work(_: Path) -> Receipt:
        cache, where = LatentCache.open(place_of(data_root, fields), fields["key"]), device(launch)
        compiled = launch.compile and _compiles(where)
        return total_costs(trained, baselines, identity_codec, cache, where, raw, compiled=compiled)

    inputs = {"fields": fields, **models, "compile": launch.compile}
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
) -> tuple[str, Any]:
    """The tables, and a Matplotlib figure of the errors; refused if a baseline is missing."""
    from ups.data.card_text import titles_of
    from ups.evaluation import comparison

    errors = comparison.errors_of(metrics, baseline_metrics)
    logged = comparison.training_time_text(costs["training"])
    note = (
        f"Training time of a baseline: that of our codec and of our operator or steady model, each divided by its "
        f"number of families, {min(seconds.values()):.0f} to {max(seconds.values()):.0f} s (linear: a fraction). It "
        f"sets the number of steps by the seconds per step, measured alternately for all models on one machine, without"
        f" trials of learning rates and compilation of our models. Logged for all families, with compilation, "
        f"without trials: {logged}; other programs slow down the seconds on the clock more than those of the CPU. "
        f"Error: mean nRMSE over test trajectories and times."
    )
    text = comparison.comparison_text(errors, costs, note)
    intervals = comparison.intervals_text(metrics, baseline_metrics)
    parts = [text, intervals, comparison.uncertainty_text(metrics)]
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
            f"baselines.max_time_ratio ({times}); run it again on a quiet machine with launch.force=true"
        )


def _families(fields: Receipt) -> list[str]:
    return FAMILIES.in_order(fields["transient"] + fields["steady"])
