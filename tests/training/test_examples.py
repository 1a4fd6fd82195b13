"""A few trajectories in memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.untrained import make_root, receipt
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.simulate import simulate
from ups.errors import DataFault
from ups.files import place_of
from ups.models.codec import codec_from
from ups.models.sizes import Sizes
from ups.models.state_statistics import StateStatistics
from ups.models.weights import load_model
from ups.training.examples import (
    Trajectories,
    encode,
    expect_memory,
    fit_codec,
    measure_statistics,
    read_trajectories,
    renormalized,
)

NAME = "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train"
SIZES = {"num_trajectories": 6, "resolution": 16, "num_snapshots": 5, "duration": 0.3, "seed": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a codec of compressible flow, whose density and pressure are encoded by their logarithm."""
    root = tmp_path_factory.mktemp("examples")
    (root / "01_raw").mkdir()
    parameters = {"eta": 0.1, "zeta": 0.1}
    simulate(root / f"01_raw/{NAME}.hdf5", family="compressible_ns_1d", parameters=parameters, **SIZES)
    return make_root(root, ())


@pytest.fixture(scope="module")
def cache(root: Path) -> LatentCache:
    """The latents of the data root."""
    found = receipt(root, "latent_cache")
    return LatentCache.open(place_of(root, found), found["key"])


@pytest.fixture(scope="module")
def trajectories(root: Path, cache: LatentCache) -> Trajectories:
    """Its training trajectories."""
    entry = cache.datasets[NAME]
    return read_trajectories(root / "01_raw", Dataset.from_json(entry["dataset"]), entry["split"]["train"], "cpu")


def test_latents_are_those_of_the_cache(root: Path, cache: LatentCache, trajectories: Trajectories):
    """The same codec gives the same latents and condition in memory as on disk."""
    entry = cache.datasets[NAME]
    examples = encode(load_model(codec_from, root, receipt(root, "codec")), trajectories)
    stored = np.stack([cache.read(NAME, "fields", index) for index in entry["split"]["train"]])
    assert torch.allclose(examples.z, torch.from_numpy(stored), atol=1e-5)
    assert examples.condition.tolist() == pytest.approx(entry["condition"])
    assert examples.domain.grid == tuple(entry["token_grid"])


def test_statistics_are_those_of_the_cache(root: Path, cache: LatentCache, trajectories: Trajectories):
    """Limits and units measured in memory are those that the cache keeps of its training split."""
    examples = encode(load_model(codec_from, root, receipt(root, "codec")), trajectories)
    channels = examples.z.shape[-1]
    statistics = StateStatistics(Sizes(["compressible_ns_1d"], [1], [3], [channels], [0], 1))
    measure_statistics(statistics, examples)
    for name, values in cache.datasets[NAME]["statistics"].items():
        expected = torch.tensor(values).clamp(min=1e-3).repeat_interleave(channels // 3)
        assert torch.allclose(getattr(statistics, name)[0], expected, rtol=1e-4), name


def test_a_new_codec_normalizes_as_the_data_do(root: Path, trajectories: Trajectories):
    """Mean and standard deviation are those of `fit_normalization` on the same trajectories; decoding is exact."""
    codec = fit_codec(trajectories, patch_size=2, components=2)
    group = codec.groups["compressible_ns_1d/fields"]
    expected = receipt(root, "normalization")["statistics"]["compressible_ns_1d"]["fields"]
    names = ("Vx", "density", "pressure") if "Vx" in expected else tuple(expected)
    found = dict(zip(trajectories.family.fields, zip(group.log, group.mean, group.std, strict=True), strict=True))
    for name in names:
        assert found[name] == (
            expected[name]["log"],
            *map(pytest.approx, (expected[name]["mean"], expected[name]["std"])),
        )
    decoded = codec.decode(encode(codec, trajectories).z[:, 0], "compressible_ns_1d/fields")
    assert torch.allclose(decoded, trajectories.u[:, 0], rtol=1e-4, atol=1e-5)


def test_renormalized_latents_do_not_know_the_scale(trajectories: Trajectories):
    """Velocities ten times as large have the same latents after the codec is normalized by them."""
    codec = fit_codec(trajectories, patch_size=2, components=2)
    scale = torch.tensor([10.0 if name == "Vx" else 1.0 for name in trajectories.family.fields]).view(1, 1, -1, 1)
    larger = replace(trajectories, u=trajectories.u * scale)
    z = encode(renormalized(codec, larger), larger).z
    assert torch.allclose(z, encode(codec, trajectories).z, atol=1e-4)


def test_mirror_images_are_trajectories_too(trajectories: Trajectories):
    """In 1D there is one more for each: reversed in x, with the velocity negated; the originals come first."""
    images = trajectories.mirrored()
    count = len(trajectories.u)
    signs = torch.tensor([-1.0 if name == "Vx" else 1.0 for name in trajectories.family.fields]).view(1, 1, -1, 1)
    assert torch.equal(images.u[:count], trajectories.u)
    assert torch.equal(images.u[count:], trajectories.u.flip(-1) * signs)


def test_batches_hold_steps_of_the_trajectories(trajectories: Trajectories):
    """z_next follows z, a window of h + 1 snapshots holds both; every step occurs in `spread`.

    With history a window begins with the snapshot before.
    """
    plain = encode(fit_codec(trajectories, patch_size=1, components=1), trajectories)
    window = plain.draw(32, 3, np.random.default_rng(0)).window
    assert window is not None and window.shape[1] == 4
    examples = replace(plain, history=True)
    batch = examples.draw(32, 3, np.random.default_rng(0))
    assert batch.window is not None and batch.window.shape[1] == 5
    rows, offset = torch.arange(32), batch.offset
    assert len(set(offset.tolist())) > 1
    for shift, expected in ((-1, batch.before), (0, batch.z), (1, batch.z_next)):
        assert torch.equal(batch.window[rows, offset + shift], expected)
    states = batch.states(3)
    channels, each = examples.z.shape[-1], examples.z.flatten(0, 1)
    assert all(any(torch.equal(s[:, :channels], z) for z in each) for s in states[0][:4])
    every = list(examples.spread(1000, 5))
    assert {len(batch.z) for batch in every[:-1]} == {5}
    assert torch.equal(torch.cat([batch.z for batch in every]), examples.z[:, :-1].flatten(0, 1))
    assert torch.equal(torch.cat([batch.z_next for batch in every]), examples.z[:, 1:].flatten(0, 1))
    before = torch.cat([examples.z[:, :1], examples.z[:, :-2]], 1).flatten(0, 1)
    assert torch.equal(torch.cat([batch.before for batch in every]), before)


def test_memory_is_bounded(trajectories: Trajectories, monkeypatch: pytest.MonkeyPatch):
    """Where images do not fit there are the trajectories alone; a number that needs too much memory is refused."""
    monkeypatch.setattr("ups.training.examples.MAX_IMAGE_BYTES", 1)
    assert torch.equal(trajectories.mirrored().u, trajectories.u)
    expect_memory(trajectories.dataset, 4, 2**30)
    with pytest.raises(DataFault, match="4 trajectories need .* GiB .*: lower adapt.sizes"):
        expect_memory(trajectories.dataset, 4, 1000)
