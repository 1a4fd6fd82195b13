"""Versions in MLflow: what is registered can be loaded and served, and the alias moves for a reason."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests
from mlflow.exceptions import MlflowException

import ups
from tests.contents import assert_same
from tests.surrogate.conftest import CORRECTION
from tests.untrained import make_corrector, make_loadable
from ups.config import RegistrationConfig
from ups.errors import ConfigFault, DataFault
from ups.files import digest_of
from ups.pipelines.deployment import _models_digest, crown, example_of, register
from ups.runs import registry, tracking
from ups.surrogate.bundle import TENSORS
from ups.surrogate.model import Model, load

FAMILIES = ("advection_1d", "darcy_2d", "diffusion_reaction_2d")
CONFIG = RegistrationConfig(name="ups", alias="champion", max_family_ratio=1.02)
U_0 = np.linspace(0.5, 1.5, 8, dtype=np.float32)
NU = np.linspace(0.5, 1.5, 48, dtype=np.float32).reshape(8, 6)


def errors(factor: float) -> dict[str, Any]:
    """Errors of ten trajectories."""
    return {"data": {"family": "advection_1d", "trajectories": "", "nRMSE": [factor * (1 + k) for k in range(10)]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Models of random weights."""
    root = make_loadable(tmp_path_factory.mktemp("models"), FAMILIES, count=5)
    make_corrector(root, {"advection_1d": {"consistency": CORRECTION}})
    return load(root, device="cpu")


@pytest.fixture(scope="module")
def bundle(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models as a bundle."""
    folder = tmp_path_factory.mktemp("registered") / registry.BUNDLE
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with an open run, as `kedro run` has it."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv(tracking.PARENT_RUN, "")
        tracking.open_run("register", folder, {}, {})
        yield folder
        tracking.close_run("FINISHED")
        del os.environ["MLFLOW_TRACKING_URI"]


def registered(model: Model, bundle: Path, factor: float, weights: str) -> str:
    """The version of the models under a hash of weights, with errors in proportion to a factor."""
    return registry.register(CONFIG.name, bundle, errors(factor), example_of(model), weights)


@pytest.fixture(scope="module")
def first(store: Path, model: Model, bundle: Path) -> str:
    """The first version, which is the champion."""
    version = registered(model, bundle, 1.0, digest_of(bundle / TENSORS))
    assert crown(version, errors(1.0), CONFIG)["reason"] == "it is the first"
    return version


@pytest.fixture(scope="module")
def served(first: str) -> Any:
    """The champion as MLflow loads it."""
    return mlflow.pyfunc.load_model(f"models:/{CONFIG.name}@{CONFIG.alias}")


def test_the_champion_is_loaded_by_its_name(first: str, model: Model):
    """Its predictions are those of the models that were registered, bit for bit."""
    found = ups.load("models:/ups@champion", device="cpu")
    expected = model.predict("advection_1d", U_0, steps=3)
    np.testing.assert_array_equal(found.predict("advection_1d", U_0, steps=3), expected)
    assert ups.load(f"models:/ups/{first}").families == FAMILIES


def test_two_data_roots_have_registries_of_their_own(
    first: str, model: Model, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A later command in this process, for another data root, reads neither versions nor errors of the former one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setattr(tracking, "_embedded", None)
    monkeypatch.setenv(tracking.PARENT_RUN, "")
    tracking.open_run("register", tmp_path, {}, {})
    version = registry.register(CONFIG.name, bundle, errors(7.0), example_of(model), "others")
    assert registry.versions(CONFIG.name) == {version: errors(7.0)}


def test_scores_of_other_models_are_not_registered(tmp_path: Path):
    """The operator was trained again since."""
    scored = {"models": {"codec": "0", "operator": "0"}}
    with pytest.raises(DataFault, match=r"scores of other models: run `kedro run --pipeline evaluation` first"):
        register([], scored, CONFIG, tmp_path, codec={"weights": "0"}, operator={"weights": "1"})


def test_mlflow_predicts_the_same(served: Any, model: Model):
    """One answer per request: arrays and lists, steady families with coefficients among the parameters."""
    requested = [
        {"family": "advection_1d", "u_0": U_0, "steps": 2, "parameters": {"beta": 0.4}},
        {"family": "advection_1d", "u_0": U_0.tolist(), "steps": 2, "dt": 0.5},
        {"family": "darcy_2d", "parameters": {"nu": NU.tolist()}},
    ]
    answers = [answer["u"] for answer in served.predict(requested)]
    assert_same(answers[0], model.predict("advection_1d", U_0, steps=2))
    assert_same(answers[1], model.predict("advection_1d", U_0, steps=2, dt=0.5))
    assert_same(answers[2], model.predict("darcy_2d", nu=NU))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"family": "kdv", "u_0": U_0, "steps": 1}, "the model was not trained on 'kdv', only on advection_1d"),
        ({"family": "advection_1d", "u_0": U_0, "steps": 0}, "must be a whole number of at least 1, not 0"),
        ({"family": "advection_1d", "u_0": [[1.0], [2.0, 3.0]], "steps": 1}, "rows of different lengths"),
        ({"family": "advection_1d", "u_0": "u", "steps": 1}, "must hold real numbers"),
        ({"family": "advection_1d", "u_0": U_0, "u_before": U_0, "steps": 1}, "start from one snapshot"),
        ({"family": "advection_1d", "u_0": U_0, "steps": 1, "nu": 1.0}, "nu"),
        (
            {"family": "advection_1d", "u_0": U_0, "steps": 1, "parameters": {"steps": 2}},
            "steps: no parameter of a PDE",
        ),
        *(
            (
                {"family": "advection_1d", "u_0": U_0, "steps": 1, "parameters": {name: 2}},
                f"{name}: no parameter of a PDE",
            )
            for name in ("members", "labels", "self")
        ),
        ({"u_0": U_0}, "family"),
    ],
)
def test_a_wrong_request_is_refused(served: Any, request_: dict[str, Any], message: str):
    """With the line that `Model.predict` gives, or with the name of the key that is wrong."""
    with pytest.raises(MlflowException, match=message):
        served.predict([request_])


def test_mlflow_predicts_ensembles(served: Any, model: Model):
    """A request with `members` is answered with their mean and standard deviation."""
    request_ = {"family": "advection_1d", "u_0": U_0, "steps": 2, "members": 4, "seed": 3}
    (answer,) = served.predict([request_])
    ensemble = model.predict(**request_)
    assert answer.keys() == {"mean", "std"} and ensemble.std.max() > 0
    assert_same(answer["mean"], ensemble.mean)
    assert_same(answer["std"], ensemble.std)


def test_a_version_says_what_it_needs(first: str):
    """Signature, example, pinned requirements, its own source; no configuration, which may hold secrets."""
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/ups/{first}"))
    info = mlflow.models.get_model_info(f"models:/ups/{first}")
    assert {"family", "u_0", "steps", "parameters"} <= {
        field.name for field in info.signature.inputs.inputs[0].type.properties
    }
    assert json.loads((folder / "input_example.json").read_text())[0]["family"] == "advection_1d"
    requirements = (folder / "requirements.txt").read_text().split()
    assert {line.partition("==")[0] for line in requirements} == set(registry.NEEDED)
    assert all("==" in line for line in requirements)
    assert (folder / "code/ups/surrogate/model.py").is_file() and not (folder / "code/ups/conf").exists()


def test_the_same_weights_keep_their_version(first: str, model: Model, bundle: Path):
    """Registering again changes nothing."""
    assert registered(model, bundle, 1.0, digest_of(bundle / TENSORS)) == first
    assert crown(first, errors(1.0), CONFIG)["reason"] == "these models are the champion already"
    assert registry.champion(CONFIG.name, CONFIG.alias) == (first, errors(1.0))


def test_another_corrector_of_the_same_weights_is_served(tmp_path: Path, store: Path):
    """It is a version of its own, and becomes the champion: errors of test trajectories are those without corrector."""
    config = CONFIG.model_copy(update={"name": "corrected"})
    root = make_loadable(tmp_path, ("advection_1d",), count=5)
    scales, versions = [1.0, 2.0, 2.0], []
    for number, scale in enumerate(scales):
        make_corrector(root, {"advection_1d": {"consistency": CORRECTION | {"residual_scale": scale}}})
        corrected, bundle = load(root, device="cpu"), tmp_path / str(number) / registry.BUNDLE
        corrected.save(bundle)
        digest = _models_digest(bundle, corrected)
        versions.append(registry.register("corrected", bundle, errors(1.0), example_of(corrected), digest))
        crown(versions[-1], errors(1.0), config)
        with registry.bundle_of(f"models:/corrected@{CONFIG.alias}") as champion:
            assert load(champion, device="cpu").card["corrections"][0][2]["residual_scale"] == scale
    assert versions == ["1", "2", "2"]


def test_the_alias_moves_to_a_better_version_alone(
    first: str, model: Model, bundle: Path, caplog: pytest.LogCaptureFixture
):
    """A worse one stays a version; a better one is the champion, with its errors; each is one line."""
    caplog.set_level("INFO", "ups")
    worse = registered(model, bundle, 1.1, "worse")
    found = crown(worse, errors(1.1), CONFIG)
    assert found["champion"] == first and found["reason"] == "it is worse on advection_1d by 10 %"
    better = registered(model, bundle, 0.9, "better")
    assert crown(better, errors(0.9), CONFIG)["champion"] == better
    assert registry.champion(CONFIG.name, CONFIG.alias) == (better, errors(0.9))
    lines = [record.getMessage() for record in caplog.records if record.name == "ups.pipelines.deployment"]
    assert lines[0].startswith(f"ups version {worse}: champion stays at version {first}, because it is worse")
    assert lines[1].startswith(f"ups version {better}: champion moves to version {better}, because its nRMSE is 0.9 ")


def test_all_versions_have_their_errors(first: str, model: Model, bundle: Path):
    """By number, as they were registered; a name that nothing is registered under has none."""
    registered(model, bundle, 1.5, "another")
    found = registry.versions(CONFIG.name)
    assert found[first] == errors(1.0) and errors(1.5) in found.values()
    assert list(map(int, found)) == sorted(map(int, found)) and registry.versions("nobody") == {}


def test_before_the_first_registration_there_is_no_champion(store: Path):
    """Nor a version that the alias names."""
    assert registry.champion("nobody", CONFIG.alias) is None and registry.version_of("nobody", CONFIG.alias) is None


@pytest.mark.parametrize("uri", ["models:/ups@nobody", "models:/ups/999", "models:/other@champion", "models:/"])
def test_an_unknown_version_is_one_line(first: str, uri: str):
    """That names it and the store."""
    with pytest.raises(DataFault, match=f"{uri} cannot be loaded: .*the MLflow store is sqlite:") as caught:
        ups.load(uri)
    assert "\n" not in str(caught.value)


def test_without_a_store_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MLflow would make an empty one in the present folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigFault, match="there is no data/mlflow.db; set MLFLOW_TRACKING_URI"):
        ups.load("models:/ups@champion")
    assert not list(tmp_path.iterdir())


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_mlflow_serves_the_champion(first: str, model: Model, tmp_path: Path):
    """`mlflow models serve` answers a request with the prediction, and a wrong one with status 400 and one line."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", f"models:/ups/{first}"]
    command += ["--port", str(port), "--env-manager", "local", "--workers", "1"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # for uvicorn
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        wait_for(f"http://127.0.0.1:{port}/ping", server)
        request = {"family": "advection_1d", "u_0": U_0.tolist(), "steps": 2, "parameters": {"beta": 0.4}}
        address = f"http://127.0.0.1:{port}/invocations"
        answer = requests.post(address, json={"inputs": [request]}, timeout=60)
        assert answer.status_code == 200, answer.text
        u = np.asarray(answer.json()["predictions"][0]["u"])
        np.testing.assert_allclose(u, model.predict("advection_1d", U_0, steps=2), rtol=1e-6)
        refused = requests.post(address, json={"inputs": [request | {"steps": 0}]}, timeout=60)
        assert refused.status_code == 400
        assert "whole number of at least 1, not 0" in refused.json()["message"]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def wait_for(address: str, server: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "the server ended"
        try:
            if requests.get(address, timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise TimeoutError(address)
