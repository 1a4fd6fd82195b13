"""Attention over tokens: against complex rotations, under shifts, in windows, with bounded logits."""

import math

import pytest
import torch

from tests.models.test_mixing import GRIDS, normal, periodic, randomized
from ups.models.blocks import AttentionMixing, from_windows, to_windows, window_of
from ups.models.sizes import Domain

CHANNELS, HEAD = 16, 8


def attention(window: int | None = None, *, shifted: bool = False, qk_norm: bool = True) -> AttentionMixing:
    """Two heads with random weights."""
    return randomized(AttentionMixing(CHANNELS, HEAD, window=window, shifted=shifted, qk_norm=qk_norm))


def test_attention_is_a_softmax_of_rotated_products():
    """On a line logits are Re(q conj(k)) / sqrt(E) of pairs turned by 2 pi m x or, with ends, pi m x."""
    n, x = 12, normal(1, 12, CHANNELS)
    frequencies = torch.tensor([0.0, 1.0, 3.0, 6.0])  # (1 + 6)^(j / 3) - 1, rounded
    for wraps in (True, False):
        mixing = attention(qk_norm=False)
        q, k, v = (mixing.project(x)[0] @ torch.eye(3 * CHANNELS)[:, part : part + CHANNELS] for part in (0, 16, 32))
        position = (torch.arange(n) + 0.5) / n
        turn = torch.polar(torch.ones(n, 4), (2 if wraps else 1) * math.pi * position[:, None] * frequencies)
        heads = []
        for first in (0, HEAD):
            query, key = (torch.complex(*s[:, first : first + HEAD].chunk(2, 1)) * turn for s in (q, k))
            logits = (query @ key.conj().T).real / HEAD**0.5
            heads.append(logits.softmax(1) @ v[:, first : first + HEAD])
        expected = mixing.merge(torch.cat(heads, 1))
        assert torch.allclose(mixing(x, Domain("advection_1d", (n,), (wraps,)))[0], expected, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_commutes_with_shifts(grid: tuple[int, ...], qk_norm: bool):
    """On a periodic grid the output moves with the input, also around the wrap."""
    mixing, x, axes = attention(qk_norm=qk_norm), normal(2, *grid, CHANNELS), tuple(range(1, len(grid) + 1))
    shifts = tuple(range(1, len(grid) + 1))
    mixed = mixing(x, periodic(grid))
    assert torch.allclose(mixing(x.roll(shifts, axes), periodic(grid)), mixed.roll(shifts, axes), atol=1e-5)
    assert (mixed - mixed.roll(1, 1)).abs().max() > 1e-3


@pytest.mark.parametrize("shifted", [False, True])
def test_windows_commute_with_shifts_by_a_window(shifted: bool):
    """In windows of 4 x 3 tokens the output moves with the input by 4 and 3 tokens."""
    mixing, x, domain = attention(4, shifted=shifted), normal(2, 8, 9, CHANNELS), periodic((8, 9))
    moved = mixing(x.roll((4, 3), (1, 2)), domain)
    assert torch.allclose(moved, mixing(x, domain).roll((4, 3), (1, 2)), atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_one_window_is_full_attention(grid: tuple[int, ...]):
    """A window as large as the grid is attention to all tokens, shifted or not."""
    x, domain = normal(2, *grid, CHANNELS), Domain("advection_1d", grid, (False,) * len(grid))
    full = attention()(x, domain)
    for shifted in (False, True):
        assert torch.equal(attention(max(grid), shifted=shifted)(x, domain), full)


@pytest.mark.parametrize(("n", "window", "expected"), [(12, None, 12), (12, 5, 4), (12, 99, 12), (13, 5, 1), (9, 3, 3)])
def test_window_divides_its_axis(n: int, window: int | None, expected: int):
    """A window that does not divide the axis is the largest divisor below it."""
    assert window_of(n, window) == expected


@pytest.mark.parametrize(("grid", "windows"), [((12,), (3,)), ((6, 8), (3, 2)), ((4, 6, 5), (2, 3, 5))])
def test_windows_and_back(grid: tuple[int, ...], windows: tuple[int, ...]):
    """Tokens cut into windows and put together again are the tokens; the first window is the first corner."""
    x = normal(2, *grid, 3)
    inside = to_windows(x, windows)
    assert torch.equal(from_windows(inside, grid, windows), x)
    corner = x[(0, *(slice(0, w) for w in windows))]
    assert torch.equal(inside[0], corner.reshape(-1, 3))


def reached(mixing: AttentionMixing, domain: Domain, token: int) -> list[int]:
    """Which tokens of a line change when one of them does."""
    x = normal(1, *domain.grid, CHANNELS)
    other = x.clone()
    other[0, token] += 1
    return (mixing(x, domain) - mixing(other, domain)).abs().amax((0, 2)).gt(1e-6).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("shifted", "wraps", "expected"),
    [(False, True, [0, 1, 2, 3]), (True, True, [0, 1, 10, 11]), (True, False, [0, 1])],
)
def test_shifted_windows_reach_over_the_wrap_only(shifted: bool, wraps: bool, expected: list[int]):
    """The first token is seen in its window; windows that hold both ends join them only where the axis is periodic."""
    assert reached(attention(4, shifted=shifted), Domain("advection_1d", (12,), (wraps,)), 0) == expected


def test_masks_belong_to_the_windows_of_every_sample():
    """In a batch each sample is mixed in shifted windows of a bounded line as it is alone."""
    mixing, x, domain = attention(4, shifted=True), normal(3, 12, CHANNELS), Domain("advection_1d", (12,), (False,))
    alone = torch.cat([mixing(sample[None], domain) for sample in x])
    assert torch.allclose(mixing(x, domain), alone, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_qk_norm_bounds_logits(size: float):
    """However large the state, |q k| / sqrt(E) is at most sqrt(E) times the largest gains."""
    mixing = attention()
    q, k, _ = mixing.heads(size * normal(2, 12, CHANNELS), periodic((12,)))
    logits = torch.einsum("bnhe,bmhe->bhnm", q, k) / HEAD**0.5
    gains = [norm.weight.abs().max() for norm in (mixing.query_norm, mixing.key_norm)]
    assert logits.abs().max() <= HEAD**0.5 * gains[0] * gains[1] * (1 + 1e-5)


def test_without_qk_norm_logits_grow():
    """What QK-norm prevents: logits grow with the square of the state."""
    domain = periodic((12,))

    def largest(size: float) -> float:
        q, k, _ = attention(qk_norm=False).heads(size * normal(2, 12, CHANNELS), domain)
        return torch.einsum("bnhe,bmhe->bhnm", q, k).abs().max().item()

    assert largest(10.0) == pytest.approx(100 * largest(1.0), rel=1e-4)
