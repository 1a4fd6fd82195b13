"""The notebooks run from the first cell to the last."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.untrained import make_loadable
from ups.surrogate.model import load

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FAMILIES = ("burgers_1d", "darcy_2d", "shallow_water_2d")
SECONDS = 300


def execute(name: str) -> None:
    """Run all cells of a notebook in a process of its own; an error in one of them is raised."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of random weights."""
    bundle = tmp_path_factory.mktemp("models") / "bundle"
    load(make_loadable(tmp_path_factory.mktemp("root"), FAMILIES, count=5), device="cpu").save(bundle)
    return bundle


@pytest.mark.parametrize("name", ["quickstart.ipynb", "inverse_problem.ipynb"])
def test_a_notebook_runs_with_any_models(name: str, bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever they have learned."""
    for variable in ("UPS_MODEL", "UPS_CONDITIONS"):
        monkeypatch.setenv(variable, str(bundle))
    execute(name)


@pytest.mark.slow
def test_an_own_equation_from_array_to_export(monkeypatch: pytest.MonkeyPatch):
    """Fifty training steps are enough for every command of the notebook."""
    monkeypatch.setenv("UPS_STEPS", "50")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    execute("own_equation.ipynb")


def test_outputs_are_stored():
    """A reader sees results without running anything."""
    for path in NOTEBOOKS.glob("*.ipynb"):
        if not path.name.startswith("look_at"):  # pictures of whatever data there are
            cells = nbformat.read(path, as_version=4).cells
            assert any(cell.get("outputs") for cell in cells), path
