from math import pi

import pytest
import torch

from ups.solvers import sample_initial_states, solve
from ups.solvers.incompressible import advected, cosine_transform, divergence, laplacian, to_centres, to_faces

torch.set_num_threads(1)


def still(num_points: int) -> tuple[torch.Tensor, dict]:
    """A box at rest, filled with c = 1, without force."""
    u_0 = torch.zeros(1, 3, num_points, num_points, dtype=torch.float64)
    u_0[:, 2] = 1
    field = torch.zeros(num_points, num_points)
    return u_0, {"force_x": field, "force_y": field.clone()}


def test_centres_are_undone():
    """Face velocities of a closed box are found again from their means at the centres."""
    faces = torch.randn(2, 3, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    faces[:, 0, -1], faces[:, 1, :, -1] = 0, 0
    assert torch.allclose(to_faces(to_centres(faces)), faces, atol=1e-12)


def test_flow_has_no_divergence():
    """After the first step no cell gains or loses volume."""
    u_0, force = sample_initial_states("incompressible_ns_2d", range(2), (16, 24), seed=0)
    state = to_faces(solve("incompressible_ns_2d", u_0.double(), force, [0.0, 0.5])[:, 1])
    assert divergence(state[:, 0], state[:, 1], 1 / 16, 1 / 24).abs().max() < 1e-9


def test_a_uniform_force_is_carried_by_pressure():
    """A constant force on a full box moves nothing."""
    u_0, force = still(16)
    u = solve("incompressible_ns_2d", u_0, {**force, "force_x": torch.ones(16, 16)}, [0.0, 0.5])
    assert torch.allclose(u[:, 1], u_0, atol=1e-12)


def test_the_force_acts_on_the_particles():
    """An empty box does not feel the force; a filled one does."""
    u_0, force = still(16)
    force["force_x"] = (2 * pi * torch.arange(16) / 16).sin().expand(16, 16)
    for c, moves in ((0.0, False), (1.0, True)):
        u = solve("incompressible_ns_2d", u_0 * c, force, [0.0, 0.1])[0, 1, :2]
        assert (u.abs().max() > 1e-3) == moves


def test_particles_are_carried_along_the_new_velocity():
    """From rest a force moves them within the first step already."""
    u_0, force = still(16)
    u_0[:, 2] = torch.arange(16.0)[:, None]
    force["force_x"] = (2 * pi * torch.arange(16) / 16).sin().expand(16, 16)
    c = solve("incompressible_ns_2d", u_0, force, [0.0, 0.005])[0, :, 2]
    assert (c[1] - c[0]).abs().max() > 1e-4


def test_forces_are_smoother_than_flows():
    """No force has a mode longer than sqrt(5); flows and particles have those of length 1 too."""
    u_0, force = sample_initial_states("incompressible_ns_2d", [0], (16, 16), seed=0)
    lowest = [torch.fft.fft2(u)[0, 0, 1].abs() / 256 for u in (force["force_x"], force["force_y"], u_0[:, 2])]
    assert lowest[0] < 1e-6 and lowest[1] < 1e-6 and lowest[2] > 1e-2


def test_a_flow_without_force_comes_to_rest():
    """Without force kinetic energy falls from snapshot to snapshot."""
    u_0, _ = sample_initial_states("incompressible_ns_2d", range(2), (16, 16), seed=0)
    u = solve("incompressible_ns_2d", u_0, still(16)[1], [0.0, 0.1, 0.3, 0.6, 1.0])
    energy = u[:, :, :2].square().mean((2, 3, 4))
    assert (energy.diff(dim=1) < 0).all()


def test_particles_make_no_new_extrema():
    """The particle density stays between its smallest and its largest initial value."""
    u_0, force = sample_initial_states("incompressible_ns_2d", range(3), (16, 16), seed=1)
    c = solve("incompressible_ns_2d", u_0, force, [0.0, 0.5, 1.0])[:, :, 2]
    assert (c.amax((1, 2, 3)) <= u_0[:, 2].amax((1, 2)) + 1e-6).all()
    assert (c.amin((1, 2, 3)) >= u_0[:, 2].amin((1, 2)) - 1e-6).all()


def test_uniform_particles_stay_uniform():
    """A flow carries particles of one density nowhere, at the walls neither."""
    u_0, force = sample_initial_states("incompressible_ns_2d", range(2), (16, 12), seed=0)
    u_0[:, 2] = 1.5
    u = solve("incompressible_ns_2d", u_0.double(), force, [0.0, 0.5])[:, 1]
    assert torch.allclose(u[:, 2], torch.tensor(1.5, dtype=torch.float64), atol=1e-12)


def vortex(X: int, Y: int) -> torch.Tensor:
    """A smooth flow around the middle of the box, and particles that vary along both axes, on X x Y cells."""
    x, y = (((torch.arange(n, dtype=torch.float64) + 0.5) / n * pi) for n in (X, Y))
    v_x = torch.outer(x.sin().square(), (2 * y).sin())
    v_y = -torch.outer((2 * x).sin(), y.sin().square())
    return torch.stack((v_x, v_y, 1 + torch.outer(x.cos(), y.cos())))[None]


def test_more_cells_along_one_axis_change_little():
    """Three times the cells along x or y give the flow on square cells, within a few percent of its values."""
    means = []
    for X, Y in ((16, 16), (48, 16), (16, 48)):
        force = {name: torch.zeros(X, Y) for name in ("force_x", "force_y")}
        u = solve("incompressible_ns_2d", vortex(X, Y), force, [0.0, 0.2])[0, 1]
        means.append(u.unflatten(2, (16, -1)).mean(3).unflatten(1, (16, -1)).mean(2))
    assert (means[0] - vortex(16, 16)[0]).abs().amax((1, 2)).min() > 0.2
    assert (torch.stack(means[1:]) - means[0]).abs().max() < 0.05


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_advection_over_whole_cells_is_a_shift(padding):
    """Two cells downstream lies what was here; what comes in through the wall is 0 or the wall's own value."""
    u = torch.arange(1.0, 7.0, dtype=torch.float64)[None, :, None].expand(1, 6, 5)
    moved = advected(u, torch.full_like(u, 2.0), torch.zeros_like(u), padding)
    wall = 0.0 if padding == "zeros" else 1.0
    expected = torch.tensor([wall, wall, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert torch.allclose(moved, expected[None, :, None].expand(1, 6, 5))


def test_advection_interpolates_linearly():
    """A quarter of a cell upstream lies three quarters of here and one of the neighbour."""
    u = torch.randn(1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = advected(u, torch.zeros_like(u), torch.full_like(u, 0.25), "zeros")
    assert torch.allclose(moved[..., 1:], 0.75 * u[..., 1:] + 0.25 * u[..., :-1])


def test_cosines_diagonalise_the_zero_flux_second_difference():
    """Vectors and eigenvalues rebuild the matrix with rows 1 -2 1, and -1 1 at the walls."""
    vectors, eigenvalues = cosine_transform(7, 1.0)
    second = torch.diag(torch.full((7,), -2.0)) + torch.diag(torch.ones(6), 1) + torch.diag(torch.ones(6), -1)
    second[0, 0] = second[-1, -1] = -1
    assert torch.allclose(vectors @ torch.diag(eigenvalues) @ vectors.T, second.double(), atol=1e-13)


def test_laplacian_of_a_sine():
    """A sine that is 0 one cell beyond the grid is an eigenvector."""
    wave = torch.sin(pi * torch.arange(1, 16, dtype=torch.float64) / 16)
    u = (wave[:, None] * wave)[None]
    eigenvalue = -4 * 16**2 * torch.sin(torch.tensor(pi / 32, dtype=torch.float64)) ** 2
    assert torch.allclose(laplacian(u, 1 / 16, 1 / 16), 2 * eigenvalue * u, atol=1e-10)
