from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from ups.solvers import sample_initial_states, solve
from ups.solvers.advection import finite_volume_heat

torch.set_num_threads(1)


def centres(num_points: int) -> Tensor:
    """Centres of equal cells on (0, 1)."""
    return (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points


def burgers_before_shock(x: Tensor, t: float) -> Tensor:
    """Solve u = u_0(x - u t) for u_0 = 1 + 0.2 sin(2 pi x), by Newton's method."""
    u = torch.ones_like(x)
    for _ in range(50):
        phase = 2 * pi * (x - u * t)
        u = u - (u - 1 - 0.2 * phase.sin()) / (1 + 0.4 * pi * t * phase.cos())
    return u


def cell_means(f, num_points: int) -> Tensor:
    """Means over cells by Gauss' rule with three points."""
    offset = sqrt(0.6) / 2 / num_points
    x = centres(num_points)
    return (5 * f(x - offset) + 8 * f(x) + 5 * f(x + offset)) / 18


@pytest.mark.parametrize("beta", [1.0, -1.0])
def test_the_generators_advection_converges_at_second_order(beta):
    """The mean error against the shifted wave falls at second order, 1.8 with a limiter, in either direction."""
    errors = []
    for num_points in (64, 128, 256):
        u_0 = cell_means(lambda x: (2 * pi * x).sin(), num_points)[None, None]
        exact = cell_means(lambda x: (2 * pi * (x - 0.3 * beta)).sin(), num_points)
        errors.append((solve("advection_1d", u_0, {"beta": beta}, [0.0, 0.3])[0, 1, 0] - exact).abs().mean())
    orders = torch.stack(errors[:-1]).log2() - torch.stack(errors[1:]).log2()
    assert orders.min() > 1.8


def test_the_generators_advection_keeps_mean_and_range():
    """Upwinding neither loses anything nor makes new extrema."""
    u_0, _ = sample_initial_states("advection_1d", range(8), (64,), seed=0)
    u = solve("advection_1d", u_0.double(), {"beta": 0.7}, [0.0, 0.5, 2.0])
    assert torch.allclose(u.mean(-1), u[:, :1].mean(-1).expand(-1, 3, -1), atol=1e-13)
    assert (u.amax((1, 2, 3)) <= u_0.amax((1, 2)) + 1e-6).all()
    assert (u.amin((1, 2, 3)) >= u_0.amin((1, 2)) - 1e-6).all()


def test_burgers_converges_at_second_order_to_characteristics():
    """Before the shock the mean error against characteristics falls at second order, 1.8 with a limiter."""
    errors = []
    for num_points in (64, 128, 256):
        u_0 = cell_means(lambda x: burgers_before_shock(x, 0.0), num_points)[None, None]
        u = solve("burgers_1d", u_0, {"nu": 0.0}, [0.0, 0.4])[0, 1, 0]
        exact = cell_means(lambda x: burgers_before_shock(x, 0.4), num_points)
        errors.append((u - exact).abs().mean())
    orders = torch.stack(errors[:-1]).log2() - torch.stack(errors[1:]).log2()
    assert orders.min() > 1.8


def test_burgers_keeps_its_mean_through_shocks():
    """The mean of a Burgers solution stays what it was to round-off."""
    u_0, _ = sample_initial_states("burgers_1d", range(8), (64,), seed=0)
    u = solve("burgers_1d", u_0.double(), {"nu": 0.01}, [0.0, 0.5, 1.0])
    assert torch.allclose(u.mean(-1), u[:, :1].mean(-1).expand(-1, 3, -1), atol=1e-13)


def test_burgers_makes_no_new_extrema():
    """A Burgers solution stays between the smallest and the largest value of its initial state."""
    u_0, _ = sample_initial_states("burgers_1d", range(8), (64,), seed=1)
    u = solve("burgers_1d", u_0, {"nu": 0.02}, [0.0, 0.5, 1.0])
    assert (u.amax((1, 2, 3)) <= u_0.amax((1, 2)) + 1e-6).all()
    assert (u.amin((1, 2, 3)) >= u_0.amin((1, 2)) - 1e-6).all()


def test_burgers_diffusion_is_nu_over_pi():
    """A tiny wave on a moving background decays at the rate (nu/pi) (2 pi)^2."""
    wave = 1e-4 * (2 * pi * centres(128)).sin()
    u = solve("burgers_1d", (1 + wave)[None, None], {"nu": 0.1}, [0.0, 1.0])[0, 1, 0]
    decay = (u - 1).std() / wave.std()
    assert decay.item() == pytest.approx(torch.tensor(-0.1 / pi * (2 * pi) ** 2).exp().item(), rel=5e-3)


def test_finite_volume_heat_keeps_sign_and_mean():
    """Discrete heat spreads one filled cell without negative values and without loss, over any time."""
    u = torch.zeros(32, dtype=torch.float64)
    u[5] = 1.0
    for diffused in (1e-5, 1e-3, 1.0):
        u_next = finite_volume_heat(u, torch.tensor(diffused), 1.0)
        assert u_next.min() > -1e-15
        assert u_next.sum().item() == pytest.approx(1.0, abs=1e-14)
