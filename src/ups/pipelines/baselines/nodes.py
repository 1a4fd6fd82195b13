"""Nodes of pipeline `baselines`: models of single families, trained as long as ours, scored alike, in one table."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ups.config import BaselineConfig, BaselinesConfig, EvaluationConfig, LaunchConfig
from ups.data.pdebench import FAMILIES
from ups.errors import Diverged
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads, train_stage
from ups.pacing import seconds_per_step
from ups.receipts import Receipt, once, only_trained
from ups.run import Run, last_validation

log = logging.getLogger(__name__)

PACED_STEPS = 1000  # of a training whose length is not known yet; what a step costs depends on shares of it


def make_points(datasets: Receipt, normalization: Receipt, data_root: Path) -> Receipt:
    """The codec of models on the grid: every point is a token, every field a channel."""
    from ups.training.points import write_point_codec

    return once(
        "points",
        data_root / "06_models" / "points",
        fingerprint("ups.training.points", None, {"datasets": datasets, "normalization": normalization}),
        lambda folder: write_point_codec(folder, datasets, normalization),
        root=data_root,
    )


def measure_pace(
    fields: Receipt,
    config: BaselinesConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **ours: Receipt,
) -> Receipt:
    """Seconds per training step of our stages as they were trained and of every baseline, in turns on this machine."""
    stages = {}
    for receipt in only_trained(ours).values():
        run = Run.read(data_root / receipt["path"])
        stages[run.stage] = {"stage": run.stage, "config": run.config, "inputs": run.inputs}
    for kind in config.shares:
        for family in _families(fields):
            section = config.section(kind, family, PACED_STEPS, min(config.learning_rates))
            content = section.model_dump(mode="json")
            stages[f"{kind}/{family}"] = {"stage": "baseline", "config": content, "inputs": {"latent_cache": fields}}
    return seconds_per_step("pace", stages, config, launch, data_root, raw)


def budget(pace: Receipt, latent_cache: Receipt, data_root: Path, **ours: Receipt) -> dict[str, float]:
    """Training seconds that each family may use: what we used for all of them, divided evenly."""
    seconds = {
        receipt["stage"]: Run.read(data_root / receipt["path"]).config["steps"]
        * pace["seconds_per_step"][receipt["stage"]]
        for receipt in only_trained(ours).values()
    }
    transient, still = latent_cache["transient"], latent_cache["steady"]
    shared = seconds["codec"] / len(transient + still)
    result = {family: shared + seconds["operator"] / len(transient) for family in transient}
    return result | {family: shared + seconds["steady"] / len(still) for family in still}


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
        """For each family the model that its budget allows, with the learning rate that does best on validation."""
        receipts = {}
        inputs = {"latent_cache": fields}
        for family in _families(fields):
            allowed = config.shares[kind] * seconds[family] / pace["seconds_per_step"][f"{kind}/{family}"]
            trials = {}
            for rate in config.learning_rates:
                short = config.section(kind, family, round(config.trial_share * allowed), rate)
                trials[rate] = _validated(short, inputs, launch, data_root)
            best = min(trials, key=lambda rate: trials[rate])
            log.info("%s of %s: learning rate %g of %s", kind, family, best, trials)
            section = config.section(kind, family, round(allowed), best)
            receipts[family] = train_stage("baseline", section, inputs, launch, data_root) | {"learning_rate": best}
        return receipts

    train.__name__ = f"train_{kind}"
    return train


def _validated(section: BaselineConfig, inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> float:
    """The validation loss after a trial; none is worse than a learning rate that diverges."""
    try:
        trial = train_stage("baseline", section, inputs, launch, data_root)
    except Diverged as fault:
        log.warning("%s of %s: learning rate %g: %s", section.kind, section.family, section.learning_rate, fault)
        return math.inf
    return last_validation(data_root / trial["path"])


def evaluate_baselines(
    fields: Receipt,
    points: Receipt,
    fno: dict[str, Receipt],
    unet: dict[str, Receipt],
    linear: dict[str, Receipt],
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Score every baseline on the test split, in physical units, with the evaluator of the full pipeline."""
    from ups.data.latent_cache import LatentCache
    from ups.evaluation.baselines import score_baselines

    limit_threads(launch)
    receipts = {"fno": fno, "unet": unet, "linear": linear}
    inputs = {"fields": fields, "points": points, **receipts}
    receipt = once(
        "evaluate_baselines",
        data_root / "07_model_output" / "baselines",
        fingerprint("ups.evaluation.baselines", config, inputs),
        lambda folder: {
            "records": score_baselines(
                folder,
                LatentCache.open(data_root / fields["path"], fields["key"]),
                receipts,
                points,
                config,
                device(launch),
                raw,
                data_root,
            )
        },
        root=data_root,
    )
    return receipt["records"]


def measure_costs(
    latent_cache: Receipt,
    fields: Receipt,
    points: Receipt,
    fno: dict[str, Receipt],
    unet: dict[str, Receipt],
    linear: dict[str, Receipt],
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> dict[str, Any]:
    """Training seconds, parameters and milliseconds per frame of every method, beside the solver of the data."""
    from ups.data.latent_cache import LatentCache
    from ups.evaluation.costs import total_costs
    from ups.evaluation.score import Trained

    baselines = {"fno": fno, "unet": unet, "linear": linear}
    limit_threads(launch)
    inputs = {"latent_cache": latent_cache, "fields": fields, **stages, **baselines, "compile": launch.compile}
    receipt = once(
        "measure_costs",
        data_root / "07_model_output" / "costs",
        fingerprint("ups.evaluation.costs", None, inputs),
        lambda folder: total_costs(
            Trained(latent_cache, only_trained(stages), data_root),
            baselines,
            points,
            LatentCache.open(data_root / fields["path"], fields["key"]),
            device(launch),
            raw,
            compiled=launch.compile and _compiles(device(launch)),
        ),
        root=data_root,
    )
    return {name: receipt[name] for name in ("methods", "training_seconds", "milliseconds_per_frame", "compiled")}


def _compiles(where: str) -> bool:
    """Whether this machine can compile; a warning says why not."""
    import torch

    from ups.training.compiling import why_not_compiled

    if (reason := why_not_compiled(torch.device(where))) is not None:
        log.warning("frames are timed with models that are not compiled: %s", reason)
    return reason is None


def compare(
    metrics: list[dict[str, Any]],
    baseline_metrics: list[dict[str, Any]],
    costs: dict[str, Any],
    seconds: dict[str, float],
) -> tuple[str, dict[str, bytes]]:
    """The tables and the figure; refused if a baseline is missing."""
    from ups.evaluation.compare import comparison, draw_comparison, errors_of, logged
    from ups.evaluation.figures import png
    from ups.evaluation.resampled import resampled
    from ups.evaluation.uncertainty import uncertainty

    errors = errors_of(metrics, baseline_metrics)
    note = (
        f"Every baseline of a family was trained as long as our codec and model on average per family: "
        f"{min(seconds.values()):.0f} to {max(seconds.values()):.0f} s at the pace that was measured in turns on one "
        f"machine (the linear one for a part of it), which sets the number of steps; trials of learning rates and the "
        f"compilation of ours come on top. Logged in all, with compilation, without trials: "
        f"{logged(costs['training_seconds'])}; where these differ otherwise, other work slowed some or the pace. "
        f"Error: nRMSE of PDEBench, corrected, mean over test trajectories."
    )
    text = "\n".join([comparison(errors, costs, note), resampled(metrics, baseline_metrics), uncertainty(metrics)])
    return text, {"comparison.png": png(draw_comparison(errors))}


def _families(fields: Receipt) -> list[str]:
    return [family for family in FAMILIES if family in fields["transient"] + fields["steady"]]
