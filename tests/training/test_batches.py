"""Which samples a rank sees, in which order, in which parts."""

import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.jobs import section, wait_until
from tests.training.toys import CPU, NUM_TOKENS, Samples, ranks, toy_batches, toy_run, toy_stage
from ups.errors import ConfigFault, LostWorker
from ups.files import write_json
from ups.training.batches import Batches, BatchSampler, Share
from ups.training.distributed import Ranks, memory_place, with_agreed_memory
from ups.training.stage import batch_size

STEPS = range(12)


def shares(folder: Path, world_size: int, step: int, **launch: float) -> list[Share]:
    """The shares of all ranks in a step."""
    return [toy_batches(folder, rank, world_size, **launch).read(step) for rank in range(world_size)]


def points(share: Share) -> torch.Tensor:
    """The samples of a share in their order."""
    return torch.cat([micro.load().x for micro in share.micro_batches])


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_shares_of_all_ranks_are_the_batch_of_one(tmp_path: Path, world_size: int):
    """Whatever the number of ranks, their shares put together are the same samples in the same order."""
    for step in STEPS:
        (whole,) = shares(tmp_path, 1, step)
        parts = shares(tmp_path, world_size, step)
        assert {(part.key, part.size) for part in parts} == {(whole.key, whole.size)}
        assert torch.equal(torch.cat([points(part) for part in parts]), points(whole))


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_shares_are_equally_large(tmp_path: Path, world_size: int):
    """Every rank has as many samples as any other, and counts them for the datasets they are from."""
    for step in STEPS:
        parts = shares(tmp_path, world_size, step)
        assert {len(points(part)) for part in parts} == {parts[0].size // world_size}
        assert sum((part.seen for part in parts), Counter()) == shares(tmp_path, 1, step)[0].seen


@pytest.mark.parametrize("tokens", [1, 7, 20, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_tile_the_share(tmp_path: Path, world_size: int, tokens: int):
    """Micro-batches follow each other without gap, fit their limit where a sample does, and hold the same samples."""
    for step in STEPS:
        for rank, share in enumerate(shares(tmp_path, world_size, step, micro_batch_tokens=tokens)):
            places = [micro.place for micro in share.micro_batches]
            assert np.array_equal(np.r_[tuple(places)], np.arange(share.size).reshape(world_size, -1)[rank])
            assert share.tokens <= max(tokens, NUM_TOKENS[share.key])
            assert torch.equal(points(share), points(shares(tmp_path, world_size, step)[rank]))


@pytest.mark.parametrize(("gigabytes", "most"), [(2e-6, 1), (1e-5, 5), (1.0, 10**6)])
def test_micro_batches_are_cut_by_memory(tmp_path: Path, gigabytes: float, most: int):
    """Samples of 1000 bytes may fill half of the memory, at least one at a time; explicit tokens count alone."""
    for step in STEPS:
        (share,) = shares(tmp_path, 1, step, memory_gigabytes=gigabytes, num_processes=1)
        sizes = [micro.place.stop - micro.place.start for micro in share.micro_batches]
        assert sum(sizes) == share.size and max(sizes) == min(most, math.ceil(share.size / len(sizes)))
        assert torch.equal(points(share), points(*shares(tmp_path, 1, step)))
        (whole,) = shares(tmp_path, 1, step, memory_gigabytes=gigabytes, micro_batch_tokens=10**6)
        assert len(whole.micro_batches) == 1


def test_large_shares_are_read_one_micro_batch_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of shares that are large for the memory one micro-batch is read, and another while the one before is used."""
    loaded, load = [], Samples.load
    monkeypatch.setattr(Samples, "load", lambda *asked: loaded.append(1) or load(*asked))
    batches = toy_batches(tmp_path, memory_gigabytes=2e-6, num_processes=1)
    share = batches.read(0)
    assert len(share.micro_batches) == share.size and len(loaded) == 1
    first = share.micro_batches[0].load()
    assert wait_until(lambda: len(loaded) == 2)
    others = [micro.load().x for micro in share.micro_batches[1:]]
    assert len(loaded) == share.size
    assert torch.equal(torch.cat([first.x, *others]), points(toy_batches(tmp_path).read(0)))


class Pair(Ranks):
    """The first of two ranks, the other of which has half a megabyte."""

    def all_gather(self, value: float) -> list[float]:
        return [value, 0.0005]


def test_ranks_agree_on_the_least_memory(tmp_path: Path):
    """Without a given limit all ranks use that of the rank with the least free memory."""
    agreed = with_agreed_memory(toy_run(tmp_path), Pair(0, 2, CPU))
    assert agreed.launch.memory_gigabytes == 0.0005
    given = toy_run(tmp_path, memory_gigabytes=3.0)
    assert with_agreed_memory(given, Pair(0, 2, CPU)) is given


@pytest.mark.parametrize(
    ("changed", "kept"), [({}, True), ({"world_size": 2}, False), ({"memory_fraction": 0.1}, False)]
)
def test_a_resumed_job_keeps_its_memory(tmp_path: Path, changed: dict[str, float], kept: bool):
    """On as many processes as before the limit is that of the first start, unless a new one is asked for."""
    run = toy_run(tmp_path)
    write_json(tmp_path / "started.json", memory_place(run, ranks()) | changed | {"memory_gigabytes": 0.25})
    assert (with_agreed_memory(run, ranks()).launch.memory_gigabytes == 0.25) == kept


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_families_are_drawn_by_samples_and_dimensions(balance: float):
    """A family is drawn in proportion to a power of its samples, times what the dimensions of its grid are given."""
    weights = toy_stage().weights(section(balance=balance, family_weights_by_dimension=[2.0, 3.0, 7.0]))
    expected = {"advection_1d": 2.0 * 50**balance, "burgers_1d": 2.0 * 20**balance, "darcy_2d": 3.0 * 7**balance}
    assert weights == pytest.approx(expected)


def test_difficult_families_are_drawn_more_often():
    """From three steps after a validation on, weights are its losses over their geometric mean, within [1 / 2, 2]."""
    stage, config = toy_stage(), section(max_difficulty=2.0, validate_every=10)
    losses = {"advection_1d": 0.1, "burgers_1d": 0.8, "darcy_2d": 0.8}  # geometric mean 0.4
    weights = dict.fromkeys(losses, 1.0)
    sampler = BatchSampler(
        stage.train, stage.batch_sizes(config), weights, config, [losses, dict.fromkeys(losses, 1.0)]
    )
    for step, expected in ((12, [1, 1, 1]), (13, [0.5, 2, 2]), (22, [0.5, 2, 2]), (23, [1, 1, 1])):
        assert sampler.difficulties(step) == pytest.approx(expected), step
    drawn = Counter(sampler.draw(step)[0] for step in range(13, 23))
    assert drawn["advection_1d"] < drawn["darcy_2d"]


def test_another_seed_draws_other_samples():
    """Families and samples of a step follow from the seed and the step."""
    stage, config = toy_stage(), section()
    drawn = []
    for seed in (0, 0, 1):
        sampler = BatchSampler(stage.train, stage.batch_sizes(config), stage.weights(config), section(seed=seed))
        drawn.append([(key, *samples) for key, samples in map(sampler.draw, STEPS)])
    assert drawn[0] == drawn[1] and all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
    assert len(set(drawn[0])) == len(STEPS)


@pytest.mark.parametrize(
    ("batch_tokens", "num_tokens", "size"), [(160, 10, 16), (139, 10, 12), (141, 10, 16), (40, 100, 4), (1, 1, 4)]
)
def test_a_batch_has_the_nearest_number_of_tokens(batch_tokens: int, num_tokens: int, size: int):
    """The size is the multiple of four whose tokens are nearest to those asked for, and at least four."""
    assert batch_size(batch_tokens, num_tokens, 4) == size


@pytest.mark.parametrize("first", [0, 1, 7, 22, 23])
def test_reading_ahead_starts_at_any_step(tmp_path: Path, first: int):
    """From any step on the shares are those that are read one by one, up to the last step."""
    batches = toy_batches(tmp_path)
    with batches.from_step(first):
        for step in range(first, 24):
            share, expected = batches.next(), batches.read(step)
            assert share.step == step and torch.equal(points(share), points(expected))


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path):
    """Five ranks cannot have equally many of twelve samples, and the fault says what to change."""
    with pytest.raises(ConfigFault, match=r"a batch of \d+ snapshots of \w+ cannot be shared equally by 5 processes"):
        toy_batches(tmp_path, 0, 5)


def test_a_disk_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Data that do not come within the time-out are a lost worker, in one line that names the folder."""
    batches = toy_batches(tmp_path, timeout_seconds=2)
    monkeypatch.setattr(Batches, "read", lambda self, step: time.sleep(3))
    with batches.from_step(0), pytest.raises(LostWorker, match=f"no data for 1 s: check the disk of {tmp_path}"):
        batches.next()


def test_a_fault_of_the_reader_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What went wrong while reading ahead is raised where the share is asked for."""
    batches = toy_batches(tmp_path)

    def read(self: Batches, step: int) -> Share:
        raise ConfigFault(f"step {step}")

    monkeypatch.setattr(Batches, "read", read)
    with batches.from_step(3), pytest.raises(ConfigFault, match="step 3"):
        batches.next()


@pytest.mark.parametrize("start", [0, 1, 5, 100])
def test_every_key_comes_for_the_first_time_once(tmp_path: Path, start: int):
    """The first steps of the keys, in order: no earlier step from the start on has their key."""
    batches = toy_batches(tmp_path, 0, 1)
    first = batches.first_of_each_key(start)
    keys = {step: batches.read(step).key for step in range(start, first[-1] + 1)}
    assert [keys[step] for step in first] == list(dict.fromkeys(keys.values()))
    assert set(keys.values()) == set(NUM_TOKENS)
