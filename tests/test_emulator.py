"""Steps with residuals drawn by the exact denoiser of a Gaussian, for which theory gives mean and spread."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.evaluation.corrected import DOMAIN, FAMILY, NUM_POINTS, Denoise, flow_end, make_emulator, posterior_mean
from ups.data.pdebench import FAMILIES
from ups.emulator import Correction, Setting
from ups.models.denoiser import predict
from ups.models.domain import Domain

NUM_MEMBERS = 400
SETTING = Setting(FAMILY, DOMAIN, torch.zeros(NUM_MEMBERS, NUM_POINTS, 0), torch.zeros(NUM_MEMBERS, 1))
SAMPLE = Correction("sample", 80.0, 0.002, 60, 1.0, 0.0)


def state() -> Tensor:
    """Draw one state, the same for all members."""
    return torch.randn(NUM_POINTS, 1, generator=torch.Generator().manual_seed(0)).expand(NUM_MEMBERS, -1, -1)


def residuals(correction: Correction, denoise: Denoise, student: Denoise | None = None, num_steps: int = 1) -> Tensor:
    """Residuals that a corrector adds, one step after the other from the same state: (num_steps, members, N)."""
    emulator, generator = make_emulator(denoise, student), torch.Generator().manual_seed(3)
    make = emulator.diffusion_step if student is None else emulator.consistency_step
    step, z = make(SETTING, correction, generator), state()
    context = predict(emulator.operator, z, SETTING.coefficients, SETTING.condition, DOMAIN)
    return torch.stack([(step(z) - context.z_pred)[..., 0] / context.unit[..., 0] for _ in range(num_steps)])


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


@pytest.mark.parametrize(("num_steps", "student"), [(1, True), (2, True), (3, False)])
def test_number_of_evaluations(num_steps: int, student: bool):
    """A step takes as many evaluations as the correction says, from its level on."""
    emulator = make_emulator(posterior_mean(0.0, 1.0), flow_end(0.0, 1.0))
    model, make = (
        (emulator.student, emulator.consistency_step) if student else (emulator.denoiser, emulator.diffusion_step)
    )
    make(SETTING, Correction("refine", 2.0, 0.002, num_steps, 1.0, 0.0), torch.Generator())(state())
    levels = [level[0].item() for level in model.levels]
    assert len(levels) == num_steps and levels[0] == 2.0 and levels == sorted(set(levels), reverse=True)


@pytest.mark.parametrize("correction", [SAMPLE, replace(SAMPLE, num_steps=1)])
def test_steady_solutions_get_residuals_of_their_own(correction: Correction):
    """From zero the steady model solves; what is drawn besides has the mean and spread of the data, in its units."""
    solution = torch.linspace(-1, 1, NUM_POINTS)[:, None].expand(NUM_MEMBERS, -1, -1)
    domain = Domain(list(FAMILIES).index("darcy_2d"), (8, 4), (False, False))
    setting = Setting("darcy_2d", domain, solution, torch.zeros(NUM_MEMBERS, 1))
    emulator, generator = make_emulator(posterior_mean(0.8, 0.5), flow_end(0.8, 0.5)), torch.Generator().manual_seed(3)
    make = emulator.diffusion_step if correction.num_steps > 1 else emulator.consistency_step
    zero = torch.zeros_like(solution)
    assert torch.equal(emulator.plain_step(setting)(zero), solution)
    y = (make(setting, correction, generator)(zero) - solution) / solution[0].std(correction=0)
    assert y.mean().item() == pytest.approx(0.8, abs=0.02)
    assert y.std().item() == pytest.approx(0.5, abs=0.02)


def test_spread_is_a_factor():
    """Twice the spread are twice the residuals."""
    one, two = (residuals(replace(SAMPLE, spread=spread), posterior_mean(0.8, 0.5)) for spread in (1.0, 2.0))
    assert torch.allclose(two, 2 * one, atol=1e-4)


@pytest.mark.parametrize("memory", [0.0, 0.6, 1.0])
def test_memory_is_the_correlation_of_neighbouring_steps(memory: float):
    """Residuals n steps apart have the correlation memory^n, and always the same spread."""
    y = residuals(replace(SAMPLE, memory=memory), posterior_mean(0.0, 1.0), num_steps=3).flatten(1)
    correlation = torch.corrcoef(y)
    assert correlation[0, 1:].tolist() == pytest.approx([memory, memory**2], abs=0.03)
    assert y.std(1).tolist() == pytest.approx([1.0] * 3, abs=0.04)


@pytest.mark.parametrize(("num_steps", "student"), [(60, False), (1, True), (2, True)])
def test_noise_goes_on_from_where_a_state_comes_from(num_steps: int, student: bool):
    """Noise that is all remembered gives every state the residual of its row of the last call."""
    emulator, generator = make_emulator(posterior_mean(0.0, 1.0), flow_end(0.0, 1.0)), torch.Generator().manual_seed(3)
    make = emulator.consistency_step if student else emulator.diffusion_step
    step, z = make(SETTING, replace(SAMPLE, num_steps=num_steps, memory=1.0), generator), state()
    origins = torch.randint(NUM_MEMBERS, (NUM_MEMBERS,), generator=generator)
    z_next = step(z)
    assert torch.allclose(step(z, origins), z_next[origins], atol=1e-5)
