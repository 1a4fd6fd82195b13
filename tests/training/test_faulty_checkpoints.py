"""What a job goes on from when its checkpoints are damaged, half written, or those of another number of ranks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.jobs import (
    SECONDS_PER_JOB,
    assert_same_training,
    at_most,
    folder_of,
    lines_of,
    status_of,
    train,
)
from ups.errors import DataFault, LostWorker
from ups.files import read_json

pytestmark = pytest.mark.faults

ALONE = {"num_processes": 1}
POINTS = ("kill-before-write", "kill-before-rename", "kill-after-rename", "kill-before-purge")
Undisturbed = Callable[[int], Path]
Inject = Callable[[str], None]


def stop(root: Path, num_processes: int) -> Path:
    """Train until rank 0 is killed in step 10, with the states of steps 4 and 8 saved; returns their folder."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LostWorker):
        patch.setenv("UPS_TESTING", "1")
        patch.setenv("UPS_FAULT", "slow:rank0:step9,sigkill:rank0:step10")
        train(root, launch={"num_processes": num_processes, "restarts": 0})
    return folder_of(root) / "checkpoints"


@pytest.fixture(scope="module")
def stopped(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`stopped(n)` is a data root in which a job on n ranks was killed."""
    roots: dict[int, Path] = {}

    def of(num_processes: int) -> Path:
        if num_processes not in roots:
            root = shutil.copytree(encoded, tmp_path_factory.mktemp("stopped") / "root")
            stop(root, num_processes)
            roots[num_processes] = root
        return roots[num_processes]

    return of


def copy_of(source: Path, root: Path) -> Path:
    """Put the stopped job into the data root of the test; returns its checkpoints."""
    shutil.copytree(source / "06_models/operator", root / "06_models/operator")
    return folder_of(root) / "checkpoints"


def flip(path: Path) -> None:
    """Alter twenty bytes."""
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), len(content) // 20 + 1):
        content[place] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "missing": Path.unlink,
    "torn manifest": lambda path: os.truncate(path.with_name(f"{path.name}.json"), 30),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint(root: Path, stopped, undisturbed: Undisturbed, damage: Callable[[Path], None]):
    """R24: the one before the damaged checkpoint is used, and the status names the one that was refused."""
    damage(copy_of(stopped(1), root) / "step_00000008.pt")
    assert_same_training(train(root, launch=ALONE), undisturbed(1))
    status = status_of(root)
    assert status["resumed_at_step"] == 4
    (refused,) = status["refused_checkpoints"]
    assert "step_00000008.pt" in refused


def test_a_checkpoint_without_manifest(root: Path, stopped, undisturbed: Undisturbed):
    """R24: a state without manifest was never committed; the one before is used."""
    (copy_of(stopped(1), root) / "step_00000008.pt.json").unlink()
    assert_same_training(train(root, launch=ALONE), undisturbed(1))
    assert status_of(root)["resumed_at_step"] == 4


def test_all_checkpoints_damaged(root: Path, stopped):
    """R24: where none is intact the job ends with code 3, says so and touches nothing."""
    folder = copy_of(stopped(1), root)
    for path in folder.glob("*.pt"):
        flip(path)
    with pytest.raises(DataFault, match="no checkpoint in .* is intact; delete the folder to start anew"):
        train(root, launch=ALONE)
    assert status_of(root)["code"] == 3 and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("point", POINTS)
def test_killed_while_saving(root: Path, undisturbed: Undisturbed, inject: Inject, point: str):
    """R25: whatever point of a save a kill strikes at, the job goes on from the last committed state."""
    inject(f"{point}:rank0:step8")
    with at_most(SECONDS_PER_JOB):
        folder = train(root, launch=ALONE | {"keep_checkpoints": 1})
    assert_same_training(folder, undisturbed(1))
    assert status_of(root)["resumed_at_step"] == (8 if point == "kill-before-purge" else 4)


@pytest.mark.parametrize(
    "launch",
    [{"micro_batch_tokens": 40}, {"sharding": "fsdp"}, {"activation_checkpointing": True}],
    ids=["accumulation", "fsdp", "recomputation"],
)
def test_resume_with_other_engines(root: Path, encoded: Path, tmp_path: Path, inject: Inject, launch: dict):
    """R26: with accumulation, shards or recomputation a killed job ends as an undisturbed one, bit for bit."""
    expected = train(shutil.copytree(encoded, tmp_path / "expected"), launch=launch)
    inject("sigkill:rank1:step10")
    assert_same_training(train(root, launch=launch), expected)
    assert len(status_of(root)["restarts"]) == 1


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks(root: Path, stopped, undisturbed: Undisturbed, before: int, after: int):
    """R27: on other ranks the job goes on with a warning, the same samples and, up to rounding, the same losses."""
    copy_of(stopped(before), root)
    with at_most(SECONDS_PER_JOB):
        folder, expected = train(root, launch={"num_processes": after}), undisturbed(before)
    assert f"resumed on {after} processes instead of {before}: not bit for bit" in (folder / "train.log").read_text()
    found, wanted = ([line["loss"] for line in lines_of(place) if "loss" in line] for place in (folder, expected))
    assert found == pytest.approx(wanted, rel=1e-3)
    assert samples(folder) == samples(expected)


def samples(folder: Path) -> dict[str, int]:
    """How often each dataset was sampled, by all ranks together."""
    ranks = read_json(folder / "sampling.json")["samples_per_rank"]
    return {name: sum(rank.get(name, 0) for rank in ranks) for name in sorted(set().union(*ranks))}
