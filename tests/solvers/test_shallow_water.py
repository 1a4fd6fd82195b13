import pytest
import torch

from ups.solvers import sample_initial_states, solve
from ups.solvers.shallow_water import hll

torch.set_num_threads(1)


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
    """The solution has the symmetries of the square: it equals its mirror images and its transpose."""
    u_0, _ = sample_initial_states("shallow_water_2d", [0], (24, 24), seed=0)
    u = solve("shallow_water_2d", u_0.double(), {}, [0.0, 1.0])[0, 1, 0]
    for image in (u.flip(0), u.flip(1), u.T):
        assert torch.allclose(u, image, atol=1e-12)


def test_a_straight_dam_follows_stoker():
    """Behind a broken dam of heights 2 and 1 the water at the dam stands at Stoker's 1.4537."""
    x = torch.arange(200)[None, None, :, None].expand(1, 1, 200, 4)
    u = solve("shallow_water_2d", torch.where(x < 100, 2.0, 1.0).double(), {}, [0.0, 0.5])
    assert (u[0, 1, 0, 100:106] - 1.4537).abs().max() < 2e-3


def test_hll_is_consistent():
    """Between equal states the numerical flux is the physical flux."""
    h, v, w = 2.0, 0.3, -0.4
    state = torch.tensor([h, v, w])[None, :, None]
    assert torch.allclose(hll(state, state)[0, :, 0], torch.tensor([h * v, h * v**2 + h**2 / 2, h * v * w]))


def test_hll_by_hand():
    """Between h = 4, v = 1 and h = 1, v = -1 the waves have the speeds -2 and 3, and the flux is their mean."""
    left, right = torch.tensor([[4.0, 1.0, 0.5]])[..., None], torch.tensor([[1.0, -1.0, 2.0]])[..., None]
    across = (3 * 2.0 - 2 * 2.0 - 6 * (2.0 - 2.0)) / 5  # fluxes 2 and -2, momenta 2 and 2
    assert hll(left, right).flatten().tolist() == pytest.approx([28 / 5, 69 / 5, across])


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


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_fast_water_takes_its_own_flux_along(direction: float):
    """Where both sides move faster than waves the flux is that of the side that the water comes from."""
    left = torch.tensor([[2.0, direction * 5.0, 0.3]], dtype=torch.float64)[..., None]
    right = torch.tensor([[1.0, direction * 6.0, -0.4]], dtype=torch.float64)[..., None]
    h, v, w = (left if direction > 0 else right)[0, :, 0].tolist()
    assert hll(left, right)[0, :, 0].tolist() == pytest.approx([h * v, h * v * v + h * h / 2, h * v * w])
