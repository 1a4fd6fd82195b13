"""Pipelines `predict` and `register`: trained models on initial states in a file, and as versions in MLflow.

A registered version becomes MLflow's champion if it is better.
"""

import hashlib
import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from kedro.pipeline import Pipeline

from ups.config import LaunchConfig, PredictConfig, RegistrationConfig
from ups.errors import ConfigFault, DataFault
from ups.files import digest_of
from ups.pipelines import step
from ups.pipelines.evaluation import SURROGATE
from ups.runs.machine import compute_as_in_training, device
from ups.runs.stage_cache import Receipt, trained_receipts

if TYPE_CHECKING:
    from ups.surrogate.model import Model

log = logging.getLogger(__name__)


def create_predict() -> Pipeline:
    """One node, which needs nothing but a data root with trained models."""
    return Pipeline([step(predict, ["params:predict"], "prediction")], tags="deployment")


def create_register() -> Pipeline:
    """Needs the results of `kedro run --pipeline full`."""
    inputs = SURROGATE | {"metrics": "metrics", "rollouts": "rollouts", "config": "params:registration"}
    return Pipeline([step(register, inputs, ["registration", "champion_metrics"])], tags="register")


def predict(config: PredictConfig, launch: LaunchConfig, data_root: Path) -> dict[str, Any]:
    """Write the trajectories predicted from all initial states of a file; returns where they are, and the request."""
    from ups.runs.progress import ProgressBar
    from ups.surrogate.files import Job, Request
    from ups.surrogate.model import load

    if missing := [name for name in ("input", "family") if getattr(config, name) is None]:
        raise ConfigFault(f"predict.{missing[0]} is missing: --params predict.input=FILE,predict.family=NAME,...")
    compute_as_in_training(launch)
    source = Path(config.input).resolve()
    default = data_root / "07_model_output" / "predictions" / f"{source.stem}.zarr"
    target = default if config.output is None else Path(config.output).resolve()
    request = Request(**config.model_dump(exclude={"input", "output"}))
    job = Job.of(load(data_root, device=device(launch)), source, target, request)
    with ProgressBar("predict", job.total, "snapshots") as bar:
        job.run(bar.advance)
    log.info("predict: trajectories of %d initial states are in %s", job.count, target)
    return {"output": str(target), "trajectories": job.count, "request": config.model_dump()}


def register(
    metrics: list[dict[str, Any]],
    rollouts: Receipt,
    config: RegistrationConfig,
    data_root: Path,
    **stages: Receipt,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Register the models with the errors of their test trajectories, and say whether and why they are the champion.

    A new champion's scores are returned beside, for the gates of later runs; else none.

    Raises:
        DataFault: the scores are those of other models.
    """
    from ups.evaluation.gates import errors_of
    from ups.runs import registry
    from ups.surrogate.model import load
    from ups.surrogate.trained import stage_digests

    if stage_digests(trained_receipts(stages)) != rollouts.get("models"):
        raise DataFault("metrics.json has the scores of other models: run `kedro run --pipeline evaluation` first")
    model = load(data_root, device="cpu")
    errors = errors_of(metrics, model.card["families"], stages["latent_cache"]["key"]["source files"])
    with TemporaryDirectory() as place:
        bundle = Path(place) / registry.BUNDLE
        model.save(bundle)
        version = registry.register(config.name, bundle, errors, example_of(model), _models_digest(bundle, model))
    registration = crown(version, errors, config)
    return registration, metrics if registration["is_better"] else []


def _models_digest(bundle: Path, model: "Model") -> str:
    """SHA-256 of the weights and of how correctors are used."""
    from ups.surrogate.bundle import TENSORS

    content = json.dumps([digest_of(bundle / TENSORS), model.card["corrections"]])
    return hashlib.sha256(content.encode()).hexdigest()


def crown(version: str, errors: dict[str, Any], config: RegistrationConfig) -> dict[str, Any]:
    """Move the alias to a version with these errors if it is better than the version that has the alias, or the first.

    Returns:
        Name and version, the version that has the alias now, and the comparison.
    """
    from ups.evaluation.gates import Decision, compare
    from ups.runs import registry

    before = registry.champion(config.name, config.alias)
    if before is None:
        decision = Decision(True, "it is the first")
    elif before[0] == version:
        decision = Decision(False, "these models are the champion already")
    elif before[1] == errors:
        decision = Decision(True, "its errors are the champion's, and its correctors are others")
    else:
        decision = compare(errors, before[1], config.max_family_ratio)
    if decision.is_better:
        registry.move_alias(config.name, config.alias, version)
    champion = version if before is None or decision.is_better else before[0]
    moved = f"moves to version {champion}" if decision.is_better else f"stays at version {champion}"
    log.info("%s version %s: %s %s, because %s", config.name, version, config.alias, moved, decision.reason)
    return {"name": config.name, "version": version, "champion": champion, **asdict(decision)}


def example_of(model: "Model") -> dict[str, Any]:
    """A request for the family of the smallest grid: constant fields, parameters of training."""
    known = min(map(model.describe, model.families), key=lambda family: math.prod(family.grid))
    parameters = {name: values[0] for name, values in known.parameters.items()}
    parameters |= {name: np.ones(known.grid).tolist() for name in known.coefficients}
    if not known.time_steps:
        return {"family": known.name, "parameters": parameters}
    u_0 = np.ones((len(known.fields), *known.grid)).tolist()
    return {"family": known.name, "u_0": u_0, "steps": 1, "dt": known.time_steps[0], "parameters": parameters}
