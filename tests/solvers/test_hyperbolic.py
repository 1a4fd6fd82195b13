from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from ups.solvers import sample_initial_states, solve
from ups.solvers.hyperbolic import finite_volume_heat, roe_waves

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


def orders(errors: list[Tensor]) -> Tensor:
    """Orders of convergence between grids, each twice as fine as the one before."""
    return torch.stack(errors[:-1]).log2() - torch.stack(errors[1:]).log2()


@pytest.mark.parametrize("beta", [1.0, -1.0])
def test_the_generators_advection_converges_at_second_order(beta):
    """The mean error against the shifted wave falls at second order, 1.8 with a limiter, in either direction."""
    errors = []
    for num_points in (64, 128, 256):
        u_0 = cell_means(lambda x: (2 * pi * x).sin(), num_points)[None, None]
        exact = cell_means(lambda x: (2 * pi * (x - 0.3 * beta)).sin(), num_points)
        errors.append((solve("advection_1d", u_0, {"beta": beta}, [0.0, 0.3])[0, 1, 0] - exact).abs().mean())
    assert orders(errors).min() > 1.8


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
    assert orders(errors).min() > 1.8


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


def test_still_water_stays_still():
    """Water of constant height does not move."""
    u_0 = torch.full((1, 1, 8, 8), 1.5, dtype=torch.float64)
    assert torch.equal(solve("shallow_water_2d", u_0, {}, [0.0, 1.0])[:, 1], u_0)


def test_water_is_not_lost_before_it_reaches_the_walls():
    """While the wave is inside the domain the volume of water stays what it was to round-off."""
    u_0, _ = sample_initial_states("shallow_water_2d", range(2), (32, 32), seed=0)
    u = solve("shallow_water_2d", u_0.double(), {}, [0.0, 0.5])
    assert torch.allclose(u[:, 1].mean((-1, -2)), u[:, 0].mean((-1, -2)), atol=1e-9)


def test_a_radial_dam_breaks_radially():
    """The solution equals its mirror images; its transpose nearly, because steps go along x, then along y."""
    u_0, _ = sample_initial_states("shallow_water_2d", [0], (24, 24), seed=0)
    u = solve("shallow_water_2d", u_0.double(), {}, [0.0, 1.0])[0, 1, 0]
    for image in (u.flip(0), u.flip(1)):
        assert torch.allclose(u, image, atol=1e-12)
    assert 1e-4 < (u - u.T).abs().max() < 0.05


def test_a_straight_dam_follows_stoker():
    """Behind a broken dam of heights 2 and 1 the water at the dam stands at Stoker's 1.4537."""
    x = torch.arange(200)[None, None, :, None].expand(1, 1, 200, 4)
    u = solve("shallow_water_2d", torch.where(x < 100, 2.0, 1.0).double(), {}, [0.0, 0.5])
    assert (u[0, 1, 0, 100:106] - 1.4537).abs().max() < 2e-3


def faces(count: int = 64) -> tuple[Tensor, Tensor]:
    """Random states (h, h v, h w) on the two sides of faces, (1, 3, count) each; some of the water is fast."""
    generator = torch.Generator().manual_seed(0)
    h = 0.5 + torch.rand(2, 1, count, generator=generator, dtype=torch.float64)
    v = 3 * torch.randn(2, 2, count, generator=generator, dtype=torch.float64)
    return torch.cat([h, h * v], dim=1).unsqueeze(1).unbind()


def flux(state: Tensor) -> Tensor:
    """Flux of (h, h v, h w) along v, (1, 3, count)."""
    h, along, across = state.unbind(1)
    return torch.stack([along, along**2 / h + h**2 / 2, along * across / h], dim=1)


def test_roe_waves_add_up():
    """Waves add up to the jump of the state, and speeds times waves to the jump of the flux: Roe's conditions."""
    left, right = faces()
    waves, speeds = roe_waves(left, right)
    assert torch.allclose(waves.sum(1), right - left, atol=1e-12)
    assert torch.allclose((speeds * waves).sum(1), flux(right) - flux(left), atol=1e-11)


def test_a_wide_dam_break_has_no_jump_at_the_dam():
    """From 2 to 0.01 the flow passes the speed of waves at the dam, in Ritter's h = (2 sqrt(2) - x / t)^2 / 9."""
    n, t = 400, 0.5
    x = ((torch.arange(n, dtype=torch.float64) + 0.5) / n - 0.5) * 5.0
    u_0 = torch.where(x < 0, 2.0, 0.01)[None, None, :, None].expand(1, 1, n, 4)
    near = x.abs() < 0.3
    h = solve("shallow_water_2d", u_0.double(), {}, [0.0, t])[0, 1, 0, near, 0]
    assert (h - (2 * sqrt(2) - x[near] / t) ** 2 / 9).abs().max() < 5e-3


@pytest.mark.parametrize("axis", [2, 3])
def test_what_leaves_through_a_wall_does_not_come_back(axis):
    """Water that is higher at one wall leaves there, and the opposite wall does not feel it."""
    u_0 = torch.ones(1, 1, 24, 24, dtype=torch.float64)
    u_0.narrow(axis, 0, 4).fill_(2.0)
    u = solve("shallow_water_2d", u_0, {}, [0.0, 0.3])[:, 1]
    assert torch.allclose(u.narrow(axis, 20, 4), torch.tensor(1.0, dtype=torch.float64), atol=1e-4)
    assert u.narrow(axis, 0, 4).mean() < 1.95


def test_the_dam_has_its_radius():
    """Water of height 2 stands on an area of pi R^2 and of height 1 elsewhere, with R between 0.3 and 0.7."""
    u_0, coefficients = sample_initial_states("shallow_water_2d", range(8), (64, 64), seed=0)
    area = (u_0 - 1).double().mean((1, 2, 3)) * 25
    assert torch.allclose((area / torch.pi).sqrt(), coefficients["dam_radius"], atol=5e-3)
    assert ((coefficients["dam_radius"] > 0.3) & (coefficients["dam_radius"] < 0.7)).all()
    assert u_0.unique().min() == 1 and u_0.unique().max() == 2


def test_no_two_dams_are_the_same_on_coarse_cells():
    """Different radii are different states on 32 x 32 cells."""
    u_0, _ = sample_initial_states("shallow_water_2d", range(64), (32, 32), seed=0)
    assert len(u_0.flatten(1).unique(dim=0)) == 64
