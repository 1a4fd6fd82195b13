"""Further terms of the operator's loss: exact values on analytic fields, and gradients where they are violated."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.backbones import small
from tests.training.jobs import NO_TERMS, inputs_of, launched, lines_of, losses, noisy, section, train
from ups.config.training import Terms
from ups.data.families import NUM_CONDITIONS, boundary_feature
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch
from ups.models.codec import Codec, FieldGroup
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.losses import (
    TERMS,
    TermSum,
    Transition,
    boundary_error,
    conservation_error,
    divergence_error,
    positivity_error,
    query_error,
    spectral_error,
    term_weight,
)
from ups.training.stages import operator as stage_operator
from ups.training.stages.operator import step_loss

B, D = 4, 12
NO_FLOOR = torch.zeros(1)
NAMES = tuple(NO_TERMS)
FAMILY_OF = dict.fromkeys(NAMES, "compressible_ns_2d") | {
    "boundary": "incompressible_ns_2d",
    "divergence": "incompressible_ns_2d",
    "positivity": "diffusion_sorption_1d",
}
CPU = torch.device("cpu")
WHOLE = slice(0, B)


def weighted(**weights: float) -> Terms:
    """The section with these weights."""
    return Terms(**{name: term | {"weight": weights.get(name, 0.0)} for name, term in NO_TERMS.items()})


def drawn(step: int | None = 0, share: slice = WHOLE) -> Draw:
    """The random numbers of a step."""
    return Draw((0, 2), B, share, CPU, step)


def cells(num_points: int) -> Tensor:
    """Cell centres of the unit interval."""
    return (torch.arange(num_points) + 0.5) / num_points


def test_every_term_of_the_configuration_has_a_function():
    """The names in the configuration are those of `TERMS`."""
    assert set(TERMS) == set(Terms.model_fields)


def test_query_error_counts_the_points_asked_for():
    """An error of 1 at one of two points beside a truth of 2 everywhere is 1 / sqrt(2) / 2; elsewhere it is nothing."""
    u_ref = torch.full((1, 1, 4, 3), 2.0)
    u_pred = u_ref.clone()
    u_pred[0, 0, 1, 2] += 1.0
    at, beside = torch.tensor([[5, 0]]), torch.tensor([[0, 4]])
    torch.testing.assert_close(query_error(u_pred, u_ref, NO_FLOOR, at), torch.tensor([0.5**0.5 / 2]))
    assert query_error(u_pred, u_ref, NO_FLOOR, beside) < 1e-6


@pytest.mark.parametrize(("k", "grid", "num_bands"), [(1, (32,), 4), (5, (32,), 4), (3, (16, 12), 3)])
def test_spectral_error_of_a_sine_is_that_of_its_amplitude(k: int, grid: tuple[int, ...], num_bands: int):
    """A sine along x predicted too strong by 30 % is wrong by 0.3 in its band and right in the others."""
    sine = torch.sin(2 * torch.pi * k * cells(grid[0])).reshape(-1, *(1,) * (len(grid) - 1)).expand(grid)
    sine = sine[None, None, None]
    value = spectral_error(1.3 * sine, sine, (True,) * len(grid))
    torch.testing.assert_close(value, torch.tensor([0.3 / num_bands]), atol=1e-5, rtol=1e-4)


def test_spectral_error_is_along_space_and_blind_to_phase():
    """A shifted sine has no error; the same sine along y instead of x in a longer box has."""
    x = cells(16)
    sine = torch.sin(2 * torch.pi * x)[None, None, None, :, None].expand(1, 1, 1, 16, 16)
    assert spectral_error(sine.roll(3, 3), sine, (True, True)) < 1e-5
    assert spectral_error(sine.mT, sine, (True, True)) > 0.1


def test_spectral_error_counts_both_axes_alike():
    """Of two equally strong sines along x and y one is too strong by 0.3: 0.3 / sqrt(2) of their band, either one."""
    x, y = (torch.sin(2 * torch.pi * 3 * c) for c in torch.meshgrid(cells(16), cells(16), indexing="ij"))
    for change in (0.3 * x, 0.3 * y):
        value = spectral_error((x + y + change)[None, None, None], (x + y)[None, None, None], (True, True))
        torch.testing.assert_close(value, torch.tensor([0.3 / 2**0.5 / 4]), atol=1e-5, rtol=1e-4)


def test_spectral_error_mirrors_axes_with_walls():
    """Half a cosine between walls is one mode, so that its relative error is that of its statistics."""
    cosine = torch.cos(torch.pi * 3 * cells(32))[None, None, None]
    assert spectral_error(1.3 * cosine, cosine, (False,)) == pytest.approx(0.3 / 4, rel=1e-3)
    assert spectral_error(1.3 * cosine, cosine, (True,)) > 0.11


def test_conservation_error_is_that_of_the_integral():
    """A constant of 0.5 on a truth of mean magnitude 2 is 0.25, 0 with open boundaries; a wave without mean is 0."""
    u_ref, closed = torch.full((2, 1, 16), -2.0), torch.tensor([1.0, 0.0])
    wave = torch.sin(2 * torch.pi * cells(16))
    torch.testing.assert_close(conservation_error(u_ref + wave + 0.5, u_ref, NO_FLOOR, closed), 0.25 * closed)
    assert conservation_error(u_ref + wave, u_ref, NO_FLOOR, closed).amax() < 1e-6


def test_positivity_error_is_what_lies_below_zero():
    """Half of the points at -1 beside a truth of 2: sqrt(1/2) / 2, whatever the other points are."""
    u_pred, u_ref = torch.tensor([[[-1.0, 7.0, -1.0, 0.0]]]), torch.full((1, 1, 4), 2.0)
    torch.testing.assert_close(positivity_error(u_pred, u_ref, NO_FLOOR), torch.tensor([0.5**0.5 / 2]))
    assert positivity_error(u_pred.abs(), u_ref, NO_FLOOR) < 1e-6


def test_boundary_error_sees_the_faces_of_walls_alone():
    """1 on the faces of x beside a truth of 2 is 0.5, less on one of them; inside, or on periodic y, it is nothing."""
    u_ref = torch.full((1, 1, 6, 5), 2.0)
    faces, elsewhere = u_ref.clone(), u_ref.clone()
    faces[:, :, [0, -1]] += 1.0
    elsewhere[:, :, 1:-1] += 1.0
    torch.testing.assert_close(boundary_error(faces, u_ref, NO_FLOOR, (False, True)), torch.tensor([0.5]))
    for face in (0, -1):
        one = u_ref.index_add(2, torch.tensor([face % 6]), torch.ones(1, 1, 1, 5))
        torch.testing.assert_close(boundary_error(one, u_ref, NO_FLOOR, (False, True)), torch.tensor([0.5**1.5]))
    assert boundary_error(elsewhere, u_ref, NO_FLOOR, (False, True)) < 1e-6


def test_divergence_error_of_linear_flows():
    """(x, y) diverges by 2 where (x, -y) does not and has derivatives of 1; rotation on top changes nothing."""
    x, y = torch.meshgrid(cells(8), cells(6), indexing="ij")
    v_ref, v_pred = torch.stack([x, -y])[None], torch.stack([x, y])[None]
    rotation = torch.stack([-y, x])[None]
    torch.testing.assert_close(divergence_error(v_pred, v_ref, NO_FLOOR), torch.tensor([2.0]))
    assert divergence_error(v_ref + 3 * rotation, v_ref, NO_FLOOR) < 1e-4


def codec(family: str, mean: float = 0.0, *, log: bool = False) -> Codec:
    """A codec of patches of 2 points per axis that keeps all components."""
    fields = FAMILIES[family].fields
    grid, count = (8,) * len(FAMILIES[family].axes), len(fields)
    group = FieldGroup(grid, 2, 2 ** len(grid), (log,) * count, (mean,) * count, (1.0,) * count)
    return Codec({f"{family}/fields": group}).requires_grad_(False)


def transition_batch(family: str, known: Codec) -> LatentBatch:
    """Random latents of a family under its own boundaries."""
    group = known.groups[f"{family}/fields"]
    generator = torch.Generator().manual_seed(0)
    z, z_next = torch.randn(2, B, group.num_tokens, group.num_channels, generator=generator)
    condition = torch.zeros(B, NUM_CONDITIONS)
    periodic = (FAMILIES[family].boundary == "periodic",) * len(group.grid)
    for axis in range(len(group.grid)):
        condition[:, boundary_feature(axis, FAMILIES[family].boundary)] = 1.0
    return LatentBatch(Domain(family, group.token_grid, periodic), z, z_next, z[..., :0], condition)


def test_the_floor_is_a_thousandth_of_the_usual_magnitude():
    """Of a field of mean 3 and deviation 1 it is sqrt(10) / 1000, of one whose logarithm has the mean 3 e^3 / 1000."""
    for log, size in ((False, 10**0.5), (True, math.exp(3))):
        known = codec("burgers_1d", mean=3.0, log=log)
        batch = transition_batch("burgers_1d", known)
        step = Transition(batch.z, batch.z_next, batch.z, torch.ones(B, 1, 2), batch, known)
        torch.testing.assert_close(step.floor, torch.tensor([1e-3 * size]))


def operator_of(batch: LatentBatch) -> Operator:
    """An operator of which every weight matters."""
    torch.manual_seed(0)
    sizes = Sizes(tuple(FAMILIES), *((n,) * len(FAMILIES) for n in (3, 1, batch.z.shape[-1], 0)), NUM_CONDITIONS)
    model = Operator(sizes, small())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for name in ("max_mean", "max_fluctuation"):
        getattr(model.statistics, name).fill_(100.0)
    return model


def gradient(name: str, model: Operator, known: Codec, batch: LatentBatch) -> float:
    """The norm of the gradient that one term adds to the loss, with respect to the operator's parameters."""
    terms = TermSum(weighted(**{name: 1.0}), known, 8)
    gradients = []
    for chosen in (terms, None):
        values = step_loss(model.statistics, section(noise=noisy(0.0)), chosen)(model, batch, drawn())
        found = torch.autograd.grad(values.sum(), list(model.parameters()), allow_unused=True)
        gradients.append([gradient for gradient in found if gradient is not None])
    return float(sum((g - plain).square().sum() for g, plain in zip(*gradients, strict=True)) ** 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_violated_term_reaches_the_operator(name: str):
    """Each term has a gradient on the operator's parameters where its prediction is wrong, and none where it is not."""
    family = FAMILY_OF[name]
    known = codec(family)
    batch = transition_batch(family, known)
    model = operator_of(batch)
    violated = gradient(name, model, known, batch)
    assert violated > 1e-3
    with torch.no_grad():
        right = model(batch.z, batch.coefficients, batch.condition, batch.domain)
    if name == "positivity":
        known = codec(family, mean=1000.0)
    assert gradient(name, model, known, replace(batch, z_next=right)) < 1e-6 * violated


def test_terms_leave_alone_what_does_not_apply():
    """Open boundaries conserve nothing, periodic ones have no faces, logarithms no sign, gases are compressible."""
    known = codec("compressible_ns_2d", log=True)
    batch = transition_batch("compressible_ns_2d", known)
    model = operator_of(batch)
    for name in ("positivity", "boundary", "divergence"):
        assert gradient(name, model, known, batch) == 0.0
    assert gradient("conservation", model, known, batch) > 1e-3
    batch.condition[:, boundary_feature(0, "periodic")] = 0.0
    batch.condition[:, boundary_feature(0, "outflow")] = 1.0
    assert gradient("conservation", model, known, batch) == 0.0


def loss_with(terms: TermSum | None, step: int | None, share: slice = WHOLE) -> Tensor:
    """The whole loss of a share of a batch."""
    known = codec("incompressible_ns_2d")
    batch = transition_batch("incompressible_ns_2d", known)
    model = operator_of(batch)
    parts = (getattr(batch, name)[share] for name in ("z", "z_next", "coefficients", "condition"))
    return step_loss(model.statistics, section(noise=noisy(0.1)), terms)(
        model, LatentBatch(batch.domain, *parts), drawn(step, share)
    )


def test_the_loss_is_the_weighted_sum():
    """Each term adds its weight times its value, in training alone; the values are kept without weight."""
    known = codec("incompressible_ns_2d")
    plain = loss_with(None, 0)
    total = torch.zeros(B)
    for name in ("query", "spectral", "boundary", "divergence"):
        terms = TermSum(weighted(**{name: 0.5}), known, 8)
        added = loss_with(terms, 0) - plain
        torch.testing.assert_close(added.mean(), 0.5 * terms.values[name])
        assert torch.equal(loss_with(terms, None), loss_with(None, None))
        total = total + added
    terms = TermSum(weighted(**dict.fromkeys(NAMES, 0.5)), known, 8)
    torch.testing.assert_close(loss_with(terms, 0), plain + total)
    assert sorted(terms.values) == ["boundary", "divergence", "query", "spectral"]


def test_shares_meet_the_same_points():
    """The losses of two ranks, put together, are those of one."""
    terms = TermSum(weighted(query=1.0), codec("incompressible_ns_2d"), 8)
    parts = [loss_with(terms, 3, share) for share in (slice(0, 1), slice(1, B))]
    torch.testing.assert_close(torch.cat(parts), loss_with(terms, 3))


def test_queries_come_every_so_often_and_warm_up():
    """With `every` 2 and 4 steps of warm-up the term counts by 1/4, 0, 3/4, 0, 1, 0 of its value."""
    known = codec("incompressible_ns_2d")
    query = NO_TERMS["query"] | {"weight": 1.0, "every": 2, "warmup_steps": 4}
    warm, full = (TermSum(Terms(**NO_TERMS | {"query": q}), known, 8) for q in (query, query | {"warmup_steps": 0}))
    shares = []
    for step in range(6):
        added, whole = (loss_with(terms, step) - loss_with(None, step) for terms in (warm, full))
        shares.append((added / whole.clamp(min=1e-3)).mean().item())
    assert shares == pytest.approx([0.25, 0.0, 0.75, 0.0, 1.0, 0.0], abs=1e-4)


def test_a_stage_without_terms_has_none(root: Path, tmp_path: Path):
    """With all weights 0 nothing is computed; with one of them there are terms to tell of."""
    run = Run(tmp_path, "operator", "", {}, inputs_of(root), launched(), "cpu", root)
    assert stage_operator.build(section(), run).terms is None
    assert stage_operator.build(section(terms=weighted(query=0.1).model_dump()), run).terms == {}


def test_small_changes_count_as_small():
    """Where nearly nothing changes an error of a thousandth of a usual step's change is no larger than a tenth."""
    noise = torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(0))
    assert spectral_error(1e-3 * noise, torch.zeros_like(noise), (True,)) < 0.1


@pytest.mark.slow
def test_two_ranks_learn_terms_as_one_does(root: Path):
    """With terms and unrolled, two ranks have the losses of one, and the metrics have each term from step 1 on."""
    on = weighted(query=0.3, spectral=0.1, conservation=0.1).model_dump()
    how = {"terms": on, "unroll": {"horizon": 2, "pushforward": True, "start": 0.5, "families": None}}
    one = train(root, launch={"num_processes": 1}, **how)
    expected = [float.fromhex(value) for _, value in losses(one)]
    (root / "06_models" / "operator").rename(root / "06_models" / "one")
    found = [float.fromhex(value) for _, value in losses(train(root, launch={"num_processes": 2}, **how))]
    assert found == pytest.approx(expected, rel=1e-4)
    lines = [line for line in lines_of(root / "06_models" / "one" / one.name) if "term/query" in line]
    assert lines[0]["step"] == 1 and min(lines[0]["term/query"], lines[0]["term/spectral"]) > 0
    assert "term/conservation" in json.dumps(lines[-1])


def test_a_term_counts_in_its_phase_alone():
    """With phase [0.25, 0.75] of 8 steps a term has its weight in steps 2 to 5, and none before and after."""
    term = Terms(**NO_TERMS | {"spectral": {"weight": 0.5, "phase": [0.25, 0.75]}}).spectral
    assert [term_weight(term, step, 8) for step in range(8)] == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]


def test_a_term_is_not_logged_after_its_phase():
    """The value of a term that has ended is not kept; one that pauses keeps its latest."""
    query = NO_TERMS["query"] | {"weight": 1.0, "every": 2, "phase": [0.0, 0.5]}
    terms = TermSum(Terms(**NO_TERMS | {"query": query}), codec("incompressible_ns_2d"), 8)
    found = []
    for step in range(6):
        loss_with(terms, step)
        found.append(sorted(terms.values))
    assert found == [["query"]] * 4 + [[]] * 2
