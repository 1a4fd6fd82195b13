"""Files in other formats are copied to HDF5 once, as they are at present."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import zarr

from tests.data.own import DELTA, KDV, T, U, X, write_npz
from ups.data import arrays
from ups.data.arrays import open_data
from ups.data.field_files import open_fields
from ups.data.sources import list_files
from ups.files import publish

pytestmark = pytest.mark.usefixtures("kdv_known")


def test_a_changed_file_is_copied_anew(tmp_path: Path):
    """The copy is that of the present content, and is left alone while the file stays the same."""
    path = write_npz(tmp_path)
    copy = tmp_path / ".named.npz.hdf5"
    with open_data(path):
        pass
    made = copy.stat().st_mtime_ns
    with open_data(path) as file:
        assert copy.stat().st_mtime_ns == made and file.attrs["delta"] == DELTA
    np.savez(path, u=2 * U, x=X, t=T, delta=0.5, family="kdv_1d")
    with open_data(path) as file:
        assert file.attrs["delta"] == 0.5 and (file["u"][:] == 2 * U).all()


def test_an_older_chunk_of_equal_size_is_noticed(tmp_path: Path):
    """A chunk that `rsync -a` replaces keeps the time that it has elsewhere, which may lie before all others."""
    path = tmp_path / "named.zarr"
    array = zarr.open_group(path, mode="w").create_array("u", data=U, chunks=(1, *U.shape[1:]), compressors=None)
    with open_data(path) as file:
        assert (file["u"][:] == U).all()
    chunk = path / "u" / "c" / "1" / "0" / "0"
    size = chunk.stat().st_size
    array[1] = 2 * U[1]
    os.utime(chunk, ns=(0, 0))
    with open_data(path) as file:
        assert chunk.stat().st_size == size and (file["u"][1] == 2 * U[1]).all()


def test_what_a_killed_copy_has_left_is_deleted(tmp_path: Path):
    """Its temporary file may have many GB; those of other files are left alone."""
    path = write_npz(tmp_path)
    left, other = (tmp_path / f"..{name}.npz.hdf5.0123456789abcdef.tmp" for name in ("named", "other"))
    for each in (left, other, tmp_path / ".named.npz.hdf5.lock"):
        each.touch()
    open_data(path).close()
    assert {each.name for each in tmp_path.iterdir()} == {path.name, ".named.npz.hdf5", other.name}


def test_one_process_at_a_time_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The others wait, and use the copy that it has made."""
    path, begun, goes_on, copied = write_npz(tmp_path), Event(), Event(), []

    def wait(copy: Path) -> AbstractContextManager[Path]:
        copied.append(copy)
        begun.set()
        assert goes_on.wait(60)
        return publish(copy)

    monkeypatch.setattr(arrays, "publish", wait)
    monkeypatch.setattr(arrays, "POLL_SECONDS", 0.01)
    with ThreadPoolExecutor(2) as pool:
        opened = [pool.submit(open_data, path)]
        assert begun.wait(60)
        opened.append(pool.submit(open_data, path))
        time.sleep(0.2)
        assert not opened[1].done()
        goes_on.set()
        for each in opened:
            each.result(60).close()
    assert copied == [tmp_path / ".named.npz.hdf5"]


@pytest.mark.parametrize("shards", [None, (2, 4, 32)])
def test_chunks_without_a_file_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shards: tuple[int, ...] | None
):
    """Lost ones are read as zeros, and so are those of a field at rest, which zarr leaves out: the log says it."""
    path = tmp_path / "named.zarr"
    group = zarr.open_group(path, mode="w", attributes={"delta": DELTA, "family": "kdv_1d"})
    group.create_array("u", data=np.concatenate([U, U, U])[:9], chunks=(1, 2, 16), shards=shards)
    for name, values in {"x": X, "t": T}.items():
        group.create_array(name, data=values)
    assert list_files(tmp_path, tmp_path / "sums.json") and not caplog.messages
    (path / "u" / "c" / "1" / "0" / "0").unlink()
    list_files(tmp_path, tmp_path / "sums.json")
    (told,) = caplog.messages
    assert told.startswith(f"{path}: of 'u' chunks without a file, 1 in number, are read as 0: ") and "\n" not in told
    caplog.clear()
    for _ in range(2):
        with open_fields(path, KDV) as file:
            assert file.first.count == 9
    assert caplog.messages == [told]
