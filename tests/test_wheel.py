"""The wheel by itself: a bundle without its dependencies, `python -m ups` without the repository."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import ups.__main__ as main_module
from tests.surrogate.test_bundle import needed
from tests.untrained import make_loadable
from ups.surrogate.model import Model, load

PROJECT = Path(__file__).parents[1]
SECRET = "conf/local/credentials.yml"
SCRIPT = """
import time
start = time.perf_counter()
import ups
imported = time.perf_counter() - start
import numpy as np
model = ups.load("bundle")
u = model.predict("burgers_1d", np.linspace(0.5, 1.5, 8), steps=20, nu=0.01)
print(ups.__file__, imported, time.perf_counter() - start)
np.save("u.npy", u)
"""


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, without the repository on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository that has a file with secrets."""
    copy, target = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, copy)
    for name in ("src", "conf"):
        shutil.copytree(PROJECT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / SECRET).write_text("password: secret\n")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    subprocess.run(build, cwd=copy, check=True, capture_output=True, timeout=300)
    return next(target.glob("*.whl"))


def environment(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with the wheel alone, and its folder of packages."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder / "bin/python"


def packages_of(python: Path) -> Path:
    """The folder of packages of an environment."""
    return next((python.parents[1] / "lib").glob("python*")) / "site-packages"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Models of random weights."""
    return load(make_loadable(tmp_path_factory.mktemp("models"), ("advection_1d", "burgers_1d"), count=5), device="cpu")


@pytest.mark.slow
def test_the_wheel_has_data_and_configuration_but_no_secrets(wheel: Path):
    """Every YAML of conf but those of `local`, and every table."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    conf = {f"ups/{path.relative_to(PROJECT)}" for path in PROJECT.glob("conf/**/*.yml") if path.parent.name != "local"}
    tables = {str(path.relative_to(PROJECT / "src")) for path in PROJECT.glob("src/ups/**/*.csv")}
    assert conf | tables | {"ups/__main__.py"} <= names and len(conf) > 10 and tables
    assert f"ups/{SECRET}" not in names


@pytest.mark.slow
def test_a_bundle_is_used_without_the_dependencies(wheel: Path, model: Model, tmp_path: Path):
    """In an environment of torch, numpy and safetensors alone: the right numbers, soon, `import ups` at once."""
    python = environment(tmp_path / "venv", wheel)
    for distribution in needed("torch") | needed("numpy") | needed("safetensors"):
        link_distribution(distribution, packages_of(python))
    assert run(python, "-c", "import kedro", cwd=tmp_path).returncode == 1
    assert run(python, "-c", "import pydantic", cwd=tmp_path).returncode == 1
    model.save(tmp_path / "bundle")
    completed = run(python, "-c", SCRIPT, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    place, imported, seconds = completed.stdout.split()
    assert Path(place).is_relative_to(tmp_path) and float(imported) < 0.3 and float(seconds) < 20
    expected = model.predict("burgers_1d", np.linspace(0.5, 1.5, 8), steps=20, nu=0.01)
    np.testing.assert_array_equal(np.load(tmp_path / "u.npy"), expected)


def link_distribution(name: str, packages: Path) -> None:
    """Link the top-level files and folders of an installed distribution, if it is installed."""
    if name not in {"setuptools", "cuda-bindings"}:
        for part in {file.parts[0] for file in files(name) or [] if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(find_spec("torch").origin)).parents[1] / part
            if source.exists() and not (packages / part).exists():
                (packages / part).symlink_to(source)


@pytest.mark.slow
def test_a_whole_run_needs_no_repository(wheel: Path, tmp_path: Path):
    """`python -m ups --pipeline full --env smoke` trains, scores and judges in an empty folder."""
    python = environment(tmp_path / "venv", wheel)
    (packages_of(python) / "dependencies.pth").write_text(str(Path(str(find_spec("torch").origin)).parents[1]))
    (tmp_path / "work").mkdir()
    completed = run(python, "-m", "ups", "--pipeline", "full", "--env", "smoke", cwd=tmp_path / "work")
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "work/data/smoke/08_reporting/verdict.json").is_file()
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"data"}
    wrong = run(python, "-m", "ups", "--env", "nowhere", cwd=tmp_path / "work")
    assert wrong.returncode == 2 and "has no environment 'nowhere'; known: accuracy, base" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "has_conf", "expected"),
    [
        (["--env", "smoke"], False, ["--conf-source", str(main_module.PACKAGED), "--env", "smoke"]),
        (["--env", "smoke"], True, ["--env", "smoke"]),
        (["--conf-source=mine"], False, ["--conf-source=mine"]),
    ],
)
def test_the_packaged_configuration_is_for_folders_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], has_conf: bool, expected: list[str]
):
    """A folder of its own comes first, and what is given on the command line before all."""
    from kedro.framework.cli.project import run as command

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEDRO_LOGGING_CONFIG", "kept")
    monkeypatch.setattr(sys, "argv", ["ups", *arguments])
    monkeypatch.setattr(type(command), "main", lambda _, given, prog_name: calls.append(given))
    monkeypatch.setattr("kedro.framework.project.configure_project", lambda name: None)
    if has_conf:
        (tmp_path / "conf/base").mkdir(parents=True)
    main_module.main()
    assert calls == [expected]


def test_the_package_starts_at_once():
    """`import ups` takes less than 0.3 s, the best of three, and does not import torch."""
    script = (
        "import sys, time; t = time.perf_counter(); import ups; print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in outputs) < 0.3
    assert {loaded for _, loaded in outputs} == {"False"}
