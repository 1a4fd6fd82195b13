import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import requests

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


def test_a_failed_upload_is_a_warning_without_password(
    store: MagicMock, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Artifacts that a server refuses do not end the run, and the warning does not show how to log in."""
    store.log_artifacts.side_effect = requests.HTTPError(f"403 Client Error: Forbidden for url: {SERVER}/artifacts")
    tracking.log_results({"score": 1.0}, {}, tmp_path)
    (line,) = caplog.messages
    assert "the result of this run is not tracked: 403" in line and "//***@server" in line and "hidden" not in line


def test_mlflow_prints_no_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """At the end of a run MLflow would print the address of its server, with the password that is in it."""
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    tracking.client(f"sqlite:///{tmp_path}/mlflow.db")
    assert os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "true"
