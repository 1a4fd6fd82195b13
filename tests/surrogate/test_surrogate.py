"""Steps with residuals drawn by the exact denoiser of a Gaussian, for which theory gives mean and spread."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.backbones import small
from tests.evaluation.corrected import (
    DOMAIN,
    FAMILY,
    NUM_POINTS,
    Denoise,
    Denoiser,
    flow_end,
    make_surrogate,
    posterior_mean,
)
from tests.surrogate.tiny import dataset_of, domain_of, random_inputs, tiny_model, tiny_surrogate
from ups.data.families import NUM_CONDITIONS
from ups.data.pdebench import FAMILIES
from ups.diffusion import Normal, independent
from ups.models.denoiser import predict_step
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.surrogate.surrogate import Correction, Setting

NUM_MEMBERS = 400
SETTING = Setting(FAMILY, DOMAIN, torch.zeros(NUM_MEMBERS, NUM_POINTS, 0), torch.zeros(NUM_MEMBERS, 1))
SAMPLE = Correction("sample", 80.0, 0.002, 60, 1.0, 0.0)


def normal(seed: int) -> Normal:
    """Noise of a seed, every row by itself."""
    return independent(torch.Generator().manual_seed(seed))


def state() -> Tensor:
    """Draw one state, the same for all members."""
    return torch.randn(NUM_POINTS, 1, generator=torch.Generator().manual_seed(0)).expand(NUM_MEMBERS, -1, -1)


def residuals(correction: Correction, denoise: Denoise, student: Denoise | None = None, num_steps: int = 1) -> Tensor:
    """Residuals that a corrector adds, one step after the other from the same state: (num_steps, members, N)."""
    surrogate = make_surrogate(denoise, student)
    make = surrogate.diffusion_step if student is None else surrogate.consistency_step
    step, z = make(SETTING, correction, normal(3)), state()
    context = predict_step(surrogate.operator, z, SETTING.coefficients, SETTING.condition, DOMAIN)
    return torch.stack([(step(z) - context.z_pred)[..., 0] / context.change_rms[..., 0] for _ in range(num_steps)])


def test_sampled_residuals_are_the_gaussian():
    """From a level that hides the residual, mean and spread are those of the data."""
    y = residuals(SAMPLE, posterior_mean(0.8, 0.5))
    assert y.mean().item() == pytest.approx(0.8, abs=0.02)
    assert y.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 2.0])
def test_refined_residuals_are_what_fits_below_sigma(sigma: float):
    """From noise sigma alone come the mean m (1 - s / hypot(s, sigma)) and the spread s sigma / hypot(s, sigma)."""
    mean, std = 0.8, 0.5
    y = residuals(Correction("refine", sigma, 0.002, 40, 1.0, 0.0), posterior_mean(mean, std))
    assert y.mean().item() == pytest.approx(mean * (1 - std / math.hypot(std, sigma)), abs=0.015)
    assert y.std().item() == pytest.approx(std * sigma / math.hypot(std, sigma), rel=0.02)


def test_student_draws_what_the_teacher_draws():
    """The exact student gives in one evaluation the residuals that its denoiser gives in many, noise by noise."""
    many = residuals(Correction("refine", 1.0, 0.002, 80, 1.0, 0.0), posterior_mean(0.8, 0.5))
    one = residuals(Correction("refine", 1.0, 0.002, 1, 1.0, 0.0), posterior_mean(0.8, 0.5), flow_end(0.8, 0.5))
    assert torch.allclose(one, many, atol=5e-3)


@pytest.mark.parametrize(("max_tokens", "num_calls"), [(1, 400), (3 * NUM_POINTS + 1, 134), (None, 1)])
def test_models_take_as_many_tokens_at_once_as_they_may(max_tokens: int | None, num_calls: int):
    """Three states of three and a third, a single one of none; with the same noise all members are the same."""
    whole = make_surrogate(posterior_mean(0.8, 0.5), flow_end(0.8, 0.5))
    parts = replace(make_surrogate(posterior_mean(0.8, 0.5), flow_end(0.8, 0.5)), max_tokens=max_tokens)
    how = Correction("refine", 1.0, 0.002, 2, 1.0, 0.5)
    for make in ("diffusion_step", "consistency_step"):
        expected, found = (getattr(each, make)(SETTING, how, normal(3))(state()) for each in (whole, parts))
        assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(parts.plain_step(SETTING)(state()), whole.plain_step(SETTING)(state()))
    assert len(parts.student.levels) == 2 * num_calls
    assert sum(map(len, parts.student.levels)) == 2 * NUM_MEMBERS


@pytest.mark.parametrize(("num_steps", "student"), [(1, True), (2, True), (3, False)])
def test_number_of_evaluations(num_steps: int, student: bool):
    """A step takes as many evaluations as the correction says, from its level on."""
    surrogate = make_surrogate(posterior_mean(0.0, 1.0), flow_end(0.0, 1.0))
    model, make = (
        (surrogate.student, surrogate.consistency_step) if student else (surrogate.denoiser, surrogate.diffusion_step)
    )
    make(SETTING, Correction("refine", 2.0, 0.002, num_steps, 1.0, 0.0), normal(0))(state())
    levels = [level[0].item() for level in model.levels]
    assert len(levels) == num_steps and levels[0] == 2.0 and levels == sorted(set(levels), reverse=True)


@pytest.mark.parametrize("correction", [SAMPLE, replace(SAMPLE, num_steps=1)])
def test_steady_solutions_get_residuals_of_their_own(correction: Correction):
    """From zero the steady model solves; what is drawn besides has the mean and spread of the data, in its units."""
    solution = torch.linspace(-1, 1, NUM_POINTS)[:, None].expand(NUM_MEMBERS, -1, -1)
    domain = Domain("darcy_2d", (8, 4), (False, False))
    setting = Setting("darcy_2d", domain, solution, torch.zeros(NUM_MEMBERS, 1))
    surrogate = make_surrogate(posterior_mean(0.8, 0.5), flow_end(0.8, 0.5))
    make = surrogate.diffusion_step if correction.num_steps > 1 else surrogate.consistency_step
    zero = torch.zeros_like(solution)
    assert torch.equal(surrogate.plain_step(setting)(zero), solution)
    y = (make(setting, correction, normal(3))(zero) - solution) / solution[0].std(correction=0)
    assert y.mean().item() == pytest.approx(0.8, abs=0.02)
    assert y.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("student", "num_steps"), [(None, 60), (flow_end(0.8, 0.5), 1)], ids=["denoiser", "student"])
def test_residual_scale_is_a_factor(student: Denoise | None, num_steps: int):
    """Twice the scale doubles the residuals."""
    corrections = (replace(SAMPLE, num_steps=num_steps, residual_scale=scale) for scale in (1.0, 2.0))
    one, two = (residuals(correction, posterior_mean(0.8, 0.5), student) for correction in corrections)
    assert torch.allclose(two, 2 * one, atol=1e-4)


@pytest.mark.parametrize("noise_correlation", [0.0, 0.6, 1.0])
def test_residuals_of_neighbouring_steps_are_correlated(noise_correlation: float):
    """Residuals n steps apart have the correlation c^n of their noise, and always the same variance."""
    correction = replace(SAMPLE, noise_correlation=noise_correlation)
    y = residuals(correction, posterior_mean(0.0, 1.0), num_steps=3).flatten(1)
    correlation = torch.corrcoef(y)
    assert correlation[0, 1:].tolist() == pytest.approx([noise_correlation, noise_correlation**2], abs=0.03)
    assert y.std(1).tolist() == pytest.approx([1.0] * 3, abs=0.04)


@pytest.mark.parametrize(("num_steps", "student"), [(60, False), (1, True), (2, True)])
def test_noise_goes_on_from_where_a_state_comes_from(num_steps: int, student: bool):
    """Fully correlated noise gives every state the residual of the row of the last call that it comes from."""
    surrogate, generator = (
        make_surrogate(posterior_mean(0.0, 1.0), flow_end(0.0, 1.0)),
        torch.Generator().manual_seed(3),
    )
    make = surrogate.consistency_step if student else surrogate.diffusion_step
    correction = replace(SAMPLE, num_steps=num_steps, noise_correlation=1.0)
    step, z = make(SETTING, correction, independent(generator)), state()
    origins = torch.randint(NUM_MEMBERS, (NUM_MEMBERS,), generator=generator)
    z_next = step(z)
    assert torch.allclose(step(z, origins), z_next[origins], atol=1e-5)


def test_members_of_an_ensemble_have_the_setting_of_their_trajectory():
    """Two trajectories of three members are rows a b a b a b, coefficients and condition alike."""
    setting = Setting(FAMILY, DOMAIN, torch.tensor([1.0, 2.0])[:, None, None], torch.tensor([[10.0], [20.0]]))
    repeated = setting.repeated(3)
    assert repeated.coefficients.flatten().tolist() == [1.0, 2.0] * 3
    assert repeated.condition.flatten().tolist() == [10.0, 20.0] * 3


def test_a_corrected_step_is_limited_by_the_state_before_it():
    """From z of mean 8 beyond all limits, halved by the operator to 4, residuals of mean 3 reach 7 and not 4."""
    surrogate = make_surrogate(lambda x, sigma: torch.ones_like(x))
    surrogate.operator.statistics.max_mean.fill_(0.0)
    z = torch.full((2, NUM_POINTS, 1), 8.0)
    setting = Setting(FAMILY, DOMAIN, z[..., :0], torch.zeros(2, 1))
    step = surrogate.diffusion_step(setting, replace(SAMPLE, num_steps=1, residual_scale=0.75), normal(0))
    torch.testing.assert_close(step(z), torch.full_like(z, 4.0 + 0.75 * 4.0))


def test_a_corrected_step_meets_the_constraints():
    """Residuals with a mean add mass to gas: after the step it is that of the state before."""
    name = "compressible_ns_2d"
    surrogate = replace(tiny_surrogate(name), denoiser=Denoiser(lambda x, sigma: torch.ones_like(x), []))
    model, domain = surrogate.operator, domain_of(dataset_of(FAMILIES[name]))
    assert model is not None
    model.persistence.bases[1].copy_(torch.eye(8))
    for weight in model.parameters():  # a network that is far off would meet the limits of the constraint
        weight.zero_()
    tokens, channels = math.prod(domain.grid), model.sizes.latent_channels[1]
    z = 0.3 * torch.randn(2, tokens, channels, generator=torch.Generator().manual_seed(0))
    setting = Setting(name, domain, z[..., :0], torch.zeros(2, NUM_CONDITIONS))

    def moved_further() -> float:
        z_next = surrogate.diffusion_step(setting, replace(SAMPLE, num_steps=1), normal(0))(z)
        return float((gas(z_next, z, model.persistence.bases_of(domain, channels), domain) - z_next).abs().max())

    gas = copy.deepcopy(model.constraints[0])
    kept = moved_further()
    model.constraints[0].is_on = [False, False]
    assert kept < 1e-4 < 1e-2 < moved_further()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["incompressible_ns_2d", "compressible_ns_2d"])
def test_compiled_models_meet_the_constraints_of_fluids(family: str):
    """Beside the filter by wavenumber, on a grid with other numbers of points along its axes."""
    model = tiny_model(family)
    inputs = random_inputs(model, 3).values()
    eager = model(*inputs)
    assert any(on for constraint in model.model.constraints for on in constraint.is_on)
    model.model.compile(dynamic=False)
    torch.testing.assert_close(model(*inputs), eager, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_compiled_surrogate_makes_the_same_steps():
    """Whatever the number of states; what the models are otherwise stays."""
    sizes = Sizes(tuple(FAMILIES), *((n,) * len(FAMILIES) for n in (1, 1, 1, 0)), num_conditions=1)
    operator = Operator(sizes, small())
    with torch.no_grad():
        for p in operator.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    eager = replace(make_surrogate(posterior_mean(0.0, 1.0)), operator=operator)
    compiled = replace(eager, operator=copy.deepcopy(operator), steady=None)
    compiled.compile()
    for count in (1, 3):
        setting = replace(SETTING, coefficients=SETTING.coefficients[:count], condition=torch.ones(count, 1))
        z = torch.randn(count, NUM_POINTS, 1, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            found, expected = (surrogate.plain_step(setting)(z) for surrogate in (compiled, eager))
        assert not torch.allclose(expected, z, atol=1e-2)
        assert torch.allclose(found, expected, atol=1e-5)
