from math import pi

import torch
from torch import Tensor

from ups.solvers import sample_initial_states, solve
from ups.solvers.reaction import heat, logistic

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
    """A uniform state follows u_t = u - u^3 - k - v and v_t = u - v, as a short Euler step says."""
    u_0 = torch.tensor([0.3, -0.2], dtype=torch.float64)[None, :, None, None].expand(1, 2, 8, 8)
    u = solve("diffusion_reaction_2d", u_0, {}, [0.0, 1e-6])[0, 1, :, 0, 0]
    rate = torch.tensor([0.3 - 0.027 - 5e-3 + 0.2, 0.3 + 0.2], dtype=torch.float64)
    assert torch.allclose((u - u_0[0, :, 0, 0]) / 1e-6, rate, atol=1e-5)
