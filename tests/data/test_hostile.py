"""HDF5 files made to read other files, to exhaust the memory or to run foreign code."""

import resource
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import DataFault

SECRET = b"root:x:0:0:root\n" * 100
EXOTIC_FILTER = 32001
MEMORY_BYTES = 2**30

Edit = Callable[[h5py.File], None]


def swap(name: str, make: Callable[[h5py.File, str, tuple[int, ...]], object]) -> Edit:
    """Edit that makes something else in the place of a dataset of that shape."""

    def edit(file: h5py.File) -> None:
        shape = file[name].shape
        del file[name]
        make(file, name, shape)

    return edit


def outside(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Values in the raw bytes of another file."""
    file.create_dataset(name, shape, np.float32, external=[("secret", 0, h5py.h5f.UNLIMITED)])


def virtual(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Values gathered from another HDF5 file."""
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[:] = h5py.VirtualSource("other.hdf5", "values", shape)
    file.create_virtual_dataset(name, layout)


def virtual_of_itself(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """Values gathered from the file itself, so that nothing else need exist."""
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[:] = h5py.VirtualSource(".", name, shape)
    file.create_virtual_dataset(name, layout)


def linked(link: object) -> Callable[[h5py.File, str, tuple[int, ...]], None]:
    """A link to elsewhere."""

    def make(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
        file[name] = link

    return make


def filtered(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
    """A dataset whose values only a plug-in can unpack."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(shape)
    properties.set_filter(EXOTIC_FILTER, h5py.h5z.FLAG_OPTIONAL, (1, 2))
    dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(shape), properties)
    dataset.write_direct_chunk((0,) * len(shape), bytes(4 * int(np.prod(shape))), 0)


def typed(dtype: object) -> Callable[[h5py.File, str, tuple[int, ...]], None]:
    """A dataset of a type that is no number."""

    def make(file: h5py.File, name: str, shape: tuple[int, ...]) -> None:
        file.create_dataset(name, shape, dtype)

    return make


def shaped(*shape: int, **options: object) -> Callable[[h5py.File, str, tuple[int, ...]], None]:
    """A dataset that claims another shape."""

    def make(file: h5py.File, name: str, _: tuple[int, ...]) -> None:
        file.create_dataset(name, shape, np.float32, **options)

    return make


def bomb(file: h5py.File) -> None:
    """Gigabytes of zeros that take a few kilobytes, in one chunk."""
    shape = (3, 5, 2**25)
    del file["tensor"], file["x-coordinate"]
    dataset = file.create_dataset("tensor", shape, np.float32, chunks=(1, 5, 2**25), compression="gzip")
    packed = zlib.compress(bytes(1000))
    for i in range(3):
        dataset.id.write_direct_chunk((i, 0, 0), packed)
    file.create_dataset("x-coordinate", (2**25,), np.float32)


def large_snapshots(file: h5py.File, side: int = 2**17, chunk: int = 2**12, junk: int = 0) -> None:
    """Snapshots of a hundred gigabytes in chunks of moderate size, all of them there, and `junk` bytes of ballast."""
    del file["tensor"], file["nu"]
    packed = zlib.compress(bytes(100))
    file["junk"] = np.zeros(junk, np.int8)
    for name, shape in (("tensor", (1, 1, side, side)), ("nu", (1, side, side))):
        chunks = (1,) * (len(shape) - 2) + (chunk, chunk)
        dataset = file.create_dataset(name, shape, np.float32, chunks=chunks, compression="gzip")
        for i in range(0, side, chunk):
            for j in range(0, side, chunk):
                dataset.id.write_direct_chunk((0,) * (len(shape) - 2) + (i, j), packed)
    for axis in "xy":
        del file[f"{axis}-coordinate"]
        file[f"{axis}-coordinate"] = (np.arange(side) + 0.5) / side


def attribute(value: object, dtype: object = None, shape: tuple[int, ...] | None = None) -> Edit:
    """Edit that stores something odd in the place of a parameter."""

    def edit(file: h5py.File) -> None:
        file.attrs.create("beta", value, dtype=dtype, shape=shape)

    return edit


def group_link(link: object, name: str = "0002") -> Edit:
    """Edit that puts a link in the middle of a path."""

    def edit(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return edit


def refer(file: h5py.File) -> None:
    """A parameter that is a reference to an object."""
    file.attrs.create("beta", file["tensor"].ref, dtype=h5py.ref_dtype)


T, X = "t-coordinate", "x-coordinate"
SOFT, EXTERNAL = h5py.SoftLink("/other"), h5py.ExternalLink("other.hdf5", "/values")
HOSTILE: dict[str, tuple[str, Edit, str]] = {
    "external storage": ("advection_1d", swap("tensor", outside), "other files"),
    "external storage of a field": ("compressible_ns_3d", swap("Vz", outside), "other files"),
    "external storage of times": ("advection_1d", swap(T, outside), "other files"),
    "external storage of coefficients": ("darcy_2d", swap("nu", outside), "other files"),
    "external storage in a group": ("shallow_water_2d", swap("0002/data", outside), "other files"),
    "external storage of the force": ("incompressible_ns_2d", swap("force", outside), "other files"),
    "virtual": ("advection_1d", swap("tensor", virtual), "other files"),
    "virtual of itself": ("advection_1d", swap("tensor", virtual_of_itself), "other files"),
    "virtual coordinates": ("compressible_ns_2d", swap("y-coordinate", virtual), "other files"),
    "virtual in a group": ("diffusion_reaction_2d", swap("0004/grid/t", virtual), "other files"),
    "external link": ("advection_1d", swap("tensor", linked(EXTERNAL)), "link"),
    "external link to coordinates": ("advection_1d", swap(X, linked(EXTERNAL)), "link"),
    "external link to no HDF5": ("darcy_2d", swap("nu", linked(h5py.ExternalLink("secret", "/"))), "link"),
    "external link to a device": ("darcy_2d", swap("nu", linked(h5py.ExternalLink("/dev/zero", "/"))), "link"),
    "soft link": ("burgers_1d", swap("tensor", linked(SOFT)), "link"),
    "soft link to itself": ("burgers_1d", swap("tensor", linked(h5py.SoftLink("/tensor"))), "link"),
    "external link in the middle": ("shallow_water_2d", group_link(EXTERNAL), "link"),
    "soft link in the middle": ("shallow_water_2d", group_link(h5py.SoftLink("/0000")), "link"),
    "external link to a grid": ("diffusion_sorption_1d", group_link(EXTERNAL, "0002/grid"), "link"),
    "soft link to a grid": ("diffusion_sorption_1d", group_link(h5py.SoftLink("/0000/grid"), "0002/grid"), "link"),
    "plug-in filter": ("advection_1d", swap("tensor", filtered), f"filter {EXOTIC_FILTER}"),
    "plug-in filter of times": ("advection_1d", swap(T, filtered), f"filter {EXOTIC_FILTER}"),
    "plug-in filter in a batch": ("incompressible_ns_2d", swap("velocity", filtered), f"filter {EXOTIC_FILTER}"),
    "objects": ("advection_1d", swap("tensor", typed(h5py.vlen_dtype(np.float32))), "dtype object"),
    "texts": ("advection_1d", swap("tensor", typed(h5py.string_dtype())), "dtype object"),
    "references": ("advection_1d", swap("tensor", typed(h5py.ref_dtype)), "dtype object"),
    "regions": ("advection_1d", swap("tensor", typed(h5py.regionref_dtype)), "dtype object"),
    "compounds": ("advection_1d", swap("tensor", typed(np.dtype([("u", "f4"), ("v", "f4")]))), "dtype"),
    "arrays in an array": ("advection_1d", swap("tensor", typed(np.dtype("(3,)f4"))), "dtype|axes"),
    "complex": ("advection_1d", swap("tensor", typed(np.complex64)), "complex64"),
    "truth values": ("advection_1d", swap("tensor", typed(np.bool_)), "bool"),
    "opaque": ("advection_1d", swap("tensor", typed(np.dtype("V4"))), "dtype"),
    "absurd shape": ("advection_1d", swap("tensor", shaped(2**30, 5, 2**30, chunks=(1, 5, 8))), "absurd shape"),
    "unwritten shape": ("advection_1d", swap("tensor", shaped(2**17, 5, 2**20)), "never written"),
    "absurd times": ("advection_1d", swap(T, shaped(2**40, chunks=(8,))), "absurd shape"),
    "absurd coordinates": ("advection_1d", swap(X, shaped(2**30)), "absurd shape|never written"),
    "absurd chunks": ("advection_1d", bomb, "absurd chunks"),
    "absurd snapshots": ("darcy_2d", partial(large_snapshots, side=2**14, junk=2**25), "absurd grid"),
    "absurd unpacking": ("darcy_2d", large_snapshots, "unpacks to 68719476736 bytes.*h5repack -f NONE"),
    "unlimited and empty": ("advection_1d", swap("tensor", shaped(0, 5, 8, maxshape=(None, 5, 8))), "empty"),
    "no axes": ("advection_1d", swap("tensor", shaped()), "axes"),
    "null space": ("advection_1d", swap("tensor", lambda f, n, s: f.create_dataset(n, data=h5py.Empty("f4"))), "axes"),
    "type for dataset": ("advection_1d", swap("tensor", lambda f, n, s: f.update({n: np.dtype("f4")})), "expected a"),
    "parameter of many values": ("advection_1d", attribute(np.zeros(5000)), "beta"),
    "parameter of objects": ("advection_1d", attribute("x", h5py.string_dtype()), "beta"),
    "parameter that refers": ("advection_1d", refer, "beta"),
    "parameter that is infinite": ("advection_1d", attribute(np.inf), "beta"),
    "complex parameter": ("advection_1d", attribute(1j), "beta"),
}  # fmt: skip


@pytest.fixture
def other(tmp_path: Path) -> None:
    """What a hostile file could read: a secret, and an HDF5 file with good values."""
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["values"] = np.ones((4, 5, 8), np.float32)


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(write, case):
    """One line that names the file and the trouble, before a value is used."""
    family, edit, expected = HOSTILE[case]
    path = write(family, edit=edit)
    with pytest.raises(DataFault, match=expected) as caught:
        find_datasets(path.parent, [path.name])
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("make", [outside, virtual, linked(EXTERNAL), linked(SOFT), filtered])
def test_file_that_turns_hostile_is_refused(write, make):
    """What was sound when it was described is checked again when it is read."""
    path = write("advection_1d")
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    with h5py.File(path, "r+") as file:
        swap("tensor", make)(file)
    with TrajectoryReader(path.parent, dataset) as reader, pytest.raises(DataFault, match=path.name):
        reader.read(0)


def test_refusal_needs_no_memory(write):
    """Files that claim a terabyte are refused within a gigabyte of address space."""
    paths = [
        write("advection_1d", "1D_Advection_Sols_beta0.1.hdf5", edit=HOSTILE["absurd shape"][1]),
        write("advection_1d", "1D_Advection_Sols_beta0.2.hdf5", edit=bomb),
        write("darcy_2d", edit=large_snapshots),
    ]
    code = (
        "import sys; from pathlib import Path\n"
        "from ups.data.trajectories import find_datasets; from ups.errors import DataFault\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    try: find_datasets(path.parent, [path.name])\n"
        "    except DataFault as error: print(error)\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    command = [sys.executable, "-c", code, *map(str, paths)]
    environment = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    completed = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limit, timeout=60, check=True, env=environment
    )
    assert ["absurd" in line or "unpacks" in line for line in completed.stdout.splitlines()] == [True] * 3
