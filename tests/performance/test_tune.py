import json
import re
import resource
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.training.jobs import section
from tests.training.toys import ranks, toy_run, toy_stage
from ups.config import OperatorConfig, Parameters
from ups.errors import OutOfMemory
from ups.files import read_json
from ups.performance import tune as worker
from ups.performance.tune import memory_limit, tune
from ups.pipelines import performance
from ups.pipelines.performance import tune_diffusion, tune_operator, tune_steady
from ups.runs import processes
from ups.runs.launcher import train_stage
from ups.runs.machine import with_tuned_micro_batch
from ups.runs.processes import free_memory_bytes, is_out_of_memory
from ups.runs.run import RESULT

CPU = torch.device("cpu")
MEBIBYTE = 2**20


@pytest.mark.slow
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


@pytest.mark.parametrize(("num_processes", "shares"), [(1, 1), (4, 4)])
def test_processes_of_a_machine_share_its_memory(
    num_processes: int, shares: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half of 1000 MiB may be used, by each of four processes an eighth; all of the batch fits there."""
    monkeypatch.setattr(processes, "free_memory_bytes", lambda device: 1000 * MEBIBYTE)
    monkeypatch.setattr(worker, "memory_limit", lambda num_bytes, device: nullcontext())
    tune(toy_stage(), section(), toy_run(tmp_path, num_processes=num_processes, memory_fraction=0.5), ranks())
    result = read_json(tmp_path / RESULT)
    assert result["limit_bytes"] == 500 * MEBIBYTE // shares
    assert result["tokens"] is None and result["whole"] > 0


@pytest.mark.parametrize(("tokens", "remembered"), [(None, 640), (128, 128)])
def test_a_share_that_fits_as_a_whole_is_remembered(
    tokens: int | None, remembered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: Parameters
):
    """The next training takes what was found, the whole share too, instead of an estimate."""
    monkeypatch.setattr(performance, "run_query", lambda *_: {"tokens": tokens, "whole": 640})
    launch = parameters.launch.model_copy(update={"device": "cpu"})
    tune_operator(parameters.operator, launch, tmp_path, latent_cache={"transient": ["advection_1d"]})
    config = parameters.operator.model_dump(mode="json")
    assert with_tuned_micro_batch(launch, "operator", config, "cpu", tmp_path).micro_batch_tokens == remembered


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


@pytest.mark.slow
def test_two_ranks_agree_on_a_micro_batch_that_the_next_run_takes(
    latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters
):
    """With little memory less than the whole share fits; the next run takes that, and learns the same."""
    cache, config = latents[1]["latent_cache"], _operator(parameters)
    launch = parameters.launch.model_copy(update={"num_processes": 2})
    little = 2 * 60 * MEBIBYTE / free_memory_bytes(CPU)
    found = tune_operator(config, launch.model_copy(update={"memory_fraction": little}), root, latent_cache=cache)
    assert 0 < found["tokens"] < found["whole"]
    ((place, tokens),) = read_json(root / "06_models/tuning.json").items()
    assert re.fullmatch(r"operator on 2 x cpu, ddp, [0-9a-f]{8}", place) and tokens == found["tokens"]
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


@pytest.mark.slow
def test_nothing_fits_into_nothing(latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters):
    """Where not even one snapshot fits, the fault says what to change."""
    config = _operator(parameters)
    large = config.model_copy(
        update={"model": config.model.model_copy(update={"hidden_channels": (512,) * 3, "modes": (16, 16, 16)})}
    )
    launch = parameters.launch.model_copy(update={"memory_fraction": 20 * MEBIBYTE / free_memory_bytes(CPU)})
    with pytest.raises(OutOfMemory, match="not even one snapshot .* launch.memory_gigabytes"):
        tune_operator(large, launch, root, latent_cache=latents[1]["latent_cache"])


@pytest.mark.slow
def test_stages_without_inputs_are_left_out(latents: tuple[Path, dict[str, Any]], root: Path, parameters: Parameters):
    """A stage whose inputs are not there yet is not tuned, and says so."""
    launch, cache = parameters.launch, latents[1]["latent_cache"]
    found = tune_diffusion(parameters.diffusion, launch, root, latent_cache=cache, operator=None)
    assert found == {"stage": "diffusion", "untuned": "there is no operator yet"}
    assert tune_steady(parameters.steady, launch, root, latent_cache=cache)["untuned"] == "there is no steady dataset"
