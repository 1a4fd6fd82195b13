"""Predictions from files to files."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from scipy.io import netcdf_file

from tests.untrained import make_corrector, make_loadable
from ups.data import field_stores
from ups.data.families import Family
from ups.data.field_files import open_fields
from ups.data.field_output import Content, structure_of
from ups.data.field_stores import resumable
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import find_datasets
from ups.errors import ConfigFault, DataFault
from ups.surrogate import files
from ups.surrogate.files import Job, Request
from ups.surrogate.model import Model, OutsideTraining, load

TRAINED = ("advection_1d", "darcy_2d", "diffusion_reaction_2d", "incompressible_ns_2d")
TRAINED_BETA = 0.4
SUFFIXES = (".h5", ".nc", ".zarr", ".npz")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with models of random weights for one family in each of PDEBench's layouts."""
    return make_loadable(tmp_path_factory.mktemp("root"), TRAINED, count=5)


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    """These models."""
    return load(root, device="cpu")


def request(family: str, **changed: Any) -> Request:
    """Three steps of a family."""
    steps = None if FAMILIES[family].steady else 3
    return Request(
        **{"start": 0, "steps": steps, "members": None, "seed": 0, "dt": None, "parameters": {}} | changed,
        family=family,
    )


def raw_file(root: Path, family: str) -> Path:
    """The file of a family, of five trajectories."""
    datasets = find_datasets(root / "01_raw", [path.name for path in (root / "01_raw").glob("*.h*5")])
    (name,) = (dataset.files[0] for dataset in datasets.values() if dataset.family == family)
    return root / "01_raw" / name


def read(path: Path, family: str) -> np.ndarray:
    """All fields of a file, (N, T, C, *grid)."""
    with open_fields(path, FAMILIES[family]) as file:
        return np.stack([file.read(row, 0, slice(None)) for row in range(file.first.count)])


def direct(model: Model, source: Path, family: str) -> np.ndarray:
    """What `Model.predict` gives, (N, T, C, *grid)."""
    with open_fields(source, FAMILIES[family]) as file:
        given = file.read_coefficients(range(5))
        u_0 = None if FAMILIES[family].steady else file.states(range(5), 0)
    u = model.predict(family, u_0, steps=request(family).steps, **given)
    return u[:, None, None] if FAMILIES[family].steady else u


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("family", TRAINED)
def test_a_file_holds_what_predict_gives(root: Path, model: Model, tmp_path: Path, family: str, suffix: str):
    """Every kind of file holds the trajectories of `Model.predict`, from initial states in PDEBench's layouts."""
    source, target = raw_file(root, family), tmp_path / f"out{suffix}"
    Job.of(model, source, target, request(family)).run(lambda count: None)
    np.testing.assert_allclose(read(target, family), direct(model, source, family), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TRAINED)
def test_hdf5_files_are_pdebench_files(root: Path, model: Model, tmp_path: Path, family: str):
    """Under the name of the input the reader of PDEBench's files finds grid, times and parameters of training."""
    source = raw_file(root, family)
    Job.of(model, source, tmp_path / source.name, request(family)).run(lambda count: None)
    (found,), (known,) = (find_datasets(folder, [source.name]).values() for folder in (tmp_path, source.parent))
    assert (found.grid, found.counts, found.parameters) == (known.grid, known.counts, known.parameters)
    assert np.allclose(found.times, known.times[:4]) and found.lengths == pytest.approx(known.lengths)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_job_goes_on(root: Path, model: Model, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    """Batches that were complete are not predicted again, and the file is the same as without the kill."""
    monkeypatch.setattr(files, "BATCH_TOKENS", 1)
    source, asked = raw_file(root, "advection_1d"), request("advection_1d")
    Job.of(model, source, tmp_path / f"whole{suffix}", asked).run(lambda count: None)
    job, seen = Job.of(model, source, tmp_path / f"killed{suffix}", asked), []

    def die_in_third_batch(count: int) -> None:
        seen.append(count)
        if sum(seen) > 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(die_in_third_batch)
    assert not job.target.exists()
    seen.clear()
    job.run(seen.append)
    assert seen[0] == 6 and sum(seen) == job.total == 15
    assert np.array_equal(read(job.target, "advection_1d"), read(tmp_path / f"whole{suffix}", "advection_1d"))
    assert {path.name for path in tmp_path.iterdir()} == {f"whole{suffix}", f"killed{suffix}"}


def test_a_changed_request_starts_anew(root: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a killed job of other parameters has left is not used; a complete file is not overwritten."""
    monkeypatch.setattr(files, "BATCH_TOKENS", 1)
    source, target = raw_file(root, "advection_1d"), tmp_path / "out.npz"

    def die(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Job.of(model, source, target, request("advection_1d")).run(die)
    other, seen = request("advection_1d", parameters={"beta": 0.1}), []
    Job.of(model, source, target, other).run(seen.append)
    assert seen[0] == 0
    Job.of(model, source, target, other).run(seen.append)
    with pytest.raises(ConfigFault, match="exists"):
        Job.of(model, source, target, request("advection_1d")).run(seen.append)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_prediction_is_not_overwritten(root: Path, model: Model, tmp_path: Path, suffix: str):
    """A target with other content, or an empty folder, exists: its name is to be changed, not a download repeated."""
    source, target = raw_file(root, "advection_1d"), tmp_path / f"out{suffix}"
    target.mkdir() if suffix == ".zarr" else target.write_bytes(b"notes")
    with pytest.raises(ConfigFault, match="exists: delete it, or choose another name"):
        Job.of(model, source, target, request("advection_1d")).run(lambda count: None)
    assert target.is_dir() or target.read_bytes() == b"notes"


def test_states_outside_of_training_are_a_warning(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of every batch, before the first step."""
    monkeypatch.setattr(files, "BATCH_TOKENS", 1)
    monkeypatch.setattr("ups.surrogate.model.why_outside", lambda problem, covered: f"max {problem.u_0.max():g}")
    monkeypatch.setattr(model, "_coverage", {"advection_1d": "measured"})
    np.save(tmp_path / "in.npy", np.float32([[1, 2], [3, 4]]).repeat(4, 1))
    with pytest.warns(OutsideTraining) as seen:
        Job.of(model, tmp_path / "in.npy", tmp_path / "out.npz", request("advection_1d"))
    assert [str(each.message) for each in seen] == ["max 2", "max 4"] and not (tmp_path / "out.npz").exists()


def test_changed_initial_states_are_another_request(model: Model, tmp_path: Path):
    """A rewritten chunk of a zarr store changes neither size nor time of its folder, and yet what is predicted."""
    (n,) = model.describe("advection_1d").grid
    source, target, asked = tmp_path / "in.zarr", tmp_path / "out.npz", request("advection_1d")
    states = zarr.create_array(source, data=_states((3, n)), chunks=(1, n))
    before = source.stat()
    Job.of(model, source, target, asked).run(lambda count: None)
    Job.of(model, source, target, asked).run(lambda count: None)
    states[1] = states[0]
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(ConfigFault, match="exists"):
        Job.of(model, source, target, asked).run(lambda count: None)


def test_another_correction_is_another_request(root: Path, tmp_path: Path):
    """`choose_corrector` may choose again for the same weights: an ensemble of the former correction is not kept."""
    source, target, asked = raw_file(root, "advection_1d"), tmp_path / "out.npz", request("advection_1d", members=2)
    (tmp_path / "root").mkdir()
    made = make_loadable(tmp_path / "root", ("advection_1d",), count=5)
    for num_steps in (1, 2):
        correction = {"mode": "sample", "sigma": 5.0, "sigma_min": 0.02, "num_steps": num_steps, "residual_scale": 0.7}
        chosen = {"advection_1d": {"diffusion": correction | {"noise_correlation": 0.5}}}
        make_corrector(made, chosen)
        job = Job.of(load(made, device="cpu"), source, target, asked)
        with nullcontext() if num_steps == 1 else pytest.raises(ConfigFault, match="exists"):
            job.run(lambda count: None)


def test_two_killed_requests_are_not_mixed(root: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One is killed after some trajectories, another one while it makes its file: the first begins anew."""
    monkeypatch.setattr(files, "BATCH_TOKENS", 1)
    source, target = raw_file(root, "advection_1d"), tmp_path / "out.hdf5"

    def die(*arguments: object) -> None:
        if arguments[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Job.of(model, source, target, request("advection_1d")).run(die)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(field_stores, "write_json", die)
        Job.of(model, source, target, request("advection_1d", parameters={"beta": 0.1})).run(die)
    seen = []
    Job.of(model, source, target, request("advection_1d")).run(seen.append)
    assert seen[0] == 0 and np.isfinite(read(target, "advection_1d")).all()
    Job.of(model, source, tmp_path / "whole.hdf5", request("advection_1d")).run(lambda count: None)
    assert np.array_equal(read(target, "advection_1d"), read(tmp_path / "whole.hdf5", "advection_1d"))


@pytest.mark.parametrize("axes", [("y", "x"), ("time", "x", "y"), ("x", "y", "run"), ("time", "member", "x", "y")])
def test_named_axes_in_another_order_are_refused(model: Model, tmp_path: Path, axes: tuple[str, ...]):
    """Of zarr, as xarray writes it: by position they would be read as something else."""
    sizes = {"x": 8, "y": 6}
    array = xr.DataArray(_states(tuple(sizes.get(axis, 2) for axis in axes)), dims=axes)
    xr.Dataset({"u": array, "v": array}).to_zarr(tmp_path / "in.zarr")
    with pytest.raises(DataFault, match=f"has the axes {', '.join(axes)}; arrange them as trajectory, time, x, y"):
        Job.of(model, tmp_path / "in.zarr", tmp_path / "out.npz", request("diffusion_reaction_2d"))


def test_coordinates_that_do_not_increase_are_refused(model: Model, tmp_path: Path):
    """The states would be predicted mirrored. A dimension of NetCDF may have no coordinates."""
    states = xr.Dataset({"u": (("run", "x"), _states((3, 8)))})
    for name, x in (("up", np.arange(8.0)), ("down", np.arange(8.0)[::-1])):
        states.assign_coords(x=x).to_netcdf(tmp_path / f"{name}.nc")
    states.to_netcdf(tmp_path / "none.nc")
    for name in ("up", "none"):
        Job.of(model, tmp_path / f"{name}.nc", tmp_path / "out.npz", request("advection_1d"))
    with pytest.raises(DataFault, match="'x' does not increase in equal steps; sort the data"):
        Job.of(model, tmp_path / "down.nc", tmp_path / "out.npz", request("advection_1d"))


def test_netcdf_3_is_read(model: Model, tmp_path: Path):
    """As netcdf_file of SciPy writes it."""
    states = _states((3, 8))
    with netcdf_file(tmp_path / "in.nc", "w") as file:
        for name, size in (("trajectory", 3), ("x", 8)):
            file.createDimension(name, size)
        file.createVariable("u", "f4", ("trajectory", "x"))[:] = states
    np.save(tmp_path / "in.npy", states)
    for suffix in (".nc", ".npy"):
        asked = request("advection_1d", parameters={"beta": 0.3})
        Job.of(model, tmp_path / f"in{suffix}", tmp_path / f"out{suffix}.npz", asked).run(lambda count: None)
    found, expected = (read(tmp_path / f"out{suffix}.npz", "advection_1d") for suffix in (".nc", ".npy"))
    assert np.array_equal(found, expected)


def test_pieces_of_time_change_nothing(root: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files written two snapshots at once hold the same as those written whole."""
    source, asked = raw_file(root, "diffusion_reaction_2d"), request("diffusion_reaction_2d")
    Job.of(model, source, tmp_path / "whole.zarr", asked).run(lambda count: None)
    monkeypatch.setattr(files, "PIECE_BYTES", 2 * 4 * 2 * 5 * np.prod(model.describe(asked.family).grid))
    for suffix in SUFFIXES:
        job = Job.of(model, source, tmp_path / f"pieces{suffix}", asked)
        assert job.steps_at_once == 2
        job.run(lambda count: None)
        assert np.array_equal(read(job.target, asked.family), read(tmp_path / "whole.zarr", asked.family))


def _states(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("save", "beta"),
    [
        (lambda path, n: np.save(path / "in.npy", _states((3, n))), [TRAINED_BETA] * 3),
        (lambda path, n: np.save(path / "in.npy", _states((3, 1, n))), [TRAINED_BETA] * 3),
        (lambda path, n: np.save(path / "in.npy", _states((n,))), [TRAINED_BETA]),
        (lambda path, n: np.savez(path / "in.npz", u=_states((2, 7, n)), beta=0.3), [0.3, 0.3]),
        (lambda path, n: np.savez(path / "in.npz", states=_states((2, 1, n)), beta=[0.1, 0.2]), [0.1, 0.2]),
    ],
)
def test_forms_of_initial_states(model: Model, tmp_path: Path, save: Callable[..., None], beta: list[float]):
    """Arrays with and without axes of trajectories, fields and times; parameters by name, one for all or for each."""
    (n,) = model.describe("advection_1d").grid
    save(tmp_path, n)
    (source,) = tmp_path.iterdir()
    job = Job.of(model, source, tmp_path / "out.zarr", request("advection_1d"))
    job.run(lambda count: None)
    assert read(job.target, "advection_1d").shape == (len(beta), 4, 1, n)
    with open_fields(job.target, FAMILIES["advection_1d"]) as file:
        assert file.parameters["beta"].tolist() == beta


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"parameters": {"nu": 1.0}}, "has no parameter 'nu'"),
        ({"steps": 0}, "at least 1"),
        ({"dt": 0.01}, "multiple"),
        ({"members": 3}, "even"),
    ],
)
def test_wrong_requests_are_refused(root: Path, model: Model, tmp_path: Path, changed: dict[str, Any], problem: str):
    """A request that the model cannot serve ends in one line before anything is written."""
    with pytest.raises(ConfigFault, match=problem) as fault:
        Job.of(model, raw_file(root, "advection_1d"), tmp_path / "out.npz", request("advection_1d", **changed))
    assert "\n" not in str(fault.value) and not any(tmp_path.iterdir())


def test_members_need_a_corrector(root: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without one nothing is written either."""
    monkeypatch.setattr(Model, "_corrector", lambda self, family: None)
    with pytest.raises(ConfigFault, match="no ensembles of advection_1d"):
        Job.of(model, raw_file(root, "advection_1d"), tmp_path / "out.npz", request("advection_1d", members=4))
    assert not any(tmp_path.iterdir())


def test_a_parameter_may_be_called_source(tmp_path: Path):
    """In npz files attributes are arrays as well: the parameter has the name."""
    family = Family("heated_1d", "u_t = u_xx + source", ("u",), ("x",), "periodic", ("source",))
    attributes = {"family": "heated_1d", "source": "states.npz"}
    content = Content(family, (), 3, None, (0.0, 1.0), (4,), (1.0,), {"source": np.full(3, 0.5)}, attributes, (3, 2))
    with resumable(tmp_path / "out.npz", content, "") as output:
        output.write((0, 0, 0), np.ones((1, 3, 1, 2, 4), np.float32))
        output.complete(3)
    with open_fields(tmp_path / "out.npz", family) as file:
        assert file.parameters["source"].tolist() == [0.5] * 3


@pytest.mark.parametrize(("family", "start"), [("advection_1d", 1), ("diffusion_reaction_2d", -1)])
def test_a_prediction_starts_from_any_snapshot(root: Path, model: Model, tmp_path: Path, family: str, start: int):
    """Where steps start from two snapshots, with the one before it in the file."""
    source = raw_file(root, family)
    with open_fields(source, FAMILIES[family]) as file:
        time = start % file.first.times
        u_0, before = file.states(range(5), time), file.states(range(5), time - 1)
    history = {"u_before": before} if model.describe(family).history else {}
    Job.of(model, source, tmp_path / "out.zarr", request(family, start=start)).run(lambda count: None)
    expected = model.predict(family, u_0, steps=3, **history)
    np.testing.assert_allclose(read(tmp_path / "out.zarr", family), expected, rtol=1e-5, atol=1e-6)
    assert bool(history) == (family == "diffusion_reaction_2d")


def test_a_start_outside_of_the_file_is_refused(root: Path, model: Model, tmp_path: Path):
    """The line says which snapshots there are; a file of initial states has one."""
    np.save(tmp_path / "in.npy", _states((3, *model.describe("advection_1d").grid)))
    for source, last in ((raw_file(root, "advection_1d"), 4), (tmp_path / "in.npy", 0)):
        Job.of(model, source, tmp_path / "out.npz", request("advection_1d", start=last))
        for start in (last + 1, -last - 2):
            with pytest.raises(
                ConfigFault, match=f"{last + 1} snapshots per trajectory: start is -{last + 1} to {last}"
            ):
                Job.of(model, source, tmp_path / "out.npz", request("advection_1d", start=start))


def test_an_ensemble_is_no_initial_state(model: Model, tmp_path: Path):
    """All members but one would be left out."""
    np.savez(tmp_path / "in.npz", u=_states((2, 4, 3, *model.describe("advection_1d").grid)))
    with pytest.raises(ConfigFault, match="has 4 members: keep one of them"):
        Job.of(model, tmp_path / "in.npz", tmp_path / "out.npz", request("advection_1d"))


def test_solutions_are_no_coefficients(model: Model, tmp_path: Path):
    """A file of a steady family that has its solutions alone lacks what they are predicted from."""
    u = _states((2, *model.describe("darcy_2d").grid))
    for name, is_known in (("u", False), ("tensor", False), ("permeability", True)):
        np.savez(tmp_path / "in.npz", **{name: abs(u) + 0.1})
        with nullcontext() if is_known else pytest.raises((ConfigFault, DataFault), match="nu"):
            Job.of(model, tmp_path / "in.npz", tmp_path / "out.npz", request("darcy_2d"))


def test_two_snapshots_of_another_time_step_are_refused(root: Path, model: Model, tmp_path: Path):
    """Steps that start from two snapshots know their change in one time step of training alone."""
    source = tmp_path / raw_file(root, "diffusion_reaction_2d").name
    source.write_bytes(raw_file(root, "diffusion_reaction_2d").read_bytes())
    with h5py.File(source, "r+") as file:
        for group in file.values():
            group["grid/t"][:] *= 2
    Job.of(model, source, tmp_path / "out.npz", request("diffusion_reaction_2d"))
    with pytest.raises(ConfigFault, match="start from two snapshots, .* apart, those of the file are"):
        Job.of(model, source, tmp_path / "out.npz", request("diffusion_reaction_2d", start=1))


def test_a_state_that_is_not_finite_is_found_before_the_first_step(model: Model, tmp_path: Path):
    """The fault names the file and the trajectories, and nothing is written."""
    u_0 = _states((4, *model.describe("advection_1d").grid))
    u_0[2, 1] = np.nan
    np.save(tmp_path / "in.npy", u_0)
    with pytest.raises(DataFault, match=re.escape("in.npy, trajectories 0 to 3")):
        Job.of(model, tmp_path / "in.npy", tmp_path / "out.npz", request("advection_1d"))


def test_netcdf_axes_have_names(root: Path, model: Model, tmp_path: Path):
    """Every field of a NetCDF file is linked to the coordinates of its axes."""
    source = raw_file(root, "diffusion_reaction_2d")
    Job.of(model, source, tmp_path / "out.nc", request("diffusion_reaction_2d")).run(lambda count: None)
    with h5py.File(tmp_path / "out.nc") as file:
        scales = [dim[0].name for dim in file["v"].dims]
        assert scales == ["/trajectory", "/time", "/x", "/y"] and file["v"].shape[1] == len(file["time"])


def test_more_than_ten_thousand_groups_stay_in_order(tmp_path: Path):
    """Readers sort groups by name: 1001 must not come after 10009."""
    family = FAMILIES["diffusion_sorption_1d"]
    content = Content(family, (), 10_010, None, (0.0, 1.0), (4,), (1.0,), {}, {}, (1, 1))
    names = list(structure_of(content, tmp_path / "out.h5").written)
    assert len(names) == 10_010 and names == sorted(names)


def test_zeros_are_written_to_zarr(tmp_path: Path):
    """A chunk without a file would be reported as lost when the predictions are read."""
    family = FAMILIES["advection_1d"]
    content = Content(family, (), 2, None, (0.0, 1.0), (4,), (1.0,), {"beta": np.zeros(2)}, {}, (1, 1))
    with resumable(tmp_path / "out.zarr", content, "request") as output:
        output.write((0, 0, 0), np.zeros((1, 2, 1, 2, 4), np.float32))
    assert sum(path.is_file() for path in (tmp_path / "out.zarr/u/c").rglob("*")) == 2 * 2


def test_what_a_killed_process_has_left_of_a_copy_is_removed(tmp_path: Path):
    """The same request removes an unfinished npz file and record, and leaves those of other files."""
    left = [f".{name}.{'0' * 16}.tmp" for name in ("out.npz", ".out.npz.json", "two.npz")]
    for name in left:
        (tmp_path / name).touch()
    known = {"beta": np.zeros(2)}
    content = Content(FAMILIES["advection_1d"], (), 2, None, (0.0, 1.0), (4,), (1.0,), known, {}, (1, 1))
    with resumable(tmp_path / "out.npz", content, "request") as output:
        output.write((0, 0, 0), np.zeros((1, 2, 1, 2, 4), np.float32))
    assert sorted(path.name for path in tmp_path.iterdir()) == [left[2], "out.npz"]


def test_few_arrays_of_a_file_are_open_at_once(tmp_path: Path):
    """Each holds a cache of its own, and PDEBench's files have a group for each of thousands of trajectories."""
    with h5py.File(tmp_path / "1D_diff-sorp_NA_NA.h5", "w") as file:
        for row in range(40):
            file[f"{row:04d}/data"] = np.full((3, 4, 1), row, np.float32)
    with open_fields(tmp_path / "1D_diff-sorp_NA_NA.h5", FAMILIES["diffusion_sorption_1d"]) as file:
        assert [file.read(row, 0, slice(0, 1)).max() for row in range(40)] == list(range(40))
        gc.collect()
        assert sum(isinstance(each, h5py.Dataset) and bool(each) for each in gc.get_objects()) < 20
