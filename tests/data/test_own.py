"""Arrays of one's own, written as a file that the pipeline takes, and what `ups check` says of a file."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import ups
from tests.data.own import DT, KDV, LENGTH, NUM_POINTS, X, solve_kdv
from ups.data.inspection import inspect
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault
from ups.files import only_writer

pytestmark = pytest.mark.usefixtures("families")

DELTA = 0.1
U = solve_kdv(4, 5, DELTA)
T = DT * np.arange(5)
DARCY = replace(KDV, name="own_darcy", coefficients=("a",), steady=True, positive_coefficients=("a",), conserved=())
FLOW = ups.Family("flow_2d", "?", ["u", "v"], ["x", "y"], ["periodic", "wall"], [], positive=["v"])


def written(folder: Path, **changes: Any) -> Path:
    """The file that `write_dataset` writes of U, with other arguments than the usual ones."""
    given = {"family": KDV, "arrays": {"u": U}, "parameters": {"delta": DELTA}, "coordinates": {"x": X}, "dt": DT}
    return ups.write_dataset(folder / "one.hdf5", **given | changes)


def names_in(folder: Path) -> list[str]:
    """Names of all files of a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_has_written_is_removed(tmp_path: Path):
    """The next call for the same file removes its unfinished ones, and leaves those of other files."""
    (tmp_path / f".one.hdf5.{'0' * 16}.tmp").touch()
    (tmp_path / f".two.hdf5.{'0' * 16}.tmp").touch()
    written(tmp_path)
    assert names_in(tmp_path) == [f".two.hdf5.{'0' * 16}.tmp", "one.hdf5"]


def test_unfinished_files_of_running_processes_are_kept(tmp_path: Path):
    """While another process writes the same file, this one waits."""
    with ThreadPoolExecutor(1) as thread:
        with only_writer(tmp_path / "one.hdf5"):
            (tmp_path / f".one.hdf5.{'0' * 16}.tmp").touch()
            waiting = thread.submit(written, tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(1)
            assert names_in(tmp_path) == [f".one.hdf5.{'0' * 16}.tmp", ".one.hdf5.lock"]
        waiting.result(60)
    assert names_in(tmp_path) == ["one.hdf5"]


def without(*names: str) -> dict[str, Any]:
    """Arguments of `written` that leave something out."""
    return dict.fromkeys(names)


def test_solver_conserves_mass_and_momentum():
    """Korteweg-de Vries keeps the integrals of u and of u^2."""
    for power in (1, 2):
        integral = (U**power).mean(-1)
        assert integral == pytest.approx(np.repeat(integral[:, :1], 5, axis=1), abs=1e-6)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, lambda u: u.tolist(), np.float32])
def test_written_arrays_are_read_back(tmp_path: Path, make: Callable[[np.ndarray], Any]):
    """Values, grid, times and parameters are those that were written, by a process that never saw the definition."""
    path = written(tmp_path, arrays={"u": make(U)})
    found = inspect("find", folder=tmp_path, names=[path.name], subsample={"kdv_1d": {}}, definitions=[])["one"]
    assert (found["family"], found["parameters"], found["boundary"]) == ("kdv_1d", {"delta": DELTA}, ["periodic"])
    assert (found["grid"], found["lengths"], found["times"]) == ([NUM_POINTS], [LENGTH], pytest.approx(T.tolist()))
    dataset = find_datasets(tmp_path, [path.name])["one"]
    with TrajectoryReader(tmp_path, dataset) as reader:
        read = np.stack([reader.read(index)[:, 0] for index in range(4)])
    assert read == pytest.approx(U.astype(np.float32))


def test_arrays_larger_than_a_block_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An HDF5 dataset, read in blocks of two snapshots, has the values of the array, also one of coordinates."""
    monkeypatch.setattr("ups.data.arrays.BLOCK_BYTES", 2 * 8 * NUM_POINTS)
    with h5py.File(tmp_path / "large.h5", "w") as file:
        u, x = file.create_dataset("u", data=U), file.create_dataset("x", data=X)
        path = written(tmp_path, arrays={"u": u}, coordinates={"x": x})
    with h5py.File(path) as file:
        assert file["u"][:] == pytest.approx(U.astype(np.float32)) and file["x"][:].tolist() == X.tolist()


def test_steady_families_need_no_times(tmp_path: Path):
    """A steady family has one snapshot and its coefficients."""
    arrays = {"u": U[:, :1], "a": np.exp(U[:, 0])}
    path = ups.write_dataset(tmp_path / "a.hdf5", DARCY, arrays, parameters={"delta": 1.0}, dx=0.1)
    dataset = find_datasets(tmp_path, [path.name])["a"]
    assert (dataset.times, dataset.lengths) == ((0.0,), (pytest.approx(0.1 * NUM_POINTS),))


def test_pdebench_families_take_own_data(tmp_path: Path):
    """Own Burgers data need no name of PDEBench's for file, array or parameter; other layouts are refused."""
    arrays, steps = {"u": U}, {"dx": 0.1, "dt": DT}
    path = ups.write_dataset(tmp_path / "mine.hdf5", "burgers_1d", arrays, parameters={"nu": 0.01}, **steps)
    dataset = find_datasets(tmp_path, [path.name])["mine"]
    assert (dataset.family, dataset.parameters) == ("burgers_1d", {"nu": 0.01})
    with TrajectoryReader(tmp_path, dataset) as reader:
        assert reader.read(1)[:, 0] == pytest.approx(U[1].astype(np.float32))
    with pytest.raises(ConfigFault, match="diffusion_sorption_1d has a layout of PDEBench's own"):
        ups.write_dataset(tmp_path / "other.hdf5", "diffusion_sorption_1d", arrays, parameters={}, **steps)


def test_a_pattern_of_file_names_is_part_of_the_definition(tmp_path: Path):
    """A family of one's own with a pattern is read by a process that never saw it, whatever the name of the file."""
    path = written(tmp_path, family=replace(KDV, file_pattern=r"waves_.*\.hdf5"))
    found = inspect("find", folder=tmp_path, names=[path.name], subsample={"kdv_1d": {}}, definitions=[])["one"]
    assert found["family"] == "kdv_1d"


BAD_NAN = np.where(np.arange(4)[:, None, None] == 2, np.nan, U)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no definition": ({"family": "kdv"}, "no family is called 'kdv'; known: advection_1d, "),
    "array without a name": ({"arrays": U}, "expected arrays by name"),
    "other name of a field": ({"arrays": {"v": U}}, "'u' is missing, 'v' is unknown; expected u"),
    "one trajectory": ({"arrays": {"u": U[0]}}, r"\(5, 32\), expected the axes \(trajectory, snapshot, x\)"),
    "empty": ({"arrays": {"u": U[:0]}}, r"has shape \(0, 5, 32\)"),
    "complex": ({"arrays": {"u": U + 0j}}, "has dtype complex128, expected real numbers"),
    "ragged": ({"arrays": {"u": [[1.0], [1.0, 2.0]]}}, "'u' is no array of numbers"),
    "gradient": ({"arrays": {"u": torch.zeros(4, 5, 32, requires_grad=True)}}, "'u' is no array of numbers"),
    "NaN": ({"arrays": {"u": BAD_NAN}}, "'u' of trajectory 2 is NaN or too large"),
    "beyond float32": ({"arrays": {"u": 1e300 * (1 + U)}}, "NaN or too large"),
    "parameter among the steps": ({"delta": 0.1}, "'delta' is unknown; expected x, t"),
    "no parameter": ({"parameters": {}}, "'delta' is missing"),
    "unknown parameter": ({"parameters": {"delta": 1.0, "mu": 1.0}}, "'mu' is unknown; expected delta"),
    "parameter is an array": ({"parameters": {"delta": [0.1, 0.2]}}, "expected one finite number"),
    "parameter is NaN": ({"parameters": {"delta": np.nan}}, "delta = nan, expected one finite number"),
    "no times": ({"coordinates": {"x": X}, "dt": None}, "dt = None, expected one finite number"),
    "no grid": ({"coordinates": {}}, "'x' is missing"),
    "times twice": ({"coordinates": {"x": X, "t": T}, "dt": DT}, "'t' is there twice"),
    "uneven grid": ({"coordinates": {"x": X**2}}, "'x' is not a uniform, increasing grid"),
    "grid of another size": ({"coordinates": {"x": X[:-1]}}, "'x' has 31 entries for 32 points"),
    "grid of words": ({"coordinates": {"x": ["a"] * 32}}, "'x' has dtype <U1, expected real numbers"),
    "step backwards": ({"dt": -DT}, "'dt' is -0.02; expected a positive step"),
    "hyphen": ({"family": replace(KDV, name="kdv-1d")}, "would be a variant of a family; choose a name without hyphen"),
    "PDEBench's name": ({"family": replace(KDV, name="burgers_1d")}, "PDEBench has a family burgers_1d with another"),
    "long formula": ({"family": replace(KDV, formulas=("u" * 20_000,))}, "the definition of kdv_1d is too long"),
    "one snapshot": ({"arrays": {"u": U[:, :1]}}, "one snapshot per trajectory"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_in_one_line(tmp_path: Path, what: str):
    """A mistake is a configuration fault that names the file, and leaves no file behind."""
    changes, message = WRONG[what]
    with pytest.raises(ConfigFault, match=message) as caught:
        written(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["one.npz", "one", ".hidden.hdf5", "a b.hdf5"])
def test_names_that_the_pipeline_leaves_out_are_refused(tmp_path: Path, name: str):
    """A file is not written under a name that `source: folder` would pass over."""
    with pytest.raises(ConfigFault, match="call the file NAME.hdf5"):
        ups.write_dataset(tmp_path / name, KDV, {"u": U}, parameters={"delta": 1.0}, dx=0.1, dt=0.1)


def test_fields_must_agree_and_be_positive(tmp_path: Path):
    """Fields of different shapes, and values below zero where the definition says positive, are refused."""
    u = np.ones((2, 3, 8, 8))
    steps = {"parameters": {}, "dx": 0.1, "dy": 0.1, "dt": 0.1}
    with pytest.raises(ConfigFault, match=r"'v' has shape \(2, 3, 8, 4\), the other fields have \(2, 3, 8, 8\)"):
        ups.write_dataset(tmp_path / "a.hdf5", FLOW, {"u": u, "v": u[..., :4]}, **steps)
    with pytest.raises(ConfigFault, match="'v' of trajectory 0 is not positive"):
        ups.write_dataset(tmp_path / "a.hdf5", FLOW, {"u": u, "v": 0 * u}, **steps)
    path = ups.write_dataset(tmp_path / "a.hdf5", FLOW, {"u": u, "v": u}, **steps)
    assert find_datasets(tmp_path, [path.name])["a"].boundary == ("periodic", "wall")


def examined(path: Path, family: str | None = None) -> tuple[dict[str, str], list[str]]:
    """What `ups check` shows of a file."""
    found = inspect("examine", path=path, family=family)
    return found["facts"], found["problems"]


def test_check_says_what_it_understood(tmp_path: Path):
    """Family, sizes, steps, boundary, parameters and the range of the values, with units."""
    facts, problems = examined(written(tmp_path))
    assert problems == []
    assert facts.pop("values of u") == f"{U.min():.4g} to {U.max():.4g}, all finite"
    assert facts == {
        "family": "kdv_1d",
        "equation": KDV.equation,
        "fields": "u [m] surface elevation",
        "parameters": "delta = 0.1",
        "trajectories": "4",
        "snapshots": "5",
        "grid": "32",
        "dt": "0.02",
        "axis x": "length 2, periodic",
    }


def edited(folder: Path, edit: Callable[[h5py.File], None]) -> Path:
    """A sound file after a change."""
    path = written(folder)
    with h5py.File(path, "r+") as file:
        edit(file)
    return path


def test_check_lists_all_that_is_missing(tmp_path: Path):
    """Coordinates, times and parameters that are missing are named together, each with its remedy."""

    def strip(file: h5py.File) -> None:
        del file["x"], file.attrs["dt"], file.attrs["delta"]

    facts, problems = examined(edited(tmp_path, strip))
    assert facts["parameters"] == "delta = missing" and facts["trajectories"] == "4"
    assert len(problems) == 3 and not any("\n" in line for line in problems)
    for line, remedy in zip(
        problems, ("add it, or write delta<value>", "the 5 times", "the 32 cell centres"), strict=True
    ):
        assert line.startswith(f"{tmp_path / 'one.hdf5'}: ") and remedy in line


def _repeat_first_point(file: h5py.File) -> None:
    file["u"][..., -1] = file["u"][..., 0]


def _put_nan(file: h5py.File) -> None:
    file["u"][3, 2, 1] = np.nan


def _forget_family(file: h5py.File) -> None:
    del file.attrs["family"]


def _add_parameters(file: h5py.File) -> None:
    del file.attrs["delta"]
    file["delta"] = np.linspace(0, 1, 4)


def _break_definition(file: h5py.File) -> None:
    file.attrs["family"] = json.dumps(KDV.definition | {"boundry": "wall"})


def _store_integers(file: h5py.File) -> None:
    del file["u"]
    file["u"] = np.zeros((4, 5, 32), int)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_repeat_first_point, "first and the last point of the periodic axis x have the same values; leave one"),
        (_put_nan, "field 'u' of trajectory 3, snapshot 2, is NaN or infinite"),
        (_forget_family, "matches no known family, and it has no text `family`"),
        (_add_parameters, r"'delta' is float64 of shape \(4,\).*need a file of their own"),
        (_break_definition, "unknown key boundry, did you mean boundary?"),
        (_store_integers, "'u' has dtype int64, expected floating point"),
    ],
)
def test_check_finds(tmp_path: Path, edit: Callable[[h5py.File], None], message: str):
    """Each defect of a file is one line."""
    _, problems = examined(edited(tmp_path, edit))
    assert len(problems) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_check_takes_the_family_that_it_is_told(tmp_path: Path, families):
    """With the family's name, the rest of a file that does not say it is checked as well."""
    families.define(KDV)
    facts, problems = examined(edited(tmp_path, _forget_family), "kdv_1d")
    assert facts["family"] == "kdv_1d" and len(problems) == 1
