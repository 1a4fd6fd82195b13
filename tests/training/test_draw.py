import pytest
import torch

from ups.training.distributed import Draw, Ranks

CPU = torch.device("cpu")


def _shares(world_size: int, size: int) -> list[slice]:
    return [Ranks(rank, world_size, CPU).share(size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [7, 8, 64])
def test_shares_are_disjoint_and_complete(world_size: int, size: int):
    """The shares of all ranks are the global batch, each sample once, and differ by at most one sample."""
    parts = [list(range(size))[share] for share in _shares(world_size, size)]
    assert sum(parts, []) == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sample_meets_the_same_numbers_on_any_number_of_ranks(world_size: int):
    """What all ranks draw, put together, is what a single rank draws, call after call."""

    def numbers(draw: Draw) -> list[torch.Tensor]:
        return [draw.normal(), draw.integers(64), draw.normal(5, 2), draw.keep(0.3, 6)]

    whole = numbers(Draw((0, 2, 11), 8, slice(0, 8), CPU))
    parts = [numbers(Draw((0, 2, 11), 8, share, CPU)) for share in _shares(world_size, 8)]
    for expected, *drawn in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(drawn), expected)


@pytest.mark.parametrize("seed", [(1, 2, 11), (0, 3, 11), (0, 2, 12)])
def test_other_seeds_give_other_numbers(seed: tuple[int, ...]):
    """Seed, purpose and step each change the numbers."""
    first, other = (Draw(s, 8, slice(0, 8), CPU).normal(4) for s in ((0, 2, 11), seed))
    assert not torch.equal(first, other)


def test_integers_are_uniform():
    """Integers reach both ends of [1, high] and nothing beyond."""
    drawn = Draw((0, 2, 0), 4096, slice(0, 4096), CPU).integers(4)
    assert torch.bincount(drawn, minlength=5)[1:].min() > 900
    assert drawn.min() == 1 and drawn.max() == 4


def test_kept_blocks_keep_the_mean():
    """A block is skipped with the given probability, and what is kept is enlarged so that the mean stays one."""
    drawn = Draw((0, 4, 0), 4096, slice(0, 4096), CPU).keep(0.25, 8)
    assert drawn.shape == (4096, 8)
    assert sorted(set(drawn.flatten().tolist())) == pytest.approx([0.0, 4 / 3])
    assert abs(drawn.mean() - 1) < 0.02
