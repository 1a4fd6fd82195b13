"""The first trajectories of a remote file."""

import hashlib
import io
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.data.test_inspection import MUTATIONS, mutate
from ups.data import http
from ups.data.partial import SparseBuffer, fetch_trajectories, read_marker
from ups.data.pdebench import FAMILIES
from ups.data.plan import partial_name
from ups.data.published import find_file
from ups.data.recognition import find_family
from ups.data.splits import split
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault, DataFault, StorageFault

CONTIGUOUS = [name for name, family in FAMILIES.items() if family.layout in ("tensor", "fields")]
MD5 = "00112233445566778899aabbccddeeff"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder that partial files go to."""
    return tmp_path / "local"


def count_in(path: Path) -> int:
    """Number of trajectories in a whole file."""
    with h5py.File(path) as file:
        arrays = [file[name] for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        return max((array.shape[0] for array in arrays if array.ndim > 1), default=1)


def fetch(
    server,
    path: Path,
    local: Path,
    count: int = 3,
    positions: Sequence[int] | None = None,
    advance: Callable[[int], object] = lambda num_bytes: None,
    num_trajectories: int | None = None,
) -> Path:
    """Fetch the first trajectories of a file, or those at some positions, and return the small one."""
    published = find_file("2D_DarcyFlow_beta1.0_Train.hdf5")
    sizes = {"bytes": path.stat().st_size, "num_trajectories": num_trajectories or count_in(path)}
    url, family = f"{server.url}/{path.name}", find_family(path.name).name
    file = replace(published, name=path.name, family=family, url=url, md5=MD5, **sizes)
    target = local / partial_name(path.name, count)
    chosen = range(count) if positions is None else positions
    fetch_trajectories(file, target, chosen, base_url=None, advance=advance)
    return target


def expect_same(small: Path, whole: Path, count: int) -> None:
    """The trajectories of the small file are the first ones of the whole."""
    part, full = (next(iter(find_datasets(path.parent, [path.name]).values())) for path in (small, whole))
    assert part.counts == (count,)
    assert (part.times, part.grid, part.lengths, part.boundary) == (full.times, full.grid, full.lengths, full.boundary)
    assert part.parameters == full.parameters
    with TrajectoryReader(small.parent, part) as a, TrajectoryReader(whole.parent, full) as b:
        for i in range(count):
            assert np.array_equal(a.read(i), b.read(i))
            assert np.array_equal(a.read_coefficients(i), b.read_coefficients(i))


@pytest.mark.parametrize("family", CONTIGUOUS)
def test_first_trajectories_arrive(serve, write, tmp_path, local, family):
    """In every contiguous family the small file is a valid one with the same first trajectories."""
    whole = write(family)
    expect_same(fetch(serve(tmp_path), whole, local), whole, 3)


@pytest.mark.parametrize(
    "name", ["2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_32_Train.hdf5", "ReacDiff_Nu0.5_Rho1.0.hdf5"]
)
def test_first_trajectories_of_real_files(serve, samples, local, name):
    """Files written by PDEBench's own generators can be fetched in part."""
    expect_same(fetch(serve(samples), samples / name, local, 5), samples / name, 5)


def test_one_percent_of_the_bytes(serve, write, tmp_path, local):
    """3 of 300 trajectories take about 1 % of the bytes, apart from a few pages with the structure of the file."""
    whole = write("compressible_ns_2d", count=300, grid=(64, 64, 1))
    server = serve(tmp_path)
    fetch(server, whole, local)
    assert server.sent <= 0.01 * whole.stat().st_size + 4 * 2**16


def test_partial_file_is_marked(serve, write, tmp_path, local):
    """The attribute says which trajectories of which file; a whole file has none."""
    whole = write("advection_1d")
    small = fetch(serve(tmp_path), whole, local)
    assert read_marker(small) == f"trajectories 0-2 of 4 of {whole.name}, MD5 {MD5}"
    assert read_marker(whole) is None


def test_bytes_do_not_depend_on_the_time(serve, write, tmp_path, local):
    """The same trajectories fetched a second later are the same file, which keeps the fingerprints of later steps."""
    whole, server = write("darcy_2d"), serve(tmp_path)
    early = fetch(server, whole, local).read_bytes()
    time.sleep(1.1)
    assert fetch(server, whole, tmp_path / "again").read_bytes() == early


def test_double_precision_and_leading_axis_are_kept(serve, write, tmp_path, local):
    """A float64 dataset with a leading axis of one stays so."""

    def edit(file: h5py.File) -> None:
        u = file["tensor"][()]
        del file["tensor"]
        file["tensor"] = u[None].astype(np.float64)

    whole = write("advection_1d", edit=edit)
    small = fetch(serve(tmp_path), whole, local)
    with h5py.File(small) as file:
        assert file["tensor"].shape == (1, 3, 5, 8)
        assert file["tensor"].dtype == np.float64
    expect_same(small, whole, 3)


def test_attributes_are_copied(serve, write, tmp_path, local):
    """Numbers are copied; objects and long texts of strangers are not."""

    def edit(file: h5py.File) -> None:
        file.attrs["beta"], file.attrs["comment"] = 0.7, "x" * 100

    small = fetch(serve(tmp_path), write("advection_1d", edit=edit), local)
    with h5py.File(small) as file:
        assert set(file.attrs) == {"beta", "ups_partial"}
        assert file.attrs["beta"] == 0.7


def test_drops_are_repaired(serve, write, tmp_path, local):
    """Whatever connection breaks, the file is the same."""
    whole = write("compressible_ns_1d", count=50)
    server = serve(tmp_path)
    server.drop_after = [100, 0, 5, 3000, 7, 40, 1]
    expect_same(fetch(server, whole, local, 20), whole, 20)


def test_existing_partial_file_is_kept(serve, write, tmp_path, local):
    """A second fetch asks the server nothing and changes nothing."""
    whole, server = write("darcy_2d"), serve(tmp_path)
    small = fetch(server, whole, local)
    digest, num_requests = hashlib.sha256(small.read_bytes()).digest(), len(server.requests)
    fetch(server, whole, local)
    assert hashlib.sha256(small.read_bytes()).digest() == digest
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("positions", [[3], [0, 2, 3], [1, 2], range(1, 4)])
@pytest.mark.parametrize("family", ["darcy_2d", "compressible_ns_2d"])
def test_chosen_trajectories_arrive(serve, write, tmp_path, local, family, positions):
    """Any increasing positions can be chosen; the reader knows where they come from."""
    whole = write(family)
    small = fetch(serve(tmp_path), whole, local, positions=positions)
    part, full = (next(iter(find_datasets(path.parent, [path.name]).values())) for path in (small, whole))
    with TrajectoryReader(local, part) as a, TrajectoryReader(tmp_path, full) as b:
        assert [a.published_position(i) for i in range(len(positions))] == list(positions)
        for i, position in enumerate(positions):
            assert np.array_equal(a.read(i), b.read(position))
            assert np.array_equal(a.read_coefficients(i), b.read_coefficients(position))


def test_other_trajectories_of_the_same_number_are_refused(serve, write, tmp_path, local):
    """Of more ranges than the marker names, those asked for are told from others; a card shows such a marker."""
    whole, server = write("darcy_2d", count=60), serve(tmp_path)
    even, odd = range(0, 50, 2), range(1, 51, 2)
    small = fetch(server, whole, local, positions=even)
    assert read_marker(small).startswith("trajectories 25 chosen ones (SHA-256 ")
    assert fetch(server, whole, local, positions=even) == small
    with pytest.raises(DataFault, match=r"is trajectories 25 chosen ones .*; delete it to fetch it anew"):
        fetch(server, whole, local, positions=odd)


def test_a_fetch_goes_on_with_the_same_trajectories_alone(serve, write, tmp_path, local):
    """What has arrived of other trajectories of the same number is not continued."""
    whole, server = write("darcy_2d", count=60, grid=(32, 32)), serve(tmp_path)

    def stop(num_bytes: int, left: list[int] = []) -> None:  # noqa: B006
        left.append(num_bytes)
        if sum(left) > whole.stat().st_size / 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, whole, local, positions=range(0, 50, 2), advance=stop)
    assert list(local.glob("*.part"))
    small = fetch(server, whole, local, positions=range(1, 51, 2))
    with h5py.File(small) as part, h5py.File(whole) as full:
        assert np.array_equal(part["tensor"], full["tensor"][1:51:2])


@pytest.mark.parametrize("positions", [[], [-1, 2], [2, 1], [1, 1]])
def test_bad_positions_are_refused(serve, write, tmp_path, local, positions):
    """Positions must increase from 0 on."""
    with pytest.raises(ConfigFault, match="increasing positions"):
        fetch(serve(tmp_path), write("advection_1d"), local, positions=positions)
    assert not local.exists()


def test_chosen_trajectories_split_by_origin(serve, write, tmp_path, local):
    """Trajectory 7 of one file and trajectory 7 of another share a split, wherever they are in the small files."""
    server, chosen = serve(tmp_path), {"advection_1d": range(5, 25), "burgers_1d": range(20)}
    small = [fetch(server, write(family, count=40), local, positions=positions) for family, positions in chosen.items()]
    splits = split(local, find_datasets(local, [path.name for path in small]), 0, 0.2, 0.2)
    place = {
        family: {positions[i]: kind for kind, indices in splits[path.stem].items() for i in indices}
        for (family, positions), path in zip(chosen.items(), small, strict=True)
    }
    common = range(5, 20)
    assert [place["advection_1d"][i] for i in common] == [place["burgers_1d"][i] for i in common]


def test_partial_files_split_like_whole_ones(serve, write, tmp_path, local):
    """Two families with common initial states keep trajectory i of both in one split."""
    server = serve(tmp_path)
    small = [fetch(server, write(family, count=40), local, 20) for family in ("advection_1d", "burgers_1d")]
    datasets = find_datasets(local, [path.name for path in small])
    first, second = split(local, datasets, 0, 0.2, 0.2).values()
    assert first == second


def replace_first(file: h5py.File) -> None:
    """Store the trajectories compressed."""
    u = file["tensor"][()]
    del file["tensor"]
    file.create_dataset("tensor", data=u, compression="gzip")


def link_out(file: h5py.File) -> None:
    """Put a link to another file in the place of the trajectories."""
    del file["tensor"]
    file["tensor"] = h5py.ExternalLink("/etc/passwd", "/")


BAD_FILES = {
    "compressed": (replace_first, 3, "chunks; fetch the whole file"),
    "link": (link_out, 3, "link"),
    "too few": (lambda file: None, 5, "has 4 trajectories, not 5"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_remote_file_leaves_nothing(serve, write, tmp_path, local, case):
    """A remote file that cannot be fetched in part ends in one line, and nothing is written."""
    edit, count, message = BAD_FILES[case]
    whole = write("advection_1d", edit=edit)
    with pytest.raises(DataFault, match=message) as caught:
        fetch(serve(tmp_path), whole, local, count)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("http://")
    assert list(local.iterdir()) == []


def test_structure_that_crashes_hdf5_is_one_line(serve, write, tmp_path, local, fake_child):
    """A mirror whose file crashes HDF5 is a fault of data that names it, and nothing is written."""
    whole, server = write("advection_1d"), serve(tmp_path)
    url = f"{server.url}/{whole.name}"
    fake_child(
        f"print(json.dumps({{'file': {url!r}}}), json.dumps({{'fetch': [0, 8]}}), sep='\\n', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV if sys.stdin.readline() == 'iUhERg0KGgo=\\n' else signal.SIGKILL)"
    )
    with pytest.raises(DataFault, match=rf"^{url}: crashed HDF5 \(SIGSEGV\)[^\n]*$"):
        fetch(server, whole, local)
    assert list(local.iterdir()) == []


def test_structure_without_end_is_refused(serve, write, tmp_path, local, fake_child):
    """A structure that leads from place to place ends before it has cost more than 16 MiB."""
    whole, server = write("advection_1d"), serve(tmp_path)
    os.truncate(whole, 2**26)
    fake_child("print(json.dumps({'fetch': [0, 10**12]}), flush=True)\nsys.stdin.readline()")
    with pytest.raises(DataFault, match=r"more places than are read; check the source$"):
        fetch(server, whole, local, num_trajectories=4)
    assert server.sent <= 2**24 + 1 and list(local.iterdir()) == []


def test_larger_trajectories_are_refused(serve, write, tmp_path, local):
    """Three trajectories of a mirror may not take more bytes than three of the published file, of the same size."""
    whole, server = write("advection_1d", grid=(2**16,)), serve(tmp_path)
    with pytest.raises(
        DataFault, match=r"3 of its trajectories have 3932160 bytes, expected 263796; check the source$"
    ):
        fetch(server, whole, local, num_trajectories=10_000)
    assert server.sent < 2**20 and list(local.iterdir()) == []


def test_packed_coordinates_are_refused(serve, write, tmp_path, local):
    """Coordinates of few bytes that unpack to many are not copied."""

    def edit(file: h5py.File) -> None:
        del file["t-coordinate"]
        file.create_dataset("t-coordinate", data=np.zeros(2**23, np.float32), compression="gzip")

    with pytest.raises(DataFault, match=r"its coordinates have over 16 MiB; check the source$"):
        fetch(serve(tmp_path), write("darcy_2d", edit=edit), local)
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("places", [[[0, 10**15, 8]], [[0, -8, 8]], [[0, 0, -8]]])
def test_places_outside_the_file_are_refused(serve, write, tmp_path, local, fake_child, places):
    """No place of a structure lies outside the remote file."""
    answer = {"marker": "", "frame": {"pieces": [], "size": 0}, "places": places}
    fake_child(f"print(json.dumps({{'result': {answer}}}))")
    with pytest.raises(DataFault, match="its arrays lie outside"):
        fetch(serve(tmp_path), write("advection_1d"), local)
    assert list(local.iterdir()) == []


@pytest.mark.faults
@pytest.mark.parametrize("family", ["advection_1d", "compressible_ns_2d"])
def test_mutated_remote_files_are_fetched_or_refused(serve, write, tmp_path, local, family):
    """No damaged file at a mirror crashes or stops this process: it is fetched, or refused in one line."""
    whole, server, generator = write(family), serve(tmp_path), np.random.default_rng(list(family.encode()))
    content = whole.read_bytes()
    for i in range(MUTATIONS // 2):
        whole.write_bytes(mutate(content, generator))
        try:
            fetch(server, whole, local / str(i), num_trajectories=4)
        except DataFault as fault:
            assert "\n" not in str(fault) and str(fault).startswith(server.url)
            assert list((local / str(i)).iterdir()) == []


def test_server_without_ranges_is_refused(serve, write, tmp_path, local):
    """A server that answers a range with the whole file is refused before the file is read."""
    whole, server = write("advection_1d", count=2000), serve(tmp_path)
    server.ranges = False
    with pytest.raises(DataFault, match="does not send ranges of bytes; fetch the whole file"):
        fetch(server, whole, local)
    assert list(local.iterdir()) == []


def test_file_that_changes_is_refused(serve, write, tmp_path, local, monkeypatch):
    """Bytes of two versions are never mixed."""
    whole, server = write("advection_1d", count=5000), serve(tmp_path)
    answer = type(server).finish_request

    def finish_request(self, request, address):
        answer(self, request, address)
        self.tag = f'"{len(self.requests)}"'

    monkeypatch.setattr(type(server), "finish_request", finish_request)
    with pytest.raises(DataFault, match="has changed while it was read"):
        fetch(server, whole, local, 2000)
    assert [path for path in local.iterdir() if path.suffix == ".hdf5"] == []


def test_dead_server_ends(serve, write, tmp_path, local, monkeypatch):
    """A server that drops every connection is given up."""
    monkeypatch.setattr(http, "ATTEMPTS", 3)
    whole, server = write("advection_1d"), serve(tmp_path)
    server.drop_after = [0] * 1000
    with pytest.raises(DataFault, match="3 times in a row"):
        fetch(server, whole, local)
    assert list(local.iterdir()) == []


def test_other_size_is_refused(serve, write, tmp_path, local):
    """A part has no MD5 sum to check: the size of the whole file at least must be the published one."""
    whole, server = write("advection_1d"), serve(tmp_path)
    file = replace(find_file(whole.name), url=f"{server.url}/{whole.name}")
    with pytest.raises(DataFault, match="bytes, expected 8232966952"):
        fetch_trajectories(file, local / "a.hdf5", range(3), base_url=None, advance=lambda num_bytes: None)
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("limit", [1_000, 4_000, 100_000])
def test_full_disk_leaves_nothing(serve, write, tmp_path, local, limit):
    """A disk that fills up, at whatever point, is a storage fault; what has arrived is kept for the next run."""
    whole, server = write("advection_1d", count=4000), serve(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageFault, match="free space"):
            fetch(server, whole, local, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(".part" in path.name for path in local.iterdir())
    small = fetch(server, whole, local, 2000)
    expect_same(small, whole, 2000)
    assert list(local.iterdir()) == [small]


@pytest.mark.parametrize("family", ["advection_1d", "darcy_2d", "compressible_ns_2d"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_killed_fetch_goes_on(serve, write, tmp_path, local, family, share):
    """What an earlier process fetched is not fetched again."""
    whole, server, left = write(family, count=800, grid=(16, 16)), serve(tmp_path), []

    def stop(num_bytes: int) -> None:
        left.append(num_bytes)
        if sum(left) > share * whole.stat().st_size / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, whole, local, 400, advance=stop)
    server.requests.clear()
    small = fetch(server, whole, local, 400)
    ranges = [tuple(map(int, request.removeprefix("bytes=").split("-"))) for request in server.requests]
    expect_same(small, whole, 400)
    assert sum(last - first + 1 for first, last in ranges) <= (1 - share) * whole.stat().st_size / 2 + 10 * 2**16
    assert all(first <= last for first, last in ranges)  # servers refuse a range without bytes, or ignore it
    assert list(local.iterdir()) == [small]


def interrupted(server, whole: Path, local: Path) -> Path:
    """What a fetch leaves that is interrupted after more than half of its bytes."""

    def stop(num_bytes: int, left: list[int] = []) -> None:  # noqa: B006
        left.append(num_bytes)
        if sum(left) > whole.stat().st_size / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, whole, local, 2000, advance=stop)
    return local / f"{partial_name(whole.name, 2000)}.part"


def flip(path: Path) -> None:
    """Change a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARMED: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, 100),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no record": lambda path: path.with_name(f"{path.name}.version").unlink(),
    "foreign record": lambda path: path.with_name(f"{path.name}.version").write_bytes(bytes(range(256)) * 9),
    "bytes after the record": lambda path: path.write_bytes(path.read_bytes() + b"lost by a power failure"),
}


@pytest.mark.parametrize("harm", HARMED)
def test_damaged_bytes_are_not_continued(serve, write, tmp_path, local, harm):
    """What became of the bytes of an interrupted fetch is noticed; the file in the end is the right one."""
    whole, server = write("advection_1d", count=5000), serve(tmp_path)
    HARMED[harm](interrupted(server, whole, local))
    small = fetch(server, whole, local, 2000)
    assert small.read_bytes() == fetch(server, whole, tmp_path / "again", 2000).read_bytes()
    assert list(local.iterdir()) == [small]


def test_killed_fetch_goes_on_at_the_last_record(serve, write, tmp_path, local, monkeypatch):
    """A killed process, which records nothing at its end, loses the bytes since its last record alone."""
    monkeypatch.setattr("ups.data.download.RECORDED_BYTES", 50_000)
    monkeypatch.setattr(http, "BLOCK_BYTES", 20_000)
    whole, server = write("advection_1d", count=5000), serve(tmp_path)
    record, last = local / f"{partial_name(whole.name, 2000)}.part.version", []

    def stop(num_bytes: int) -> None:
        last.append((num_bytes, record.read_bytes() if record.exists() else b""))
        if sum(num_bytes for num_bytes, _ in last) > 250_000 + 2 * 2**16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, whole, local, 2000, advance=stop)
    record.write_bytes(last[-1][1])
    server.requests.clear()
    small = fetch(server, whole, local, 2000)
    starts = [int(request.removeprefix("bytes=").split("-")[0]) for request in server.requests]
    assert max(starts) > 150_000
    expect_same(small, whole, 2000)


def test_part_of_another_version_is_not_continued(serve, write, tmp_path, local):
    """If the file at the server changed since, the fetch starts over."""
    whole, server = write("advection_1d", count=3000), serve(tmp_path)
    server.drop_after = [2**20, 50_000, *[0] * 20]
    with pytest.raises(DataFault, match="times in a row"):
        fetch(server, whole, local, 2000)
    write("advection_1d", count=3000, edit=lambda file: file["tensor"].write_direct(2 * file["tensor"][:]))
    server.drop_after, server.tag = [], '"2"'
    expect_same(fetch(server, whole, local, 2000), whole, 2000)


def test_foreign_file_is_not_overwritten(serve, write, tmp_path, local):
    """A file under the name of the partial one that is something else is reported and kept."""
    whole, server = write("advection_1d"), serve(tmp_path)
    local.mkdir()
    target = local / partial_name(whole.name, 3)
    target.write_bytes(whole.read_bytes())
    with pytest.raises(DataFault, match="delete it"):
        fetch(server, whole, local)
    assert target.read_bytes() == whole.read_bytes()


CLIENT = """
import sys
from dataclasses import replace
from pathlib import Path
from ups.data.partial import fetch_trajectories
from ups.data.published import find_file
from ups.errors import DataFault
name, url, size, target = sys.argv[1:]
kept = []
try:
    fetch_trajectories(
        replace(find_file(name), url=url, bytes=int(size)), Path(target), range(2), base_url=None, advance=kept.append
    )
except DataFault as fault:
    kept.append(fault)
    sys.exit(fault.exit_code)
"""


def test_truncated_remote_file_ends_with_its_exit_code(serve, write, tmp_path, local):
    """A process that keeps the fault of a remote file that cannot be opened ends by itself, not by a crash in HDF5."""
    whole = write("advection_1d")
    whole.write_bytes(whole.read_bytes()[:1000])
    arguments = [whole.name, f"{serve(tmp_path).url}/{whole.name}", "1000", str(local / whole.name)]
    assert subprocess.run([sys.executable, "-c", CLIENT, *arguments], timeout=60, check=False).returncode == 3


def test_buffer_behaves_like_a_file(tmp_path):
    """Writes, overwrites, gaps, seeks and short reads agree with a real file."""
    sparse, plain = SparseBuffer(), (tmp_path / "plain").open("wb+", buffering=0)
    for file in (sparse, plain):
        for place, block in ((5, b"hello"), (20, b"world"), (8, b"12345"), (0, b"ab")):
            file.seek(place)
            assert file.write(block) == len(block)
        file.truncate(40)
    for place, num_bytes in ((0, 40), (3, 10), (9, 1), (25, 100), (50, 10)):
        for file in (sparse, plain):
            file.seek(place)
        assert sparse.read(num_bytes) == plain.read(num_bytes)
        assert place > 40 or sparse.tell() == plain.tell()
    assert sparse.seek(0, io.SEEK_END) == 40


def test_frame_of_a_large_dataset_is_small(tmp_path):
    """A file with a dataset of 8 GB that is not written takes a few kilobytes here, and is sound on disk."""
    frame = SparseBuffer()
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(frame, "w") as file:
        space = h5py.h5s.create_simple((2**31,))
        h5py.h5d.create(file.id, b"large", h5py.h5t.IEEE_F32LE, space, properties)
        file["small"] = np.arange(5)
    assert sum(len(block) for _, block in frame.pieces) < 20_000
    with (tmp_path / "file.hdf5").open("wb") as small:
        frame.write_to(small)
    with h5py.File(tmp_path / "file.hdf5") as file:
        assert file["large"].shape == (2**31,) and file["large"][-1] == 0
        assert file["small"][:].tolist() == [0, 1, 2, 3, 4]
