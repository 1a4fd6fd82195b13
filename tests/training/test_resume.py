"""Exact resume: whatever step a job of any stage is killed in, on 1, 2 or 3 ranks, it ends as if undisturbed."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import INPUTS, SECONDS_PER_JOB, assert_same_training, at_most, status_of, train

pytestmark = pytest.mark.slow

# `make faults` and `make proof` kill fewer times, to end sooner.
STEPS, NUM_KILLS = 24, int(os.environ.get("UPS_KILLS", "10"))


@pytest.fixture(scope="module")
def trained(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Path]]:
    """`trained(stage, n)`: a data root with what the stage needs, and its run folder on n ranks, undisturbed."""
    ready = shutil.copytree(encoded, tmp_path_factory.mktemp("ready") / "root")
    for stage in ("operator", "steady", "diffusion"):
        train(ready, stage)
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


@pytest.mark.parametrize("stage", INPUTS)
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_stage_killed_again_and_again_ends_as_if_undisturbed(
    trained, tmp_path: Path, inject: Callable[[str], None], stage: str, num_processes: int
):
    """Killed in random steps, each time on a random rank: every loss in every digit, every weight in every bit."""
    ready, expected = trained(stage, num_processes)
    root = without(ready, stage, tmp_path / "root")
    rng = random.Random(f"{stage} {num_processes}")
    steps = sorted(rng.sample(range(STEPS), NUM_KILLS))
    inject(",".join(f"sigkill:rank{rng.randrange(num_processes)}:step{step}" for step in steps))
    with at_most((NUM_KILLS + 1) * SECONDS_PER_JOB):
        folder = train(root, stage, {"num_processes": num_processes, "restarts": NUM_KILLS})
    assert_same_training(folder, expected)
    assert len(status_of(root, stage)["restarts"]) == NUM_KILLS
