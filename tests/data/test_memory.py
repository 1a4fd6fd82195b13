"""Memory that does not grow with the files; the numbers are printed, `pytest -s` shows them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.files import digest_of

NAME = "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5"
COUNT, NUM_SNAPSHOTS, GRID = 1100, 21, 128
MIN_BYTES, MAX_BYTES = 6 * 10**9, 10**9

PREAMBLE = """
import json, sys
from pathlib import Path
folder, name, url, md5, size = sys.argv[1:]
folder, advance = Path(folder), lambda count: None
def report(**values):
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be no less than the parent's
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(json.dumps({"peak": peak, **values}))
"""
DESCRIBE_AND_SPLIT = """
from ups.data.splits import split
from ups.data.trajectories import find_datasets
datasets = find_datasets(folder, [name])
splits = split(folder, datasets, 0, 0.1, 0.1)
report(test=len(next(iter(splits.values()))["test"]))
"""
CHECKSUM = """
from ups.data.sources import list_files
report(md5=list_files(folder, folder / "sums.json")[name]["md5"])
"""
DOWNLOAD = """
from ups.data.download import download_file
download_file(f"{url}/{name}", md5, folder / "local" / name, advance, num_bytes=int(size))
report()
"""
PARTIAL = """
from dataclasses import replace
from ups.data.partial import fetch_trajectories
from ups.data.published import find_file
target = folder / "partial" / name
file = replace(find_file(name), url=f"{url}/{name}", bytes=int(size), num_trajectories=1100)
fetch_trajectories(file, target, range(100), base_url=None, advance=advance)
report(bytes=target.stat().st_size)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sparse file of 6 GB whose trajectories differ in one value of their first snapshot."""
    path = tmp_path_factory.mktemp("large") / NAME
    coordinate = (np.arange(GRID) + 0.5) / GRID
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((COUNT, NUM_SNAPSHOTS, GRID, GRID))
        for field in (b"density", b"pressure", b"Vx", b"Vy"):
            h5py.h5d.create(file.id, field, h5py.h5t.IEEE_F32LE, space, properties)
        for i in range(COUNT):
            file["density"][i, 0, 0, 0] = i + 1
        file["x-coordinate"] = file["y-coordinate"] = coordinate.astype(np.float32)
        file["t-coordinate"] = np.arange(NUM_SNAPSHOTS + 1, dtype=np.float32) / 20
    assert path.stat().st_size > MIN_BYTES
    yield path
    shutil.rmtree(path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["DESCRIBE_AND_SPLIT", "CHECKSUM", "DOWNLOAD", "PARTIAL"])
def test_peak_memory_is_bounded(serve, large, task):
    """Below 1 GB, libraries and all, for a file of 6 GB."""
    md5 = digest_of(large, "md5") if task == "DOWNLOAD" else ""
    arguments = [str(large.parent), NAME, serve(large.parent).url, md5, str(large.stat().st_size)]
    command = [sys.executable, "-c", PREAMBLE + globals()[task], *arguments]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=400, check=True)
    found = json.loads(completed.stdout)
    (large.parent / "local" / NAME).unlink(missing_ok=True)
    sys.stdout.write(f"\n{task.lower()}: peak {found['peak'] / 1e6:.0f} MB {found}\n")
    assert found["peak"] < MAX_BYTES
