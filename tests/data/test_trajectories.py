import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data.families import Subsample
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.recognition import find_files
from ups.data.trajectories import TrajectoryReader, find_datasets, inspect_file, name_variants, parameter_in_name
from ups.errors import DataFault


def read(folder: Path, name: str, index: int, *window: int) -> tuple[np.ndarray, np.ndarray]:
    """A trajectory of a dataset in a folder, and its coefficients."""
    with TrajectoryReader(folder, find_datasets(folder, find_files(folder))[name]) as reader:
        return reader.read(index, *window), reader.read_coefficients(index)


def stored(path: Path, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Trajectory and coefficients of a file by plain indexing, written down once more for each layout."""
    with h5py.File(path) as file:
        if "tensor" in file:
            u = file["tensor"][index][:, None]
            return u, file["nu"][index][None] if "nu" in file else np.empty((0, *u.shape[2:]), np.float32)
        if "density" in file:
            u = np.stack([file[name][index] for name in ("density", "pressure", "Vx", "Vy", "Vz") if name in file], 1)
        elif "velocity" in file:
            v, c, f = (file[name][index] for name in ("velocity", "particles", "force"))
            return np.stack([v[..., 0], v[..., 1], c[..., 0]], 1), np.stack([f[..., 0], f[..., 1]])
        else:
            u = np.moveaxis(file[sorted(file)[index]]["data"][:], -1, 1)
            u = u.transpose(0, 1, 3, 2) if "diff-react" in path.name else u
    return u, np.empty((0, *u.shape[2:]), np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_that_keeps_datasets_open_reads_each_trajectory(write, monkeypatch, family):
    """One reader returns each trajectory's own values, in any order, with one dataset kept open, and once closed."""
    monkeypatch.setattr("ups.data.trajectories.MAX_OPEN_DATASETS", 1)
    path = write(family)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    with TrajectoryReader(path.parent, dataset) as reader:
        found = [(index, reader.read(index), reader.read_coefficients(index)) for index in (2, 0, 1, 2)]
    found.append((1, reader.read(1), reader.read_coefficients(1)))
    reader.__exit__()
    for index, u, coefficients in found:
        expected = read(path.parent, dataset.name, index)
        np.testing.assert_array_equal(u, expected[0])
        np.testing.assert_array_equal(coefficients, expected[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_agrees_with_plain_indexing(write, family):
    """A trajectory is (T, C, *grid) in the registry's order of fields and axes, whatever the layout."""
    path = write(family)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    u, coefficients = read(path.parent, dataset.name, 2)
    grid = (8, 6, 4)[: len(FAMILIES[family].axes)]
    assert u.dtype == coefficients.dtype == np.float32
    assert u.shape == (len(dataset.times), len(FAMILIES[family].fields), *grid)
    assert all(map(np.array_equal, (u, coefficients), stored(path, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_agrees_with_plain_indexing_on_real_files(samples, family):
    """Files made by PDEBench's generators are read as they are stored, all eleven families."""
    datasets = find_datasets(samples, find_files(samples))
    (dataset,) = (dataset for dataset in datasets.values() if dataset.family == family)
    with TrajectoryReader(samples, dataset) as reader:
        for index in (0, dataset.num_trajectories - 1):
            name, position = reader.locate(index)
            u, coefficients = stored(samples / name, position)
            assert np.array_equal(reader.read(index), u)
            assert np.array_equal(reader.read_coefficients(index), coefficients)


def test_real_files_are_described(samples):
    """Steps, lengths, boundaries and parameters of the real files are those of the equations."""
    datasets = find_datasets(samples, find_files(samples))
    assert {dataset.family for dataset in datasets.values()} == set(FAMILIES)
    cfd = datasets["1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train"]
    assert (cfd.lengths, cfd.grid, cfd.boundary) == ((2.0,), (128,), ("periodic",))
    assert cfd.parameters == {"eta": 0.01, "zeta": 0.01}
    assert datasets["2D_diff-react_NA_NA"].lengths == (2.0, 2.0)
    assert datasets["2D_rdb_NA_NA"].lengths == (5.0, 5.0)
    assert datasets["1D_Advection_Sols_beta0.4"].times[:3] == (0.0, 0.05, 0.1)
    assert datasets["ns_incom_inhom_2d_48"].counts == (4, 4, 4)


def test_window_reads_only_its_snapshots(write):
    """A window is the same piece of the whole trajectory."""
    path = write("compressible_ns_2d")
    whole, _ = read(path.parent, path.stem, 1)
    window, _ = read(path.parent, path.stem, 1, 1, 3)
    assert np.array_equal(window, whole[1:3])


def test_index_runs_over_all_files(write, tmp_path):
    """Batch files of one stem are one dataset, in the order of their numbers."""
    paths = [write("incompressible_ns_2d", f"ns_incom_inhom_2d_8-{k}.h5", count=2) for k in (2, 10)]
    dataset = find_datasets(tmp_path, find_files(tmp_path))["ns_incom_inhom_2d_8"]
    assert (dataset.files, dataset.counts) == (tuple(path.name for path in paths), (2, 2))
    u, coefficients = read(tmp_path, "ns_incom_inhom_2d_8", 3)
    assert all(map(np.array_equal, (u, coefficients), stored(paths[1], 1)))


def test_leading_axis_of_one_is_squeezed(write, tmp_path):
    """An array of shape (1, N, T, X), which several devices leave behind, is read as (N, T, X)."""

    def add_axis(file: h5py.File) -> None:
        values = file["tensor"][:]
        del file["tensor"]
        file["tensor"] = values[None]

    path = write("advection_1d")
    before, _ = read(tmp_path, path.stem, 3)
    write("advection_1d", edit=add_axis)
    assert np.array_equal(read(tmp_path, path.stem, 3)[0], before)


def test_double_precision_is_cast(write, tmp_path):
    """Fields stored as float64 are read as float32."""

    def widen(file: h5py.File) -> None:
        values = file["tensor"][:].astype(np.float64)
        del file["tensor"]
        file["tensor"] = values

    path = write("advection_1d", edit=widen)
    assert read(tmp_path, path.stem, 0)[0].dtype == np.float32


def test_attributes_win_over_the_file_name(write, tmp_path):
    """Parameters come from the attributes first and from the file name second."""
    path = write("burgers_1d", edit=lambda file: file.attrs.update(Nu=np.float64(0.5)))
    assert find_datasets(tmp_path, [path.name])[path.stem].parameters == {"nu": 0.5}


def test_parameters_and_boundary_from_the_file_name(write, tmp_path):
    """`Eta1.e-8` is a number, `M0.1` the Mach number, `_trans_` an outflow boundary."""
    write("compressible_ns_1d")
    write("compressible_ns_2d")
    one, two = (dataset for dataset in find_datasets(tmp_path, find_files(tmp_path)).values())
    assert one.parameters == {"eta": 1e-8, "zeta": 1e-8}
    assert one.boundary == ("outflow",)
    assert two.parameters == {"mach": 0.1, "eta": 0.01, "zeta": 0.01}
    assert two.boundary == ("periodic", "periodic")


def test_the_boundary_of_predictions_is_in_the_name_of_their_variant(write, tmp_path):
    """A file with the text `compressible_ns_1d-outflow` is of that family with this boundary, whatever its own name."""
    path = write("compressible_ns_1d", edit=lambda file: file.attrs.update(family="compressible_ns_1d-outflow"))
    renamed = path.rename(tmp_path / "predicted_Eta1.e-8_Zeta1.e-8.hdf5")
    dataset = inspect_file(renamed)
    assert (dataset.family, dataset.boundary) == ("compressible_ns_1d", ("outflow",))


def test_parameters_may_differ_in_case():
    """`A2_a3` says that A is 2 and a is 3; where only one of them is there, its case does not matter."""
    path = Path("family_A2_a3.hdf5")
    assert (parameter_in_name(path, "A"), parameter_in_name(path, "a")) == (2.0, 3.0)
    assert parameter_in_name(Path("1D_Burgers_NU0.1.hdf5"), "Nu") == 0.1


def test_hidden_and_partial_files_are_skipped(write, tmp_path):
    """Only finished files count, whatever words are in their names."""
    path = write("advection_1d")
    for name in (".hidden.hdf5", "1D_Advection_Sols_beta1.0.hdf5.part", "flow.particles.hdf5"):
        shutil.copy(path, tmp_path / name)
    assert find_files(tmp_path) == [path.name, "flow.particles.hdf5"]


def replace(name: str, change: Callable[[np.ndarray], object]) -> Callable[[h5py.File], None]:
    """Edit that stores `change(values)` in place of a dataset."""

    def edit(file: h5py.File) -> None:
        values = file[name][:]
        del file[name]
        file[name] = change(values)

    return edit


def move_outside(file: h5py.File) -> None:
    """Keep the values in a file beside this one."""
    shape = file["tensor"].shape
    del file["tensor"]
    file.create_dataset("tensor", shape, np.float32, external=[("secret.bin", 0, h5py.h5f.UNLIMITED)])


def make_virtual(file: h5py.File) -> None:
    """Gather the values from another HDF5 file."""
    layout = h5py.VirtualLayout(file["tensor"].shape, np.float32)
    layout[:] = h5py.VirtualSource("other.hdf5", "tensor", file["tensor"].shape)
    del file["tensor"]
    file.create_virtual_dataset("tensor", layout)


def link(target: h5py.SoftLink | h5py.ExternalLink) -> Callable[[h5py.File], None]:
    """Edit that puts a link in place of the dataset."""

    def edit(file: h5py.File) -> None:
        file.move("tensor", "elsewhere")
        file["tensor"] = target

    return edit


def claim_everything(file: h5py.File) -> None:
    """Declare a shape that no machine can hold."""
    del file["tensor"]
    file.create_dataset("tensor", (2**21, 5, 2**21), np.float32, chunks=(1, 5, 8))


def make_group(file: h5py.File) -> None:
    """Put a group where the dataset should be."""
    del file["tensor"]
    file["tensor/u"] = np.ones(3)


def leave_gaps(file: h5py.File) -> None:
    """Write two trajectories of four."""
    del file["tensor"]
    file.create_dataset("tensor", (4, 5, 8), np.float32, chunks=(1, 5, 8))[:2] = 1


def ask_for_plugin(file: h5py.File) -> None:
    """Store with a filter that few readers know."""
    values = file["tensor"][:]
    del file["tensor"]
    file.create_dataset("tensor", data=values, scaleoffset=3)


BAD_CONTENTS = {
    "missing key": ("advection_1d", lambda file: file.pop("tensor"), "no 'tensor'"),
    "missing field": ("compressible_ns_1d", lambda file: file.pop("pressure"), "no 'pressure'"),
    "missing coordinate": ("compressible_ns_2d", lambda file: file.pop("y-coordinate"), "no 'y-coordinate'"),
    "wrong rank": ("advection_1d", replace("tensor", lambda u: u[0]), "expected the axes"),
    "two axes too many": ("advection_1d", replace("tensor", lambda u: u[None, None]), "expected 3 axes"),
    "integers": ("burgers_1d", replace("tensor", lambda u: u.astype(np.int32)), "int32"),
    "text": ("burgers_1d", replace("tensor", lambda u: "u"), "axes"),
    "fields differ": ("compressible_ns_1d", replace("Vx", lambda u: u[:2]), "'Vx' has shape"),
    "x differs": ("advection_1d", replace("x-coordinate", lambda x: x[1:]), "7 entries for 8"),
    "t differs": ("advection_1d", replace("t-coordinate", lambda t: t[:3]), "3 entries for 5"),
    "no trajectories": ("advection_1d", replace("tensor", lambda u: u[:0]), "empty"),
    "no groups": ("shallow_water_2d", lambda file: file.clear(), "no trajectory"),
    "stray dataset": ("shallow_water_2d", lambda file: file.update({"zzz": np.ones(3)}), "'zzz"),
    "one snapshot": ("advection_1d", replace("tensor", lambda u: u[:, :1]), "2 entries|one snapshot|6 entries"),
    "odd time step": ("advection_1d", replace("t-coordinate", lambda t: t**2), "uniform"),
    "NaN in time": ("advection_1d", replace("t-coordinate", lambda t: t * np.nan), "uniform"),
    "odd grid": ("advection_1d", replace("x-coordinate", lambda x: x**2), "uniform"),
    "outdated Burgers": ("burgers_1d", replace("x-coordinate", lambda x: 2 * x - 1), "outdated.*twice the flux"),
    "group differs": ("diffusion_sorption_1d", replace("0004/grid/t", lambda t: 2 * t), "'0004'"),
    "fields of a group": ("diffusion_reaction_2d", replace("0002/data", lambda u: u[..., :1]), "1 fields"),
    "trajectories differ": ("incompressible_ns_2d", replace("t", lambda t: t * np.arange(1, 5)[:, None]), "'t'"),
    "aborted run": ("incompressible_ns_2d", lambda file: file.attrs.update(latestIndex=2), "aborted"),
    "no latestIndex": ("incompressible_ns_2d", lambda file: file.attrs.clear(), "aborted"),
    "parameter is text": ("advection_1d", lambda file: file.attrs.update(beta="fast"), "beta"),
    "parameter is NaN": ("advection_1d", lambda file: file.attrs.update(beta=np.nan), "beta"),
    "external storage": ("advection_1d", move_outside, "other files"),
    "virtual": ("advection_1d", make_virtual, "other files"),
    "soft link": ("advection_1d", link(h5py.SoftLink("/elsewhere")), "link"),
    "external link": ("advection_1d", link(h5py.ExternalLink("other.hdf5", "/tensor")), "link"),
    "group for dataset": ("advection_1d", make_group, "is a group"),
    "absurd shape": ("advection_1d", claim_everything, "absurd"),
    "gaps": ("advection_1d", leave_gaps, "never written"),
    "exotic filter": ("advection_1d", ask_for_plugin, "filter"),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
def test_bad_contents_are_refused(write, case):
    """A damaged or hostile file ends in one line that names the file and the trouble, before any value is used."""
    family, edit, expected = BAD_CONTENTS[case]
    path = write(family, edit=edit)
    with pytest.raises(DataFault, match=expected) as caught:
        find_datasets(path.parent, [path.name])
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_BYTES = {
    "empty": (lambda whole: b"", "empty"),
    "foreign": (lambda whole: b"not a field" * 100, "foreign"),
    "HTML": (lambda whole: b"<!DOCTYPE html><title>Log in</title>", "HTML"),
    "truncated": (lambda whole: whole[: len(whole) // 2], "truncated"),
    "header only": (lambda whole: whole[:8], "truncated"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_bad_bytes_are_refused(write, case):
    """What is no complete HDF5 file is named as what it is."""
    damage, expected = BAD_BYTES[case]
    path = write("advection_1d")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataFault, match=f"{re.escape(path.name)}.*{expected}"):
        find_datasets(path.parent, [path.name])


def test_random_damage_never_escapes_as_another_error(write):
    """A flipped byte is either harmless or a DataFault, never an error of the HDF5 library."""
    path = write("shallow_water_2d", count=2)
    sound = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in generator.integers(8, len(sound), 200):
        damaged = bytearray(sound)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read(path.parent, path.stem, 1)
        except DataFault as fault:
            assert path.name in str(fault)


def test_missing_parameter_is_refused(write, tmp_path):
    """A parameter that is neither an attribute nor in the name is asked for."""
    path = write("advection_1d", "1D_Advection_Sols_mine.hdf5")
    with pytest.raises(DataFault, match="1D_Advection_Sols_mine.hdf5.*'beta'"):
        find_datasets(tmp_path, [path.name])


def test_grids_and_boundaries_of_one_family_are_variants(write, tmp_path):
    """Two grids and two boundaries make variants, named by what differs; other families keep their names."""
    write("compressible_ns_1d")
    names = {"periodic": (8,), "trans": (16,)}
    for boundary, grid in names.items():
        write("compressible_ns_1d", f"1D_CFD_Rand_Eta0.1_Zeta0.1_{boundary}_Train.hdf5", grid=grid)
    write("advection_1d")
    datasets = name_variants(find_datasets(tmp_path, find_files(tmp_path)))
    assert sorted(dataset.family for dataset in datasets.values()) == [
        "advection_1d",
        "compressible_ns_1d-16-outflow",
        "compressible_ns_1d-8-outflow",
        "compressible_ns_1d-8-periodic",
    ]


def test_domains_of_different_lengths_are_named(write, tmp_path, caplog):
    """A model has no input that says the length: on one grid the files of a family should have one."""
    paths = [write("burgers_1d", f"1D_Burgers_Sols_Nu{nu}.hdf5") for nu in (0.1, 1.0)]
    with h5py.File(paths[1], "r+") as file:
        file["x-coordinate"][...] *= 2
    options = {"subsample": {"burgers_1d": dataclasses.asdict(Subsample())}, "seed": 0}
    options |= {"valid_fraction": 0.3, "test_fraction": 0.3}
    inspect("describe", folder=tmp_path, names=[path.name for path in paths], **options)
    (line,) = caplog.messages
    assert re.match(r"1D_Burgers_Sols_Nu1.0: its domain of length \S+ is that of 1D_Burgers_Sols_Nu0.1 of length", line)


def test_variants_are_their_family_with_another_name():
    """A variant has all attributes of its family; names of neither are unknown."""
    variant = FAMILIES["darcy_2d-64x64"]
    assert dataclasses.replace(variant, name="darcy_2d") == FAMILIES["darcy_2d"] and variant.name == "darcy_2d-64x64"
    for name in ("darcy", "darcy-64x64"):
        with pytest.raises(KeyError):
            FAMILIES[name]
    assert FAMILIES.in_order(["darcy_2d", "darcy_2d-8x8", "burgers_1d", "darcy_2d"]) == [
        "burgers_1d",
        "darcy_2d",
        "darcy_2d-8x8",
    ]


def test_second_file_of_a_dataset_is_refused(write, tmp_path):
    """Two files that differ only in their ending are not one dataset."""
    path = write("advection_1d")
    shutil.copy(path, path.with_suffix(".h5"))
    with pytest.raises(DataFault, match="second file"):
        find_datasets(tmp_path, find_files(tmp_path))


def test_unknown_file_is_refused(write, tmp_path):
    """A name that fits no family is answered with the names that do."""
    write("advection_1d", "wave.hdf5")
    with pytest.raises(DataFault, match=r"wave\.hdf5.*1D_Advection_"):
        find_datasets(tmp_path, find_files(tmp_path))


@pytest.mark.parametrize("name", ["missing", "file.txt", "empty"])
def test_folder_without_files_is_refused(tmp_path, name):
    """A folder that does not exist, is a file or holds nothing is named."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(DataFault, match=re.escape(str(tmp_path / name))):
        find_files(tmp_path / name)


def test_missing_file_is_refused(tmp_path):
    """A selected file that is not there is named."""
    with pytest.raises(DataFault, match="1D_Advection_Sols_beta0.4.hdf5: no such file"):
        find_datasets(tmp_path, ["1D_Advection_Sols_beta0.4.hdf5"])


def test_index_outside_is_an_error(write, tmp_path):
    """Negative or too large positions do not wrap around."""
    path = write("advection_1d")
    for index in (-1, 4):
        with pytest.raises(IndexError):
            read(tmp_path, path.stem, index)


def test_file_changed_after_description(write, tmp_path):
    """A file that was replaced by another size is refused at reading."""
    path = write("advection_1d")
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    write("advection_1d", grid=(16,))
    with TrajectoryReader(tmp_path, dataset) as reader, pytest.raises(DataFault, match="has changed"):
        reader.read(0)
