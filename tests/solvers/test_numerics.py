"""Residuals of exact solutions vanish at second order in dt and dx; time steps and differences."""

from collections.abc import Callable
from math import pi

import pytest
import torch
from torch import Tensor

from ups.solvers import sample_initial_states, solve
from ups.solvers.families import equation_of
from ups.solvers.numerics import central_difference, face_states, integrate, wall_divergence, zero_flux_laplacian
from ups.solvers.reaction import D

torch.set_num_threads(1)

Solution = Callable[[Tensor, float], Tensor]  # u(x, t) of the cell centres


def centres(num_points: int) -> Tensor:
    """Centres of equal cells on (0, 1)."""
    return (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points


def wave(x: Tensor, t: float) -> Tensor:
    """Solve advection with beta = 0.7."""
    return (2 * pi * (x - 0.7 * t)).sin() + 2


def cole_hopf(x: Tensor, t: float) -> Tensor:
    """Solve viscous Burgers with diffusion 0.3 / pi: u = -2 d (log phi)_x, phi = 2 + exp(-d q^2 t) cos(q x)."""
    d, q = 0.3 / pi, 2 * pi
    decay = torch.exp(torch.tensor(-d * q * q * t, dtype=torch.float64))
    return 2 * d * q * decay * (q * x).sin() / (2 + decay * (q * x).cos())


def cooling(x: Tensor, t: float) -> Tensor:
    """Solve the heat equation with nu = 0.05."""
    return torch.exp(torch.tensor(-0.05 * 4 * pi * pi * t, dtype=torch.float64)) * (2 * pi * x).cos()


def growing(x: Tensor, t: float) -> Tensor:
    """Solve the logistic equation with rho = 3, the same everywhere."""
    return 1 / (1 + 4 * torch.exp(-3 * torch.full_like(x, t)))


EXACT = {
    "advection": ("advection_1d", {"beta": 0.7}, wave),
    "burgers": ("burgers_1d", {"nu": 0.3}, cole_hopf),
    "heat": ("diffusion_reaction_1d", {"nu": 0.05, "rho": 0.0}, cooling),
}


def size_of_residual(family: str, c: dict[str, float], solution: Solution, num_points: int, dt: float) -> float:
    """RMS of the residual of the exact solution between t = 0.3 and 0.3 + dt."""
    u = torch.stack([solution(centres(num_points), t) for t in (0.3, 0.3 + dt)])[None, :, None]
    equation = equation_of(family, c, (1 / num_points,), "periodic")
    return float(equation.residual(u, dt).square().mean().sqrt())


def order(coarse: float, fine: float) -> float:
    """Order of convergence when something is halved."""
    return float(torch.tensor(coarse / fine).log2())


@pytest.mark.parametrize("name", EXACT)
def test_residuals_converge_at_second_order_in_dx(name: str):
    """With a tiny dt, half the dx leaves a quarter of the residual."""
    errors = [size_of_residual(*EXACT[name], num_points, 1e-4) for num_points in (32, 64)]
    assert 1.9 < order(*errors) < 2.1


@pytest.mark.parametrize("name", EXACT)
def test_residuals_converge_at_second_order_in_dt(name: str):
    """With a tiny dx, half the dt leaves a quarter of the residual."""
    errors = [size_of_residual(*EXACT[name], 4096, dt) for dt in (0.025, 0.0125)]
    assert 1.9 < order(*errors) < 2.1


def test_the_reaction_converges_at_second_order_in_dt():
    """Uniform logistic growth has no error in space, and a quarter of the residual with half the dt."""
    errors = [size_of_residual("diffusion_reaction_1d", {"nu": 1.0, "rho": 3.0}, growing, 8, dt) for dt in (0.1, 0.05)]
    assert 1.9 < order(*errors) < 2.1
    assert order(errors[1], size_of_residual("diffusion_reaction_1d", {"nu": 1.0, "rho": 2.0}, growing, 8, 0.05)) < -3


def test_the_steady_state_of_sorption_has_no_residual():
    """The line that meets both conditions of diffusion-sorption is steady."""
    slope = 1 / (9 + D * 8)  # per cell: 1 - 9 slope = D slope / dx
    u = (1 - slope * torch.arange(1, 9, dtype=torch.float64)).expand(1, 2, 1, 8)
    equation = equation_of("diffusion_sorption_1d", {}, (1 / 8,), "cauchy")
    assert equation.residual(u, 5.0).abs().max() < 1e-14
    assert equation.residual(0.9 * u, 5.0).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("family", "grid", "boundary", "times"),
    [
        ("diffusion_sorption_1d", (32,), "cauchy", (300.0, 2.0)),
        ("diffusion_reaction_2d", (16, 16), "zero_flux", (2.0, 0.1)),
    ],
)
def test_solvers_leave_a_residual_of_second_order_in_dt(family, grid, boundary, times):
    """On the solver's own grid, half the dt between its snapshots leaves a quarter of the residual."""
    start, dt = times
    u_0, _ = sample_initial_states(family, [0], grid, seed=0)
    length = 2.0 if family.endswith("2d") else 1.0
    equation, errors = equation_of(family, {}, tuple(length / n for n in grid), boundary), []
    for step in (dt, dt / 2):
        u = solve(family, u_0.double(), {}, [0.0, start, start + step])[:, 1:]
        errors.append(float(equation.residual(u, step).square().mean().sqrt()))
    assert 1.7 < order(*errors) < 2.3


@pytest.mark.parametrize("vary", ["dx", "dt"])
def test_an_entropy_wave_leaves_a_residual_of_second_order(vary: str):
    """Density carried by a uniform flow at uniform pressure solves Euler's equations in mass, energy and momentum."""
    errors = []
    for factor in (1, 2):
        num_points, dt = (16 * factor, 1e-4) if vary == "dx" else (1024, 0.05 / factor)
        x, y = torch.meshgrid(centres(num_points), centres(8), indexing="ij")
        flat = torch.ones_like(x)
        rho = [1 + 0.2 * (2 * pi * (x - 0.5 * t)).sin() for t in (0.3, 0.3 + dt)]
        u = torch.stack([torch.stack((r, 2 * flat, 0.5 * flat, -0.25 * flat)) for r in rho])[None]
        residual = equation_of("compressible_ns_2d", {}, (1 / num_points, 1 / 8), "periodic").residual(u, dt)
        errors.append(residual.square().mean(dim=(0, 1, 3, 4)).sqrt())
    orders = (errors[0] / errors[1]).log2()
    assert len(orders) == 4 and ((orders > 1.9) & (orders < 2.1)).all()


def test_pressure_pushes():
    """A pressure gradient without flow changes momentum, and nothing else, at the rate -grad p."""
    x = centres(64)
    u = torch.stack((torch.ones_like(x), 2 + (2 * pi * x).sin(), torch.zeros_like(x)))[None, None].expand(1, 2, 3, 64)
    residual = equation_of("compressible_ns_1d", {}, (1 / 64,), "periodic").residual(u, 0.1)[0, 0]
    assert residual[:2].abs().max() < 1e-14
    assert torch.allclose(residual[2], 2 * pi * (2 * pi * x).cos(), atol=0.02)


def test_vortices_carry_nothing_across_their_streamlines_and_have_no_divergence():
    """For v = (psi_y, -psi_x) in a box the residual of c = psi^2 falls at second order in dx, and div v at order 1.5.

    Its error is of second order in the interior and of first order in the cells at the walls.
    """
    errors = []
    for num_points in (32, 64):
        x, y = torch.meshgrid(centres(num_points), centres(num_points), indexing="ij")
        psi = ((pi * x).sin() * (pi * y).sin()).square()
        v_x = (pi * x).sin().square() * pi * (2 * pi * y).sin()
        v_y = -pi * (2 * pi * x).sin() * (pi * y).sin().square()
        u, spacing = torch.stack((v_x, v_y, psi.square()))[None, None].expand(1, 2, -1, -1, -1), (1 / num_points,) * 2
        residual = equation_of("incompressible_ns_2d", {}, spacing, "wall").residual(u, 0.1)
        errors.append([float(e.square().mean().sqrt()) for e in (residual, wall_divergence(u[0, :1, :2], spacing))])
    carried, divergence = (order(coarse, fine) for coarse, fine in zip(*errors, strict=True))
    assert 1.9 < carried < 2.1 and 1.4 < divergence < 1.6


def test_a_tracer_moves_with_its_flow():
    """Particles 2 x + 3 y that stay where they are although v = (1, 2) miss 1 * 2 + 2 * 3 per unit of time."""
    x, y = torch.meshgrid(centres(8), centres(10), indexing="ij")
    u = torch.stack((torch.ones_like(x), 2 * torch.ones_like(x), 2 * x + 3 * y))[None, None].expand(1, 2, 3, 8, 10)
    residual = equation_of("incompressible_ns_2d", {}, (1 / 8, 1 / 10), "wall").residual(u, 0.1)
    assert torch.allclose(residual[..., 1:-1, 1:-1], torch.tensor(8.0, dtype=torch.float64))


def test_derivatives_end_as_the_boundary_says():
    """Beyond the ends stand the other end, the same value, or its negative."""
    u = torch.tensor([1.0, 2.0, 4.0])
    assert central_difference(u, 0, 0.5, "periodic").tolist() == [-2.0, 3.0, -1.0]
    assert central_difference(u, 0, 0.5, "outflow").tolist() == [1.0, 3.0, 2.0]
    assert central_difference(u, 0, 0.5, "wall").tolist() == [3.0, 3.0, -6.0]


def test_shallow_water_has_no_equation():
    """The height alone does not say how it changes."""
    assert equation_of("shallow_water_2d", {}, (0.1, 0.1), "outflow") is None


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


def test_integrate_ends_at_the_interval():
    """Steps that do not divide the interval are shortened, for each trajectory by itself."""
    limit = torch.tensor([0.3, 0.7]).reshape(2, 1, 1)
    u = integrate(lambda u, dt: u + dt, lambda u: limit, torch.zeros(2, 1, 4), 1.0)
    assert torch.allclose(u, torch.ones(2, 1, 4))


def test_face_states_by_hand():
    """Slopes of cells 1, 2, 6, 7, 5: the central 2.5 limited to twice the smaller difference 1, 2.5 to 2, 0 at 7."""
    lower, upper = face_states(torch.tensor([1.0, 2.0, 6.0, 7.0, 5.0])[None], 1)
    assert lower[0].tolist() == [2.0 + 1.0, 6.0 + 1.0]
    assert upper[0].tolist() == [6.0 - 1.0, 7.0]
