"""Going on with one family."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.jobs import SIZES, assert_same_training, launched, lines_of, noisy, section
from tests.untrained import make_root, receipt
from ups.config import OperatorConfig
from ups.data.samples import LatentSamples
from ups.data.simulate import simulate
from ups.errors import ConfigFault
from ups.files import WEIGHTS, read_json
from ups.models.weights import load, load_weights
from ups.pipelines.studies import train_finetune
from ups.runs.run import Run
from ups.training import loop
from ups.training.distributed import Draw, Ranks
from ups.training.stage import Stage
from ups.training.stages import finetune, operator

CPU = torch.device("cpu")
FAMILY = "advection_1d"
FILES = [
    (FAMILY, {"beta": 0.1}, "1D_Advection_Sols_beta0.1.hdf5"),
    (FAMILY, {"beta": 0.4}, "1D_Advection_Sols_beta0.4.hdf5"),
    ("burgers_1d", {"nu": 0.1}, "1D_Burgers_Sols_Nu0.1.hdf5"),
    ("darcy_2d", {"beta": 1.0}, "2D_DarcyFlow_beta1.0_Train.hdf5"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with an operator of two transient families, one of which has two datasets, and a steady one."""
    root = tmp_path_factory.mktemp("finetune")
    (root / "01_raw").mkdir()
    for family, parameters, name in FILES:
        sizes = SIZES | {"num_snapshots": 1 if family == "darcy_2d" else SIZES["num_snapshots"], "seed": 0}
        simulate(root / "01_raw" / name, family=family, parameters=parameters, **sizes)
    return make_root(root, ("operator",))


def run_of(root: Path, folder: Path) -> Run:
    """A run that goes on from the operator of `root`."""
    inputs = {name: receipt(root, name) for name in ("latent_cache", "operator")}
    return Run(folder, "finetune", "", {}, inputs, launched(checkpoint_steps=1000), "cpu", root)


@pytest.fixture
def stage(root: Path, tmp_path: Path) -> Stage:
    """The stage that goes on."""
    return finetune.build(section("finetune"), run_of(root, tmp_path))


def test_it_starts_where_the_operator_ended(root: Path, stage: Stage):
    """Every weight and statistic is that of the trained operator, and can be trained."""
    expected = load_weights(root, receipt(root, "operator"))
    state = stage.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert all(parameter.requires_grad for parameter in stage.model.parameters())


def test_it_sees_one_family(root: Path, stage: Stage):
    """Samples are those of the family's datasets, in the same order as for the operator, of both splits."""
    whole = operator.build(section("operator"), run_of(root, Path()))
    for mine, all_of_them in ((stage.train, whole.train), (stage.valid, whole.valid)):
        assert isinstance(mine, LatentSamples)
        assert mine.num_samples == {FAMILY: all_of_them.num_samples[FAMILY]}
        found = [mine.find(FAMILY, sample) for sample in range(mine.num_samples[FAMILY])]
        assert found == [all_of_them.find(FAMILY, sample) for sample in range(len(found))]
    assert len({mine.dataset(FAMILY, sample) for sample in range(len(found))}) == 2
    assert stage.num_tokens == {FAMILY: whole.num_tokens[FAMILY]} == stage.train.num_tokens


def test_its_loss_is_that_of_the_operator(root: Path, stage: Stage):
    """The section that the operator was trained with decides on the loss, noise included."""
    config = section("operator")
    whole = operator.build(config, run_of(root, Path()))
    batch = whole.train.load(FAMILY, torch.arange(6).numpy())
    expected = whole.loss(stage.model, batch, draw())
    assert torch.equal(stage.loss(stage.model, batch, draw()), expected)
    without_noise = operator.build(section("operator", noise=noisy(0.0)), run_of(root, Path()))
    assert not torch.equal(without_noise.loss(stage.model, batch, draw()), expected)


def test_its_schedules_are_those_of_its_own_steps(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The section of the operator with the number of steps that this stage has."""
    sections = []

    def build(config: OperatorConfig, run: Run) -> Stage:
        sections.append(config)
        return operator.build(config, run)

    monkeypatch.setattr(finetune, "build_operator", build)
    finetune.build(section("finetune", steps=7), run_of(root, tmp_path))
    assert sections == [section("operator", steps=7)]


def draw() -> Draw:
    """The random numbers of one step for six samples."""
    return Draw((0, 2, 5), 6, slice(0, 6), CPU, 5)


def test_it_learns_its_family(root: Path, tmp_path: Path):
    """Some steps from the operator's weights lower the loss on the family, and leave the operator's file alone."""
    before = load_weights(root, receipt(root, "operator"))
    config = section("finetune", steps=60, learning_rate=0.01, validate_every=30, log_every=10, warmup_steps=0)
    run = run_of(root, tmp_path)
    stage = finetune.build(config, run)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = loop.validate(stage, stage.model, config, run, Ranks(0, 1, CPU))[FAMILY]
    loop.train(stage, config, run, Ranks(0, 1, CPU))
    torch.set_num_threads(num_threads)
    lines = [line for line in lines_of(tmp_path) if "valid_loss" in line]
    assert lines[-1]["valid_loss"] < 0.8 * start
    assert lines[-1]["valid_loss"] == lines[-1][f"valid_loss/{FAMILY}"]
    after = load(tmp_path / WEIGHTS)["weights"]
    unchanged = load_weights(root, receipt(root, "operator"))
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(unchanged[name], before[name]) for name in before)


@pytest.mark.parametrize("family", [None, "darcy_2d", "compressible_ns_1d"])
def test_other_families_are_refused(root: Path, family: str | None):
    """No family, a steady one, or one that is not in the latent cache: one line with those that there are."""
    config = section("finetune", family=family)
    with pytest.raises(ConfigFault, match=f"finetune.family = {family}: .* advection_1d, burgers_1d$"):
        train_finetune(receipt(root, "latent_cache"), receipt(root, "operator"), config, launched(), root)
    assert not (root / "06_models/finetune").exists()


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(root: Path, tmp_path: Path, inject: Callable[[str], None]):
    """A job that loses its process goes on from its checkpoint, and ends as one that did not."""
    config, inputs = section("finetune"), run_of(root, tmp_path).inputs
    copies = [shutil.copytree(root, tmp_path / name) for name in ("undisturbed", "killed")]
    folders = []
    for copy in copies:
        if copy.name == "killed":
            inject("sigkill:rank0:step10")
        folders.append(copy / train_finetune(*inputs.values(), config, launched(num_processes=1), copy)["path"])
    assert_same_training(folders[1], folders[0])
    assert len(read_json(folders[1] / "status.json")["restarts"]) == 1
