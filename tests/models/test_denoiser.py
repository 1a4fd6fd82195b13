"""The denoiser: preconditioned as in EDM, and told of the predicted step in units of its own change."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.backbones import small
from ups.models.denoiser import SMALLEST_CHANGE, Denoiser, PredictedStep, predict_step
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
