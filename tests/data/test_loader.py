import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.data.conftest import write_file
from tests.data.latents import write_cache
from tests.training.jobs import section
from ups.data.arrays import stamp
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.samples import FieldSamples, LatentSamples
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import DataFault
from ups.training.batches import BatchSampler
from ups.training.stage import batch_size, fixed_batches

NUM_SAMPLES = {"advection_1d": 30, "burgers_1d": 7, "darcy_2d": 100}
BATCH_SIZES = {"advection_1d": 8, "burgers_1d": 16, "darcy_2d": 4}
SPLIT = {"train": [0, 3, 4], "valid": [1], "test": [2, 5]}
GRIDS = {"advection_1d": [8], "burgers_1d": [8], "darcy_2d": [8, 6]}


class Numbers:
    """Samples that are numbers and nothing else, all equally likely."""

    def __init__(self, num_samples: dict[str, int]) -> None:
        self.num_samples = num_samples

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Any of them."""
        return rng.integers(self.num_samples[key], size=size)


def _sampler(seed: int = 0) -> BatchSampler:
    return BatchSampler(Numbers(NUM_SAMPLES), BATCH_SIZES, NUM_SAMPLES, section(seed=seed))


def test_batch_depends_on_seed_and_step_alone():
    """A batch is the same for a new sampler that starts at its step, and another for another seed."""
    past = _sampler()
    batches = [past.draw(step) for step in range(12)]
    for step in (11, 5, 0):
        key, samples = _sampler().draw(step)
        assert key == batches[step][0]
        np.testing.assert_array_equal(samples, batches[step][1])
    assert any(not np.array_equal(_sampler(1).draw(step)[1], batches[step][1]) for step in range(12))


def test_keys_come_in_proportion_to_their_weights():
    """A key of four times the weight makes four times as many batches."""
    sampler = BatchSampler(
        Numbers(NUM_SAMPLES), BATCH_SIZES, {"burgers_1d": 4.0, "darcy_2d": 1.0, "advection_1d": 0.0}, section()
    )
    counts = Counter(sampler.draw(step)[0] for step in range(3000))
    assert counts["burgers_1d"] / counts["darcy_2d"] == pytest.approx(4.0, rel=0.1)
    assert "advection_1d" not in counts


@pytest.mark.parametrize(("tokens", "size"), [(1, 12), (256, 12), (600, 36), (4096, 252)])
def test_batch_size_is_a_multiple(tokens: int, size: int):
    """A batch has the multiple of 12 snapshots nearest to its tokens, and one multiple at least."""
    assert batch_size(tokens, 16, 12) == size


def test_batches_reach_every_sample():
    """Batches have the size of their key, stay within its samples and reach all of them."""
    seen = {key: set() for key in NUM_SAMPLES}
    for step in range(600):
        key, samples = _sampler().draw(step)
        assert samples.shape == (BATCH_SIZES[key],)
        seen[key] |= set(samples.tolist())
    assert seen == {key: set(range(number)) for key, number in NUM_SAMPLES.items()}


def test_validation_batches_are_spread_evenly():
    """There is one validation batch per key, without repetition, from the first sample to the last."""
    batches = dict(fixed_batches(NUM_SAMPLES, BATCH_SIZES))
    assert {key: len(samples) for key, samples in batches.items()} == {
        "advection_1d": 8,
        "burgers_1d": 7,
        "darcy_2d": 4,
    }
    for key, samples in batches.items():
        assert len(set(samples)) == len(samples)
        assert (samples[0], samples[-1]) == (0, NUM_SAMPLES[key] - 1)


@pytest.fixture
def datasets(write: Callable[..., Path]) -> dict[str, Dataset]:
    """Six trajectories of two transient families and a steady one."""
    names = [write(family, count=6).name for family in GRIDS]
    return find_datasets(write("darcy_2d", count=6).parent, names)


@pytest.fixture
def cache(tmp_path: Path, datasets: dict[str, Dataset]) -> LatentCache:
    """Their latents: every grid point a token, every field a channel."""
    write_cache(tmp_path / "cache", tmp_path, datasets, dict.fromkeys(datasets, SPLIT), key={})
    return LatentCache.open(tmp_path / "cache", {})


@pytest.mark.parametrize("split", SPLIT)
def test_pairs_are_consecutive_snapshots(cache: LatentCache, split: str):
    """The samples of a split are exactly its pairs of neighbouring snapshots of one trajectory."""
    name = "1D_Burgers_Sols_Nu0.01"
    samples = LatentSamples(cache, split)
    batch = samples.load("burgers_1d", np.arange(samples.num_samples["burgers_1d"]))
    trajectories = [cache.read(name, "fields", index) for index in SPLIT[split]]
    np.testing.assert_array_equal(batch.z, np.concatenate([z[:-1] for z in trajectories]))
    np.testing.assert_array_equal(batch.z_next, np.concatenate([z[1:] for z in trajectories]))


@pytest.mark.parametrize("horizon", [1, 3, 99])
def test_windows_hold_the_pairs(cache: LatentCache, horizon: int):
    """Whatever the horizon, samples, z and z_next are the same; windows are what the trajectory has around them."""
    name = "1D_Burgers_Sols_Nu0.01"
    plain, wide = (LatentSamples(cache, "train", horizons={"burgers_1d": h}) for h in (1, horizon))
    assert (wide.num_samples, wide.num_tokens) == (plain.num_samples, plain.num_tokens)
    samples = np.arange(plain.num_samples["burgers_1d"])
    expected, batch = (made.load("burgers_1d", samples) for made in (plain, wide))
    for field in ("z", "z_next", "coefficients", "condition"):
        np.testing.assert_array_equal(getattr(batch, field), getattr(expected, field))
    if horizon == 1:
        assert batch.window is None
        return
    num_steps = min(horizon, 4)
    for sample, window, offset in zip(samples, batch.window, batch.offset, strict=True):
        _, trajectory, time = wide.find("burgers_1d", sample)
        first = min(time, 4 - num_steps)
        snapshots = cache.read(name, "fields", trajectory)
        np.testing.assert_array_equal(window, snapshots[first : first + num_steps + 1])
        assert offset == time - first


@pytest.mark.parametrize("horizon", [1, 3, 99])
def test_families_with_history_have_the_snapshot_before(cache: LatentCache, horizon: int):
    """Whatever the horizon it is the true one, of a first snapshot itself; also of rollouts that start earlier."""
    name = "1D_Burgers_Sols_Nu0.01"
    plain = LatentSamples(cache, "train", horizons={"burgers_1d": horizon})
    samples = LatentSamples(cache, "train", horizons={"burgers_1d": horizon}, history=["burgers_1d"])
    numbers = np.arange(samples.num_samples["burgers_1d"])
    batch, expected = (made.load("burgers_1d", numbers) for made in (samples, plain))
    assert expected.before is None
    np.testing.assert_array_equal(batch.z, expected.z)
    np.testing.assert_array_equal(batch.z_next, expected.z_next)
    for h in (1, 2, 5):
        (state, *later), (first, *others) = batch.states(h), expected.states(h)
        channels = first.shape[-1]
        np.testing.assert_array_equal(state[..., :channels], first)
        assert all(map(np.array_equal, later, others))
        for number, z, before in zip(numbers, state[..., :channels], state[..., channels:], strict=True):
            snapshots = cache.read(name, "fields", samples.find("burgers_1d", number)[1])
            (time,) = (t for t in range(4) if np.array_equal(snapshots[t], z))
            np.testing.assert_array_equal(before, snapshots[max(0, time - 1)])
    for number, before in zip(numbers, batch.before, strict=True):
        _, trajectory, time = samples.find("burgers_1d", number)
        np.testing.assert_array_equal(before, cache.read(name, "fields", trajectory)[max(0, time - 1)])


def test_windows_are_as_long_as_the_shortest_trajectories_of_the_family(cache: LatentCache):
    """Two datasets of one family make batches of windows equally long, which both can fill."""
    short = {**cache.datasets["1D_Burgers_Sols_Nu0.01"], "arrays": {"fields": {"shape": [6, 3, 8, 1], "scale": None}}}
    cache.datasets["short"] = short
    read = cache.read
    cache.read = lambda name, *place: read("1D_Burgers_Sols_Nu0.01", *place)
    samples = LatentSamples(cache, "train", horizons={"burgers_1d": 9})
    last = samples.num_samples["burgers_1d"] - 1
    assert {samples.dataset("burgers_1d", sample) for sample in (0, last)} == {"short", "1D_Burgers_Sols_Nu0.01"}
    assert samples.load("burgers_1d", np.array([0, 3, last])).window.shape == (3, 3, 8, 1)


def test_early_steps_come_more_often(cache: LatentCache):
    """Step t of T = 4 comes as often as it is the earliest of 1, 2 or 8 uniform steps, in the mean of the three."""
    later = {n: [(t / 4) ** n for t in (4, 3, 2, 1, 0)] for n in (1, 2, 8)}  # probability that all of n are at least t
    early = {t: sum(later[n][t] - later[n][t + 1] for n in later) / 3 for t in range(4)}
    samples = LatentSamples(cache, "train")
    drawn = samples.draw("burgers_1d", 20_000, np.random.default_rng(0))
    places = [samples.find("burgers_1d", sample)[1:] for sample in drawn]
    for part, expected in (
        (0, dict.fromkeys(SPLIT["train"], 1 / 3)),
        (1, early),
    ):
        shares = {value: count / len(drawn) for value, count in Counter(place[part] for place in places).items()}
        assert shares == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("history", [[], ["darcy_2d"]])
def test_steady_samples_are_coefficients_and_solutions(cache: LatentCache, history: list[str]):
    """A steady sample is the solution as z_next, its own coefficients, and zero before it, with a history too."""
    name = "2D_DarcyFlow_beta1.0_Train"
    batch = LatentSamples(cache, "train", history=history).load("darcy_2d", np.array([2]))
    assert batch.z.shape == batch.z_next.shape and not batch.state.any()
    assert (batch.before is not None) == bool(history)
    np.testing.assert_array_equal(batch.z_next, cache.read(name, "fields", 4))
    np.testing.assert_array_equal(batch.coefficients, cache.read(name, "coefficients", 4))


@pytest.mark.parametrize(("key", "length"), [("advection_1d/fields", 5), ("darcy_2d/fields", 1)])
def test_field_samples_equal_the_reader(tmp_path: Path, datasets: dict[str, Dataset], key: str, length: int):
    """The samples of a field group are the snapshots that the reader gives for the split."""
    samples = FieldSamples(tmp_path, datasets, dict.fromkeys(datasets, SPLIT), "train")
    assert samples.num_samples[key] == 3 * length
    batch = samples.load(key, np.arange(3 * length))
    dataset = next(dataset for dataset in datasets.values() if key.startswith(dataset.family))
    with TrajectoryReader(tmp_path, dataset) as reader:
        np.testing.assert_array_equal(batch.u, np.concatenate([reader.read(index) for index in SPLIT["train"]]))


def test_a_process_opens_more_files_than_the_soft_limit(tmp_path: Path):
    """A reader keeps all files of its dataset open: 24 with a soft limit of 20, which it may raise."""
    for number in range(24):
        write_file(tmp_path, "incompressible_ns_2d", f"ns_incom_inhom_2d_8-{number}.h5", count=1)
    code = """
import resource, sys
from pathlib import Path
from ups.data.recognition import find_files
from ups.data.trajectories import TrajectoryReader, find_datasets
folder = Path(sys.argv[1])
(dataset,) = find_datasets(folder, find_files(folder)).values()
resource.setrlimit(resource.RLIMIT_NOFILE, (20, int(sys.argv[2])))
with TrajectoryReader(folder, dataset) as reader:
    print(sum(reader.read(index).shape[0] for index in range(24)))
"""
    raised, kept = (
        subprocess.run([sys.executable, "-c", code, str(tmp_path), hard], capture_output=True, text=True)
        for hard in ("60", "20")
    )
    assert raised.stdout == f"{24 * 5}\n"
    assert "(Too many open files); raise the limit, see `ulimit -n`" in kept.stderr


def test_coefficient_samples_equal_the_reader(tmp_path: Path, datasets: dict[str, Dataset]):
    """Coefficient fields form a group of their own, one sample per trajectory."""
    samples = FieldSamples(tmp_path, datasets, dict.fromkeys(datasets, SPLIT), "test")
    batch = samples.load("darcy_2d/coefficients", np.array([1, 0]))
    with TrajectoryReader(tmp_path, datasets["2D_DarcyFlow_beta1.0_Train"]) as reader:
        np.testing.assert_array_equal(batch.u, np.stack([reader.read_coefficients(index) for index in (5, 2)]))
    assert samples.num_samples["darcy_2d/coefficients"] == 2


def test_field_samples_are_of_the_described_files(tmp_path: Path, datasets: dict[str, Dataset]):
    """A file that has another stamp when it is opened is refused; one that is replaced later is read as it was."""
    names = [name for dataset in datasets.values() for name in dataset.files]
    stamps, splits = {name: stamp(tmp_path / name) for name in names}, dict.fromkeys(datasets, SPLIT)
    opened, later = (FieldSamples(tmp_path, datasets, splits, "test", stamps) for _ in range(2))
    before = opened.load("darcy_2d/fields", np.array([0])).u
    path = tmp_path / datasets["2D_DarcyFlow_beta1.0_Train"].files[0]
    shutil.copy(path, tmp_path / "other")
    with h5py.File(tmp_path / "other", "r+") as file:
        file["tensor"][...] = 0.0
    (tmp_path / "other").replace(path)
    np.testing.assert_array_equal(opened.load("darcy_2d/fields", np.array([0])).u, before)
    with pytest.raises(DataFault, match="has changed since the datasets were described"):
        later.load("darcy_2d/fields", np.array([0]))
