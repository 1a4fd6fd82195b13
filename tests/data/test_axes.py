"""Where a file names the axes of its arrays, their order is checked."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr

from ups.data.families import Families, Family
from ups.data.field_files import open_fields
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import DataFault

NAMED = ("zarr 2", "zarr 3", "NetCDF 3", "NetCDF 4")
HEAT = Family("heat_2d", "u_t = u_xx + u_yy", ("u",), ("x", "y"), "periodic", ())


def _write_xarray(folder: Path, kind: str, axes: tuple[str, ...]) -> Path:
    """Six trajectories with six snapshots of a field on 6 x 6 points, with named axes."""
    u = np.random.default_rng(0).normal(size=(6, 6, 6, 6)).astype(np.float32)
    x = (np.arange(6) + 0.5) / 6
    content = xr.Dataset({"u": (axes, u)}, {"x": x, "y": x, "time": 0.1 * np.arange(6)}, {"family": "heat_2d"})
    if kind.startswith("zarr"):
        content.to_zarr(folder / "in.zarr", zarr_format=int(kind[-1]), consolidated=False)
        return folder / "in.zarr"
    if kind == "NetCDF 3":
        content.to_netcdf(folder / "in.nc", engine="scipy")
        return folder / "in.nc"
    with h5py.File(folder / "in.nc", "w") as file:
        for name, values in content.variables.items():
            file[name] = values.values
        for place, axis in enumerate(axes):
            if axis not in file:
                file[axis] = np.arange(content.sizes[axis], dtype=np.float32)
            file[axis].make_scale(axis)
            file["u"].dims[place].attach_scale(file[axis])
        file.attrs["family"] = "heat_2d"
    return folder / "in.nc"


@pytest.mark.parametrize("axes", [("n", "time", "y", "x"), ("n", "x", "y", "time"), ("y", "time", "n", "x")])
@pytest.mark.parametrize("kind", NAMED)
def test_named_axes_in_another_order_are_refused(tmp_path: Path, families: Families, kind: str, axes: tuple[str, ...]):
    """On a grid of n x n points nothing else would tell that x and y, or x and time, are exchanged."""
    families.define(HEAT)
    path = _write_xarray(tmp_path, kind, axes)
    with pytest.raises(DataFault, match=f"'u' has the axes {', '.join(axes)}; arrange .* so") as fault:
        find_datasets(tmp_path, [path.name])
    assert str(fault.value).startswith(f"{path}: ") and "\n" not in str(fault.value)
    with pytest.raises(DataFault, match=f"'u' has the axes {', '.join(axes)}; arrange"), open_fields(path, HEAT):
        pass


@pytest.mark.parametrize("axes", [("n", "time", "x", "y"), ("sample", "step", "row", "column")])
@pytest.mark.parametrize("kind", NAMED)
def test_other_names_of_axes_are_accepted(tmp_path: Path, families: Families, kind: str, axes: tuple[str, ...]):
    """Names that are not the family's say nothing about the order."""
    families.define(HEAT)
    path = _write_xarray(tmp_path, kind, axes)
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    with open_fields(path, HEAT) as file, TrajectoryReader(tmp_path, dataset) as reader:
        assert np.array_equal(file.read(1, 0, slice(None)), reader.read(1))


def test_attributes_that_only_look_like_names_of_axes_are_ignored(tmp_path: Path, families: Families):
    """HDF5 crashes on names of another type or shape than its own."""
    families.define(HEAT)
    for strange in (3, "x", np.array([b"n", b"t", b"y", b"x"]), np.array([1, 2, 3, 4])):
        path = _write_xarray(tmp_path, "NetCDF 4", ("n", "time", "x", "y"))
        with h5py.File(path, "a") as file:
            file["u"].attrs["DIMENSION_LIST"] = file["u"].attrs["DIMENSION_LABELS"] = strange
        assert list(find_datasets(tmp_path, [path.name]))
