"""MLflow: one run per `kedro run`, a nested run per stage that trains.

Training processes never wait for a tracking server: they append to `metrics.jsonl`, the launcher forwards its lines.
"""

import json
import logging
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ups.config import without_logins
from ups.files import private_lock, publish

if TYPE_CHECKING:
    from mlflow import MlflowClient


log = logging.getLogger(__name__)

EXPERIMENT = "ups"
PARENT_RUN = "UPS_TRACKING_RUN"
BATCH = 1000  # metrics per request, the limit of MLflow
PARAM_BATCH = 100  # parameters per request, the limit of MLflow
LONGEST_VALUE = 6000  # characters of a parameter, the limit of MLflow
PAUSE_SECONDS = 30.0  # without requests after one that failed
_embedded: str | None = None  # the store that an earlier run in this process has used, if that was no one's choice

CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default a call to a dead server returns after four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # which may have a password in it
    "GIT_PYTHON_REFRESH": "quiet",
}


def client(uri: str | None = None) -> "MlflowClient":
    """A client of the store at `uri`, by default MLFLOW_TRACKING_URI, with short time-outs."""
    os.environ.update({name: value for name, value in CLIENT_ENVIRONMENT.items() if name not in os.environ})
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):  # after the import, which sets them to INFO
        logging.getLogger(name).setLevel(logging.WARNING)
    # Not the store of the last `mlflow.set_tracking_uri` in this process, which MLflow prefers to the variable.
    return MlflowClient(uri or os.environ.get("MLFLOW_TRACKING_URI"))


def sqlite_uri(path: Path) -> str:
    """The URI of a store in a file. No other characters are quoted: MLflow makes an empty folder of the quoted name."""
    return f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")


@contextmanager
def _store_may_fail(what: str) -> Iterator[None]:
    """Log a failed call to the store as a warning: training goes on, and `metrics.jsonl` has every metric."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    # OSError: artifacts that a server or a disk does not take; SQLAlchemyError: tables that cannot be made
    except (MlflowException, SQLAlchemyError, OSError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        log.warning("%s is not tracked: %s", what, without_logins(why))


def open_run(name: str, data_root: Path, tags: dict[str, str], params: dict[str, str]) -> None:
    """Open the run of one `kedro run` in the embedded store below `data_root`, unless MLFLOW_TRACKING_URI is set."""
    from mlflow.entities import Param

    global _embedded  # noqa: PLW0603
    os.environ[PARENT_RUN] = ""  # if the store fails, stages report `tracking: degraded` instead of `off`
    with _store_may_fail("this run"):
        if os.environ.get("MLFLOW_TRACKING_URI", _embedded) == _embedded:
            _embedded = os.environ["MLFLOW_TRACKING_URI"] = sqlite_uri(_store(data_root / "mlflow.db"))
        tracker = client()
        experiment = tracker.get_experiment_by_name(EXPERIMENT)
        # A server keeps artifacts where it was told to: it cannot show files of this machine.
        is_server = os.environ["MLFLOW_TRACKING_URI"].startswith(("http://", "https://"))
        folder = None if is_server else (data_root / "mlruns").as_uri()
        experiment_id = experiment.experiment_id if experiment else tracker.create_experiment(EXPERIMENT, folder)
        _close_orphans(tracker, experiment_id)
        run = tracker.create_run(experiment_id, run_name=name, tags=tags | _process_tags())
        os.environ[PARENT_RUN] = run.info.run_id
        values = [Param(key, value[:LONGEST_VALUE]) for key, value in params.items()]
        for start in range(0, len(values), PARAM_BATCH):
            tracker.log_batch(run.info.run_id, params=values[start : start + PARAM_BATCH])


def _process_tags() -> dict[str, str]:
    return {"pid": str(os.getpid()), "host": platform.node()}


def _store(path: Path) -> Path:
    """The sqlite store at `path`; created under a temporary name, so that a kill leaves none with missing tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with private_lock(path.with_name(".mlflow.lock")):
        if not path.is_file():
            with publish(path) as temporary:
                client(sqlite_uri(temporary)).search_experiments()
    return path


def _close_orphans(tracker: "MlflowClient", experiment_id: str) -> None:
    """Mark runs as KILLED whose process on this machine no longer exists: a killed process cannot do that itself."""
    for run in tracker.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
        tags = run.data.tags
        if tags.get("host") == platform.node() and not psutil.pid_exists(int(tags["pid"])):
            tracker.set_terminated(run.info.run_id, "KILLED")


def log_results(metrics: dict[str, float], tags: dict[str, str], reports: Path) -> None:
    """Add the scores, the tags and a copy of the folder `reports` to the run of this `kedro run`."""
    from mlflow.entities import Metric

    if run_id := os.environ.get(PARENT_RUN):
        now, tracker = int(time.time() * 1000), client()
        # Names of files may have a +, which MLflow refuses.
        values = [Metric(re.sub(r"[^\w./ :-]", "_", key), value, now, 0) for key, value in metrics.items()]
        with _store_may_fail("the result of this run"):
            for start in range(0, len(values), BATCH):
                tracker.log_batch(run_id, metrics=values[start : start + BATCH])
        with _store_may_fail("the report of this run"):
            for key, value in tags.items():
                tracker.set_tag(run_id, key, value)
            tracker.log_artifacts(run_id, str(reports), reports.name)


def close_run(status: str) -> None:
    """End the run of this `kedro run` as FINISHED, FAILED or KILLED; later calls change nothing."""
    run_id = os.environ.pop(PARENT_RUN, None)
    if run_id:
        with _store_may_fail("the end of this run"):
            client().set_terminated(run_id, status)


class StageRun:
    """The nested run of one training stage; forwards what rank 0 appends to `metrics.jsonl`.

    After a failed request all its lines are sent again later: each carries its step and time, so that sending one
    twice is harmless. Outside `kedro run` nothing is tracked.
    """

    def __init__(self, stage: str, section: dict[str, Any], fingerprint: str) -> None:
        self.stage, self.num_sent, self.paused_until = stage, 0, 0.0
        self.run_id: str | None = None
        self.parent = os.environ.get(PARENT_RUN)
        if self.parent:
            with _store_may_fail(stage):
                self._open(self.parent, section, fingerprint)

    @property
    def state(self) -> str:
        """`ok`; `degraded` if the store lacks lines of `metrics.jsonl`; `off` outside `kedro run`."""
        if self.parent is None:
            return "off"
        return "ok" if self.run_id is not None and self.paused_until == 0.0 else "degraded"

    def _open(self, parent: str, section: dict[str, Any], fingerprint: str) -> None:
        from mlflow.entities import Param

        self.client = client()
        experiment_id = self.client.get_run(parent).info.experiment_id
        tags = {"mlflow.parentRunId": parent, "fingerprint": fingerprint} | _process_tags()
        self.run_id = self.client.create_run(experiment_id, run_name=self.stage, tags=tags).info.run_id
        values = {f"{self.stage}.{key}": str(value)[:LONGEST_VALUE] for key, value in flatten(section).items()}
        self.client.log_batch(self.run_id, params=[Param(key, value) for key, value in values.items()])

    def forward(self, lines: list[str]) -> None:
        """Send the lines of `metrics.jsonl` that have not been sent; none for PAUSE_SECONDS after a failed request."""
        if self.run_id is None or time.monotonic() < self.paused_until:
            return
        if len(lines) < self.num_sent:  # a resumed stage drops the lines of steps it repeats
            self.num_sent = 0
        self.paused_until = time.monotonic() + PAUSE_SECONDS
        metrics = [metric for line in lines[self.num_sent :] for metric in self._metrics(json.loads(line))]
        with _store_may_fail(f"{self.stage} for {PAUSE_SECONDS:.0f} s"):
            for start in range(0, len(metrics), BATCH):
                self.client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])
            self.num_sent, self.paused_until = len(lines), 0.0

    def _metrics(self, line: dict[str, float]) -> list[Any]:
        from mlflow.entities import Metric

        step, milliseconds = int(line.pop("step")), int(line.pop("time") * 1000)
        return [Metric(f"{self.stage}/{key}", value, milliseconds, step) for key, value in line.items()]

    def close(self, status: str, lines: list[str]) -> None:
        """Send the remaining lines and end the nested run with `status`."""
        self.paused_until = 0.0
        self.forward(lines)
        if self.run_id is not None:
            with _store_may_fail(f"the end of {self.stage}"):
                self.client.set_terminated(self.run_id, status)


def flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
