"""Tokens that hold one field each: split and joined again, and attention between the fields of a point."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.models.test_mixing import normal, periodic, randomized, token_mixer
from ups.models.backbone import TokenMixer
from ups.models.blocks import FieldExchange, join_fields, split_fields

F, K = 2, 3
CHOICES = {"separate_fields": True, "hidden_channels": (16, 16, 16)}


def test_each_token_has_its_own_field_of_every_state():
    """Token (b, n) of two states a and b and what is shared becomes (a_f, b_f, shared) for each field f."""
    a, b, shared = normal(2, 5, F * K), normal(2, 5, F * K, seed=1), normal(2, 5, 4, seed=2)
    found = split_fields(torch.cat([a, b, shared], -1), 2, F, K)
    for sample, field in itertools.product(range(2), range(F)):
        mine = slice(field * K, (field + 1) * K)
        expected = torch.cat([a[sample, :, mine], b[sample, :, mine], shared[sample]], -1)
        assert torch.equal(found[sample * F + field], expected)


def test_joining_undoes_splitting():
    """One state without anything shared comes back."""
    x = normal(2, 5, F * K)
    assert torch.equal(join_fields(split_fields(x, 1, F, K), F), x)


@pytest.mark.parametrize("grid", [(5,), (2, 3)])
def test_exchange_is_attention_among_the_fields_of_a_point(grid: tuple[int, ...]):
    """It equals softmax(q k^T / sqrt(E)) v by plain loops over samples, points and heads."""
    exchange, num_fields, head_channels = randomized(FieldExchange(8, 4)), 3, 4
    x = normal(2 * num_fields, *grid, 8)
    found = exchange(x, num_fields).unflatten(0, (2, num_fields)).flatten(2, -2)
    points = x.unflatten(0, (2, num_fields)).flatten(2, -2)
    for sample, point in itertools.product(range(2), range(math.prod(grid))):
        q, k, v = exchange.project(points[sample, :, point]).chunk(3, -1)
        heads = []
        for head in range(2):
            own = slice(head * head_channels, (head + 1) * head_channels)
            weights = (q[:, own] @ k[:, own].T / math.sqrt(head_channels)).softmax(-1)
            heads.append(weights @ v[:, own])
        assert torch.allclose(found[sample, :, point], exchange.merge(torch.cat(heads, -1)), atol=1e-5)


def mix(mixer: TokenMixer, tokens: Tensor, seed: int = 0) -> Tensor:
    """The output, with the fields split_fields, for a fixed summary and condition."""
    return mixer(tokens, normal(len(tokens), 8, seed=seed), normal(len(tokens), 7), periodic((12,)), 4)


@pytest.mark.parametrize("changed", [0, 3])
def test_every_field_feels_the_others_through_the_exchange_alone(changed: int):
    """A change in one channel of the state reaches both fields; without the exchange only its own."""
    mixer, tokens = token_mixer(**CHOICES), normal(1, 12, 5)
    other = tokens.clone()
    other[:, 3, changed] += 1
    own = slice(0, 2) if changed < 2 else slice(2, 4)
    assert (mix(mixer, tokens) != mix(mixer, other)).any(1).all()
    for block in mixer.trunks[0].blocks:
        torch.nn.init.zeros_(block.exchange.merge.weight)
    moved = (mix(mixer, tokens) != mix(mixer, other)).any(1).flatten()
    assert moved[own].all() and moved.sum() == 2


def test_fields_are_told_apart():
    """Two fields with the same numbers everywhere have different outputs."""
    mixer = token_mixer(**CHOICES)
    tokens, summary = normal(1, 12, 2).repeat(1, 1, 2), normal(1, 4).view(1, 2, 1, 2).expand(1, 2, 2, 2).reshape(1, 8)
    tokens = torch.cat([tokens, torch.ones(1, 12, 1)], -1)
    first, second = mixer(tokens, summary, normal(1, 7), periodic((12,)), 4).split(2, -1)
    assert not torch.allclose(first, second, atol=1e-3)


class Recorder(torch.nn.Module):
    """Takes the place of a part: keeps its inputs, gives back 16 channels of zeros."""

    channels = 16

    def forward(self, *inputs: object) -> Tensor:
        self.inputs = inputs
        return torch.zeros(*inputs[0].shape[:-1], self.channels)


def test_every_field_is_told_its_own_number_and_summary():
    """Rows of two samples are fields 0 and 1 in turn; each has its own means and log amplitudes, and its number."""
    mixer, condition = token_mixer(**CHOICES), normal(2, 7)
    mixer.summary, mixer.trunks[0] = Recorder(), Recorder()
    summary = torch.arange(16.0).view(2, 8)  # of each sample means of two components of two fields, then amplitudes
    mixer(normal(2, 12, 5), summary, condition, periodic((12,)), 4)
    told = mixer.trunks[0].inputs[2]
    assert torch.equal(told[:, :7], condition.repeat_interleave(2, 0))
    assert told[:, 7:].tolist() == [[1.0, 0.0], [0.0, 1.0]] * 2
    assert mixer.summary.inputs[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
