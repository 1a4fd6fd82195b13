"""States of two snapshots: what models read of them, and a PDE that one snapshot does not determine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backbones import small
from tests.models.test_baselines import SIZES, settings
from tests.models.test_operator import normal
from tests.training.jobs import adapt_section
from ups.data.families import NUM_CONDITIONS
from ups.models.baselines import grid_model
from ups.models.history import History
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.training.adaptation import fit
from ups.training.examples import Examples, measure_statistics

FAMILIES = ("advection_1d", "burgers_1d")
COUNTS = (1, 1), (1, 1), (4, 2), (0, 0), NUM_CONDITIONS
N = 16


def domain(family: str) -> Domain:
    """Tokens on a periodic axis."""
    return Domain(family, (N,), (True,))


@torch.no_grad()
def stepped(model: torch.nn.Module, state: Tensor, family: str) -> Tensor:
    """A step without coefficients."""
    return model(state, state[..., :0], torch.zeros(len(state), NUM_CONDITIONS), domain(family))


def operator(history: tuple[str, ...]) -> Operator:
    """A small operator of two families with weights anywhere, whose limits do not bind."""
    made = Operator(Sizes(FAMILIES, *COUNTS, history), small())
    made.statistics.max_mean.fill_(100.0), made.statistics.max_fluctuation.fill_(100.0)
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=seed))
    return made


def test_a_state_is_a_snapshot_and_the_one_before():
    """What is joined is split again; of a family without history what follows the snapshot is ignored."""
    history, z, before = History(Sizes(FAMILIES, *COUNTS, FAMILIES[:1])), normal(3, N, 4), normal(3, N, 4, seed=1)
    found = history.split(torch.cat([z, before], -1), domain("advection_1d"))
    assert torch.equal(found[0], z) and torch.equal(found[1], before)
    joined = history.join(before, torch.cat([z, before], -1), domain("advection_1d"))
    assert torch.equal(joined, torch.cat([before, z], -1))
    short = normal(3, N, 2)
    assert history.split(torch.cat([short, short], -1), domain("burgers_1d"))[1] is None
    assert torch.equal(history.join(short, joined, domain("burgers_1d")), short)


def test_only_families_with_history_see_the_snapshot_before():
    """A step of one depends on it, and carries its own snapshot on; a single snapshot counts as one at rest."""
    model, z = operator(("advection_1d",)), normal(2, N, 4)
    at_rest, moving = (stepped(model, torch.cat([z, before], -1), "advection_1d") for before in (z, 0.9 * z))
    assert torch.equal(at_rest[..., 4:], z) and torch.equal(moving[..., 4:], z)
    assert torch.equal(stepped(model, z, "advection_1d"), at_rest)
    assert not torch.allclose(at_rest, moving, rtol=1e-3)
    z = normal(2, N, 2)
    assert torch.equal(stepped(model, torch.cat([z, 0.9 * z], -1), "burgers_1d"), stepped(model, z, "burgers_1d"))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", sorted(SIZES))
def test_baselines_get_what_the_operator_gets(kind: str, normalized: bool):
    """Of a family with history their steps start from two snapshots as well."""
    torch.manual_seed(0)
    model = grid_model(**settings(kind, normalized=normalized) | {"history": True})
    model.statistics.max_mean.fill_(100.0), model.statistics.max_fluctuation.fill_(100.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    z = normal(2, N, 2)
    at_rest, moving = (stepped(model, torch.cat([z, before], -1), "burgers_1d") for before in (z, 0.9 * z))
    assert torch.equal(at_rest[..., 2:], z) and torch.equal(stepped(model, z, "burgers_1d"), at_rest)
    assert not torch.equal(at_rest[..., :2], moving[..., :2])


def standing_waves(count: int, num_steps: int) -> Tensor:
    """Solutions a cos(2 pi x + phase) cos(2 pi t) (B, T, N, 1) of u_tt = u_xx, which are at rest at first."""
    a, phase = torch.rand(2, count, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    x, t = torch.arange(N)[:, None] / N, 0.1 * torch.arange(num_steps + 1)[:, None, None]
    return (0.5 + a) * (2 * math.pi * (x + phase)).cos() * (2 * math.pi * t).cos()


def test_a_wave_equation_needs_the_snapshot_before():
    """A snapshot does not say whether a wave rises or falls: with history the error of a step is far smaller.

    Exact: u(t + dt) = 2 cos(omega dt) u(t) - u(t - dt).
    """
    z, errors = standing_waves(32, 8), []
    plain = Examples(domain("advection_1d"), z, z.new_zeros(len(z), N, 0), torch.zeros(NUM_CONDITIONS))
    for history in ((), FAMILIES[:1]):
        torch.manual_seed(0)
        examples = replace(plain, history=bool(history))
        model = Operator(Sizes(FAMILIES[:1], (1,), (1,), (1,), (0,), NUM_CONDITIONS, history), small(norm=False))
        measure_statistics(model.statistics, examples)
        model.statistics.fit_change_law([(z[:, t], z[:, t + 1]) for t in range(8)], examples.domain)
        section = adapt_section(steps=150).training(0.01)
        model = fit(model, examples, section)
        batch = examples.draw(64, 1, np.random.default_rng(1))
        with torch.no_grad():
            z_pred = model(batch.state, batch.coefficients, batch.condition, batch.domain)[..., :1]
        errors.append(float((z_pred - batch.z_next).square().mean().sqrt()))
    assert errors[1] < 0.3 * errors[0]
