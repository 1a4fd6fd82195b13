"""Denoising and consistency losses, and the preconditioning they are balanced for."""

import math

import pytest
import torch
from torch import Tensor

from ups.diffusion.losses import consistency_loss, denoising_loss, next_sigma
from ups.models.denoiser import precondition

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
    assert (next_sigma(level, 256.0, 8.0, 0.5, stage=0) / level).item() == pytest.approx(expected, rel=1e-5)


def test_next_sigma_far_up():
    """At high noise the ratio tends to 1 - 1 / q, and each stage multiplies q."""
    level = torch.tensor([1e3], dtype=torch.float64)
    assert next_sigma(level, 4.0, 8.0, 0.5, stage=0).item() == pytest.approx(750)
    assert next_sigma(level, 4.0, 8.0, 0.5, stage=1).item() == pytest.approx(1000 - 1000 / 16)


@pytest.mark.parametrize("q", [1.5, 2.0, 16.0, 256.0])
def test_next_sigma_is_below(q: float):
    """0 <= s < t for every level and schedule."""
    sigma = torch.logspace(-3, 2, 200)
    s = next_sigma(sigma, q, 8.0, 0.5, stage=0)
    assert (s >= 0).all()
    assert (s < sigma).all()


def test_next_sigma_reaches_zero():
    """With q = 2 low noise levels are compared with the data themselves."""
    assert next_sigma(torch.tensor([0.1, 1.0]), 2.0, 8.0, 0.5, stage=0).tolist() == [0.0, 0.0]
