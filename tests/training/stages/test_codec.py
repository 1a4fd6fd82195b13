"""The training of the codec: the same bases however much memory there is, and however many processes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.jobs import section, train
from ups.config.training import CodecModel
from ups.errors import ConfigFault
from ups.files import read_json
from ups.models.weights import load
from ups.runs.run import Run
from ups.training.batches import micro_batch_size
from ups.training.stages import codec

ALONE = {"num_processes": 1, "device": "cpu"}
SHARDED = {"num_processes": 2, "sharding": "fsdp"}


@pytest.mark.parametrize("launch", [{"memory_gigabytes": 1e-5}, SHARDED | {"memory_gigabytes": 1e-4}])
def test_bases_do_not_depend_on_memory_and_processes(root: Path, launch: dict[str, Any]):
    """With memory for single samples, and sharded over two processes, the bases are the same up to rounding."""
    expected = load(train(root, "codec", launch=ALONE) / "weights.pt")["weights"]
    folder = train(root, "codec", launch=ALONE | launch | {"force": True})
    found = load(folder / "weights.pt")["weights"]
    assert read_json(folder / "started.json")["memory_gigabytes"] == launch["memory_gigabytes"]
    assert expected.keys() == found.keys() and len(found) == 4
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in expected.items())


STEP = """
import json, sys, torch
from pathlib import Path
from ups.models.codec import Codec, FieldGroup
def private(key):
    status = Path("/proc/self/status").read_text()
    return int(status.split(key + ":")[1].split()[0]) * 1024
torch.set_num_threads(1)
group = FieldGroup((96,) * 3, 8, 64, (False,) * 5, (0.0,) * 5, (1.0,) * 5)
codec, u = Codec({"flow/fields": group}), torch.ones(1, 5, 96, 96, 96)
before = private("VmRSS") - u.nbytes
patches, patches_pred = codec(u, "flow/fields", torch.tensor([30]))
(patches_pred - patches).square().mean((0, 2, 3)).sum().backward()
print(json.dumps((private("VmHWM") - before) / u.nbytes))
"""


def test_a_step_needs_less_memory_than_estimated():
    """Forward and backward pass of a 3D snapshot, with parameters and libraries, need less than the estimate."""
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < codec.COPIES


def test_a_sample_is_estimated_to_need_twelve_times_its_size(root: Path):
    """The estimate counts fields and points in float32, the reading included; half of the memory is for it."""
    run = Run.read(train(root, "codec", launch=ALONE))
    stage = codec.build(section("codec"), run)
    assert stage.sample_bytes["darcy_2d/fields"] == 12 * 4 * 16 * 16
    assert stage.sample_bytes["advection_1d/fields"] == 12 * 4 * 16
    gigabytes = 2 * 5.5 * stage.sample_bytes["darcy_2d/fields"] / 1e9
    run = replace(run, launch=run.launch.model_copy(update={"memory_gigabytes": gigabytes}))
    assert micro_batch_size(stage, "darcy_2d/fields", run) == 5


def waves(tolerance: float) -> CodecModel:
    """Options for patches of 1 to 16 points in one dimension."""
    return CodecModel(patch_size=(1, 1, 1), max_tokens=(64, 64, 64), components=16, tolerance=tolerance)


@pytest.mark.parametrize("tolerance", [0.3, 0.1, 0.03])
def test_chosen_sizes_have_the_fewest_latents_that_keep_the_tolerance(root: Path, tolerance: float):
    """No patch keeps the tolerance with fewer latents, one component less misses it, and coefficients share a patch."""
    run = Run.read(train(root, "codec", launch=ALONE))
    assert run.raw is not None
    found = codec.measure_rates(waves(tolerance), run.inputs["datasets"], run.inputs["normalization"], run.raw)
    curves, chosen = found["errors"]["advection_1d/fields"], found["chosen"]["advection_1d/fields"]
    needed = {int(patch): sum(error > tolerance for error in curve) for patch, curve in curves.items()}
    assert chosen["components"] == needed[chosen["patch"]] <= chosen["patch"]
    assert chosen["components"] / chosen["patch"] == min(k / patch for patch, k in needed.items())
    assert found["chosen"]["darcy_2d/fields"]["patch"] == found["chosen"]["darcy_2d/coefficients"]["patch"]


def test_a_tolerance_out_of_reach_is_refused(root: Path):
    """Where even the largest number of components misses the tolerance the family is named, and what to change."""
    run = Run.read(train(root, "codec", launch=ALONE))
    assert run.raw is not None
    model = waves(1e-3).model_copy(update={"patch_size": (4, 4, 4), "components": 1})
    with pytest.raises(ConfigFault, match=r"advection_1d/fields.*raise it or codec.model.components"):
        codec.measure_rates(model, run.inputs["datasets"], run.inputs["normalization"], run.raw)
