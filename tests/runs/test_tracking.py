import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import requests
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError

from tests.training.jobs import wait_until
from ups.runs import tracking

SERVER = "https://me:hidden@server"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A client of a store without experiments, in place of that of MLflow."""
    store = MagicMock()
    store.get_experiment_by_name.return_value = None
    store.search_runs.return_value, store.create_run.return_value.info.run_id = [], "a run"
    monkeypatch.setattr(tracking, "client", lambda uri=None: store)
    monkeypatch.setenv(tracking.PARENT_RUN, "a run")
    return store


@pytest.mark.parametrize("is_server", [True, False])
def test_a_server_keeps_artifacts_itself(
    store: MagicMock, tmp_path: Path, is_server: bool, monkeypatch: pytest.MonkeyPatch
):
    """Artifacts go to the place that a server has for them, and without one to the data root."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER if is_server else f"sqlite:///{tmp_path}/mlflow.db")
    tracking.open_run("full", tmp_path, {}, {})
    ((_, place), _) = store.create_experiment.call_args
    assert place == (None if is_server else (tmp_path / "mlruns").as_uri())


def test_each_run_of_a_process_has_the_store_of_its_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two sessions in a notebook, the first of which has registered a model, unless the user has named a store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "_embedded", None)
    for name in ("one", "two"):
        tracking.open_run("full", tmp_path / name, {}, {})
        assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/{name}/mlflow.db"
        monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", os.environ["MLFLOW_TRACKING_URI"])
    for name in ("one", "two"):
        store = tracking.client(f"sqlite:///{tmp_path}/{name}/mlflow.db")
        experiment = store.get_experiment_by_name(tracking.EXPERIMENT)
        assert len(store.search_runs([experiment.experiment_id])) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mine.db")
    tracking.open_run("full", tmp_path / "three", {}, {})
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mine.db"


@pytest.mark.parametrize("name", ["a?b", "pc%41", "ä b#c"])
def test_a_data_root_of_any_name_has_its_store(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the URI of a store a ? would end the path, and %41 would be an A."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "_embedded", None)
    root = tmp_path / name
    tracking.open_run("full", root, {}, {})
    assert os.environ[tracking.PARENT_RUN] and (root / "mlflow.db").stat().st_size > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(root)] == []


def test_names_of_datasets_are_names_of_metrics(store: MagicMock, tmp_path: Path):
    """A + may stand in the name of a file, and in none of MLflow's; where metrics fail, the report is kept."""
    store.log_batch.side_effect = requests.HTTPError("500")
    tracking.log_results({"test/kdv+1/operator/rollout/nRMSE": 1.0}, {}, tmp_path)
    ((metric,),) = (call.kwargs["metrics"] for call in store.log_batch.call_args_list)
    assert metric.key == "test/kdv_1/operator/rollout/nRMSE" and store.log_artifacts.called


def test_a_failed_upload_is_a_warning_without_password(
    store: MagicMock, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Artifacts that a server refuses do not end the run, and the warning does not show how to log in."""
    store.log_artifacts.side_effect = requests.HTTPError(f"403 Client Error: Forbidden for url: {SERVER}/artifacts")
    tracking.log_results({"score": 1.0}, {}, tmp_path)
    (line,) = caplog.messages
    assert "the report of this run is not tracked: 403" in line and "//***@server" in line and "hidden" not in line


@pytest.mark.parametrize("password", ["hidden", "hid/den", "hid@den", "hid?d#en"])
def test_no_password_is_in_a_warning(store: MagicMock, caplog: pytest.LogCaptureFixture, password: str):
    """Whatever its characters; the rest of the address is kept."""
    address = f"postgresql://me:{password}@db.test/ml"
    store.set_terminated.side_effect = MlflowException(f"no database at {address}: see its log")
    tracking.close_run("FINISHED")
    (line,) = caplog.messages
    assert "no database at postgresql://***@db.test/ml: see its log" in line


def test_lines_of_a_failed_request_are_sent_again(store: MagicMock, monkeypatch: pytest.MonkeyPatch):
    """After the pause, with the lines since; until then the stage is degraded."""
    clock, stage = 0.0, tracking.StageRun("operator", {"steps": 3}, "a key")
    monkeypatch.setattr(tracking.time, "monotonic", lambda: clock)
    lines = [json.dumps({"step": step, "time": 1.0, "loss": 1 / step}) for step in (1, 2, 3)]
    store.log_batch.reset_mock()
    store.log_batch.side_effect = [MlflowException("the store is away"), None]
    stage.forward(lines[:2])
    stage.forward(lines)
    assert stage.state == "degraded" and store.log_batch.call_count == 1
    clock += tracking.PAUSE_SECONDS
    stage.forward(lines)
    sent = [metric.step for metric in store.log_batch.call_args.kwargs["metrics"]]
    assert stage.state == "ok" and sent == [1, 2, 3]


def test_tables_that_cannot_be_made_are_a_warning(
    store: MagicMock, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The embedded store of a full disk: the run goes on and is not tracked."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store.search_experiments.side_effect = OperationalError("CREATE TABLE", {}, OSError("disk I/O error"))
    tracking.open_run("full", tmp_path, {}, {})
    assert "this run is not tracked" in caplog.messages[0] and not (tmp_path / "mlflow.db").exists()
    assert (os.environ[tracking.PARENT_RUN], os.environ.get("MLFLOW_TRACKING_URI")) == ("", None)


def test_mlflow_prints_no_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """At the end of a run MLflow would print the address of its server, with the password that is in it."""
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    tracking.client(f"sqlite:///{tmp_path}/mlflow.db")
    assert os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "true"


@pytest.mark.slow
def test_a_server_has_metrics_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real server, on this machine, keeps the losses, scores and reports of a run, and this machine keeps none."""
    reports = tmp_path / "root/08_reporting"
    (reports / "figures").mkdir(parents=True)
    (reports / "figures/errors.png").write_bytes(b"png")
    lines = [json.dumps({"step": step, "time": 1.0, "loss": 1 / step}) for step in (1, 2, 3)]
    with server(tmp_path / "server") as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.delenv(tracking.PARENT_RUN, raising=False)
        tracking.open_run("full", tmp_path / "root", {"commit": "abc"}, {"seed": "0"})
        run_id, stage = os.environ[tracking.PARENT_RUN], tracking.StageRun("operator", {"steps": 3}, "a key")
        stage.close("FINISHED", lines)
        tracking.log_results({"score": 0.5}, {"grade": "good"}, reports)
        tracking.close_run("FINISHED")
        client = tracking.client()
        run = client.get_run(run_id)
        assert (run.data.metrics, run.data.tags["grade"], run.info.status) == ({"score": 0.5}, "good", "FINISHED")
        history = client.get_metric_history(stage.run_id, "operator/loss")
        assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
        (tmp_path / "back").mkdir()
        found = client.download_artifacts(run_id, "08_reporting/figures/errors.png", str(tmp_path / "back"))
        assert stage.state == "ok" and Path(found).read_bytes() == b"png"
    assert list((tmp_path / "server").rglob("errors.png")) and not list((tmp_path / "root").rglob("mlruns"))


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of an MLflow server that keeps all it gets in `folder`."""
    folder.mkdir()
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: is_healthy(uri) or time.sleep(0.5), 120), (folder / "log").read_text()
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def is_healthy(uri: str) -> bool:
    """Whether a server answers."""
    try:
        return requests.get(f"{uri}/health", timeout=2).ok
    except requests.ConnectionError:
        return False
