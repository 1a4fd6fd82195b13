import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from ups.config import OperatorConfig, Parameters
from ups.errors import OutOfMemory
from ups.files import read_json
from ups.performance.tune import free_memory_bytes, memory_limit, tune
from ups.pipelines.performance import tune_diffusion, tune_operator, tune_steady
from ups.runs.launcher import train_stage
from ups.runs.run import Run
from ups.training.distributed import Ranks
from ups.training.stages import operator
from ups.training.update import is_out_of_memory

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MEBIBYTE = 2**20


def test_an_allocation_above_the_limit_fails_as_one_without_memory():
    """Below the limit there is memory, above it the error is that of a machine without, and after it all is well."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit(300 * MEBIBYTE, CPU):
        torch.ones(50 * MEBIBYTE // 4)
        with pytest.raises(RuntimeError) as caught:
            torch.ones(400 * MEBIBYTE // 4)
    assert is_out_of_memory(caught.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.ones(400 * MEBIBYTE // 4)


def test_free_memory_is_below_that_of_the_machine():
    """What is free is more than nothing and less than all."""
    assert 0 < free_memory_bytes(CPU) < psutil.virtual_memory().total


@pytest.fixture
def root(latents: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A data root of the test's own with latents."""
    return shutil.copytree(latents[0], tmp_path / "root", ignore=shutil.ignore_patterns("operator"))


def _operator(parameters: Parameters) -> OperatorConfig:
    """Large batches for a model that is small: memory goes into activations."""
    model = parameters.operator.model.model_copy(update={"hidden_channels": (64,) * 3, "num_layers": 4})
    sizes = {"steps": 3, "log_every": 1, "validate_every": 3, "batch_tokens": 8192, "learning_rate": 1e-4}
    return parameters.operator.model_copy(update=sizes | {"model": model})


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_two_ranks_agree_on_a_micro_batch_that_the_next_run_takes(
    latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters
):
    """With little memory less than the whole share fits; the next run takes that, and learns the same."""
    cache, config = latents[1]["latent_cache"], _operator(parameters)
    launch = parameters.launch.model_copy(update={"num_processes": 2})
    little = 2 * 60 * MEBIBYTE / free_memory_bytes(CPU)
    found = tune_operator(config, launch.model_copy(update={"memory_fraction": little}), root, latent_cache=cache)
    assert 0 < found["tokens"] < found["whole"]
    assert read_json(root / "06_models/tuning.json") == {"operator on 2 x cpu, ddp": found["tokens"]}
    losses = {}
    for name, tuned in (("tuned", True), ("whole", False)):
        if not tuned:
            (root / "06_models/tuning.json").unlink()
        receipt = train_stage(
            "operator", config, {"latent_cache": cache}, launch.model_copy(update={"force": True}), root
        )
        folder = root / receipt["path"]
        used = read_json(folder / "run.json")["launch"]["micro_batch_tokens"]
        assert used == (found["tokens"] if tuned else None)
        losses[name] = _losses(folder)
    assert len(losses["tuned"]) == 3
    np.testing.assert_allclose(losses["tuned"], losses["whole"], rtol=1e-4)


def test_nothing_fits_into_nothing(latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters):
    """Where not even one snapshot fits, the fault says what to change."""
    config = _operator(parameters)
    large = config.model_copy(
        update={"model": config.model.model_copy(update={"hidden_channels": (512,) * 3, "modes": (16, 16, 16)})}
    )
    launch = parameters.launch.model_copy(update={"memory_fraction": 20 * MEBIBYTE / free_memory_bytes(CPU)})
    inputs = {"latent_cache": latents[1]["latent_cache"]}
    run = Run(root, "operator", "tuning", large.model_dump(), inputs, launch, "cpu", root)
    with pytest.raises(OutOfMemory, match="not even one snapshot .* launch.memory_fraction"):
        tune(operator.build(large, run), large, run, Ranks(0, 1, CPU))


def test_stages_without_inputs_are_left_out(latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters):
    """A stage whose inputs are not there yet is not tuned, and says so."""
    launch, cache = parameters.launch, latents[1]["latent_cache"]
    found = tune_diffusion(parameters.diffusion, launch, root, latent_cache=cache, operator=None)
    assert found == {"stage": "diffusion", "untuned": "there is no operator yet"}
    assert tune_steady(parameters.steady, launch, root, latent_cache=cache)["untuned"] == "there is no steady dataset"
