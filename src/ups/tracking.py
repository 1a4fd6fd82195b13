"""MLflow: one run per `kedro run`, a nested run per stage that trains. Training processes never talk to it."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ups.files import publish

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

EXPERIMENT = "ups"
PARENT_RUN = "UPS_TRACKING_RUN"
BATCH = 1000
LONGEST_VALUE = 6000
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


def client(uri: str | None = None) -> "MlflowClient":
    """A client of the store at `uri`, by default that in MLFLOW_TRACKING_URI, impatient with a dead server."""
    os.environ.update({name: value for name, value in PATIENCE.items() if name not in os.environ})
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):  # after the import, which sets them to INFO
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(uri)


def open_run(name: str, data_root: Path, tags: dict[str, str]) -> str:
    """Open the run of one `kedro run` in the embedded store below `data_root`, unless MLFLOW_TRACKING_URI is set."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{_store(data_root / 'mlflow.db')}"
    tracker = client()
    experiment = tracker.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        experiment_id = tracker.create_experiment(EXPERIMENT, artifact_location=(data_root / "mlruns").as_uri())
    else:
        experiment_id = experiment.experiment_id
    _close_orphans(tracker, experiment_id)
    run = tracker.create_run(experiment_id, run_name=name, tags=tags | {"pid": str(os.getpid())})
    os.environ[PARENT_RUN] = run.info.run_id
    return run.info.run_id


def _store(path: Path) -> Path:
    """The sqlite store at `path`; it gets its name when its tables are made, so that a kill leaves none half made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(".mlflow.lock")):
        if not path.is_file():
            with publish(path) as temporary:
                client(f"sqlite:///{temporary}").search_experiments()
    return path


def _close_orphans(tracker: "MlflowClient", experiment_id: str) -> None:
    """Mark runs KILLED whose process is gone: a killed run cannot say so itself."""
    for run in tracker.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
        pid = run.data.tags.get("pid")
        if pid is not None and not Path(f"/proc/{pid}").exists():
            tracker.set_terminated(run.info.run_id, "KILLED")


def close_run(status: str) -> None:
    """End the run of this `kedro run`: FINISHED, FAILED or KILLED. The first word stands."""
    run_id = os.environ.pop(PARENT_RUN, None)
    if run_id is not None:
        client().set_terminated(run_id, status)


class StageRun:
    """The nested run of one training stage; forwards what rank 0 appends to `metrics.jsonl`.

    The file is the truth: where the store does not answer, lines wait and are sent again; lines carry their time, so
    sending one twice is harmless. Outside `kedro run` nothing is tracked.
    """

    def __init__(self, stage: str, section: dict[str, Any], fingerprint: str) -> None:
        from mlflow.entities import Param

        self.stage, self.sent = stage, 0
        self.run_id: str | None = None
        parent = os.environ.get(PARENT_RUN)
        if parent is not None:
            self.client = client()
            experiment_id = self.client.get_run(parent).info.experiment_id
            tags = {"mlflow.parentRunId": parent, "fingerprint": fingerprint, "pid": str(os.getpid())}
            self.run_id = self.client.create_run(experiment_id, run_name=stage, tags=tags).info.run_id
            params = [Param(f"{stage}.{key}", str(value)[:LONGEST_VALUE]) for key, value in flatten(section).items()]
            self.client.log_batch(self.run_id, params=params)

    def forward(self, lines: list[str]) -> None:
        """Send the lines of `metrics.jsonl` that have not been sent yet."""
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            return
        if len(lines) < self.sent:  # a resumed stage drops the lines of steps it repeats
            self.sent = 0
        metrics = [metric for line in lines[self.sent :] for metric in self._metrics(json.loads(line))]
        try:
            for start in range(0, len(metrics), BATCH):
                self.client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])
        except MlflowException as error:
            log.warning("tracking of %s waits: %s", self.stage, str(error).splitlines()[0])
        else:
            self.sent = len(lines)

    def _metrics(self, line: dict[str, float]) -> list[Any]:
        from mlflow.entities import Metric

        step, milliseconds = int(line.pop("step")), int(line.pop("time") * 1000)
        return [Metric(f"{self.stage}/{key}", value, milliseconds, step) for key, value in line.items()]

    def close(self, status: str) -> None:
        """End the nested run."""
        if self.run_id is not None:
            self.client.set_terminated(self.run_id, status)


def flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
