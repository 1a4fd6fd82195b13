"""Latents to train on and undisturbed runs to compare with, made once."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.jobs import SECONDS_PER_JOB, assert_nothing_left, at_most, prepare, train
from tests.untrained import make_root, receipt
from ups.data.families import Dataset
from ups.data.simulate import simulate
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import Trained
from ups.training.examples import Trajectories, read_trajectories


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


FEW = [
    ("advection_1d", {"beta": 0.4}, "1D_Advection_Sols_beta0.4.hdf5"),
    ("compressible_ns_1d", {"eta": 0.1, "zeta": 0.1}, "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5"),
    ("darcy_2d", {"beta": 1.0}, "2D_DarcyFlow_beta1.0_Train.hdf5"),
]


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with operator and steady model of three families, with random weights."""
    root = tmp_path_factory.mktemp("untrained")
    (root / "01_raw").mkdir()
    for family, parameters, name in FEW:
        sizes = {"num_trajectories": 6, "resolution": 16, "num_snapshots": 5, "duration": 0.3, "seed": 0}
        sizes |= {"num_snapshots": 1} if family == "darcy_2d" else {}
        simulate(root / "01_raw" / name, family=family, parameters=parameters, **sizes)
    return make_root(root, ("operator", "steady"))


@pytest.fixture(scope="session")
def surrogate(untrained: Path) -> Surrogate:
    """Its models."""
    stages = {name: receipt(untrained, name) for name in ("codec", "operator", "steady")}
    return Trained(receipt(untrained, "latent_cache"), stages, untrained).surrogate("cpu")


@pytest.fixture(scope="session")
def trajectories(untrained: Path) -> dict[str, Trajectories]:
    """Four trajectories of each family."""
    described = map(Dataset.from_json, receipt(untrained, "datasets")["datasets"].values())
    return {each.family: read_trajectories(untrained / "01_raw", each, range(4), "cpu") for each in described}


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`inject(faults)` has the jobs of this test meet these faults."""

    def plan(faults: str) -> None:
        monkeypatch.setenv("UPS_TESTING", "1")
        monkeypatch.setenv("UPS_FAULT", faults)

    return plan
