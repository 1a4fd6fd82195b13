"""Samplers with the exact denoiser of a Gaussian, for which everything is known."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ups.diffusion import (
    antithetic,
    consistency_grid,
    consistency_sampler,
    correlated_noise,
    independent,
    karras_grid,
    multistep_sampler,
)

MEAN, STD = 0.8, 0.5
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0


def denoise(x: Tensor, sigma: Tensor) -> Tensor:
    """Posterior mean of y ~ N(MEAN, STD^2) given x = y + sigma n."""
    variance = sigma[:, None] ** 2
    return (STD**2 * x + variance * MEAN) / (STD**2 + variance)


def consistent(x: Tensor, sigma: Tensor) -> Tensor:
    """The end of the probability flow that passes x at level sigma."""
    return MEAN + (x - MEAN) * STD / (STD**2 + sigma[:, None] ** 2).sqrt()


def euler(denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor) -> Tensor:
    """First-order solver of the probability flow."""
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + (sigma_next - sigma) * (x - denoise(x, sigma.expand(x.shape[0]).to(x))) / sigma
    return x


def moments(sampler: Callable, num_steps: int) -> tuple[float, float]:
    """Mean and std of what a sampler makes of unit noise: it is affine in the noise, so two points tell both."""
    noise = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    y = sampler(denoise, SIGMA_MAX * noise, karras_grid(num_steps, SIGMA_MIN, SIGMA_MAX))
    return y[0].item(), (y[1] - y[0]).item()


def test_sampler_recovers_the_gaussian():
    """Noise becomes samples with the mean and the variance of the data."""
    mean, std = moments(multistep_sampler, 80)
    assert mean == pytest.approx(MEAN, abs=0.01)
    assert std == pytest.approx(STD, abs=0.005)


def test_sampler_is_of_second_order():
    """Twice the steps divide the error of the standard deviation by about four."""
    errors = [abs(moments(multistep_sampler, num_steps)[1] - STD) for num_steps in (20, 40)]
    assert 3 < errors[0] / errors[1] < 6


@pytest.mark.parametrize("num_steps", [6, 8, 16, 32])
def test_multistep_beats_euler(num_steps: int):
    """At equal numbers of evaluations the second-order multistep solver is closer than Euler's."""
    errors = [abs(moments(sampler, num_steps)[1] - STD) for sampler in (multistep_sampler, euler)]
    assert errors[0] < 0.7 * errors[1]


def test_one_evaluation_per_step():
    """N noise levels take N evaluations, each of the whole batch at one level."""
    calls = []
    multistep_sampler(lambda x, sigma: calls.append(sigma) or x / 2, torch.ones(3, 2), karras_grid(8, 0.02, 5.0))
    assert len(calls) == 8
    assert {sigma.shape for sigma in calls} == {(3,)}


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_known_data_are_found_at_once(num_steps: int):
    """A denoiser of constant output y leads to y in any number of steps."""
    y = torch.tensor([[1.0, -2.0]])
    found = multistep_sampler(lambda x, sigma: y, 5 * torch.ones(1, 2), karras_grid(num_steps, 0.02, 5.0))
    assert torch.allclose(found, y, atol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 3, 18])
def test_karras_grid(num_steps: int):
    """The grid falls from sigma_max to sigma_min in N levels, then ends at zero."""
    sigmas = karras_grid(num_steps, 0.02, 5.0)
    assert len(sigmas) == num_steps + 1
    assert sigmas[[0, -2, -1]].tolist() == pytest.approx([5.0, 0.02, 0.0])
    assert (sigmas.diff() < 0).all()


def test_karras_grid_by_hand():
    """The middle of three levels is the mean of seventh roots, to the seventh power (rho = 7)."""
    assert karras_grid(3, 1.0, 128.0)[1].item() == pytest.approx(1.5**7)


def test_karras_grid_of_one_step():
    """One step goes from sigma_max straight to zero."""
    assert karras_grid(1, 0.02, 5.0).tolist() == [5.0, 0.0]


@pytest.mark.parametrize(
    ("num_steps", "sigma_max", "expected"), [(1, 80.0, [80.0]), (2, 80.0, [80.0, 1.64]), (2, 2.0, [2.0, 1.0])]
)
def test_consistency_grid_by_hand(num_steps: int, sigma_max: float, expected: list[float]):
    """The second level is 1.64, but never above half of the first."""
    assert consistency_grid(num_steps, sigma_max).tolist() == pytest.approx(expected)


def test_one_consistency_step():
    """One step maps noise of level sigma_max to the flow's end."""
    noises = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    y = consistency_sampler(consistent, noises, torch.tensor([SIGMA_MAX]))
    share = STD / math.hypot(STD, SIGMA_MAX)
    assert y[0].item() == pytest.approx(MEAN - MEAN * share)
    assert (y[1] - y[0]).item() == pytest.approx(SIGMA_MAX * share)


def test_two_consistency_steps_keep_the_gaussian():
    """Fresh noise at the second level and its removal leave mean and variance of the data."""
    generator = torch.Generator().manual_seed(0)
    noises = torch.randn(2, 50_000, 1, generator=generator, dtype=torch.float64)
    y = consistency_sampler(consistent, noises, torch.tensor([SIGMA_MAX, 1.64]))
    assert y.mean().item() == pytest.approx(MEAN, abs=0.01)
    assert y.std().item() == pytest.approx(STD, abs=0.01)


def test_antithetic_noise_comes_in_pairs():
    """One half of the rows is unit noise, the other its negative, at correlated later steps too."""
    step_noise = correlated_noise(2, 0.8, antithetic(torch.Generator().manual_seed(0)))
    for _ in range(3):
        noise = step_noise(torch.empty(2000, 5), None)
        assert noise.shape == (2, 2000, 5)
        assert torch.equal(noise[:, 1000:], -noise[:, :1000])
        assert noise[:, :1000].std().item() == pytest.approx(1, abs=0.03)


def test_mean_of_antithetic_samples_is_that_of_a_gaussian():
    """Where the denoiser is linear, two antithetic samples have the mean without error; two independent ones do not."""
    sigmas = karras_grid(80, SIGMA_MIN, SIGMA_MAX).double()
    errors = []
    for normal in (antithetic, independent):
        noise = normal(torch.Generator().manual_seed(0))(1, 2, 500)[0].double()
        zero = multistep_sampler(denoise, torch.zeros(1, 500, dtype=torch.float64), sigmas)
        y = multistep_sampler(denoise, SIGMA_MAX * noise, sigmas)
        errors.append((y.mean(dim=0) - zero[0]).square().mean().sqrt().item())
    assert errors[0] < 1e-6
    assert errors[1] == pytest.approx(STD / math.sqrt(2), rel=0.1)


def test_karras_grid_is_rounded_once():
    """Levels are computed in double precision: each is the single-precision number nearest to the formula."""
    roots = [(1 - i / 39) * SIGMA_MAX ** (1 / 7) + i / 39 * SIGMA_MIN ** (1 / 7) for i in range(40)]
    expected = torch.tensor([root**7 for root in roots], dtype=torch.float64)
    assert torch.equal(karras_grid(40, SIGMA_MIN, SIGMA_MAX)[:-1], expected.float())


def test_denoiser_gets_levels_like_its_data():
    """Both samplers give each of the B rows of x a level, of the type of x."""
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def see(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append((sigma.shape, sigma.dtype))
        return x

    noises = torch.zeros(1, 3, 2, dtype=torch.float64)
    multistep_sampler(see, noises[0], karras_grid(1, SIGMA_MIN, SIGMA_MAX))
    consistency_sampler(see, noises, torch.tensor([SIGMA_MAX]))
    assert seen == [((3,), torch.float64)] * 2


def test_each_level_has_its_noise():
    """A number of noises that is not that of the levels is our own mistake, and refused."""
    with pytest.raises(ValueError, match="zip"):
        consistency_sampler(consistent, torch.zeros(2, 1, 1), torch.tensor([SIGMA_MAX]))


@pytest.mark.parametrize("make", [independent, antithetic])
def test_noise_is_that_of_its_generator(make: Callable[[torch.Generator], Callable[..., Tensor]]):
    """Equal generators make equal noise, on the device of the generator whatever the default device is."""
    with torch.device("meta"):
        one, other = (make(torch.Generator("cpu").manual_seed(3))(2, 4, 5) for _ in range(2))
    assert one.device.type == "cpu" and torch.equal(one, other)


def test_correlated_noise_by_hand():
    """With c = 0.6 each step is 0.6 of the step before, of the row it continues, plus 0.8 of fresh noise."""
    fresh = iter([torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[10.0], [20.0]]]), torch.zeros(1, 2, 1)])
    step_noise = correlated_noise(1, 0.6, lambda *shape: next(fresh))
    z = torch.zeros(2, 1)
    assert step_noise(z).flatten().tolist() == [1.0, 2.0]
    assert step_noise(z).flatten().tolist() == pytest.approx([8.6, 17.2])
    assert step_noise(z, torch.tensor([1, 1])).flatten().tolist() == pytest.approx([10.32, 10.32])
