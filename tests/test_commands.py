"""The command line `ups`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

import ups
from tests.data.own import DT, KDV, X, solve_kdv
from ups.commands import main
from ups.data.pdebench import FAMILIES

PROJECT = Path(__file__).parents[1]
ENTRY = {name: list(value) if isinstance(value, tuple) else value for name, value in KDV.definition.items()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's configuration and a file of a family that is defined nowhere."""
    before = dict(FAMILIES)
    (tmp_path / "conf" / "base").mkdir(parents=True)
    (tmp_path / "conf" / "local").mkdir()
    arrays = {"u": solve_kdv(3, 4, 0.1)}
    path = ups.write_dataset(tmp_path / "a.hdf5", KDV, arrays, parameters={"delta": 0.1}, coordinates={"x": X}, dt=DT)
    relabelled(path, "kdv_1d")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    FAMILIES.clear()
    FAMILIES.update(before)


def relabelled(path: Path, label: str) -> None:
    """Put a name in the place of the definition."""
    import h5py

    with h5py.File(path, "r+") as file:
        file.attrs["family"] = label


def run(*arguments: str) -> Result:
    """The result of `ups ARGUMENTS`."""
    return CliRunner().invoke(main, arguments)


def test_a_name_that_no_file_can_have_is_one_line():
    """What the disk refuses is a fault of storage, in every command."""
    result = run("info", 300 * "a")
    assert result.exit_code == 6
    assert result.output.splitlines()[-1].endswith("File name too long; choose another name")


def test_check_needs_the_definition(project: Path):
    """Without `families.yml` the file is refused with exit code 3 and one line, with it the file is complete."""
    result = run("check", "a.hdf5")
    assert result.exit_code == 3
    assert "is of the family 'kdv_1d', which is not defined; define it in conf/base/families.yml" in result.output
    assert result.output.splitlines()[-1].startswith("FAULT 3 data: a.hdf5: cannot be used yet")
    (project / "conf/local/families.yml").write_text(yaml.safe_dump({"kdv_1d": ENTRY | {"name": "kdv_1d"}}))
    result = run("check", "a.hdf5")
    assert result.exit_code == 0, result.output
    assert "u [m] surface elevation" in result.output and "complete: kedro run --params source=folder" in result.output


def test_check_says_the_whole_command(project: Path):
    """With the environment that defines the family, in quotes where needed; a folder with a comma must be renamed."""
    (project / "conf/mine").mkdir()
    (project / "conf/mine/families.yml").write_text(yaml.safe_dump({"kdv_1d": ENTRY | {"name": "kdv_1d"}}))
    result = run("check", "a.hdf5", "--env", "mine")
    assert result.output.splitlines()[-1] == "complete: kedro run --env mine --params source=folder,raw_root=."
    for name in ("my data", "my,data"):
        (project / name).mkdir()
        shutil.copy(project / "a.hdf5", project / name)
    result = run("check", "my data/a.hdf5", "--env", "mine")
    assert result.output.endswith("--params 'source=folder,raw_root=my data'\n")
    result = run("check", "my,data/a.hdf5", "--env", "mine")
    assert result.exit_code == 2 and "my,data: rename the folder" in result.output


def test_score_takes_families_of_an_environment(project: Path):
    """A family that `conf/mine` defines is known with `--env mine` alone."""
    (project / "conf/mine").mkdir()
    (project / "conf/mine/families.yml").write_text(yaml.safe_dump({"kdv_1d": ENTRY | {"name": "kdv_1d"}}))
    asked = ("score", "a.hdf5", "--dataset", "a.hdf5")
    assert "is of the family 'kdv_1d', which is not defined" in run(*asked).output
    result = run(*asked, "--env", "mine")
    assert result.exit_code == 0, result.output


def test_check_takes_a_link_by_its_own_name(project: Path):
    """As the pipeline does: git-annex and DVC keep files under other names."""
    (project / "conf/local/families.yml").write_text(yaml.safe_dump({"kdv_1d": ENTRY | {"name": "kdv_1d"}}))
    (project / "store").mkdir()
    (project / "a.hdf5").rename(project / "store/0f3a9c")
    (project / "a.hdf5").symlink_to("store/0f3a9c")
    result = run("check", "a.hdf5")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("check", "none.npz"), 3, "none.npz: no such file"),
        (("check", "conf"), 3, "conf: is no regular file"),
        (("check", "a.hdf5", "--family", "burger_1d"), 3, "no family is called 'burger_1d', did you mean burgers_1d?"),
        (("check",), 2, "Missing argument 'FILE'"),
        (("chek", "a.hdf5"), 2, "No such command 'chek'"),
        (("agent", "--data-root", "none"), 3, "none is no folder of this node; mount the disk"),
        (("agent", "--data-root", "conf", "--wait", "0"), 9, "no `kedro run` with launch.num_nodes > 1 works in"),
    ],
)
def test_mistakes_are_one_line(project: Path, arguments: tuple[str, ...], code: int, message: str):
    """A wrong command, file or family ends with its exit code, and without a traceback."""
    result = run(*arguments)
    assert result.exit_code == code and message in result.output and "Traceback" not in result.output


def test_a_wrong_definition_is_named(project: Path):
    """A mistake in `families.yml` has exit code 2."""
    (project / "conf/base/families.yml").write_text("kdv_1d: {fields: [u]}\n")
    result = run("check", "a.hdf5")
    assert result.exit_code == 2 and "families.yml, kdv_1d: equation is missing" in result.output


def test_other_libraries_only_warn():
    """A command shows what this project says, and warnings of others, not every step of an export."""
    code = "import click, logging; from ups.commands import main; main(['info', 'absent'], standalone_mode=False)"
    levels = "[logging.getLogger(name).isEnabledFor(logging.INFO) for name in ('ups.runs', 'onnx_ir')]"
    code = code.replace("; main", "\ntry: main") + f"\nexcept click.ClickException: print({levels})"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert printed.stdout.strip() == "[True, False]"


def test_the_start_imports_little():
    """`import ups` and `ups --help` need neither torch nor Kedro, and the names of the package are found lazily."""
    code = "import sys, ups, ups.commands; print({'torch', 'kedro', 'h5py', 'numpy', 'pydantic'} & set(sys.modules))"
    code += "; print(ups.Family.__name__, ups.write_dataset.__name__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert printed.stdout == "set()\nFamily write_dataset\n"
    with pytest.raises(AttributeError, match="module 'ups' has no attribute 'famly'"):
        _ = ups.famly
