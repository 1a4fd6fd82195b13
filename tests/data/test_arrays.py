"""Files in npz, zarr and NetCDF are read as the same data in HDF5 are."""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from scipy.io import netcdf_file

from tests.data.own import DELTA, DT, KDV, T, U, X, write_npz
from ups.data.arrays import open_data
from ups.data.families import Families
from ups.data.field_files import open_fields
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.sources import list_files
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import DataFault, StorageFault

NOBODY = 65534
pytestmark = pytest.mark.usefixtures("kdv_known")


def write_compressed(folder: Path) -> Path:
    """One field as `tensor`, steps as numbers, family and parameter in the name."""
    path = folder / f"kdv_1d_delta{DELTA}.npz"
    np.savez_compressed(path, tensor=U, dx=X[1] - X[0], dt=DT)
    return path


def write_zarr(version: int, folder: Path) -> Path:
    """A group of chunked arrays, with attributes."""
    group = zarr.open_group(folder / "named.zarr", mode="w", zarr_format=version)
    for name, values in {"u": U, "x": X, "t": T}.items():
        group.create_array(name, data=values, chunks=(2,) * values.ndim)
    group.attrs.update(delta=DELTA, family="kdv_1d")
    return folder / "named.zarr"


def write_netcdf_3(folder: Path) -> Path:
    """Classic NetCDF, as xarray writes it with SciPy."""
    with netcdf_file(folder / "named.nc", "w") as file:
        for axis, values in {"x": X, "t": T, "n": range(4)}.items():
            file.createDimension(axis, len(values))
        for name, axes, values in (("u", "ntx", U), ("x", "x", X), ("t", "t", T)):
            file.createVariable(name, values.dtype.str[1:], tuple(axes))[:] = values
        file.delta, file.family = np.array([DELTA]), "kdv_1d"
    return folder / "named.nc"


def write_netcdf_4(folder: Path) -> Path:
    """NetCDF 4 is HDF5 with dimension scales."""
    with h5py.File(folder / "named.nc", "w") as file:
        file["u"], file["x"], file["time"] = U, X, T
        for place, name in ((1, "time"), (2, "x")):
            file[name].make_scale(name)
            file["u"].dims[place].attach_scale(file[name])
        file.attrs["delta"], file.attrs["family"] = np.array([DELTA]), "kdv_1d"
    return folder / "named.nc"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "npz": write_npz,
    "compressed npz": write_compressed,
    "zarr 2": lambda folder: write_zarr(2, folder),
    "zarr 3": lambda folder: write_zarr(3, folder),
    "NetCDF 3": write_netcdf_3,
    "NetCDF 4": write_netcdf_4,
}


@pytest.mark.parametrize("blocks", [2**26, 64])
@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, blocks: int):
    """Whatever the format, and however small the blocks in which it is copied: values, grid, times and parameters."""
    monkeypatch.setattr("ups.data.arrays.BLOCK_BYTES", blocks)
    path = FORMATS[kind](tmp_path)
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    assert (dataset.family, dataset.parameters, dataset.files) == ("kdv_1d", {"delta": DELTA}, (path.name,))
    assert (dataset.grid, dataset.lengths) == ((32,), (2.0,)) and dataset.times == pytest.approx(T)
    with TrajectoryReader(tmp_path, dataset) as reader:
        assert (np.stack([reader.read(index)[:, 0] for index in range(4)]) == U).all()
        assert (reader.read(2, 1, 3)[:, 0] == U[2, 1:3]).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_first_reader_is_the_child_process(tmp_path: Path, kind: str):
    """Families and datasets are found by the process that may die of a damaged file."""
    path = FORMATS[kind](tmp_path)
    assert inspect("recognize", folder=tmp_path, names=[path.name])["families"] == {path.name: "kdv_1d"}
    files = list_files(tmp_path, tmp_path / "sums.json")
    assert list(files) == [path.name] and files[path.name]["family"] == "kdv_1d"
    assert list_files(tmp_path, tmp_path / "sums.json") == files


@contextmanager
def without_rights() -> Iterator[None]:
    """Root has the rights of others, to whom folders may be closed."""
    users = os.getresuid()
    if users[1] == 0:
        os.setresuid(NOBODY, NOBODY, users[2])
    try:
        yield
    finally:
        os.setresuid(*users)


def test_a_folder_that_is_not_writable_is_named(tmp_path: Path):
    """Without room for the copy there is one line."""
    open_data(write_npz(tmp_path)).close()  # imports all that it needs, which others may not read
    with tempfile.TemporaryDirectory() as folder:  # others may not enter `tmp_path`
        path = write_npz(Path(folder))
        path.parent.chmod(0o555)
        message = "named.npz: its folder is not writable, where it is copied to HDF5 once"
        with without_rights(), pytest.raises(StorageFault, match=message):
            open_data(path)
        path.parent.chmod(0o700)


def test_a_zarr_that_could_run_code_is_refused(tmp_path: Path):
    """Codecs other than those that compress or reorder bytes are refused before zarr reads anything."""
    changes = {"zarr 2": {"filters": [{"id": "pickle"}]}, "zarr 3": {"codecs": [{"name": "numcodecs.pickle"}]}}
    for name, change in changes.items():
        path = FORMATS[name](tmp_path)
        metadata = next(each for each in (path / "u" / ".zarray", path / "u" / "zarr.json") if each.is_file())
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
        with pytest.raises(DataFault, match=r"the codec '(numcodecs\.)?pickle' is not read"):
            open_data(path)
        with pytest.raises(DataFault, match=r"the codec '(numcodecs\.)?pickle' is not read"), open_fields(path, KDV):
            pass
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.parametrize("name", ["attributes", "node_type"])
def test_names_of_arrays_hide_no_code(tmp_path: Path, name: str):
    """Where the metadata of all arrays are together, an array may have the name of a part of metadata."""
    group = zarr.open_group(tmp_path / "in.zarr", mode="w", zarr_format=3)
    for each in (name, "attributes"):
        group.create_array(each, data=U, overwrite=True)
    zarr.consolidate_metadata(group.store)
    metadata = json.loads((tmp_path / "in.zarr/zarr.json").read_text())
    metadata["consolidated_metadata"]["metadata"]["attributes"]["codecs"] = [{"name": "numcodecs.pickle"}]
    (tmp_path / "in.zarr/zarr.json").write_text(json.dumps(metadata))
    with (
        pytest.raises(DataFault, match=r"the codec 'numcodecs.pickle' is not read"),
        open_fields(tmp_path / "in.zarr", KDV),
    ):
        pass


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
def test_attributes_may_have_the_names_of_codecs(tmp_path: Path, version: int, consolidated: bool):
    """What a user says of filters and codecs is no codec, of an array or of the whole store."""
    path = write_zarr(version, tmp_path)
    group = zarr.open_group(path, mode="a")
    for each in (group, group["u"]):
        each.attrs.update(filters=["none"], codecs=["of my own"], compressor={"id": "none"})
    if consolidated:
        zarr.consolidate_metadata(group.store)
    with open_fields(path, KDV) as file:
        np.testing.assert_array_equal(file.read(0, 0, slice(None))[:, 0], U[0])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[400] ^= 255
    path.write_bytes(content)


def _save_objects(path: Path) -> None:
    np.savez(path, u=np.array([{}, 1], object), family="kdv_1d")


def _save_fortran(path: Path) -> None:
    np.savez(path, u=np.asfortranarray(U), x=X, t=T, delta=DELTA, family="kdv_1d")


def _save_null(path: Path) -> None:
    np.savez(path, u=U, x=X, t=T, delta=DELTA, family="kdv_1d", title=np.array("a\0b"))


def _save_nested(path: Path) -> None:
    np.savez(path, **{"u": U, "u/v": U}, x=X, t=T, delta=DELTA, family="kdv_1d")


def _save_html(path: Path) -> None:
    path.write_text("<html>not found</html>")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "cannot be read as npz .File is not a zip file"),
        (_flip, "Bad CRC-32 for file 'u.npy'"),
        (_save_objects, "holds Python objects"),
        (_save_fortran, "an array in Fortran's order; save numpy.ascontiguousarray"),
        (_save_html, "cannot be read as npz"),
        (_save_null, "cannot be copied to HDF5 .*embedded NULL"),
        (_save_nested, "cannot be copied to HDF5"),
    ],
)
def test_a_damaged_archive_is_one_line(tmp_path: Path, damage: Callable[[Path], None], message: str):
    """What cannot be read is named with the reason, and no copy is left."""
    path = write_npz(tmp_path)
    damage(path)
    with pytest.raises(DataFault, match=message) as caught:
        inspect("recognize", folder=tmp_path, names=[path.name])
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_dimensions_of_netcdf_4_are_no_coordinates(tmp_path: Path):
    """NetCDF 4 stores an axis without coordinates as a dataset of its name; then `dx` and `dt` say the rest."""
    path = tmp_path / "plain.nc"
    with h5py.File(path, "w") as file:
        file["u"] = U
        for name, size in (("t", U.shape[1]), ("x", U.shape[2])):
            dimension = file.create_dataset(name, (size,), np.float32)
            dimension.make_scale(f"This is a netCDF dimension but not a netCDF variable.{size:10}")
        file.attrs.update({"family": "kdv_1d", "delta": DELTA, "dx": X[1] - X[0], "dt": DT})
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    assert dataset.times == pytest.approx(T) and dataset.lengths == pytest.approx((len(X) * (X[1] - X[0]),))


def test_an_attribute_of_a_strange_type_is_one_line(tmp_path: Path):
    """A file of fields to predict from, with a time as HDF5 has it and numpy has not."""
    path = tmp_path / "in.hdf5"
    with h5py.File(path, "w") as file:
        file["u"] = U[:, 0]
        h5py.h5a.create(file.id, b"when", h5py.h5t.UNIX_D32LE, h5py.h5s.create(h5py.h5s.SCALAR))
    with pytest.raises(DataFault, match="its contents are damaged") as fault, open_fields(path, KDV):
        pass
    assert "\n" not in str(fault.value)


def test_faults_name_the_file_and_not_its_copy(tmp_path: Path, families: Families):
    """What is missing in an npz is said of the npz."""
    families.define(replace(KDV, parameters=("delta", "mu")))
    path = write_npz(tmp_path)
    with pytest.raises(DataFault, match=f"^{path}: parameter 'mu'"):
        find_datasets(tmp_path, [path.name])
    np.savez(path, u=U, x=X[1:], t=T, delta=DELTA, mu=1, family="kdv_1d")
    with pytest.raises(DataFault, match=f"^{path}: 'x' has 31 entries for 32 points"):
        find_datasets(tmp_path, [path.name])


def _claim_much(folder: Path) -> Path:
    """An archive of some bytes that claims 2^48 values."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**16,) * 3})
    with zipfile.ZipFile(folder / "named.npz", "w") as archive:
        archive.writestr("u.npy", header.getvalue())
    return folder / "named.npz"


def test_many_chunks_are_many_accesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file per snapshot: listing and reading them takes as long as it takes, each access a limited time."""
    path, accesses = tmp_path / f"kdv_1d_delta{DELTA}.zarr", []
    group = zarr.open_group(path, mode="w")
    for name, values in {"u": U, "x": X, "t": T}.items():
        group.create_array(name, data=values, chunks=(1, 1, 32)[-values.ndim :])
    monkeypatch.setattr("ups.data.zarr_stores.MOST_FILES", 4)
    monkeypatch.setattr("ups.data.hdf5.before_access", accesses.append)
    with open_data(path) as file:
        np.testing.assert_array_equal(file["u"], U.astype(np.float32))
    assert accesses.count(str(path)) > 3 * U.shape[0] * U.shape[1] / 4


ENCODINGS = {
    "packed": ({"dtype": "int16", "scale_factor": 1e-4}, "'u' is packed"),
    "missing": ({"_FillValue": -9999.0}, r"'u' marks missing values by -9999 \(_FillValue\)"),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["nc", "zarr 2", "zarr 3", "hdf5"])
def test_numbers_that_are_no_values_are_refused(tmp_path: Path, kind: str, encoding: str):
    """Packed integers, and values below which there are none: as data and as initial states."""
    how, message = ENCODINGS[encoding]
    path = tmp_path / f"kdv_1d_delta{DELTA}.{kind.split()[0]}"
    data = xr.Dataset({"u": (("n", "t", "x"), U)}, coords={"t": T, "x": X})
    if kind == "nc":
        data.to_netcdf(path, engine="scipy", encoding={"u": how})
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            file["u"], file["t"], file["x"] = U, T, X
            file["u"].attrs.update({name: value for name, value in how.items() if name != "dtype"})
    else:
        data.to_zarr(path, zarr_format=int(kind[-1]), encoding={"u": how}, consolidated=False)
    with pytest.raises(DataFault, match=message):
        inspect("describe_file", path=path, family="kdv_1d")
    with pytest.raises(DataFault, match=message), open_fields(path, KDV) as file:
        file.read(0, 0, slice(None))


def test_times_of_initial_states_that_begin_late_keep_their_step(tmp_path: Path):
    """In float32, seconds since 1970 would be a hundred apart."""
    np.savez(tmp_path / "in.npz", u=U, t=1.7e9 + 60 * np.arange(U.shape[1]))
    with open_fields(tmp_path / "in.npz", KDV) as file:
        assert np.diff(file.times).tolist() == [60] * (U.shape[1] - 1)


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
def test_initial_states_have_the_parameters_that_data_have(tmp_path: Path, suffix: str):
    """Under the name of PDEBench's files, `Nu`, as under that of the family, also beside a single array."""
    path = tmp_path / f"in.{suffix}"
    for name in ("u", "states"):
        arrays = {name: np.ones((2, 8), np.float32), "Nu": np.float64(0.7)}
        if suffix == "npz":
            np.savez(path, **arrays)
        else:
            with h5py.File(path, "w") as file:
                file.update(arrays)
        with open_fields(path, FAMILIES["burgers_1d"]) as found:
            assert found.parameters["nu"].tolist() == [0.7, 0.7] and found.first.count == 2


def test_an_absurd_claim_costs_nothing(tmp_path: Path):
    """A header that claims more than there is, is refused before anything is allocated."""
    path = _claim_much(tmp_path)
    with pytest.raises(DataFault, match=r"named\.npz: 'u' has the absurd shape \(65536, 65536, 65536\)"):
        inspect("recognize", folder=tmp_path, names=[path.name])
