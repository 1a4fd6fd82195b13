"""Latents to train on and undisturbed runs to compare with, made once."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.jobs import SECONDS_PER_JOB, assert_nothing_left, at_most, prepare, train


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with the latents of three families; tests take copies."""
    root = tmp_path_factory.mktemp("encoded")
    with at_most(3 * SECONDS_PER_JOB):
        prepare(root)
    return root


@pytest.fixture
def root(encoded: Path, tmp_path: Path) -> Iterator[Path]:
    """A data root of the test's own, in which only the codec has been trained; no process or lock may be left there."""
    root = shutil.copytree(encoded, tmp_path / "root")
    with at_most(4 * SECONDS_PER_JOB):
        yield root
        assert_nothing_left(root)


@pytest.fixture(scope="session")
def undisturbed(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`undisturbed(n)` is the run folder of an operator trained on n processes without interruption."""
    folders: dict[int, Path] = {}

    def of(num_processes: int) -> Path:
        if num_processes not in folders:
            root = shutil.copytree(encoded, tmp_path_factory.mktemp("undisturbed") / "root")
            with at_most(SECONDS_PER_JOB), pytest.MonkeyPatch.context() as patch:
                patch.delenv("UPS_FAULT", raising=False)
                folders[num_processes] = train(root, launch={"num_processes": num_processes})
        return folders[num_processes]

    return of


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`inject(faults)` has the jobs of this test meet these faults."""

    def plan(faults: str) -> None:
        monkeypatch.setenv("UPS_TESTING", "1")
        monkeypatch.setenv("UPS_FAULT", faults)

    return plan
