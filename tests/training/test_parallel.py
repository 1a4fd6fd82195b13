import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ups.training.parallel import clip_gradients, full_state

PROJECT = Path(__file__).parents[2]
SECONDS = 90
SHARDINGS = ("ddp", "fsdp")

StepResult = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> StepResult:
    """`outcome(world_size, check)` is what the check returned on each rank; one that failed ends all ranks."""
    results: dict[int, list[dict[str, Any]]] = {}

    def of(world_size: int, check: str) -> list[Any]:
        if world_size not in results:
            results[world_size] = _run(world_size, tmp_path_factory.mktemp("ranks"))
        missing = [rank for rank, result in enumerate(results[world_size]) if check not in result]
        assert not missing, f"ranks {missing} ended at or before {check!r}: their tracebacks are among the output"
        return [result[check] for result in results[world_size]]

    return of


def _run(world_size: int, folder: Path) -> list[dict[str, Any]]:
    """All checks on `world_size` processes, killed when they take too long."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    commands = [
        [sys.executable, "-m", "tests.training.parallel_checks", str(rank), str(world_size), str(folder)]
        for rank in range(world_size)
    ]
    processes = [subprocess.Popen(command, env=environment, cwd=PROJECT) for command in commands]
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def small(gaps: list[Any]) -> bool:
    """Whether the gap is below 1e-5 on every rank."""
    return all(isinstance(gap, float) and gap < 1e-5 for gap in gaps)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["gradients", "accumulated"])
def test_ranks_compute_the_gradients_of_one_process(outcome: StepResult, world_size: int, sharding: str, kind: str):
    """However samples are spread over ranks and micro-batches, gradients are those of the whole batch."""
    gaps = outcome(world_size, f"{kind} {sharding}")
    assert small(gaps), gaps


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", ["target from student", "unrolled", "compiled"])
def test_a_second_forward_pass_or_compiled_blocks_change_nothing(outcome: StepResult, sharding: str, kind: str):
    """Gradients are the same with a pass without gradients in between, when unrolled, or when blocks are compiled."""
    gaps = outcome(2, f"{kind} {sharding}")
    assert small(gaps), gaps


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exchange_in_bfloat16_rounds_gradients(outcome: StepResult, world_size: int):
    """The largest relative error is that of 8 significant bits: neither none nor that of a wrong sum."""
    gaps = outcome(world_size, "bfloat16")
    assert all(2**-12 < gap < 2**-7 for gap in gaps), gaps


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_sees_all_shards(outcome: StepResult, world_size: int, sharding: str):
    """The norm is that of the whole gradient, and so is the norm that clipping leaves."""
    gaps = outcome(world_size, f"norm {sharding}")
    assert small(gaps), gaps


@pytest.mark.parametrize("check", ["given up", "forward failed", "early forward failed", "early backward failed"])
def test_replicas_survive_a_step_that_is_given_up(outcome: StepResult, check: str):
    """Training goes on when one rank fails before gradients are exchanged and all give up the step."""
    gaps = outcome(3, f"{check} ddp")
    assert small(gaps), gaps


@pytest.mark.parametrize("check", ["given up", "forward failed", "early backward given up"])
def test_shards_survive_a_step_that_all_give_up(outcome: StepResult, check: str):
    """Nothing of a step that every rank gives up at the same place is left in the shards."""
    gaps = outcome(3, f"{check} fsdp")
    assert small(gaps), gaps


@pytest.mark.parametrize(
    "check",
    ["one to ddp", "ddp to fsdp", "fsdp to one", "one to fsdp", "ddp to fsdp-offload", "fsdp-offload to one"],
)
def test_state_moves_between_shardings(outcome: StepResult, check: str):
    """Model, average and optimizer continue on another number of ranks and with the other sharding."""
    gaps = outcome(2, check)
    assert small(gaps), gaps


def test_resume_is_exact(outcome: StepResult):
    """A model repeats the steps after a saved state bit by bit, also where the order of sums matters."""
    assert outcome(3, "resumes") == [True] * 3


@pytest.mark.parametrize(
    ("check", "name"), [("altered", "mixer.trunks.0.blocks.1.mlp.first.bias"), ("bypassed", "mixer.stem.weights.1")]
)
def test_every_rank_notices_unsynchronised_gradients(outcome: StepResult, check: str, name: str):
    """One bit on one rank, or a backward pass without an exchange, is told by all ranks in the same words."""
    complaints = outcome(3, check)
    assert len(set(complaints)) == 1
    assert complaints[0].startswith(f"ranks 0 and 1 have different gradients of {name}: ")


def test_full_state_is_a_copy():
    """What was saved does not change when training goes on."""
    model = nn.Linear(2, 2)
    state = full_state(model)
    nn.init.zeros_(model.weight)
    assert state["weight"].abs().sum() > 0


def test_small_gradients_are_not_clipped():
    """A gradient (3, 4) has norm 5, is left alone by a limit of 6 and halved by 2.5."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], max_norm=6.0) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip_gradients([parameter], max_norm=2.5)
    assert torch.allclose(parameter.grad, torch.tensor([1.5, 2.0]))


def test_ranks_are_checked_before_a_training(outcome: StepResult):
    """Every rank knows the speed of all and of their sums; a rank on which a sum is wrong is named on all."""
    assert outcome(3, "rates") == [3, 3, 3]
    assert all(rate > 0 for rate in outcome(3, "bandwidths"))
    assert outcome(3, "wrong sum") == ["a sum of 4096 bytes over 3 ranks is wrong on rank 2"] * 3
