"""What is read of a file besides its values: grid and lengths."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data import recognition
from ups.data.field_files import open_fields
from ups.data.pdebench import FAMILIES
from ups.data.recognition import warn_of_chunks
from ups.data.trajectories import find_datasets
from ups.errors import DataFault


@pytest.mark.parametrize("family", FAMILIES)
def test_a_domain_is_as_long_as_its_cells(family: str, write):
    """The centres of n cells of 1 / n span less than the domain, whose length is 1 along every axis."""
    path: Path = write(family)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    assert dataset.lengths == (1.0,) * len(FAMILIES[family].axes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grid_has_its_points_in_the_order_of_the_axes(family: str, write):
    """On 8 x 6 x 4 points the grid is (8, 6, 4), whatever the order on disk."""
    path: Path = write(family)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    assert dataset.grid == (8, 6, 4)[: len(FAMILIES[family].axes)]


@pytest.mark.parametrize(("chunk", "compression", "warns"), [(2, "gzip", True), (1, "gzip", False), (2, None, False)])
def test_chunks_of_several_trajectories_are_slow(
    chunk: int,
    compression: str | None,
    warns: bool,
    write,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """A warning says how many trajectories are unpacked for one, and what to do; of small ones nothing is said."""

    def chunked(file: h5py.File) -> None:
        values = file["Vx"][:]
        del file["Vx"]
        file.create_dataset("Vx", data=values, chunks=(chunk, 1, *values.shape[2:]), compression=compression)

    path = write("compressible_ns_2d", edit=chunked)
    datasets = find_datasets(path.parent, [path.name]).values()
    warn_of_chunks(path.parent, datasets)
    assert not caplog.text
    monkeypatch.setattr(recognition, "SLOW_BYTES", 1)
    warn_of_chunks(path.parent, datasets)
    expected = f"{path}: to read one trajectory of /Vx, 2 are unpacked; write it without compression (h5repack -f NONE)"
    assert (expected in caplog.text) == warns and len(caplog.records) == warns


def test_batches_of_other_times_are_no_dataset(write):
    """Files of one simulation that differ in their time step are refused, those that agree are one dataset."""

    def slower(file: h5py.File) -> None:
        file["t"][:] = 2 * file["t"][:]

    paths = [write("incompressible_ns_2d", f"ns_incom_inhom_2d_8-{k}.h5", count=3) for k in range(2)]
    (dataset,) = find_datasets(paths[0].parent, [path.name for path in paths]).values()
    assert dataset.counts == (3, 3)
    paths.append(write("incompressible_ns_2d", "ns_incom_inhom_2d_8-2.h5", count=3, edit=slower))
    with pytest.raises(DataFault, match="8-2.h5.* has other times than ns_incom_inhom_2d_8-0.h5"):
        find_datasets(paths[0].parent, [path.name for path in paths])


@pytest.mark.parametrize(("first", "dt"), [(0.0, 0.05), (1.7e9, 60.0), (86400.0, 0.005), (2e4, 0.001)])
def test_times_that_begin_late_keep_their_step(first: float, dt: float, write):
    """In float32, seconds since 1970 would be a hundred apart; 0.05, stored in float32, is 0.05 again."""

    def late(file: h5py.File) -> None:
        count = len(file["t-coordinate"])
        del file["t-coordinate"]
        file["t-coordinate"] = first + dt * np.arange(count) if first else np.float32(dt) * np.arange(count)

    path: Path = write("advection_1d", edit=late)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    with open_fields(path, FAMILIES["advection_1d"]) as file:
        for times in (dataset.times, file.times):
            assert np.diff(times) == pytest.approx([dt] * (len(times) - 1), rel=1e-3)
    assert first > 0 or dataset.times[1] == 0.05


@pytest.mark.parametrize("name", ["x-coordinate", "t-coordinate"])
def test_coordinates_far_from_zero_are_rounded(name: str, write):
    """In float32 steps of 0.05 behind 5000 differ by up to a hundredth; times are uniform ones, lengths the same."""
    path = write("advection_1d")
    (near,) = find_datasets(path.parent, [path.name]).values()

    def far(file: h5py.File) -> None:
        step = 0.05 * np.arange(len(file[name]))
        del file[name]
        file[name] = (5000 + step).astype(np.float32)

    path = write("advection_1d", edit=far)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    if name == "x-coordinate":
        assert dataset.lengths == pytest.approx([0.05 * near.grid[0]], rel=2e-3)
    else:
        assert np.diff(dataset.times) == pytest.approx(0.05, rel=2e-3) and np.ptp(np.diff(dataset.times)) < 1e-9


@pytest.mark.parametrize("sign", [-1, 1])
def test_one_uneven_step_of_many_is_refused(sign: int, write):
    """On 400 points a cell that is a tenth shorter or longer than the others makes the grid uneven."""

    def uneven(file: h5py.File) -> None:
        x = file["x-coordinate"][:]
        x[200:] += sign * 0.1 * (x[1] - x[0])
        file["x-coordinate"][:] = x

    path = write("advection_1d", grid=(400, 1, 1), edit=uneven)
    with pytest.raises(DataFault, match="'x-coordinate' is not a uniform"):
        find_datasets(path.parent, [path.name])
