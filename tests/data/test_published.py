"""The table of published files and what is chosen from it."""

import re
from collections import Counter
from typing import Any

import pytest

from ups.data.pdebench import FAMILIES
from ups.data.plan import bytes_to_fetch, select
from ups.data.published import ALIASES, find_file, read_published_files, refuse_outdated_md5
from ups.data.recognition import find_family
from ups.errors import ConfigFault, DataFault

DARCY = "2D_DarcyFlow_beta1.0_Train.hdf5"
EVERYTHING: dict[str, Any] = {
    "parameters": {},
    "kind": "train",
    "resolution": None,
    "files_per_family": None,
    "max_gigabytes": None,
    "trajectories": None,
}


def names(families: list[str], files: list[str] | None = None, **conditions: Any) -> list[str]:
    """Names of the selected files."""
    return [file.name for file in select(families, files or [], **EVERYTHING | conditions)]


def test_registry_is_complete():
    """All 375 rows of PDEBench's table, and the two files it forgets, have a URL of their own and an MD5 sum."""
    files = list(read_published_files().values())
    assert len(files) == len({file.url for file in files}) == 377
    assert all(re.fullmatch(r"[0-9a-f]{32}", file.md5) and file.url.startswith("https://") for file in files)
    assert {"3D_CFD_Rand_M0.1_Eta1e-08_Zeta1e-08_periodic_Train.hdf5", "ns_incom_inhom_2d_512-49.h5"} <= set(
        read_published_files()
    )


def test_registry_counts():
    """Files per family as PDEBench publishes them, training and test; sizes of all training files are known."""
    counts = Counter((file.family, file.kind) for file in read_published_files().values())
    assert counts == {
        ("advection_1d", "train"): 8,
        ("burgers_1d", "train"): 12,
        ("diffusion_reaction_1d", "train"): 16,
        ("diffusion_reaction_1d", "test"): 20,
        ("diffusion_sorption_1d", "train"): 1,
        ("compressible_ns_1d", "train"): 5,
        ("compressible_ns_1d", "test"): 7,
        ("darcy_2d", "train"): 5,
        ("compressible_ns_2d", "train"): 8,
        ("compressible_ns_2d", "test"): 9,
        ("diffusion_reaction_2d", "train"): 1,
        ("shallow_water_2d", "train"): 1,
        ("incompressible_ns_2d", "train"): 275,
        ("compressible_ns_3d", "train"): 3,
        ("compressible_ns_3d", "test"): 6,
    }
    assert all(file.bytes for file in read_published_files().values() if file.kind == "train")


def test_registry_agrees_with_the_families():
    """Training files match the name pattern of their family and have all its parameters."""
    for file in read_published_files().values():
        if file.kind == "train":
            assert find_family(file.name) is FAMILIES[file.family]
            assert set(file.parameters) == set(FAMILIES[file.family].parameters)


def test_byte_copies_are_marked():
    """24 pairs of the table and file 49 are copies; a copy has the MD5 and the size of its original."""
    copies = [file for file in read_published_files().values() if file.copy_of is not None]
    assert len(copies) == 25
    for file in copies:
        original = read_published_files()[file.copy_of]
        assert (original.md5, original.bytes, original.copy_of) == (file.md5, file.bytes, None)


@pytest.mark.parametrize(
    ("family", "bytes_per_value"), [("advection_1d", 4), ("darcy_2d", 8), ("compressible_ns_2d", 16)]
)
def test_sizes_agree_with_shapes(family: str, bytes_per_value: int):
    """Bytes = trajectories x snapshots x points x fields x 4, and a few kilobytes."""
    for file in (file for file in read_published_files().values() if file.family == family and file.kind == "train"):
        points = file.num_trajectories * file.num_snapshots
        for n in file.grid:
            points *= n
        assert 0 <= file.bytes - bytes_per_value * points < 20_000


@pytest.mark.parametrize(("alias", "family"), [(alias, family) for alias, (family, _) in ALIASES.items()])
def test_tasks_of_the_earlier_stack_are_accepted(alias: str, family: str):
    """Each of the eleven task names selects training files of one PDEBench family."""
    assert len(ALIASES) == 11
    assert {read_published_files()[name].family for name in names([alias])} == {family}


def test_families_and_names_are_selected_once():
    """Named files come first, each file once, also if an alias and its family are both given."""
    chosen = names(["darcy_2d", "darcy2d"], ["1D_Burgers_Sols_Nu1.0.hdf5", DARCY])
    assert chosen[:2] == ["1D_Burgers_Sols_Nu1.0.hdf5", DARCY]
    assert len(chosen) == len(set(chosen)) == 6


def test_byte_copies_are_left_out():
    """Of the 275 incompressible Navier-Stokes files 250 differ."""
    assert len(names(["incompressible_ns_2d"])) == 250


def test_selection_by_parameter():
    """Files with one of the values; a family without the parameter is not concerned."""
    assert names(["advection_1d", "diffusion_reaction_2d"], parameters={"beta": [0.4, 7]}) == [
        "1D_Advection_Sols_beta0.4.hdf5",
        "1D_Advection_Sols_beta7.0.hdf5",
        "2D_diff-react_NA_NA.h5",
    ]


def test_selection_by_two_parameters():
    """Every parameter must agree."""
    assert names(["diffusion_reaction_1d"], parameters={"nu": [0.5], "rho": [1, 10]}) == [
        "ReacDiff_Nu0.5_Rho1.0.hdf5",
        "ReacDiff_Nu0.5_Rho10.0.hdf5",
    ]


def test_selection_by_resolution_count_and_kind():
    """Points per axis, number of files per family, training or test files."""
    assert len(names(["compressible_ns_2d"], resolution=512)) == 4
    assert len(names(["advection_1d", "burgers_1d"], files_per_family=2)) == 4
    assert len(names(["compressible_ns_2d"], kind="test")) == 9


def test_selection_by_size():
    """As many files as fit: two of 8.2 GB in 17 GB; first trajectories need their share only."""
    assert len(names(["advection_1d"], max_gigabytes=17.0)) == 2
    assert len(names(["advection_1d"], max_gigabytes=1.0, trajectories=100)) == 8


def test_a_file_that_just_fits_is_taken():
    """A limit of exactly the bytes of a file takes it, one byte less does not."""
    size = find_file(DARCY).bytes / 10**9
    assert names([], [DARCY], max_gigabytes=size) == [DARCY]
    with pytest.raises(ConfigFault, match="leaves too little"):
        names([], [DARCY], max_gigabytes=size - 1e-9)


def test_partial_size():
    """100 of 10,000 trajectories are about one percent of the bytes; all of them are the file itself."""
    file = find_file("2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5")
    assert 0.01 <= bytes_to_fetch(file, 100) / file.bytes < 0.0101
    assert bytes_to_fetch(file, 10_000) == bytes_to_fetch(file, None) == file.bytes


def test_mirror_address():
    """A mirror has PDEBench's folders."""
    assert find_file(DARCY).address("http://mirror.test/pde/") == f"http://mirror.test/pde/2D/DarcyFlow/{DARCY}"
    assert find_file(DARCY).address(None).endswith("/133219")


BAD_SELECTIONS: dict[str, tuple[list[str], list[str], dict[str, Any], str]] = {
    "misspelt family": (["darcy"], [], {}, "darcy_2d"),
    "foreign family": (["helmholtz"], [], {}, "unknown family"),
    "misspelt file": ([], [DARCY[:-1]], {}, DARCY),
    "foreign file": ([], ["zzz"], {}, "unknown file"),
    "path": ([], ["../../etc/passwd"], {}, "unknown file"),
    "empty name": ([], [""], {}, "unknown file"),
    "id of a file": ([], ["133219"], {}, f"write {DARCY}"),
    "URL of a file": ([], ["https://darus.uni-stuttgart.de/api/access/datafile/133219"], {}, f"write {DARCY}"),
    "outdated advection id": ([], ["133110"], {}, "outdated.*advection_1d.*2 beta"),
    "outdated advection URL": ([], ["https://x.test/api/access/datafile/133100"], {}, "outdated.*advection_1d"),
    "outdated advection test id": ([], ["133025"], {}, "outdated.*advection_1d"),
    "outdated Burgers id": ([], ["133136"], {}, "outdated.*burgers_1d.*twice the flux"),
    "outdated Burgers test id": ([], ["133119"], {}, "outdated.*burgers_1d"),
    "unknown parameter": (["advection_1d"], [], {"parameters": {"speed": [1.0]}}, "none of these families has it"),
    "parameter of another family": (["darcy_2d"], [], {"parameters": {"rho": [1.0]}}, "none of these families"),
    "unknown value": (["advection_1d"], [], {"parameters": {"beta": [0.5]}}, "beta = 0.5; the files have 0.1, 0.2"),
    "no value": (["advection_1d"], [], {"parameters": {"beta": []}}, r"beta = \[\]"),
    "combination that is not there": (
        ["compressible_ns_2d"],
        [],
        {"parameters": {"eta": [0.1]}, "resolution": 512},
        "no file of compressible_ns_2d",
    ),
    "resolution that is not there": (["darcy_2d"], [], {"resolution": 421}, "resolutions of that kind: 128"),
    "kind that is not there": (["darcy_2d"], [], {"kind": "test"}, "no file of darcy_2d has kind test"),
    "too little room for a family": (["advection_1d"], [], {"max_gigabytes": 1.0}, "smallest file has 8.23 GB"),
    "too little room for a name": ([], [DARCY], {"max_gigabytes": 1.0}, f"{DARCY} has 1.3 GB"),
    "unknown size within a budget": ([], ["Sod1.hdf5"], {"max_gigabytes": 1.0}, "unknown size"),
    "part of a compressed file": (["diffusion_sorption_1d"], [], {"trajectories": 10}, "fetch it whole"),
    "part of groups": ([], ["2D_rdb_NA_NA.h5"], {"trajectories": 10}, "fetch it whole"),
    "part of a batch": (["incompressible_ns_2d"], [], {"trajectories": 3}, "fetch it whole"),
}


@pytest.mark.parametrize("case", BAD_SELECTIONS)
def test_bad_selection_is_refused(case: str):
    """A selection that cannot be met is refused in one line that says what is known instead."""
    families, files, conditions, message = BAD_SELECTIONS[case]
    with pytest.raises(ConfigFault, match=message) as caught:
        names(families, files, **conditions)
    assert "\n" not in str(caught.value)


def test_outdated_content_is_refused(tmp_path):
    """A file with the bytes of an outdated version is recognised by its MD5 sum, whatever its name."""
    with pytest.raises(DataFault, match="outdated version of advection_1d"):
        refuse_outdated_md5(tmp_path / "a.hdf5", "99d57a5a8d660ba2cb824f41e09c6543")
    with pytest.raises(DataFault, match="outdated version of burgers_1d"):
        refuse_outdated_md5(tmp_path / "a.hdf5", "0a49257a0e5cd644459d3984185bb033")
    refuse_outdated_md5(tmp_path / "a.hdf5", find_file(DARCY).md5)
