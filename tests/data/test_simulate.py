import re
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml

from ups.data import simulate as module
from ups.data.families import Family
from ups.data.pdebench import FAMILIES
from ups.data.simulate import file_name, files_of, simulate
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault, DataFault, StorageFault
from ups.metrics.errors import conservation_drift
from ups.solvers import SIMULATED_FAMILIES, sample_initial_states
from ups.solvers.families import PROBLEMS

torch.set_num_threads(1)

SHARED = Path(__file__).parents[2].parent / "shared" / "pdebench"
PARAMETERS = {"beta": 0.4, "nu": 0.5, "rho": 1.0, "eta": 0.01, "zeta": 0.01, "mach": 0.1}
SHARED_PARAMETERS = {
    "burgers_1d": {"nu": 0.01},
    "darcy_2d": {"beta": 1.0},
    "compressible_ns_3d": {"mach": 1.0, "eta": 1e-8, "zeta": 1e-8},
}
SIZES = {"t", "tdim", "T_end", "n_time_steps", "xdim", "ydim", "seed", "dam_radius"}  # in the text of a group
SHARED_RESOLUTION = {"compressible_ns_2d": 32, "incompressible_ns_2d": 48}  # a part of the name


def parameters_of(family: str) -> dict[str, float]:
    """Values for all parameters of a family."""
    return {name: PARAMETERS[name] for name in FAMILIES[family].parameters}


def write(folder: Path, family: str, parameters: dict | None = None, **changes) -> Path:
    """A small file of a family under PDEBench's name."""
    if parameters is None:
        parameters = parameters_of(family)
    sizes = {"num_trajectories": 3, "resolution": 8, "num_snapshots": 4, "duration": 0.3, "seed": 0}
    if FAMILIES[family].steady:
        sizes["num_snapshots"] = 1
    sizes |= changes
    path = folder / file_name(family, parameters, sizes["resolution"])
    simulate(path, family=family, parameters=parameters, **sizes)
    return path


def test_waves_may_run_to_the_left(tmp_path: Path):
    """A negative speed is simulated, named and read back."""
    path = write(tmp_path, "advection_1d", {"beta": -0.4})
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    assert dataset.parameters == {"beta": pytest.approx(-0.4)}


def layout(file: h5py.File) -> dict:
    """Every dataset with its dtype and number of axes, every group, and their attributes with their types."""
    found = {"": {name: type(value) for name, value in file.attrs.items()}}

    def visit(name, item):
        if name[:4].isdigit() and not name.startswith("0000"):
            return
        kind = (item.dtype, item.ndim) if isinstance(item, h5py.Dataset) else "group"
        found[name] = (kind, {key: type(value) for key, value in item.attrs.items()})

    file.visititems(visit)
    return found


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
@pytest.mark.skipif(not SHARED.is_dir(), reason="PDEBench's sample files are not here")
def test_a_file_has_the_name_and_layout_of_pdebench(family, tmp_path):
    """Names, dtypes, axes and attributes of a written file equal those of PDEBench's file of the same name."""
    short = {} if FAMILIES[family].steady else {"num_snapshots": 2, "duration": 0.01}
    resolution = SHARED_RESOLUTION.get(family, 8)
    path = write(tmp_path, family, SHARED_PARAMETERS.get(family), resolution=resolution, **short)
    with h5py.File(path) as written, h5py.File(SHARED / path.name) as real:
        assert layout(written) == layout(real)
        if family != "incompressible_ns_2d":
            assert dict(written.attrs) == dict(real.attrs)


@pytest.mark.parametrize("family", ["diffusion_sorption_1d", "diffusion_reaction_2d", "shallow_water_2d"])
@pytest.mark.skipif(not SHARED.is_dir(), reason="PDEBench's sample files are not here")
def test_groups_say_of_the_equation_what_pdebench_says(family, tmp_path):
    """Coefficients and domain in the text of a group are those of PDEBench's file, sizes and random numbers apart."""
    path = write(tmp_path, family, num_snapshots=2, duration=0.01)
    with h5py.File(path) as written, h5py.File(SHARED / path.name) as real:
        ours, theirs = (yaml.safe_load(file["0000"].attrs["config"]) for file in (written, real))
    assert ours["name"] == theirs["name"] and ours["sim"].keys() == theirs["sim"].keys()
    equation = ours["sim"].keys() - SIZES
    assert {name: ours["sim"][name] for name in equation} == {name: theirs["sim"][name] for name in equation}


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_written_files_are_read_back(family, tmp_path):
    """The reader finds in a written file the family, its parameters, its domain and the states that were drawn."""
    path = write(tmp_path, family)
    dataset = next(iter(find_datasets(tmp_path, [path.name]).values()))
    assert (dataset.family, dataset.counts, dataset.parameters) == (family, (3,), parameters_of(family))
    assert dataset.grid == (8,) * len(FAMILIES[family].axes)
    assert dataset.lengths == (PROBLEMS[family].high - PROBLEMS[family].low,) * len(dataset.grid)
    u_0, drawn = sample_initial_states(family, [1], dataset.grid, 0, dataset.parameters)
    with TrajectoryReader(tmp_path, dataset) as reader:
        u, fields = reader.read(1), reader.read_coefficients(1)
    assert np.isfinite(u).all()
    if u_0 is not None:
        np.testing.assert_array_equal(u[0], u_0[0])
    for name, field in zip(FAMILIES[family].coefficients, fields, strict=True):
        np.testing.assert_array_equal(field, drawn[name][0])


def test_box_flow_comes_in_files_of_four(tmp_path):
    """A recipe of incompressible flow is split into numbered files of four that go on with the trajectories."""
    recipe = {"family": "incompressible_ns_2d", "parameters": {}, "num_trajectories": 6, "resolution": 8, "seed": 0}
    recipe |= {"num_snapshots": 2, "duration": 0.01}
    files = files_of(recipe)
    assert list(files) == ["ns_incom_inhom_2d_8-0.h5", "ns_incom_inhom_2d_8-1.h5"]
    for name, arguments in files.items():
        simulate(tmp_path / name, **arguments)
    dataset = find_datasets(tmp_path, list(files))["ns_incom_inhom_2d_8"]
    assert dataset.counts == (4, 2)
    with TrajectoryReader(tmp_path, dataset) as reader:
        np.testing.assert_array_equal(
            reader.read(5)[0], sample_initial_states("incompressible_ns_2d", [5], (8, 8), 0)[0][0]
        )


def test_open_ends_and_shocks_are_named_as_in_pdebench(tmp_path):
    """Shock tubes with open ends have PDEBench's name, and the reader tells their boundary from it."""
    inviscid = {"eta": 1e-8, "zeta": 1e-8}
    how = {"start": "Shock", "boundary": "outflow"}
    name = file_name("compressible_ns_1d", inviscid, **how)
    assert name == "1D_CFD_Shock_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5"
    path = write(tmp_path, "compressible_ns_1d", inviscid, **how).rename(tmp_path / name)
    dataset = find_datasets(tmp_path, [path.name])[path.stem]
    assert dataset.boundary == ("outflow",)
    assert dataset.parameters == inviscid


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_the_same_arguments_write_the_same_bytes(family, tmp_path):
    """A file depends on the arguments alone, and another seed changes it."""
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    expected = write(first, family).read_bytes()
    assert write(second, family).read_bytes() == expected
    assert write(other, family, seed=1).read_bytes() != expected


def test_the_batch_size_does_not_change_trajectories(tmp_path, monkeypatch):
    """Written in one batch or one by one, a file holds the same trajectories in the same order."""
    together = write(tmp_path / "together", "burgers_1d")
    monkeypatch.setattr(module, "BATCH_VALUES", 1)
    one_by_one = write(tmp_path / "one_by_one", "burgers_1d")
    with h5py.File(together) as a, h5py.File(one_by_one) as b:
        np.testing.assert_allclose(a["tensor"][:], b["tensor"][:], atol=1e-6)


def test_tensor_files_have_cell_centres_and_one_time_more(tmp_path):
    """Coordinates are cell centres, the times are the snapshots' and one step beyond, and row i is trajectory i."""
    with h5py.File(write(tmp_path, "advection_1d")) as file:
        assert file["tensor"].shape == (3, 4, 8)
        np.testing.assert_allclose(file["x-coordinate"], (np.arange(8) + 0.5) / 8)
        np.testing.assert_allclose(file["t-coordinate"], [0.0, 0.1, 0.2, 0.3, 0.4], rtol=1e-6)
        np.testing.assert_array_equal(
            file["tensor"][2, 0], sample_initial_states("advection_1d", [2], (8,), 0)[0][0, 0]
        )
        assert file["tensor"].chunks is None


def test_darcy_files_hold_permeability_and_solution(tmp_path):
    """A Darcy file has the permeability beside the solution and no time axis of coordinates."""
    with h5py.File(write(tmp_path, "darcy_2d")) as file:
        assert file["tensor"].shape == (3, 1, 8, 8)
        np.testing.assert_array_equal(file["nu"][:], sample_initial_states("darcy_2d", range(3), (8, 8), 0)[1]["nu"])
        assert "t-coordinate" not in file


def test_group_files_store_y_before_x_for_reaction_diffusion(tmp_path):
    """Two-dimensional reaction-diffusion is stored (T, Y, X, 2) with exact times, one group per trajectory."""
    with h5py.File(write(tmp_path, "diffusion_reaction_2d")) as file:
        assert list(file) == ["0000", "0001", "0002"]
        u_0 = sample_initial_states("diffusion_reaction_2d", [1], (8, 8), 0)[0][0]
        np.testing.assert_array_equal(file["0001/data"][0], u_0.permute(2, 1, 0))
        np.testing.assert_allclose(file["0001/grid/t"], [0.0, 0.1, 0.2, 0.3], rtol=1e-6)
        np.testing.assert_allclose(file["0001/grid/y"], -1 + (np.arange(8) + 0.5) / 4)


def test_groups_are_read_in_the_order_of_the_trajectories(tmp_path):
    """Trajectory 10,000 is read after 9,999: names have the digits of the last one."""
    path = write(tmp_path, "diffusion_sorption_1d", num_snapshots=2, duration=0.01, first=9_998)
    with h5py.File(path) as file:
        assert list(file) == ["09998", "09999", "10000"]
    dataset = find_datasets(tmp_path, [path.name])[path.stem]
    u_0 = sample_initial_states("diffusion_sorption_1d", range(9_998, 10_001), (8,), 0)[0]
    with TrajectoryReader(tmp_path, dataset) as reader:
        np.testing.assert_array_equal(np.stack([reader.read(index)[0] for index in range(3)]), u_0)


def test_groups_tell_their_equation(tmp_path):
    """The YAML text of a shallow-water group names the domain and the radius of its dam."""
    with h5py.File(write(tmp_path, "shallow_water_2d")) as file:
        sim = yaml.safe_load(file["0002"].attrs["config"])["sim"]
    radius = sample_initial_states("shallow_water_2d", [2], (8, 8), 0)[1]["dam_radius"].item()
    assert sim["dam_radius"] == pytest.approx(radius)
    assert (sim["x_left"], sim["y_top"], sim["xdim"], sim["n_time_steps"]) == (-2.5, 2.5, 8, 3)


def test_names_fit_the_registry():
    """Every name is one that the registry recognises as its family."""
    for family in SIMULATED_FAMILIES:
        name = file_name(family, dict.fromkeys(FAMILIES[family].parameters, 1), 128)
        assert re.fullmatch(FAMILIES[family].file_pattern, name)
    assert file_name("burgers_1d", {"nu": 1}) == "1D_Burgers_Sols_Nu1.0.hdf5"


def test_a_solution_that_is_not_finite_is_not_written(tmp_path, monkeypatch):
    """NaN in the solution is a DataFault and leaves no file behind."""
    monkeypatch.setattr(module, "evolve", lambda *_, **__: iter([torch.full((3, 1, 8), torch.nan)]))
    with pytest.raises(DataFault, match="not finite"):
        write(tmp_path, "burgers_1d")
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_when_it_is_complete(tmp_path):
    """While it is being written the file has no final name, and a half-written one from before does not matter."""
    path = tmp_path / file_name("burgers_1d", {"nu": 0.5})
    (tmp_path / f".{path.name}.1234.tmp").write_bytes(b"half")
    seen = []
    write(tmp_path, "burgers_1d", advance=lambda n: seen.append(path.exists()))
    assert len(seen) > 0
    assert not any(seen)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("family", "parameters", "changes", "message"),
    [
        ("compressible_ns_3d", {}, {}, r"has the parameters \['mach', 'eta', 'zeta'\]"),
        ("compressible_ns_2d", {"mach": 0.0, "eta": 0.1, "zeta": 0.1}, {}, "mach must be"),
        ("compressible_ns_1d", {"eta": 0.1, "zeta": 0.1}, {"start": "Turb"}, "start must be one of Rand, Shock"),
        ("burgers_1d", {"nu": 1.0}, {"boundary": "outflow"}, "the boundary of burgers_1d cannot be chosen"),
        ("burgers_1d", {"beta": 1.0}, {}, r"has the parameters \['nu'\]"),
        ("burgers_1d", {"nu": -1.0}, {}, "not negative"),
        ("burgers_1d", {"nu": 1.0}, {"num_snapshots": 1}, "num_snapshots >= 2"),
        ("burgers_1d", {"nu": 1.0}, {"duration": 0.0}, "duration > 0"),
        ("burgers_1d", {"nu": 1.0}, {"num_trajectories": 0}, "num_trajectories >= 1"),
        ("darcy_2d", {"beta": 1.0}, {"num_snapshots": 2}, "steady"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(family, parameters, changes, message, tmp_path):
    """A wrong family, parameter or size is a ConfigFault, and the folder stays empty."""
    with pytest.raises(ConfigFault, match=message):
        write(tmp_path, family, parameters, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.conserved], ids=lambda f: f.name)
def test_conserved_fields_are_conserved(tmp_path: Path, family: Family):
    """The integral of a field that the registry calls conserved stays what it was at the start, up to round-off."""
    path = write(tmp_path, family.name, resolution=16)
    dataset = find_datasets(tmp_path, [path.name])[path.stem]
    with TrajectoryReader(tmp_path, dataset) as reader:
        u = torch.from_numpy(np.stack([reader.read(index) for index in range(3)]))
    u = u[:, :, [family.fields.index(field) for field in family.conserved]]
    assert conservation_drift(u[:, 1:], u[:, 0]).max().item() < 1e-5
    assert (u[:, 1:] - u[:, :1]).abs().max().item() > 1e-3


@pytest.mark.parametrize("limit", [0, 1_000, 4_000])
@pytest.mark.parametrize("family", ["burgers_1d", "diffusion_reaction_2d", "incompressible_ns_2d"])
def test_a_full_disk_is_one_line(tmp_path: Path, family: str, limit: int):
    """In each layout, wherever the disk fills up; nothing is left, and HDF5 survives."""
    parameters = {"nu": 0.01} if family == "burgers_1d" else {}
    sizes = {"num_trajectories": 3, "resolution": 32, "num_snapshots": 5, "duration": 0.1, "seed": 0}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageFault, match="free some space"):
            simulate(tmp_path / "out.hdf5", family=family, parameters=parameters, **sizes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())
    simulate(tmp_path / "out.hdf5", family=family, parameters=parameters, **sizes)
    with h5py.File(tmp_path / "out.hdf5") as file:
        assert len(file) > 0
