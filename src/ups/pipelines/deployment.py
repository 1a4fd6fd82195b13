"""Pipeline `predict`: the trained models of a data root on initial states in a file."""

from pathlib import Path
from typing import Any

from kedro.pipeline import Pipeline

from ups.config import LaunchConfig, PredictConfig
from ups.errors import ConfigFault
from ups.pipelines import step
from ups.runs.machine import device, limit_threads


def create_predict() -> Pipeline:
    """One node, which needs nothing but a data root with trained models."""
    return Pipeline([step(predict, ["params:predict"], "prediction")], tags="deployment")


def predict(config: PredictConfig, launch: LaunchConfig, data_root: Path) -> dict[str, Any]:
    """Write the trajectories predicted from all initial states of a file; returns where they are, and the request."""
    from ups.runs.progress import ProgressBar
    from ups.surrogate.files import Job, Request
    from ups.surrogate.model import load

    if missing := [name for name in ("input", "family") if getattr(config, name) is None]:
        raise ConfigFault(f"predict.{missing[0]} is missing: --params predict.input=FILE,predict.family=NAME,...")
    limit_threads(launch)
    source = Path(config.input).resolve()
    default = data_root / "07_model_output" / "predictions" / f"{source.stem}.zarr"
    target = default if config.output is None else Path(config.output).resolve()
    request = Request(**config.model_dump(exclude={"input", "output"}))
    job = Job.of(load(data_root, device=device(launch)), source, target, request)
    with ProgressBar("predict", job.total, "snapshots") as bar:
        job.run(bar.advance)
    return {"output": str(target), "trajectories": job.count, "request": config.model_dump()}
