"""Exact resume: whatever step a job of any stage is killed in, on 1, 2 or 3 ranks, it ends as if undisturbed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import INPUTS, SECONDS_PER_JOB, assert_same_training, at_most, status_of, train

pytestmark = pytest.mark.slow

STEPS = 24
KILLS = [(stage, n, step) for stage in INPUTS for n in (1, 2, 3) for step in random.Random(n).sample(range(STEPS), 10)]


@pytest.fixture(scope="module")
def trained(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Path]]:
    """`trained(stage, n)`: a data root with what the stage needs, and its run folder on n ranks, undisturbed."""
    ready = shutil.copytree(encoded, tmp_path_factory.mktemp("ready") / "root")
    for stage in ("operator", "diffusion"):
        train(ready, stage)
    for path in (*ready.glob("06_models/codec/*"), *ready.glob("06_models/consistency/*")):
        shutil.rmtree(path)
    folders: dict[tuple[str, int], Path] = {}

    def of(stage: str, num_processes: int) -> tuple[Path, Path]:
        if (stage, num_processes) not in folders:
            root = without(ready, stage, tmp_path_factory.mktemp("trained") / "root")
            folders[stage, num_processes] = train(root, stage, {"num_processes": num_processes})
        return ready, folders[stage, num_processes]

    return of


def without(ready: Path, stage: str, root: Path) -> Path:
    """A copy of a data root in which the stage has not been trained."""
    shutil.copytree(ready, root)
    shutil.rmtree(root / "06_models" / stage, ignore_errors=True)
    return root


@pytest.mark.parametrize(("stage", "num_processes", "step"), KILLS)
def test_a_killed_stage_ends_as_if_undisturbed(
    trained, tmp_path: Path, inject: Callable[[str], None], stage: str, num_processes: int, step: int
):
    """Losses are equal in every digit and weights in every bit; at most one save was still being written."""
    ready, expected = trained(stage, num_processes)
    root = without(ready, stage, tmp_path / "root")
    inject(f"sigkill:rank{step % num_processes}:step{step}")
    with at_most(2 * SECONDS_PER_JOB):
        folder = train(root, stage, {"num_processes": num_processes})
    assert_same_training(folder, expected)
    assert step - status_of(root, stage)["resumed_at_step"] <= 8
    assert len(status_of(root, stage)["restarts"]) == 1
