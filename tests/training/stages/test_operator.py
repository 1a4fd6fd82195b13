"""The loss of the operator over several steps: how many, from where, and what gradients flow through."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.backbones import small
from tests.training.jobs import NO_TERMS, assert_same_training, inputs_of, launched, noisy, section, status_of, train
from tests.training.toys import CPU, ranks
from ups.config import OperatorConfig
from ups.config.training import Noise, Unroll
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch, domains
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import StateStatistics
from ups.runs.run import Run
from ups.training.batches import Batches
from ups.training.distributed import Draw
from ups.training.history import StepTimer
from ups.training.injection import Injection
from ups.training.inputs import field_rms, open_cache, training_steps
from ups.training.stages.operator import build, horizon_at, state_noise, step_loss
from ups.training.update import Update

B, N, D, H = 6, 12, 3, 3
DOMAIN = Domain("burgers_1d", (N,), (True,))
STEPS = 24
SAMPLES = 20_000


def unroll(
    horizon: int = H, *, pushforward: bool = False, start: float = 0.5, families: list[str] | None = None
) -> Unroll:
    """How to unroll."""
    return Unroll(horizon=horizon, pushforward=pushforward, start=start, families=families)


def configured(how: Unroll, std: float = 0.0, own_error: float = 0.0) -> OperatorConfig:
    """The section of an operator that is unrolled so, and trained with this noise."""
    return section(noise=noisy(std, own_error), steps=STEPS, unroll=how.model_dump())


def noise_rms(std: float, own_error: float, error: float) -> Tensor:
    """RMS of the noise of each sample, for a model of this validation error."""
    draw = Draw((0, 0, 0), SAMPLES, slice(0, SAMPLES), torch.device("cpu"), 0)
    config = Noise(std=std, own_error=own_error)
    return state_noise(config, torch.tensor(error), draw, torch.Size((SAMPLES, 64, D))).square().mean((1, 2)).sqrt()


def drawn(step: int | None) -> Draw:
    """The random numbers of a step."""
    return Draw((0, 2, step or 0), B, slice(0, B), torch.device("cpu"), step)


def batch(num_steps: int = H) -> LatentBatch:
    """Windows of random states, in which the sample's own state stands at different places."""
    window = torch.randn(B, num_steps + 1, N, D, generator=torch.Generator().manual_seed(0))
    offset = torch.arange(B) % num_steps
    z, z_next = window[torch.arange(B), offset], window[torch.arange(B), offset + 1]
    return LatentBatch(DOMAIN, z, z_next, z[..., :0], torch.randn(B, 2), window, offset)


class Factor(nn.Module):
    """z_next = a z."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))

    def forward(self, z: Tensor, *_: object) -> Tensor:
        return self.a * z


def statistics_of(channels: int) -> StateStatistics:
    """Statistics of all families with so many latent channels."""
    return StateStatistics(Sizes(tuple(FAMILIES), *((n,) * len(FAMILIES) for n in (1, 1, channels, 0)), 2))


def operator() -> Operator:
    """An operator of which every weight matters."""
    torch.manual_seed(1)
    sizes = Sizes(
        families=tuple(FAMILIES),
        num_axes=(3,) * len(FAMILIES),
        num_fields=(1,) * len(FAMILIES),
        latent_channels=(D,) * len(FAMILIES),
        coefficient_channels=(0,) * len(FAMILIES),
        num_conditions=2,
    )
    model = Operator(sizes, small())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def gradients_of(values: Tensor, model: nn.Module) -> list[Tensor]:
    """Gradients of all parameters that the values depend on."""
    found = torch.autograd.grad(values.sum(), list(model.parameters()), allow_unused=True)
    used = [gradient for gradient in found if gradient is not None]
    assert len(used) > 10
    return used


def test_noise_is_as_strong_as_told():
    """Without `own_error` every sample has noise of the same `std`, whatever the model's error."""
    assert noise_rms(0.3, 0.0, error=0.5) == pytest.approx(torch.full((SAMPLES,), 0.3), rel=0.3)
    assert noise_rms(0.3, 0.0, error=0.5).square().mean().sqrt().item() == pytest.approx(0.3, rel=0.03)


def test_noise_follows_the_error_of_the_model():
    """Its RMS over samples is `own_error` e; P(|n| < 0.1) = 0.0797 of the samples have less than a tenth of it."""
    rms = noise_rms(0.0, 1.5, error=0.2)
    assert rms.square().mean().sqrt().item() == pytest.approx(0.3, rel=0.03)
    assert (rms < 0.03).float().mean().item() == pytest.approx(0.0797, abs=0.008)
    assert noise_rms(0.0, 1.5, error=0.0).max() == 0


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (unroll(1), [1] * 8),
        (unroll(3, start=0.5), [1, 1, 1, 1, 1, 2, 2, 3]),
        (unroll(4, start=0.0), [1, 2, 2, 3, 3, 3, 4, 4]),
        (unroll(9, start=0.0), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_horizon_grows_linearly_from_one(how: Unroll, expected: list[int]):
    """It is 1 up to `start` and grows from there on: 1 + ceil((horizon - 1) p) with p from 0 to 1 at the end."""
    assert [horizon_at(step, 8, how) for step in range(8)] == expected
    assert horizon_at(100, 8, how) == how.horizon


@pytest.mark.parametrize("step", [None, 0, 7])
def test_a_horizon_of_one_is_the_loss_of_one_step_bit_for_bit(step: int | None):
    """With horizon 1 and before the curriculum, value and gradients are those of one step; validation has no noise."""
    one, model = batch(), operator()
    statistics = model.statistics
    unit = statistics.expected_change(one.z, DOMAIN)
    z = one.z if step is None else one.z + unit * (0.1 * drawn(step).normal(N, D))
    error = (model(z, one.coefficients, one.condition, DOMAIN) - one.z_next) / unit
    expected = field_rms(error, DOMAIN.family).mean(1)
    gradients = gradients_of(expected, model)
    horizon = 1 if step == 7 else H
    for how in (unroll(horizon, start=0.0 if horizon == 1 else 0.5), unroll(horizon, pushforward=True, start=0.9)):
        values = step_loss(statistics, configured(how, std=0.1))(model, one, drawn(step))
        assert torch.equal(values, expected)
        found = gradients_of(values, model)
        assert all(map(torch.equal, found, gradients))


def test_the_loss_has_noise_of_the_error_of_its_own_family():
    """The state is z + unit (std + own_error |n| e) n', with e of the batch's family, not of another."""
    one, model, draw = batch(), operator(), drawn(7)
    statistics = model.statistics
    statistics.validation_error.fill_(9.0)
    statistics.validation_error[list(FAMILIES).index(DOMAIN.family)] = 0.2
    unit = statistics.expected_change(one.z, DOMAIN)
    white = draw.normal(N, D)
    z = one.z + unit * ((0.1 + 1.5 * 0.2 * draw.normal(1, 1).abs()) * white)
    error = (model(z, one.coefficients, one.condition, DOMAIN) - one.z_next) / unit
    values = step_loss(statistics, configured(unroll(1), std=0.1, own_error=1.5))(model, one, drawn(7))
    torch.testing.assert_close(values, field_rms(error, DOMAIN.family).mean(1))


def test_the_unrolled_loss_has_its_exact_value():
    """States that double in every step under a model that triples them: errors 3^k - 2^k in units of 2^(k-1)."""
    z = torch.randn(1, N, 1).expand(B, N, 1)
    window = torch.stack([2**k * z for k in range(H + 1)], 1)
    doubled = LatentBatch(DOMAIN, z, 2 * z, z[..., :0], torch.zeros(B, 2), window, torch.zeros(B, dtype=torch.int64))
    statistics = statistics_of(1)
    unit = statistics.expected_change(z, DOMAIN)
    # Amplitudes stay within their limits, so the unit doubles with the state.
    assert torch.allclose(statistics.expected_change(4 * z, DOMAIN), 4 * unit)
    values = step_loss(statistics, configured(unroll()))(Factor(3.0), doubled, drawn(STEPS - 1))
    errors = [(3**k - 2**k) / 2 ** (k - 1) for k in (1, 2, 3)]
    size = z.square().mean(1).sqrt() / unit[:, 0]
    torch.testing.assert_close(values, (size * sum(errors) / 3)[:, 0])


@pytest.mark.parametrize("pushforward", [False, True])
def test_gradients_flow_through_all_steps_or_one(pushforward: bool):
    """Gradients of the unrolled loss are those of a plain loop, whose states are cut off with `pushforward`."""
    windows, model = batch(), operator()
    values = step_loss(model.statistics, configured(unroll(pushforward=pushforward)))(model, windows, drawn(STEPS - 1))
    found = gradients_of(values, model)
    total, z = torch.zeros(B), windows.window[:, 0]
    for k in range(1, H + 1):
        before, reference = windows.window[:, k - 1], windows.window[:, k]
        prediction = model(z, windows.coefficients, windows.condition, DOMAIN)
        error = (prediction - reference) / model.statistics.expected_change(before, DOMAIN)
        total = total + error.square().mean((1, 2)).sqrt() / H
        z = prediction.data if pushforward else prediction
    torch.testing.assert_close(values, total)
    torch.testing.assert_close(found, gradients_of(total, model))


def test_both_kinds_of_gradients_differ():
    """Cutting the gradient between steps changes it."""
    found = []
    for pushforward in (False, True):
        model = Factor(1.5)
        loss = step_loss(statistics_of(D), configured(unroll(pushforward=pushforward)))
        loss(model, batch(), drawn(STEPS - 1)).sum().backward()
        found.append(float(model.a.grad))
    assert abs(found[0] / found[1] - 1) > 0.1


def test_states_lie_in_the_window():
    """The states of any horizon are consecutive in the window, start at z where they can, and earlier where not."""
    windows = batch(4)
    for horizon in (1, 2, 3, 4, 9):
        h = min(horizon, 4)
        states = torch.stack(windows.states(horizon), 1)
        for sample, offset in enumerate(windows.offset):
            first = min(int(offset), 4 - h)
            assert torch.equal(states[sample], windows.window[sample, first : first + h + 1])


def test_a_pair_is_a_window_of_one_step():
    """Without a window there is one step, whatever is asked for."""
    pair = replace(batch(), window=None, offset=None)
    assert all(map(torch.equal, pair.states(5), (pair.z, pair.z_next)))


@pytest.mark.slow
def test_an_unrolled_operator_resumes_exactly(root: Path, inject: Callable[[str], None]):
    """Killed while its horizon grows, on two ranks, it ends with every bit of an undisturbed one."""
    how = unroll(4, start=0.25).model_dump()
    undisturbed = train(root, unroll=how)
    (root / "06_models" / "operator").rename(root / "06_models" / "undisturbed")
    inject("sigkill:rank1:step14")
    folder = train(root, unroll=how)
    assert_same_training(folder, root / "06_models" / "undisturbed" / undisturbed.name)
    assert len(status_of(root)["restarts"]) == 1


@pytest.mark.parametrize("families", [None, ["burgers_1d"], []])
def test_only_chosen_families_are_unrolled(root: Path, families: list[str] | None):
    """The others learn from one step, and need the memory of one."""
    run = Run(root, "operator", "", {}, inputs_of(root), launched(), "cpu", root)
    plain, stage = (build(configured(unroll(h, families=families)), run) for h in (1, 4))
    assert len(stage.train.families) > 1
    for family in stage.train.families:
        steps = 4 if families is None or family in families else 1
        assert len(stage.train.load(family, np.zeros(2, int)).states(9)) == 1 + steps
        assert stage.sample_bytes[family] == steps * plain.sample_bytes[family]


def test_a_family_stands_for_its_variants():
    """On two grids a family has variants, which its name means too; a variant's own name means that alone."""
    how = Unroll(horizon=4, pushforward=True, start=0.5, families=["burgers_1d", "darcy_2d-64x64"])
    families = ("burgers_1d", "burgers_1d-128", "darcy_2d", "darcy_2d-64x64")
    assert [how.of(family).horizon for family in families] == [4, 4, 1, 4]


@pytest.mark.parametrize("pushforward", [False, True])
def test_operations_are_counted_in_every_phase(root: Path, pushforward: bool):
    """While horizons grow and a term comes and goes, the count of each step is torch's count of the whole step."""
    terms = NO_TERMS | {"spectral": {"weight": 0.1, "phase": [0.5, 0.75]}}
    how = unroll(3, pushforward=pushforward, start=0.25).model_dump()
    config = section(steps=8, unroll=how, terms=terms, symmetries=False)
    run = Run(root, "operator", "", {}, inputs_of(root), launched(num_processes=1), "cpu", root)
    stage, inject = build(config, run), Injection(root, 0)
    update, timer = Update(stage, config, run, ranks(), inject), StepTimer(10.0, CPU, peak_rate=1.0)
    batches, per_sample = Batches(stage, config, run, ranks(), inject), set()
    for step in range(8):
        share, before = batches.read(step), timer.flops
        timer.count(share, update, 1)
        with FlopCounterMode(display=False) as counted:
            update(share, 0.001, stop=False, save=False)
        assert timer.flops - before == counted.get_total_flops()
        per_sample.add((share.key, counted.get_total_flops() / share.size))
    assert len(per_sample) == len(timer.flops_per_sample) > 4


def test_changes_have_unit_size_in_what_is_expected(root: Path):
    """Over the steps of training, in every family; the filter's energies are in the same units."""
    run = Run(root, "operator", "", {}, inputs_of(root), launched(), "cpu", root)
    operator, cache = build(configured(unroll(1)), run).model, open_cache(run, "transient")
    statistics = operator.statistics
    for family, domain in domains(cache).items():
        changes = [(z_next - z) / statistics.expected_change(z, domain) for z, z_next in training_steps(cache, family)]
        sizes = torch.cat([field_rms(change, family).square().mean(1) for change in changes])
        assert sizes.mean().item() == pytest.approx(1.0, rel=0.02), family
