"""The parameters for GPUs, `--env pdebench`: all eleven families, or two of them, on 1, 2, 4 and 8 processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.conftest import write_file
from tests.test_parameters import load
from ups.config import Parameters
from ups.data.published import find_file
from ups.files import read_json
from ups.hooks import check_parameters

PROJECT = Path(__file__).parents[1]
TWO_FAMILIES = {"source": "folder", "raw_root": "files"}
ELEVEN = {find_file(name).family: name for name in load("pdebench")["download"]["files"]}
TWO = {family: ELEVEN[family] for family in ("burgers_1d", "darcy_2d")}
MODEL = {"hidden_channels": [16, 16, 16], "num_layers": 3, "modes": [4, 4, 4]}
STEPS = {"batch_tokens": 2048, "warmup_steps": 1}


@pytest.mark.parametrize("data", [{}, TWO_FAMILIES], ids=["eleven", "two"])
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_one_parameter_is_the_number_of_gpus(num_processes: int, data: dict[str, Any]):
    """Every combination is a valid configuration, in which each process has whole snapshots of every batch."""
    parameters = load("pdebench", launch={"num_processes": num_processes}, **data)
    check_parameters(parameters)
    typed = Parameters.model_validate({name: value for name, value in parameters.items() if name[0] != "_"})
    assert (typed.launch.world_size, typed.launch.compile) == (num_processes, True)
    stages = (typed.codec, typed.operator, typed.diffusion, typed.consistency, typed.steady, typed.baselines.recipe)
    assert [stage.batch_multiple % num_processes for stage in stages] == [0] * 6


def test_the_listed_files_are_those_of_eleven_families():
    """`--env pdebench` names published files alone, of each family at least one."""
    assert len(ELEVEN) == 11


def test_every_family_has_a_tolerance_of_its_latents():
    """That of the default run, where it is at most 0.0001: larger networks err less."""
    found, of_default_run = load("pdebench")["latents"]["tolerance"], load("base")["compression"]["variants"]
    (of_default_run,) = (variant["latents"] for variant in of_default_run if variant["name"] == "by_family")
    assert of_default_run.keys() == {"default", *ELEVEN}
    for family in ELEVEN:
        assert found.get(family, found["default"]) == min(of_default_run[family], 0.0001), family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "num_processes", "steps"),
    [(TWO, 1, 4), (TWO, 2, 4), (ELEVEN, 2, 4), (TWO, 4, 1), (TWO, 8, 1)],
    ids=lambda value: len(value) if isinstance(value, dict) else value,
)
def test_families_are_trained_with_the_parameters_for_gpus(
    files: dict[str, str], num_processes: int, steps: int, tmp_path: Path
):
    """A folder with files of two or eleven families is trained on, here by CPU processes."""
    (tmp_path / "raw").mkdir()
    for family, name in files.items():
        write_file(tmp_path / "raw", family, name, count=8)
    places = {"source": "folder", "raw_root": str(tmp_path / "raw"), "data_root": str(tmp_path / "data")}
    few = STEPS | {"steps": steps, "validate_every": steps}
    stages = {"codec": few, "operator": few | {"model": MODEL}, "steady": few | {"model": MODEL}}
    launch = {"num_processes": num_processes, "device": "cpu", "compile": False, "threads_per_process": 1}
    run = {"env": "pdebench", "to_nodes": "train_operator,train_steady", "params": places | stages | {"launch": launch}}
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"run": run}))
    command = [sys.executable, "-m", "kedro", "run", "--config", str(tmp_path / "run.yml")]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for stage in ("operator", "steady"):
        receipt = read_json(tmp_path / "data" / "06_models" / f"{stage}.json")
        assert read_json(tmp_path / "data" / receipt["path"] / "run.json")["launch"]["num_processes"] == num_processes
