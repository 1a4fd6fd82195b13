"""MLflow's registry of models: versions that hold a bundle and the errors of its test trajectories, and an alias."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import log_model

from ups.config import without_logins
from ups.errors import ConfigFault, DataFault, StorageFault
from ups.files import read_json, write_json
from ups.runs import tracking

BUNDLE, ERRORS = "bundle", "errors.json"
NEEDED = ("torch", "numpy", "safetensors", "mlflow", "pydantic")  # to serve a bundle; the source of ups is copied
DEFAULT_STORE = Path("data/mlflow.db")
PACKAGE = Path(__file__).parents[1]


@contextmanager
def _registry_may_fail(what: str, kind: type[DataFault | StorageFault]) -> Iterator[None]:
    try:
        yield
    except MlflowException as error:
        uri, why = mlflow.get_tracking_uri(), str(error).partition("\n")[0]
        where = f"the MLflow store is {uri}, MLFLOW_TRACKING_URI names another"
        raise kind(without_logins(f"{what}: {why}; {where}")) from error


def register(name: str, bundle: Path, errors: dict[str, Any], example: dict[str, Any], models: str) -> str:
    """Log a bundle into the MLflow run of this command and register it under `name`; returns the version.

    `errors` are those of the test trajectories, `example` is a request of `served_model`, `models` the hash of what the
    bundle predicts with: models that are registered already keep their version.

    Raises:
        StorageFault: the store cannot be reached.
    """
    client = tracking.client()
    with _registry_may_fail(f"{name} is not registered", StorageFault), TemporaryDirectory() as place:
        same = client.search_model_versions(f"name = '{name}' and tag.models = '{models}'")
        if same:
            return str(min(int(each.version) for each in same))
        write_json(Path(place) / ERRORS, errors)
        source = Path(place) / "ups"  # the link to conf is left out: conf/local may hold secrets
        shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("conf", "__pycache__"))
        with _run_of_command():
            logged = log_model(
                name=name,
                python_model=PACKAGE / "runs" / "served_model.py",
                artifacts={"bundle": str(bundle), "errors": str(Path(place) / ERRORS)},
                code_paths=[str(source)],
                pip_requirements=[f"{package}=={version(package)}" for package in NEEDED],
                input_example=[example],
                registered_model_name=name,
            )
        found = str(logged.registered_model_version)
        client.set_model_version_tag(name, found, "models", models)
        return found


@contextmanager
def _run_of_command() -> Iterator[None]:
    """The MLflow run of this `kedro run`, as the active one; it goes on afterwards."""
    run_id = os.environ.get(tracking.PARENT_RUN)
    if not run_id:
        raise StorageFault("a model is registered below an MLflow run, and this command has none: see its warnings")
    with _in_store(os.environ["MLFLOW_TRACKING_URI"]), mlflow.start_run(run_id=run_id):
        yield
    tracking.client().update_run(run_id, "RUNNING")


def champion(name: str, alias: str) -> tuple[str, dict[str, Any]] | None:
    """The version that an alias names, and its errors; None before the first registration.

    Raises:
        DataFault: the version has no errors.
    """
    if (found := version_of(name, alias)) is None:
        return None
    with _registry_may_fail(f"{name}@{alias} cannot be read", DataFault):
        return found, _errors_of(name, found)


def version_of(name: str, alias: str) -> str | None:
    """The version that an alias names, None before the first registration; raises `DataFault` without a store."""
    with _registry_may_fail(f"{name}@{alias} cannot be read", DataFault):
        found = tracking.client().search_registered_models(f"name = '{name}'")
    aliases = found[0].aliases if found else {}
    return str(aliases[alias]) if alias in aliases else None


def _errors_of(name: str, found: str) -> dict[str, Any]:
    with TemporaryDirectory() as place, _in_store(os.environ.get("MLFLOW_TRACKING_URI")):
        path = mlflow.artifacts.download_artifacts(f"models:/{name}/{found}/artifacts/{ERRORS}", dst_path=place)
        return read_json(Path(path), dict[str, Any])


def versions(name: str) -> dict[str, dict[str, Any]]:
    """The errors of all versions of `name`, oldest first; none before the first registration.

    Raises:
        DataFault: the store cannot be read, or a version has no errors.
    """
    with _registry_may_fail(f"the versions of {name} cannot be read", DataFault):
        found = tracking.client().search_model_versions(f"name = '{name}'")
        return {version: _errors_of(name, version) for version in sorted((str(v.version) for v in found), key=int)}


def move_alias(name: str, alias: str, to: str) -> None:
    """Let an alias name the version `to`."""
    with _registry_may_fail(f"{name}@{alias} is not moved", StorageFault):
        tracking.client().set_registered_model_alias(name, alias, to)


@contextmanager
def _in_store(uri: str | None) -> Iterator[None]:
    """The store of MLflow's functions in this block; afterwards the variable names it again, for later runs too."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)  # which deletes the variable
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


@contextmanager
def bundle_of(uri: str) -> Iterator[Path]:
    """The bundle of a version, such as `models:/ups@champion`, in a folder that is deleted afterwards.

    The store is MLFLOW_TRACKING_URI, by default that of the data root `data`.

    Raises:
        ConfigFault: there is no store.
        DataFault: there is no such version, or it holds no bundle.
    """
    if "MLFLOW_TRACKING_URI" not in os.environ and not DEFAULT_STORE.is_file():
        raise ConfigFault(f"{uri}: there is no {DEFAULT_STORE}; set MLFLOW_TRACKING_URI, as sqlite:///DIR/mlflow.db")
    tracking.client()
    store = os.environ.get("MLFLOW_TRACKING_URI", tracking.sqlite_uri(DEFAULT_STORE.resolve()))
    with TemporaryDirectory() as place:
        with _in_store(store), _registry_may_fail(f"{uri} cannot be loaded", DataFault):
            root = Path(mlflow.artifacts.download_artifacts(uri, dst_path=place))
        if not (root / "artifacts" / BUNDLE).is_dir():
            raise DataFault(f"{uri} holds no bundle: name a version that `kedro run --pipeline register` made")
        yield root / "artifacts" / BUNDLE
