from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from ups.solvers import draw, solve
from ups.solvers.transient import finite_volume_heat, heat, integrate, logistic, shift, zero_flux_laplacian

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


def test_shift_moves_a_wave_by_any_distance():
    """A resolved wave moves by an arbitrary distance to round-off."""
    x = centres(32)
    u = (2 * pi * 3 * x).sin() + (2 * pi * 5 * x + 1).cos()
    expected = (2 * pi * 3 * (x - 0.123)).sin() + (2 * pi * 5 * (x - 0.123) + 1).cos()
    assert torch.allclose(shift(u, torch.tensor(0.123), 1.0), expected, atol=1e-13)


def test_advection_over_whole_cells_is_a_roll():
    """When beta t is a whole number of cells, the solution is the initial state rolled by them, however rough it is."""
    u_0 = torch.randn(2, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = solve("advection_1d", u_0, {"beta": torch.tensor([0.5, -0.25])}, [0.0, 0.25, 1.0], scheme="accurate")
    assert torch.allclose(u[0, :, 0], torch.stack([u_0[0, 0].roll(s) for s in (0, 4, 16)]), atol=1e-12)
    assert torch.allclose(u[1, :, 0], torch.stack([u_0[1, 0].roll(s) for s in (0, -2, -8)]), atol=1e-12)


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
    u_0, _ = draw("advection_1d", range(8), (64,), seed=0)
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
    u_0, _ = draw("burgers_1d", range(8), (64,), seed=0)
    u = solve("burgers_1d", u_0.double(), {"nu": 0.01}, [0.0, 0.5, 1.0])
    assert torch.allclose(u.mean(-1), u[:, :1].mean(-1).expand(-1, 3, -1), atol=1e-13)


def test_burgers_makes_no_new_extrema():
    """A Burgers solution stays between the smallest and the largest value of its initial state."""
    u_0, _ = draw("burgers_1d", range(8), (64,), seed=1)
    u = solve("burgers_1d", u_0, {"nu": 0.02}, [0.0, 0.5, 1.0])
    assert (u.amax((1, 2, 3)) <= u_0.amax((1, 2)) + 1e-6).all()
    assert (u.amin((1, 2, 3)) >= u_0.amin((1, 2)) - 1e-6).all()


def test_burgers_diffusion_is_nu_over_pi():
    """A tiny wave on a moving background decays at the rate (nu/pi) (2 pi)^2."""
    wave = 1e-4 * (2 * pi * centres(128)).sin()
    u = solve("burgers_1d", (1 + wave)[None, None], {"nu": 0.1}, [0.0, 1.0])[0, 1, 0]
    decay = (u - 1).std() / wave.std()
    assert decay.item() == pytest.approx(torch.tensor(-0.1 / pi * (2 * pi) ** 2).exp().item(), rel=5e-3)


def test_heat_decays_each_mode_exactly():
    """The mode m decays by exp(-nu (2 pi m / L)^2 t) on a domain of length L."""
    u = torch.cos(2 * pi * 3 * centres(32))
    expected = u * torch.tensor(-0.01 * (2 * pi * 3 / 2.0) ** 2).exp()
    assert torch.allclose(heat(u, torch.tensor(0.01), 2.0), expected, atol=1e-7)


def test_finite_volume_heat_keeps_sign_and_mean():
    """Discrete heat spreads one filled cell without negative values and without loss, over any time."""
    u = torch.zeros(32, dtype=torch.float64)
    u[5] = 1.0
    for diffused in (1e-5, 1e-3, 1.0):
        u_next = finite_volume_heat(u, torch.tensor(diffused), 1.0)
        assert u_next.min() > -1e-15
        assert u_next.sum().item() == pytest.approx(1.0, abs=1e-14)


def test_logistic_satisfies_its_closed_form():
    """Growth follows u = 1 / (1 + exp(-rho t) (1 - u_0) / u_0), also from 0 and 1."""
    u_0 = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)
    grown = torch.tensor(0.7, dtype=torch.float64)
    assert torch.allclose(logistic(u_0, grown), 1 / (1 + torch.exp(-grown) * (1 - u_0) / u_0), atol=1e-15)
    assert torch.equal(logistic(torch.tensor([0.0, 1.0]), grown), torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_reaction_diffusion_is_resolved_in_time():
    """Diffusion and growth together agree with steps twenty times as short."""
    u_0, _ = draw("diffusion_reaction_1d", range(4), (64,), seed=0)
    coefficients = {"nu": torch.tensor([0.5, 1.0, 2.0, 5.0]), "rho": 10.0}
    u = solve("diffusion_reaction_1d", u_0.double(), coefficients, [0.0, 0.2])
    times = torch.linspace(0, 0.2, 10_001).tolist()
    u_ref = solve("diffusion_reaction_1d", u_0.double(), coefficients, times)
    assert torch.allclose(u[:, -1], u_ref[:, -1], atol=1e-4)


def test_zero_flux_laplacian_loses_nothing():
    """Diffusion between closed walls keeps the mean of every field."""
    u = torch.randn(2, 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(zero_flux_laplacian(u, 0.1, 0.2).mean((-1, -2)), torch.zeros(2, 2, dtype=u.dtype), atol=1e-13)


def test_zero_flux_laplacian_of_a_cosine():
    """cos(pi x) between walls at 0 and 1 is an eigenvector with the discrete eigenvalue along either axis."""
    u = torch.cos(pi * centres(16)).expand(1, 1, 16, 16)
    eigenvalue = -4 * 16**2 * torch.sin(torch.tensor(pi / 32)) ** 2
    for state in (u, u.transpose(-1, -2)):
        assert torch.allclose(zero_flux_laplacian(state, 1 / 16, 1 / 16), eigenvalue * state, atol=1e-5)


def test_reaction_diffusion_2d_starts_at_its_equation():
    """A uniform state follows u_t = u - u^3 - k - v and v_t = u - v, as a short Euler step says."""
    u_0 = torch.tensor([0.3, -0.2], dtype=torch.float64)[None, :, None, None].expand(1, 2, 8, 8)
    u = solve("diffusion_reaction_2d", u_0, {}, [0.0, 1e-6])[0, 1, :, 0, 0]
    rate = torch.tensor([0.3 - 0.027 - 5e-3 + 0.2, 0.3 + 0.2], dtype=torch.float64)
    assert torch.allclose((u - u_0[0, :, 0, 0]) / 1e-6, rate, atol=1e-5)


def test_integrate_ends_at_the_interval():
    """Steps that do not divide the interval are shortened, for each trajectory by itself."""
    limit = torch.tensor([0.3, 0.7]).reshape(2, 1, 1)
    u = integrate(lambda u, dt: u + dt, lambda u: limit, torch.zeros(2, 1, 4), 1.0)
    assert torch.allclose(u, torch.ones(2, 1, 4))
