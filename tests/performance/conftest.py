import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from ups.config import Parameters
from ups.files import read_json
from ups.settings import CONFIG_LOADER_ARGS

PROJECT = Path(__file__).parents[2]
SECONDS = 300


def kedro_run(data_root: Path, pipeline: str, *params: str) -> subprocess.CompletedProcess[str]:
    """`kedro run --env smoke` of one pipeline, below `data_root`."""
    given = ",".join([f"data_root={data_root}", "launch.device=cpu", *params])
    command = [sys.executable, "-m", "kedro", "run", "--env", "smoke", "--pipeline", pipeline, "--params", given]
    environment = os.environ | {"DO_NOT_TRACK": "true", "COLUMNS": "500"}
    completed = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


@pytest.fixture(scope="session")
def parameters() -> Parameters:
    """The parameters of `conf/smoke`, on the CPU."""
    loaded = OmegaConfigLoader(str(PROJECT / "conf"), env="smoke", **CONFIG_LOADER_ARGS)["parameters"]
    loaded["launch"] |= {"device": "cpu", "threads_per_process": 1}
    return Parameters.model_validate({name: value for name, value in loaded.items() if not name.startswith("_")})


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root in which the benchmark has run."""
    data_root = tmp_path_factory.mktemp("measured")
    kedro_run(data_root, "benchmark")
    return data_root


@pytest.fixture(scope="session")
def latents(measured: Path) -> tuple[Path, dict[str, Any]]:
    """A data root with raw files and latents, and their receipts: what the benchmark made for itself."""
    return measured / "benchmark", read_json(measured / "benchmark/data.json")
