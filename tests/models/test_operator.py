"""The operator: still before training, bounded after it, and attentive to everything it is told."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.backbones import small
from ups.data.families import BOUNDARIES, NUM_CONDITIONS, PARAMETERS, Dataset, condition_features
from ups.data.pdebench import FAMILIES
from ups.models.denoiser import predict_step
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import LARGEST, SMALLEST, StateStatistics

torch.set_num_threads(1)

GRID, D, D_C = (4, 6), 6, 2
DATASET = Dataset(
    name="toy",
    family="darcy_2d",
    files=("toy.hdf5",),
    counts=(4,),
    times=(0.0, 0.1),
    grid=(8, 12),
    lengths=(1.0, 1.0),
    boundary=("outflow", "outflow"),
    parameters=dict.fromkeys(PARAMETERS, 0.1),
)
OTHERS = {
    "dt": replace(DATASET, times=(0.0, 0.2)),
    "family": replace(DATASET, family="shallow_water_2d"),
    "resolution": replace(DATASET, grid=(16, 24)),
    **{name: replace(DATASET, parameters=DATASET.parameters | {name: 0.2}) for name in PARAMETERS},
    **{name: replace(DATASET, boundary=(name, "outflow")) for name in BOUNDARIES if name != "outflow"},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Unit normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def domain_of(dataset: Dataset) -> Domain:
    """The token grid of a dataset."""
    return Domain(dataset.family, GRID, tuple(name == "periodic" for name in dataset.boundary))


def operator(randomized: bool = False) -> Operator:
    """A small operator for all families whose bounds do not bind; with weights anywhere if randomized."""
    made = Operator(
        Sizes(tuple(FAMILIES), *((n,) * len(FAMILIES) for n in (3, 1, D, D_C)), NUM_CONDITIONS), small(modes=(3, 3, 3))
    )
    made.statistics.max_mean.fill_(100.0)
    made.statistics.max_fluctuation.fill_(100.0)
    if randomized:
        with torch.no_grad():
            for seed, parameter in enumerate(made.parameters()):
                parameter.copy_(0.3 * normal(*parameter.shape, seed=seed))
    return made


@torch.no_grad()
def advance(model: Operator, dataset: Dataset, z: Tensor) -> Tensor:
    """One step of a state with fixed coefficients."""
    condition = torch.tensor([condition_features(dataset)]).expand(len(z), -1)
    return model(z, normal(len(z), z.shape[1], D_C, seed=9), condition, domain_of(dataset))


@pytest.mark.parametrize("dataset", OTHERS.values(), ids=OTHERS.keys())
def test_untrained_operator_is_persistence(dataset: Dataset):
    """Before training the next state is the state."""
    z = normal(2, 24, D)
    assert torch.equal(advance(operator(), dataset, z), z)


@pytest.mark.parametrize("name", OTHERS)
def test_operator_listens(name: str):
    """Another time step, parameter, boundary, resolution or family is another prediction."""
    model, z = operator(randomized=True), normal(2, 24, D)
    difference = advance(model, OTHERS[name], z) - advance(model, DATASET, z)
    assert difference.abs().max() > 1e-4


def test_operator_sees_the_coefficients():
    """A change of the coefficients at one token changes the prediction."""
    model, z, coefficients = operator(randomized=True), normal(1, 24, D), normal(1, 24, D_C)
    condition, domain = torch.tensor([condition_features(DATASET)]), domain_of(DATASET)
    other = coefficients.clone()
    other[0, 5] += 1
    difference = model(z, coefficients, condition, domain) - model(z, other, condition, domain)
    assert difference.abs().max() > 1e-4


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3, 1e6])
def test_prediction_stays_within_its_bound(size: float):
    """However absurd the state, mean and fluctuation of each channel stay where its family allows or the state was."""
    model, bound, spread = operator(randomized=True), torch.linspace(0.1, 5.0, D), torch.linspace(3.0, 0.3, D)
    row = list(FAMILIES).index(DATASET.family)
    model.statistics.max_mean[row], model.statistics.max_fluctuation[row] = bound, spread
    before = size * normal(2, 24, D)
    z = advance(model, DATASET, before)
    mean_before = before.mean(1, keepdim=True)
    limit = torch.maximum(bound, mean_before.abs())
    rest_limit = torch.maximum(spread, (before - mean_before).abs().amax(1, keepdim=True))
    assert z.isfinite().all()
    assert (z.abs() <= (limit + rest_limit) * (1 + 1e-6)).all()


@pytest.mark.parametrize("factor", [1.0, 1.1, 3.0])
def test_nothing_grows_faster_than_training_showed(factor: float):
    """The RMS of each field's distance from its mean grows by `growth` at most; below that no bit is changed."""
    free, slowed, z = operator(randomized=True), operator(randomized=True), normal(2, 24, D)
    slowed.statistics.max_growth.fill_(factor)
    statistics, domain = slowed.statistics, domain_of(DATASET)
    before, after, wild = (
        x - x.mean(1, keepdim=True) for x in (z, advance(slowed, DATASET, z), advance(free, DATASET, z))
    )
    grown = statistics.field_rms(after, domain) / statistics.field_rms(before, domain)
    wanted = statistics.field_rms(wild, domain) / statistics.field_rms(before, domain)
    assert wanted.max() > 1.1
    torch.testing.assert_close(grown, wanted.clamp(max=factor))
    torch.testing.assert_close(advance(slowed, DATASET, z).mean(1), advance(free, DATASET, z).mean(1))
    slowed.statistics.max_growth.fill_(10.0 * wanted.max())
    assert torch.equal(advance(slowed, DATASET, z), advance(free, DATASET, z))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_nothing_grows_larger_than_training_showed(share: float):
    """The RMS of each field's distance from its mean stays below `largest`, or what it was; else nothing moves."""
    free, bounded, z = operator(randomized=True), operator(randomized=True), normal(2, 24, D)
    statistics, domain = bounded.statistics, domain_of(DATASET)
    before, wild = (statistics.field_rms(x - x.mean(1, keepdim=True), domain) for x in (z, advance(free, DATASET, z)))
    limit = share * wild[wild > before].max()
    statistics.max_rms.fill_(limit)
    after = advance(bounded, DATASET, z)
    rms = statistics.field_rms(after - after.mean(1, keepdim=True), domain)
    assert (wild > before.clamp(min=limit)).any()
    torch.testing.assert_close(rms, torch.minimum(wild, before.clamp(min=limit)))
    statistics.max_rms.fill_(2.0 * wild.max())
    assert torch.equal(advance(bounded, DATASET, z), advance(free, DATASET, z))


def test_a_constant_field_has_finite_gradients():
    """A state and a step that are constant in space have a gradient, which a root mean square alone has not."""
    model, z = operator(), torch.ones(2, 24, D)
    model.statistics.max_growth.fill_(1.0)
    condition = torch.tensor([condition_features(DATASET)]).expand(len(z), -1)
    model(z, z[..., :D_C], condition, domain_of(DATASET)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_state_outside_training_is_kept():
    """An untrained operator leaves a state alone however far its mean lies outside what training showed."""
    model, z = operator(), 50.0 + normal(2, 24, D)
    model.statistics.max_mean.fill_(1.0)
    assert torch.equal(advance(model, DATASET, z), z)


@pytest.mark.parametrize(("shifts", "same"), [((0.2, 0.5), False), ((2.0, 30.0), True)], ids=["inside", "outside"])
def test_what_training_never_showed_is_not_seen(shifts: tuple[float, float], same: bool):
    """However far the mean is outside, the same change is predicted; inside, each has its own."""
    model = operator(randomized=True)
    model.statistics.max_mean.fill_(1.0), model.statistics.max_fluctuation.fill_(1e3)
    after = [advance(model, DATASET, shift + normal(2, 24, D)) for shift in shifts]
    one, other = (z - z.mean(1, keepdim=True) for z in after)
    assert torch.allclose(one, other, atol=1e-3) == same


def test_families_may_have_fewer_channels():
    """A family with fewer latent channels than the largest uses the first of them."""
    z = advance(operator(randomized=True), DATASET, normal(2, 24, D - 2))
    assert z.shape == (2, 24, D - 2)


def test_change_is_the_unit_of_a_step():
    """Twice the expected change per step is twice the step."""
    model, z = operator(randomized=True), normal(2, 24, D)
    step = advance(model, DATASET, z) - z
    model.statistics.step_rms.mul_(2)
    assert torch.allclose(advance(model, DATASET, z) - z, 2 * step, atol=1e-4)


def two_fields() -> StateStatistics:
    """Statistics of a family with two fields of three components each."""
    statistics = StateStatistics(Sizes(("advection_1d",), (1,), (2,), (D,), (0,), 1))
    statistics.field_average[0] = torch.block_diag(*[torch.full((3, 3), 1 / 3)] * 2)
    statistics.fluctuation_rms[0] = torch.tensor([2.0] * 3 + [0.5] * 3)
    return statistics


def test_expected_change_has_one_amplitude_for_all_fields():
    """Fields with amplitudes 1 and 3 are expected to change by sqrt((1 + 9) / 2) times their usual steps of 2 and 5."""
    domain, statistics = domain_of(DATASET), StateStatistics(Sizes(("darcy_2d",), (2,), (2,), (2,), (0,), 1))
    statistics.step_rms.copy_(torch.tensor([[2.0, 5.0]]))
    waves = torch.tensor([[1.0, 3.0], [-1.0, -3.0]]).repeat(12, 1)[None]
    found = statistics.expected_change(waves + 7.0, domain)
    torch.testing.assert_close(found, 5**0.5 * torch.tensor([[[2.0, 5.0]]]))


def test_a_step_without_change_is_described_by_finite_numbers():
    """The denoiser gets the predicted change over its RMS: an operator that predicts none gives a finite input."""
    z, domain = normal(2, 24, D), domain_of(DATASET)
    step = predict_step(operator(), z, normal(2, 24, D_C), normal(2, NUM_CONDITIONS), domain)
    assert torch.equal(step.z_pred, z)
    assert all(tensor.isfinite().all() for tensor in (step.tokens, step.summary, step.change_rms))
    assert (step.change_rms > 0).all()


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_steady_solutions_stay_within_their_limits(size: float):
    """Whatever the coefficients, mean and fluctuation of a solution are at most those of training with a margin."""
    model = SteadyModel(Sizes(("darcy_2d",), (2,), (1,), (D,), (D_C,), NUM_CONDITIONS), small(modes=(3, 3, 3)))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    model.statistics.max_mean.fill_(0.5), model.statistics.max_fluctuation.fill_(2.0)
    z = model(normal(3, 24, D), size * normal(3, 24, D_C), normal(3, NUM_CONDITIONS), domain_of(DATASET))
    assert (z.abs() <= 2.5 + 1e-5).all()


def test_amplitude_by_hand():
    """The amplitude is the RMS of a field's fluctuation over all its tokens and components, over what is usual."""
    z = torch.tensor([[1.0, 5, 5, 0, 0, 0], [-1.0, 5, 5, 0, 0, 3]])[None]  # two tokens
    expected = [(1 / 3) ** 0.5 / 2] * 3 + [(1.5**2 / 3) ** 0.5 / 0.5] * 3
    assert two_fields().amplitude(z, Domain("advection_1d", (2,), (True,))).flatten().tolist() == pytest.approx(
        expected
    )


def test_standardized_state_has_unit_amplitude():
    """Networks see zero mean per channel and the fluctuation of one per field; the summary tells what was removed."""
    domain, z = Domain("advection_1d", (24,), (True,)), 3 + normal(2, 24, D)
    statistics = two_fields()
    x, summary = statistics.standardize(z, domain)
    assert torch.allclose(x.mean(1), torch.zeros(2, D), atol=1e-5)
    assert torch.allclose(x.unflatten(2, (2, 3)).square().mean((1, 3)), torch.ones(2, 2), atol=1e-5)
    assert torch.allclose(summary, torch.cat([z.mean(1), statistics.amplitude(z, domain)[:, 0].log()], -1))


@pytest.mark.parametrize(("size", "expected"), [(0.0, SMALLEST), (1e-6, SMALLEST), (1e6, LARGEST)])
def test_amplitude_is_limited(size: float, expected: float):
    """A state at rest is not blown up, and a wild one is not taken as usual."""
    a = two_fields().amplitude(size * normal(2, 24, D), Domain("advection_1d", (24,), (True,)))
    assert torch.equal(a, torch.full_like(a, expected))


def test_statistics_stay_in_float32():
    """Under autocast amplitudes, units and what follows from them have the same bits as without."""
    domain, z, statistics = Domain("advection_1d", (24,), (True,)), 3 + normal(2, 24, D), two_fields()
    with torch.autocast("cpu", torch.bfloat16):
        found = (
            statistics.amplitude(z, domain),
            statistics.expected_change(z, domain),
            *statistics.standardize(z, domain),
        )
    expected = (
        statistics.amplitude(z, domain),
        statistics.expected_change(z, domain),
        *statistics.standardize(z, domain),
    )
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["darcy_2d", "shallow_water_2d"])
def test_autocast_is_rounding(family: str):
    """In bfloat16 the step and its gradient are those of float32 up to a few roundings, and the state is float32."""
    model, z = operator(randomized=True), normal(2, 24, D)
    dataset = replace(DATASET, family=family)
    condition = torch.tensor([condition_features(dataset)]).expand(len(z), -1)

    def step(enabled: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            z_next = model(z, normal(2, 24, D_C, seed=9), condition, domain_of(dataset))
            (z_next - normal(2, 24, D, seed=3)).square().mean().backward()
        return z_next.detach() - z, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for rounded, exact in zip(step(True), step(False), strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.03 * exact.norm()
