"""The notebooks run from the first cell to the last, and so does the page on other models."""

import os
import re
import shlex
import sys
from pathlib import Path

import h5py
import nbformat
import numpy as np
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient

from tests.data.conftest import write_file
from tests.untrained import make_loadable
from ups.commands import main
from ups.config import NONE_ADDED, WHOLE, SplitConfig
from ups.evaluation.entries import Described, Scores
from ups.files import read_json, write_json
from ups.pipelines.data import describe_datasets, list_folder
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
        assert any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), path


def test_another_model_is_added_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its code reads and predicts the test split, its command scores it: persistence has the error of the raw file."""
    page, raw = (NOTEBOOKS / "add_your_model.md").read_text(encoding="utf-8"), tmp_path / "data" / "01_raw"
    raw.mkdir(parents=True)
    truth = write_file(raw, "burgers_1d", "1D_Burgers_Sols_Nu0.01.hdf5", count=9)
    split = SplitConfig(seed=0, valid_fraction=0.3, test_fraction=0.4)
    described = describe_datasets({}, {}, list_folder("folder", raw, tmp_path), split, WHOLE, NONE_ADDED, raw, tmp_path)
    write_json(tmp_path / "data/04_feature/datasets.json", described)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    (command,) = re.findall(r"^ups (score .*)$", page, re.MULTILINE)
    scored = CliRunner().invoke(main, shlex.split(command))
    assert scored.exit_code == 0, scored.output
    test = described["splits"]["1D_Burgers_Sols_Nu0.01"]["test"]
    with h5py.File(truth) as file:
        u = file["tensor"][:][test].astype(float)
    error = np.sqrt(((u[:, 1:] - u[:, :1]) ** 2).mean(2) / (u[:, 1:] ** 2).mean(2)).mean()
    scores = read_json(tmp_path / "scores/burgers.json", Scores)
    (value,) = (record.value for record in scores.records if record.metric == "nRMSE")
    assert scores.method == "persistence" and value == pytest.approx(error, rel=1e-5)
    assert scores.trajectories == Described.below(tmp_path / "data").test_trajectories("1D_Burgers_Sols_Nu0.01")
