"""The commands that predict and score files, from a shell."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.training.jobs import launched
from tests.untrained import make_loadable
from ups import commands
from ups.commands import main
from ups.config import PredictConfig
from ups.errors import ConfigFault
from ups.pipelines.deployment import predict

TRAINED = ("advection_1d", "darcy_2d")
KILLED = """
import os, sys
from ups import commands
from ups.commands import main
from ups.surrogate import files
files.BATCH_TOKENS = 1
complete = files.Output.complete
def die_after_two(output, done):
    complete(output, done)
    if done == 2 and sys.argv[-1] == "killed":
        os.kill(os.getpid(), 9)
files.Output.complete = die_after_two
main(sys.argv[1:-1])
"""
WITHOUT_TORCH = """
import sys
from ups.commands import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with models of random weights."""
    return make_loadable(tmp_path_factory.mktemp("root"), TRAINED, count=5)


@pytest.fixture(scope="module")
def source(root: Path) -> Path:
    """A file of five trajectories of advection."""
    return next((root / "01_raw").glob("1D_Advection*"))


def ups(*arguments: object) -> Result:
    """One command."""
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "line"),
    [
        (("--help",), 0, "predict"),
        (("predict", "--help"), 0, "--steps"),
        (("predict", "a.npz", "b.npz"), 2, "Missing option '--family'"),
        (("predict", "a.npz", "b.npz", "--family", "burgers_1d", "--nu", "x"), 2, "not a number"),
        (("score", "a.npz", "--dataset", "b.h5", "--seed", "x"), 2, "not a valid integer"),
    ],
)
def test_the_command_starts_without_torch(arguments: tuple[str, ...], exit_code: int, line: str):
    """`ups --help` and the checks of options import no torch."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert found.returncode == exit_code and line in found.stdout + found.stderr


def test_predict_and_score(root: Path, source: Path, tmp_path: Path):
    """A file in PDEBench's layout, predicted with a parameter of the command line, is scored against the truth."""
    with h5py.File(source) as file:
        num_steps = file["tensor"].shape[1] - 1
    asked = ("--family", "advection_1d", "--steps", num_steps, "--beta", -0.3)
    done = ups("predict", source, tmp_path / "p.hdf5", "--model", root, *asked)
    assert done.exit_code == 0, done.output
    with h5py.File(tmp_path / "p.hdf5") as file:
        assert file.attrs["beta"] == -0.3
    scored = ups("score", tmp_path / "p.hdf5", "--dataset", source, "--output", tmp_path / "scores.json")
    assert scored.exit_code == 0 and "nRMSE" in scored.output
    records = json.loads((tmp_path / "scores.json").read_text())["records"]
    assert {(r["method"], r["horizon"], r["num_trajectories"]) for r in records} == {("p", "rollout", 5)}


@pytest.mark.parametrize("beta", [("--beta", -0.3), ("--beta=-0.3",)])
def test_parameters_may_stand_before_the_files(root: Path, source: Path, tmp_path: Path, beta: tuple):
    """The usage line says options first: they are those of the command and the parameters of the PDE."""
    asked = ("--model", root, "--family", "advection_1d", *beta, "--steps", 3)
    done = ups("predict", *asked, source, tmp_path / "p.hdf5")
    assert done.exit_code == 0, done.output
    with h5py.File(tmp_path / "p.hdf5") as file:
        assert file.attrs["beta"] == -0.3


def test_a_killed_command_goes_on(root: Path, source: Path, tmp_path: Path):
    """After SIGKILL in the third batch the same command ends with the file of an undisturbed one."""
    asked = ("--model", root, "--family", "advection_1d", "--steps", 3)

    def run(name: str, how: str) -> int:
        command = [sys.executable, "-c", KILLED, "predict", source, tmp_path / name, *asked, how]
        return subprocess.run(list(map(str, command)), capture_output=True).returncode

    assert run("whole.h5", "whole") == 0
    assert run("killed.h5", "killed") == -9 and not (tmp_path / "killed.h5").exists()
    assert run("killed.h5", "again") == 0
    with h5py.File(tmp_path / "whole.h5") as whole, h5py.File(tmp_path / "killed.h5") as killed:
        assert np.array_equal(whole["tensor"], killed["tensor"])


def test_info_and_export(root: Path, tmp_path: Path):
    """A bundle has the families and the description of the data root."""
    assert ups("export", root, tmp_path / "bundle").exit_code == 0
    for option in (("--family", "advection_1d"), ("--dt", 0.25)):
        refused = ups("export", root, tmp_path / "some", *option)
        assert refused.exit_code == 2 and f"all families: leave out {option[0]}" in refused.output
        assert not (tmp_path / "some").exists()
    step = ("--format", "pt2", "--family", "advection_1d", "--dt")
    assert ups("export", root, tmp_path / "some", *step, 0.3).exit_code == 2
    assert ups("export", root, tmp_path / "some", *step, 0.5).exit_code == 0 and (tmp_path / "some").is_file()
    for arguments in ((), ("advection_1d",)):
        shown = ups("info", tmp_path / "bundle", *arguments)
        assert shown.exit_code == 0 and shown.output == ups("info", root, *arguments).output
    assert "transported quantity" in shown.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--family", "advektion_1d", "--steps", 3), "did you mean advection_1d?"),
        (("--family", "advection_1d", "--step", 3), "did you mean --steps?"),
        (("--family", "advection_1d", "--steps", "x"), "not a valid integer"),
        (("--family", "advection_1d", "--steps", 3, "--nu", 1), "has no parameter 'nu'"),
        (("--family", "advection_1d", "--steps", 3, "--beta", "x"), "not a number"),
        (("--family", "advection_1d", "--steps", 3, "--beta"), "not a number"),
        (("--family", "advection_1d", "--steps", 3, "more"), "unexpected extra argument (more)"),
        (("--family", "advection_1d", "--steps", 3, "--device", "foo"), "no device 'foo'"),
        (("--steps", 3), "Missing option '--family'"),
    ],
)
def test_wrong_options_end_in_one_line(root: Path, source: Path, tmp_path: Path, options: tuple, problem: str):
    """Exit code 2, one line with what is wrong, and nothing written."""
    ended = ups("predict", source, tmp_path / "out.npz", "--model", root, *options)
    assert ended.exit_code == 2 and problem in ended.output and ended.output.count("\n") == 1
    assert ended.output.startswith("FAULT 2 config: ") and not any(tmp_path.iterdir())


def test_parameters_may_resemble_options():
    """`--speed` is a parameter of a wave equation, and without such an equation a misspelt `--seed`."""
    commands._expect_parameters(["speed", "feed"], {"speed", "feed"})
    with pytest.raises(ConfigFault, match="there is no option --speed: did you mean --seed?"):
        commands._expect_parameters(["speed"], {"nu"})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("in.npz", b"no archive", "no zip archive"),
        ("in.npy", b"\x93NUMPY", "cannot be read"),
        ("in.h5", b"<!doctype html>", "not an HDF5 file"),
        ("in.nc", b"\x89HDF\r\n\x1a\n", "cannot be opened"),
        ("in.txt", b"", "unknown kind"),
        ("in.zarr", b"", "cannot be read"),
    ],
)
def test_wrong_files_end_in_one_line(root: Path, tmp_path: Path, name: str, content: bytes, problem: str):
    """A damaged file, or one of another kind, is named in one line."""
    (tmp_path / name).write_bytes(content)
    asked = ("--family", "advection_1d", "--steps", 3)
    ended = ups("predict", tmp_path / name, tmp_path / "out.npz", "--model", root, *asked)
    assert ended.exit_code in (2, 3) and problem in ended.output and ended.output.count("\n") == 1, ended.output


def test_the_pipeline_does_what_the_command_does(root: Path, source: Path, tmp_path: Path):
    """The node writes the same file, below the data root if no other place is named; without an input it refuses."""
    given = {"input": str(source), "family": "advection_1d", "start": 2, "steps": 3, "members": None, "seed": 0}
    config = PredictConfig(**given, dt=None, output=str(tmp_path / "node.npz"), parameters={"beta": 0.3})
    receipt = predict(config, launched(num_processes=1), root)
    asked = ("--family", "advection_1d", "--start", 2, "--steps", 3, "--beta", 0.3)
    ups("predict", source, tmp_path / "command.npz", "--model", root, *asked)
    assert receipt["trajectories"] == 5
    node, command = (np.load(tmp_path / f"{name}.npz")["u"] for name in ("node", "command"))
    assert np.array_equal(node, command)
    with pytest.raises(ConfigFault, match=r"predict\.input is missing"):
        predict(config.model_copy(update={"input": None}), launched(num_processes=1), root)
