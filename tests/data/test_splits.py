from dataclasses import replace
from itertools import combinations
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.data.families import Family
from ups.data.layouts import POSITIONS_DATASET
from ups.data.own import write_dataset
from ups.data.pdebench import FAMILIES
from ups.data.recognition import find_files
from ups.data.splits import group_by_initial_condition, split
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault, DataFault

HEAT = Family("heat_1d", "u_t = kappa u_xx", ["u"], ["x"], "periodic", ["kappa"])


def split_folder(folder: Path, seed: int = 0, valid: float = 0.25, test: float = 0.25) -> dict:
    """Splits of everything in a folder."""
    return split(folder, find_datasets(folder, find_files(folder)), seed, valid, test)


def place(splits: dict[str, list[int]], index: int) -> str:
    """Split a trajectory is in."""
    (kind,) = (kind for kind, indices in splits.items() if index in indices)
    return kind


def copy_first_snapshot(name: str, source: int, target: int, scale: float = 1.0):
    """Edit that makes a trajectory start like another one."""

    def edit(file: h5py.File) -> None:
        file[name][target, 0] = scale * file[name][source, 0]

    return edit


def groups_of(folder: Path) -> list[list[tuple[str, int]]]:
    """Trajectories with a common initial condition, of everything in a folder."""
    return group_by_initial_condition(folder, find_datasets(folder, find_files(folder)))


def copy_states(source: Path, places: dict[int, int]):
    """Edit that makes trajectories start like those of another file, `{theirs: here}`."""

    def edit(file: h5py.File) -> None:
        with h5py.File(source) as other:
            for theirs, here in places.items():
                file["velocity"][here] = other["velocity"][theirs]
                file["particles"][here] = other["particles"][theirs]

    return edit


def test_every_trajectory_is_in_one_split(write, tmp_path):
    """Train, valid and test are disjoint, complete and have the sizes the fractions ask for."""
    path = write("advection_1d", count=20)
    splits = split_folder(tmp_path, valid=0.2, test=0.25)[path.stem]
    assert sorted(sum(splits.values(), [])) == list(range(20))
    assert {kind: len(indices) for kind, indices in splits.items()} == {"train": 11, "valid": 4, "test": 5}


def test_split_depends_only_on_seed(write, tmp_path):
    """The same seed gives the same split, another seed another one."""
    write("advection_1d", count=20)
    assert split_folder(tmp_path, seed=1) == split_folder(tmp_path, seed=1) != split_folder(tmp_path, seed=2)


def test_families_of_one_stream_split_alike(write, tmp_path):
    """Advection, Burgers and 1D reaction-diffusion start trajectory i alike, so i is in one split for all of them."""
    stems = [write(family, count=12).stem for family in ("advection_1d", "burgers_1d", "diffusion_reaction_1d")]
    first, *others = (split_folder(tmp_path)[stem] for stem in stems)
    assert all(other == first for other in others)


def test_files_of_one_family_split_alike(write, tmp_path):
    """Files with other parameters repeat the initial conditions; extra trajectories do not disturb the common ones."""
    few = write("compressible_ns_2d", count=8).stem
    many = write("compressible_ns_2d", "2D_CFD_Rand_M1.0_Eta0.1_Zeta0.1_periodic_8_Train.hdf5", count=14).stem
    splits = split_folder(tmp_path)
    assert all(place(splits[few], index) == place(splits[many], index) for index in range(8))
    assert len(splits[many]["test"]) == 4


def test_parts_of_a_file_split_by_their_published_positions(write, tmp_path):
    """Trajectory k of a part goes where the trajectory of its position goes in a whole file of the same stream."""
    positions = [9, 2, 7, 4, 0, 5]

    def part(file: h5py.File) -> None:
        file[POSITIONS_DATASET] = positions

    whole = write("advection_1d", count=12).stem
    some = write("advection_1d", "1D_Advection_Sols_beta0.1.hdf5", count=6, edit=part).stem
    for seed in range(4):
        splits = split_folder(tmp_path, seed)
        assert [place(splits[some], k) for k in range(6)] == [place(splits[whole], position) for position in positions]


def test_equal_initial_snapshots_stay_together(write, tmp_path):
    """Trajectories of one dataset that start from the same field are in the same split, whatever the seed."""
    path = write("compressible_ns_1d", count=9, edit=copy_first_snapshot("Vx", 2, 7))
    for seed in range(8):
        splits = split_folder(tmp_path, seed)[path.stem]
        assert place(splits, 2) == place(splits, 7)


def test_minus_zero_is_zero(write, tmp_path):
    """Initial states that differ in the sign of a zero alone are one state."""

    def edit(file: h5py.File) -> None:
        for index, zero in ((2, 0.0), (7, -0.0)):
            file["Vx"][index, 0] = file["Vx"][2, 0]
            file["Vx"][index, 0, 0] = zero

    path = write("compressible_ns_1d", count=9, edit=edit)
    for seed in range(8):
        splits = split_folder(tmp_path, seed)[path.stem]
        assert place(splits, 2) == place(splits, 7)


def test_constant_fields_do_not_link(write, tmp_path):
    """A field that is the same constant in all trajectories says nothing about their initial conditions."""

    def level(file: h5py.File) -> None:
        file["density"][:, 0] = 1

    path = write("compressible_ns_1d", count=8, edit=level)
    assert len(split_folder(tmp_path)[path.stem]["test"]) == 2


def test_a_common_background_does_not_link(write, tmp_path):
    """A velocity from which all trajectories start says nothing where their densities differ."""

    def background(file: h5py.File) -> None:
        file["Vx"][:, 0] = file["Vx"][0, 0]

    path = write("compressible_ns_1d", count=8, edit=background)
    assert len(split_folder(tmp_path)[path.stem]["test"]) == 2


@pytest.mark.usefixtures("families")
def test_one_geometry_of_all_problems_does_not_link(tmp_path):
    """Steady problems with the same geometry and other sources are other problems."""
    source = np.random.default_rng(0).random((8, 1, 16))
    geometry = np.broadcast_to(np.linspace(0, 1, 16), source.shape)
    poisson = Family("poisson_1d", "(a u_x)_x = f", ["u"], ["x"], "dirichlet", [], coefficients=["f", "a"], steady=True)
    arrays = {"u": source, "f": source[:, 0], "a": geometry[:, 0]}
    write_dataset(tmp_path / "poisson_1d.hdf5", poisson, arrays, parameters={}, dx=0.1)
    assert len(groups_of(tmp_path)) == 8


@pytest.mark.usefixtures("families")
def test_positions_link_files_of_pdebench_alone(write, tmp_path):
    """Files of an own family with other initial states at the same positions have nothing in common."""
    states = np.random.default_rng(0).random((2, 4, 3, 16))
    for number, u in enumerate(states):
        path = tmp_path / f"heat_1d_{number}.hdf5"
        write_dataset(path, HEAT, {"u": u}, parameters={"kappa": 0.1 + number}, dx=0.1, dt=0.1)
        write("advection_1d", f"1D_Advection_Sols_beta{number}.0.hdf5", count=4)
    groups = groups_of(tmp_path)
    assert sorted(map(len, groups)) == [1] * 8 + [2] * 4


def test_equal_constant_states_stay_together(write, tmp_path):
    """Diffusion-sorption starts from constants: equal ones are duplicates, different ones are not."""

    def level(file: h5py.File) -> None:
        for number, key in enumerate(sorted(file)):
            file[key]["data"][0] = max(number, 1)

    path = write("diffusion_sorption_1d", count=9, edit=level)
    for seed in range(8):
        splits = split_folder(tmp_path, seed)[path.stem]
        assert place(splits, 0) == place(splits, 1)
        assert len(splits["test"]) >= 2


def test_equal_constant_states_of_two_files_stay_together(write, tmp_path):
    """Files of one family whose trajectories 1 and 4 start from the same constant have both in one split."""

    def level(index: int):
        def edit(file: h5py.File) -> None:
            for name in ("density", "pressure", "Vx"):
                file[name][index, 0] = 1

        return edit

    one = write("compressible_ns_1d", count=9, edit=level(1)).stem
    other = write("compressible_ns_1d", "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5", count=9, edit=level(4)).stem
    for seed in range(8):
        splits = split_folder(tmp_path, seed)
        assert place(splits[one], 1) == place(splits[other], 4)


def test_copied_batch_files_stay_together(write, tmp_path):
    """A byte copy of an incompressible Navier-Stokes file, as there are 24, adds no trajectory to other splits."""
    paths = [write("incompressible_ns_2d", f"ns_incom_inhom_2d_8-{k}.h5", count=3) for k in range(3)]
    paths[2].write_bytes(paths[0].read_bytes())
    for seed in range(8):
        splits = split_folder(tmp_path, seed)["ns_incom_inhom_2d_8"]
        assert all(place(splits, index) == place(splits, index + 6) for index in range(3))
    assert sum(map(len, splits.values())) == 9


def test_steady_problems_are_compared_by_coefficient(write, tmp_path):
    """Two Darcy problems with the same permeability are the same problem, whatever their solutions."""

    def repeat(file: h5py.File) -> None:
        file["nu"][5] = file["nu"][1]

    path = write("darcy_2d", count=8, edit=repeat)
    for seed in range(8):
        splits = split_folder(tmp_path, seed)[path.stem]
        assert place(splits, 1) == place(splits, 5)


def test_blocks_of_compressible_flow_are_linked(write, tmp_path, monkeypatch):
    """Where every block repeats the fields of the one before, trajectories one block apart stay together."""
    small = replace(FAMILIES["compressible_ns_1d"], initial_condition_block=4)
    monkeypatch.setitem(FAMILIES, "compressible_ns_1d", small)
    path = write("compressible_ns_1d", count=12)
    splits = split_folder(tmp_path)[path.stem]
    assert all(place(splits, index) == place(splits, index + 4) == place(splits, index + 8) for index in range(4))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_trajectories_reach_every_split(write, tmp_path, count):
    """Three trajectories are enough for one in each split, even with greedy fractions."""
    path = write("compressible_ns_3d", count=count)
    splits = split_folder(tmp_path, valid=0.45, test=0.45)[path.stem]
    assert all(splits.values())


def test_small_strata_still_fill_every_split(write, tmp_path):
    """A dataset whose trajectories fall into strata of fewer than three groups is split all the same."""
    counts = {"0.4": 3, "1.0": 5}
    stems = [write("advection_1d", f"1D_Advection_Sols_beta{beta}.hdf5", count=n).stem for beta, n in counts.items()]
    stems.append(write("burgers_1d", count=4).stem)
    splits = split_folder(tmp_path)
    assert all(all(splits[stem].values()) for stem in stems)


@pytest.mark.parametrize(
    ("count", "valid", "test", "sizes"),
    [
        (40, 0.1, 0.1, [32, 4, 4]),
        (20, 0.1, 0.2, [13, 3, 4]),
        (12, 0.1, 0.1, [6, 3, 3]),
        (10, 0.1, 0.1, [6, 2, 2]),
        (7, 0.1, 0.1, [5, 1, 1]),
        (4, 0.1, 0.1, [2, 1, 1]),
        (4, 0.45, 0.45, [1, 2, 1]),
        (6, 0.7, 0.25, [1, 3, 2]),
        (6, 0.25, 0.7, [1, 2, 3]),
    ],
)
def test_sizes_by_hand(write, tmp_path, count, valid, test, sizes):
    """Sizes are rounded, up to three or a quarter of few trajectories.

    Where train would be empty, the larger of valid and test gives one, test if they are equal.
    """
    path = write("compressible_ns_3d", count=count)
    splits = split_folder(tmp_path, valid=valid, test=test)[path.stem]
    assert [len(splits[kind]) for kind in ("train", "valid", "test")] == sizes


def test_three_trajectories_are_shuffled(write, tmp_path):
    """Which of three trajectories is in which split depends on the seed."""
    path = write("compressible_ns_3d", count=3)
    assert len({split_folder(tmp_path, seed)[path.stem]["test"][0] for seed in range(12)}) == 3


def test_groups_leave_train_only_where_others_stay(write, tmp_path):
    """Three datasets of three groups, some shared by two of them, each have one group in each split."""
    name = "ns_incom_inhom_2d_{}-0.h5"
    shared = write("incompressible_ns_2d", name.format(4), count=3)
    write("incompressible_ns_2d", name.format(5), count=3, edit=copy_states(shared, {0: 0}))
    write("incompressible_ns_2d", name.format(6), count=3, edit=copy_states(shared, {1: 0, 2: 1}))
    splits = split_folder(tmp_path)
    assert [list(map(len, splits[stem].values())) for stem in sorted(splits)] == [[1, 1, 1]] * 3


def test_positions_link_only_what_one_stream_made(write, tmp_path):
    """Equal positions are one group in families of one stream, and in no others."""
    names = [write("advection_1d", count=3), write("burgers_1d", count=2), write("compressible_ns_1d", count=2)]
    names += [write("compressible_ns_2d", count=1), write("incompressible_ns_2d", count=2)]
    found = sorted(sorted((name[:10], index) for name, index in group) for group in groups_of(tmp_path))
    advection, burgers, *others = (path.stem[:10] for path in names)
    linked = [[(advection, i), (burgers, i)] for i in range(2)] + [[(advection, 2)]]
    alone = [[(name, i)] for name, count in zip(others, (2, 1, 2), strict=True) for i in range(count)]
    assert found == sorted(linked + alone)


def test_positions_repeat_only_in_blocks(write, tmp_path):
    """Of 130 trajectories of a family without blocks each is a group of its own."""
    write("advection_1d", count=130)
    assert len(groups_of(tmp_path)) == 130


def test_weak_fields_are_states_too(write, tmp_path):
    """Fields of magnitude 1e-9 are as different as others."""

    def weaken(file: h5py.File) -> None:
        file["velocity"][...] *= 1e-9
        file["particles"][...] *= 1e-9
        file["force"][...] *= 1e-9

    write("incompressible_ns_2d", count=5, edit=weaken)
    assert len(groups_of(tmp_path)) == 5


def test_too_few_initial_conditions_are_refused(write, tmp_path):
    """Two distinct initial conditions cannot fill three splits."""
    path = write("shallow_water_2d", count=2)
    with pytest.raises(DataFault, match=f"{path.name}: needs at least 3 .* has 2"):
        split_folder(tmp_path)


def test_all_files_of_a_refused_dataset_are_named(write, tmp_path):
    """Who looks for the trajectories that are too few reads in which files they are."""
    paths = [write("incompressible_ns_2d", f"ns_incom_inhom_2d_8-{k}.h5", count=1) for k in range(2)]
    with pytest.raises(DataFault, match=f"^{paths[0].name}, {paths[1].name}: needs at least 3 .* has 2; add traj"):
        split_folder(tmp_path)


@pytest.mark.parametrize("fractions", [(0.0, 0.1), (0.1, 0.0), (0.5, 0.5), (-0.1, 0.2), (float("nan"), 0.1)])
def test_impossible_fractions_are_refused(write, tmp_path, fractions):
    """Fractions must leave something for each split."""
    write("advection_1d")
    with pytest.raises(ConfigFault, match="fractions"):
        split_folder(tmp_path, 0, *fractions)


def test_real_files_share_no_initial_condition(samples):
    """No state in two splits of advection, Burgers and 1D reaction-diffusion, even after rescaling to [0, 1]."""
    datasets = find_datasets(samples, find_files(samples))
    splits = split(samples, datasets, 0, 0.1, 0.1)
    states: dict[str, list[np.ndarray]] = {"train": [], "valid": [], "test": []}
    for name in ("1D_Advection_Sols_beta0.4", "1D_Burgers_Sols_Nu0.01", "ReacDiff_Nu0.5_Rho1.0"):
        with TrajectoryReader(samples, datasets[name]) as reader:
            for kind, indices in splits[name].items():
                u_0 = [reader.read(index, 0, 1).reshape(128, -1).mean(1) for index in indices]
                states[kind] += [(u - u.min()) / (u.max() - u.min()) for u in u_0]
    for one, other in combinations(states.values(), 2):
        assert min(abs(np.stack(one)[:, None] - np.stack(other)).max(-1).ravel()) > 0.01


def test_real_files_are_all_split(samples):
    """Each real dataset has trajectories in all splits."""
    datasets = find_datasets(samples, find_files(samples))
    splits = split(samples, datasets, 0, 0.1, 0.1)
    assert all(all(splits[name].values()) for name in datasets)
    assert all(sum(map(len, splits[name].values())) == datasets[name].num_trajectories for name in datasets)
