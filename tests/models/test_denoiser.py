"""The denoiser: preconditioned as in EDM, told of the predicted step in units of its own change; its losses."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.backbones import small
from ups.models.denoiser import (
    SMALLEST_CHANGE,
    Denoiser,
    PredictedStep,
    consistency_loss,
    denoising_loss,
    next_sigma,
    precondition,
    predict_step,
)
from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import StateStatistics

FAMILIES = ("advection_1d", "burgers_1d")
SIZES = Sizes(FAMILIES, (1, 1), (1, 1), (2, 2), (1, 1), num_conditions=3)
DOMAIN = Domain("burgers_1d", (4,), (True,))
WAVE = torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None].repeat(2, 1, 2)  # two states of four tokens, RMS 1


class Recorder(nn.Module):
    """Takes the place of the token mixer: keeps what it gets, answers 10 everywhere."""

    def visible(self, condition: Tensor) -> Tensor:
        return condition

    def forward(self, tokens: Tensor, summary: Tensor, condition: Tensor, domain: Domain, channels: int) -> Tensor:
        self.tokens, self.summary, self.condition = tokens, summary, condition
        return torch.full((*tokens.shape[:2], channels), 10.0)


class Adds:
    """A model that adds a fixed change to every state."""

    def __init__(self, change: Tensor | float) -> None:
        self.change, self.statistics = change, StateStatistics(SIZES)

    def __call__(self, z: Tensor, *_: object) -> Tensor:
        return z + self.change


def denoised(sigma: tuple[float, float]) -> tuple[Tensor, Recorder]:
    """The denoised wave at two noise levels, and what the network was given."""
    denoiser, context = Denoiser(SIZES, small()), PredictedStep(WAVE, 3 * WAVE, WAVE[:, 0], WAVE[:, :1])
    denoiser.mixer = Recorder()
    return denoiser(WAVE, torch.tensor(sigma), context, torch.ones(2, 3), DOMAIN), denoiser.mixer


def described(z: Tensor, change: Tensor | float, max_mean: float = 100.0) -> PredictedStep:
    """The description of a step that changes z by `change`, for statistics of 1 but for this limit."""
    model = Adds(change)
    model.statistics.max_mean.fill_(max_mean)
    return predict_step(model, z, torch.zeros(2, 4, 1), torch.zeros(2, 3), DOMAIN)


def test_denoiser_is_preconditioned_by_hand():
    """At sigma = 3/4 the output is 0.64 x + 0.6 F, at sigma = 0 it is x (Karras et al. 2022, Table 1)."""
    found, _ = denoised((0.75, 0.0))
    torch.testing.assert_close(found, torch.stack([0.64 * WAVE[0] + 6.0, WAVE[0]]))


def test_network_gets_the_noisy_residual_at_unit_variance():
    """The input is x / sqrt(sigma^2 + 1), then the tokens of the predicted step; the summary is that of the step."""
    _, given = denoised((0.75, 2.4))
    torch.testing.assert_close(given.tokens[..., :2], WAVE * torch.tensor([0.8, 1 / 2.6])[:, None, None])
    assert torch.equal(given.tokens[..., 2:], 3 * WAVE)
    assert torch.equal(given.summary, WAVE[:, 0])


def test_network_gets_the_noise_level_as_waves_of_a_quarter_of_its_logarithm():
    """After the condition come sines, then cosines, of ln(sigma) / 4 times 1/2, 1, 2 and 4."""
    _, given = denoised((math.exp(2.0), math.exp(-1.0)))
    angles = torch.tensor([[0.25, 0.5, 1.0, 2.0], [-0.125, -0.25, -0.5, -1.0]])
    torch.testing.assert_close(given.condition, torch.cat([torch.ones(2, 3), angles.sin(), angles.cos()], 1))


@pytest.mark.parametrize("channels", [1, 2])
def test_a_residual_of_one_is_its_usual_share_of_the_change(channels: int):
    """The unit is the family's residual over change times the change of this step, field by field."""
    denoiser, change_rms = Denoiser(SIZES, small()), torch.tensor([[[2.0, 3.0]], [[5.0, 7.0]]])[..., :channels]
    denoiser.residual_rms.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    context = PredictedStep(WAVE[..., :channels], WAVE, WAVE[:, 0], change_rms)
    expected = torch.tensor([[[0.6, 1.2]], [[1.5, 2.8]]])[..., :channels]
    torch.testing.assert_close(denoiser.residual_unit(context, DOMAIN), expected)


def test_the_change_is_described_in_units_of_its_rms():
    """A change of 3 and 4 times a wave of RMS 1 is that wave, and its RMS is 3 and 4."""
    step = described(WAVE, torch.tensor([3.0, 4.0]) * WAVE.roll(1, 1))
    assert torch.equal(step.change_rms, torch.tensor([3.0, 4.0]).expand(2, 1, 2))
    assert torch.equal(step.tokens[..., 2:4], WAVE.roll(1, 1))


def test_the_change_is_that_of_the_state_and_not_of_its_clamped_copy():
    """Of a state whose mean 5 lies outside training the network sees mean 1, but the change that was predicted."""
    step = described(WAVE + 5.0, 2.0 * WAVE.roll(1, 1), max_mean=1.0)
    torch.testing.assert_close(step.tokens[..., :4], torch.cat([WAVE, WAVE.roll(1, 1)], -1))
    torch.testing.assert_close(step.summary, torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2))


def test_a_small_change_counts_as_a_share_of_the_usual_one():
    """The RMS of a change is at least 5 % of what a step is expected to change."""
    step = described(3.0 * WAVE, 1e-6)
    torch.testing.assert_close(step.change_rms, torch.full((2, 1, 2), 3.0 * SMALLEST_CHANGE))


def test_what_is_usual_follows_from_the_state_before():
    """Where the first field comes to rest and the second stays, that counts as 5 % of the change of both before."""
    step = described(3.0 * WAVE, torch.tensor([-3.0, 0.0]) * WAVE)
    torch.testing.assert_close(step.change_rms, torch.tensor([3.0, 3.0 * SMALLEST_CHANGE]).expand(2, 1, 2))


SIGMAS = [0.002, 0.05, 0.5, 1.0, 4.0, 80.0]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Unit normal numbers in double precision."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_preconditioned_network_sees_unit_variance(sigma: float):
    """At every noise level, for data of unit variance, the network's input and its target have unit variance."""
    y, n = normal(40_000, seed=1), normal(40_000, seed=2)
    x = y + sigma * n
    c_skip, c_out, c_in, _ = precondition(torch.tensor([sigma], dtype=torch.float64))
    target = (y - c_skip * x) / c_out
    assert (c_in * x).var().item() == pytest.approx(1, abs=0.03)
    assert target.var().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_loss_weight_undoes_the_output_scale(sigma: float):
    """The weight is 1 / c_out^2: a network off by one everywhere has loss one at every noise level."""
    y, n, sigmas = normal(3, 5, 2, seed=1), normal(3, 5, 2, seed=2), torch.full((3,), sigma, dtype=torch.float64)
    c_out = precondition(sigmas)[1]
    loss = denoising_loss(lambda x, sigma: y + c_out[:, None, None], y, n, sigmas)
    assert loss.tolist() == pytest.approx([1.0] * 3)


def test_denoiser_sees_the_noisy_data():
    """The denoiser is called with y + sigma n, each sample with its own level."""
    y, n, sigma = normal(4, 3, seed=1), normal(4, 3, seed=2), torch.tensor([0.1, 1.0, 2.0, 9.0]).double()
    loss = denoising_loss(lambda x, sigma: x - sigma[:, None] * n, y, n, sigma)
    assert loss.shape == (4,)
    assert loss.max() < 1e-20


def test_denoising_loss_is_of_each_sample():
    """At level 1 the errors 1 and 3 have the losses 2 and 18, whatever the other sample is."""
    y, sigma = torch.zeros(2, 4), torch.ones(2)
    error = torch.tensor([1.0, 3.0])[:, None]
    assert denoising_loss(lambda x, sigma: y + error, y, torch.zeros(2, 4), sigma).tolist() == [2.0, 18.0]


def test_denoising_loss_is_least_for_the_posterior_mean():
    """For unit normal data the best denoiser of the form a x is x / (1 + sigma^2)."""
    y, n, sigma = normal(1, 20_000, seed=1), normal(1, 20_000, seed=2), torch.tensor([0.7], dtype=torch.float64)
    a = torch.linspace(0.3, 1.0, 71)
    losses = torch.cat([denoising_loss(lambda x, sigma, a=a: a * x, y, n, sigma) for a in a.double()])
    assert a[losses.argmin()].item() == pytest.approx(1 / (1 + 0.7**2), abs=0.02)


def denoise_point(x: Tensor, sigma: Tensor) -> Tensor:
    """Map every noise level of y = 0 to its noise: consistent, and not constant."""
    return x / sigma[:, None]


def test_consistent_function_has_no_loss():
    """A function that gives the same along y + sigma n for all sigma has consistency loss zero."""
    n, sigma = normal(4, 3), torch.tensor([0.1, 1.0, 2.0, 80.0]).double()
    loss = consistency_loss(denoise_point, torch.zeros_like(n), n, sigma, sigma / 3)
    assert loss.max() < 1e-20


def test_consistency_loss_by_hand():
    """For D = x the loss is (t n - s n)^2 / (t - s) = (t - s) n^2."""
    n, y = torch.tensor([[2.0], [3.0]]), torch.tensor([[5.0], [7.0]])
    sigma, sigma_next = torch.tensor([4.0, 1.0]), torch.tensor([1.0, 0.5])
    loss = consistency_loss(lambda x, sigma: x, y, n, sigma, sigma_next)
    assert loss.tolist() == pytest.approx([3.0 * 4, 0.5 * 9])


def test_target_without_noise_is_the_data():
    """Where the lower level is zero the student is compared with y itself, whatever the denoiser says there."""
    n, y, sigma = normal(2, 3, seed=1), normal(2, 3, seed=2), torch.tensor([2.0, 0.5]).double()
    loss = consistency_loss(lambda x, sigma: torch.full_like(x, 9.0), y, n, sigma, torch.zeros(2).double())
    assert torch.allclose(loss, (9 - y).square().mean(1) / sigma)


def test_gradient_reaches_only_the_student():
    """For D = w x the gradient is that of the branch at the higher noise level; the target counts as a constant."""
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    n, y = normal(4, 3, seed=1), normal(4, 3, seed=2)
    sigma, sigma_next = torch.tensor([0.5, 1.0, 2.0, 9.0]).double(), torch.tensor([0.4, 0.0, 1.0, 8.0]).double()
    consistency_loss(lambda x, sigma: w * x, y, n, sigma, sigma_next).sum().backward()
    x, x_next = y + sigma[:, None] * n, y + sigma_next[:, None] * n
    target = torch.where(sigma_next[:, None] > 0, 0.5 * x_next, y)
    expected = (2 * (0.5 * x - target) * x).mean(1) / (sigma - sigma_next)
    assert w.grad.item() == pytest.approx(expected.sum().item())


@pytest.mark.parametrize(("sigma", "expected"), [(1e-6, 1 - 5 / 256), (1.0, 1 - (1 + 8 / (1 + math.e**0.5)) / 256)])
def test_next_sigma_by_hand(sigma: float, expected: float):
    """For q = 256, k = 8, b = 0.5 the ratio of neighbouring levels is 1 - n / 256 with n from 5 down to 1."""
    level = torch.tensor([sigma], dtype=torch.float64)
    assert (next_sigma(level, 256.0, 8.0, 0.5) / level).item() == pytest.approx(expected, rel=1e-5)


def test_next_sigma_far_up():
    """At high noise the ratio tends to 1 - 1 / q."""
    level = torch.tensor([1e3], dtype=torch.float64)
    assert next_sigma(level, 4.0, 8.0, 0.5).item() == pytest.approx(750)


@pytest.mark.parametrize("q", [1.5, 2.0, 16.0, 256.0])
def test_next_sigma_is_below(q: float):
    """0 <= s < t for every level and schedule."""
    sigma = torch.logspace(-3, 2, 200)
    s = next_sigma(sigma, q, 8.0, 0.5)
    assert (s >= 0).all()
    assert (s < sigma).all()


def test_next_sigma_reaches_zero():
    """With q = 2 low noise levels are compared with the data themselves."""
    assert next_sigma(torch.tensor([0.1, 1.0]), 2.0, 8.0, 0.5).tolist() == [0.0, 0.0]
