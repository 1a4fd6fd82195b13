from math import pi

import pytest
import torch
from torch import Tensor

from ups.solvers import reaction, sample_initial_states, solve
from ups.solvers.reaction import D, heat, logistic, retardation, sorption_rate

torch.set_num_threads(1)


def centres(num_points: int) -> Tensor:
    """Centres of equal cells on (0, 1)."""
    return (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points


def test_heat_decays_each_mode_exactly():
    """The mode m decays by exp(-nu (2 pi m / L)^2 t) on a domain of length L."""
    u = torch.cos(2 * pi * 3 * centres(32))
    expected = u * torch.tensor(-0.01 * (2 * pi * 3 / 2.0) ** 2).exp()
    assert torch.allclose(heat(u, torch.tensor(0.01), 2.0), expected, atol=1e-7)


def test_logistic_satisfies_its_closed_form():
    """Growth follows u = 1 / (1 + exp(-rho t) (1 - u_0) / u_0), also from 0 and 1."""
    u_0 = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)
    grown = torch.tensor(0.7, dtype=torch.float64)
    assert torch.allclose(logistic(u_0, grown), 1 / (1 + torch.exp(-grown) * (1 - u_0) / u_0), atol=1e-15)
    assert torch.equal(logistic(torch.tensor([0.0, 1.0]), grown), torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_reaction_diffusion_is_resolved_in_time():
    """Diffusion and growth together agree with steps twenty times as short."""
    u_0, _ = sample_initial_states("diffusion_reaction_1d", range(4), (64,), seed=0)
    coefficients = {"nu": torch.tensor([0.5, 1.0, 2.0, 5.0]), "rho": 10.0}
    u = solve("diffusion_reaction_1d", u_0.double(), coefficients, [0.0, 0.2])
    times = torch.linspace(0, 0.2, 10_001).tolist()
    u_ref = solve("diffusion_reaction_1d", u_0.double(), coefficients, times)
    assert torch.allclose(u[:, -1], u_ref[:, -1], atol=1e-4)


def test_reaction_diffusion_2d_starts_at_its_equation():
    """A wave follows u_t = 1e-3 lap u + u - u^3 - k - v and v_t = 5e-3 lap v + u - v, as a short Euler step says."""
    wave = (pi * centres(8)).cos()[:, None].expand(8, 12)
    u, v = 0.3 + 0.1 * wave, -0.2 + 0.4 * wave
    u_0 = torch.stack((u, v))[None]
    found = (solve("diffusion_reaction_2d", u_0, {}, [0.0, 1e-6])[0, 1] - u_0[0]) / 1e-6
    curvature = -4 * 4**2 * torch.sin(torch.tensor(pi / 16, dtype=torch.float64)) ** 2 * wave
    rate = torch.stack((1e-4 * curvature + u - u**3 - 5e-3 - v, 2e-3 * curvature + u - v))
    assert torch.allclose(found, rate, atol=1e-5)


def test_retardation_has_its_published_constants():
    """R(1) = 1 + 0.71 / 0.29 * 2880 * 3.5e-4 * 0.874 = 3.1569, and R(0) = 1 + 2.1569 * 1e-6^(0.874 - 1)."""
    assert retardation(torch.tensor(1.0)).item() == pytest.approx(3.1569, rel=1e-4)
    assert retardation(torch.tensor(0.0)).item() == pytest.approx(1 + 2.1569 * 10**0.756, rel=1e-4)


def test_rate_has_the_ghosts_of_the_two_ends():
    """The left neighbour of the first cell is 1, the right one of the last is D (u_{N-2} - u_{N-1}) / dx."""
    u, dx = torch.tensor([[[0.5, 0.4, 0.2]]], dtype=torch.float64), 0.1
    curvature = torch.tensor([1 - 1.0 + 0.4, 0.5 - 0.8 + 0.2, 0.4 - 0.4 + D * 0.2 / dx], dtype=torch.float64)
    assert torch.allclose(sorption_rate(u, dx)[0, 0], D / retardation(u[0, 0]) * curvature / dx**2)


def test_the_steady_state_is_linear():
    """After a long time u is the line through 1 half a cell left of the domain that meets the right condition."""
    u_0, _ = sample_initial_states("diffusion_sorption_1d", [0], (8,), seed=0)
    u = solve("diffusion_sorption_1d", u_0.double(), {}, [0.0, 2e5])[0, 1, 0]
    slope = 1 / (9 + D * 8)  # per cell: 1 - 9 slope = D slope / dx
    line = 1 - slope * torch.arange(1, 9, dtype=torch.float64)
    assert torch.allclose(u, line, atol=1e-4)


def test_concentrations_stay_between_zero_and_one():
    """Nothing is above the inflow or below 0, in the early layers of both ends too."""
    u_0, _ = sample_initial_states("diffusion_sorption_1d", range(8), (64,), seed=0)
    u = solve("diffusion_sorption_1d", u_0.double(), {}, [0.0, 1.0, 5.0, 50.0, 500.0])
    assert u.min() >= 0
    assert u.max() <= 1


def test_concentration_rises_in_time_at_the_inflow():
    """The first cell fills monotonically from its initial value."""
    u_0, _ = sample_initial_states("diffusion_sorption_1d", range(4), (32,), seed=0)
    u = solve("diffusion_sorption_1d", u_0, {}, list(range(0, 501, 50)))[:, :, 0, 0]
    assert (u.diff(dim=1) > 0).all()


def test_many_stages_agree_with_short_steps(monkeypatch):
    """Steps of a second agree with Euler-sized ones within 0.2 % of the inflow after fifty seconds."""
    u_0, _ = sample_initial_states("diffusion_sorption_1d", range(4), (128,), seed=0)
    u = solve("diffusion_sorption_1d", u_0.double(), {}, [0.0, 50.0])[:, 1]
    monkeypatch.setattr(reaction, "LONGEST_STEP", 1e-9)
    assert torch.allclose(solve("diffusion_sorption_1d", u_0.double(), {}, [0.0, 50.0])[:, 1], u, atol=2e-3)
