"""Violations are zero for what obeys the physics and measure what does not."""

from dataclasses import replace
from math import pi, sin

import pytest
import torch
from torch import Tensor

from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.evaluation.violations import violations
from ups.solvers import SIMULATED_FAMILIES, sample_initial_states, solve

PARAMETERS = {"beta": 0.4, "nu": 0.01, "rho": 1.0, "eta": 0.01, "zeta": 0.01, "mach": 0.1}
TRANSIENT = [family for family in SIMULATED_FAMILIES if not FAMILIES[family].steady]


def dataset(family: str, num_points: int = 8, boundary: str | None = None) -> Dataset:
    """A dataset on the unit cube with dt = 0.1."""
    entry = FAMILIES[family]
    num_axes = len(entry.axes)
    boundaries = (boundary or entry.boundary,) * num_axes
    size = ((num_points,) * num_axes, (1.0,) * num_axes)
    return Dataset("data", family, (), (), (0.0, 0.1), *size, boundaries, PARAMETERS)


def state(family: str, seed: int = 0) -> Tensor:
    """Two random positive states (2, C, *grid)."""
    entry = FAMILIES[family]
    shape = (2, len(entry.fields), *[8] * len(entry.axes))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


@pytest.mark.parametrize("family", TRANSIENT)
def test_every_family_has_violations_of_each_trajectory_alone(family: str):
    """Violations are (B, T, C_r), finite, not negative, and the same for a trajectory by itself."""
    u = torch.stack([state(family, seed) for seed in range(4)], dim=1)
    found = violations(dataset(family), u, u[:, 0])
    alone = violations(dataset(family), u[1:], u[1:, 0])
    assert found
    for name, values in found.items():
        assert values.shape[:2] == (2, 3) and values.isfinite().all() and (values >= 0).all(), name
        assert torch.allclose(values[1:], alone[name])


def test_conservation_is_the_relative_change_of_the_integral():
    """A field that gains a tenth has drifted by a tenth; one that moved has not, and nothing is asked of open ends."""
    u_0 = state("advection_1d")
    u = torch.stack((u_0, u_0.roll(3, -1), 1.1 * u_0), dim=1)
    drift = violations(dataset("advection_1d"), u, u_0)["conservation"]
    assert torch.allclose(drift[:, :, 0], torch.tensor([0.0, 0.1], dtype=torch.float64), atol=1e-12)
    gas = state("compressible_ns_1d")
    assert "conservation" not in violations(dataset("compressible_ns_1d", boundary="outflow"), gas[:, None], gas)


def test_the_residual_is_the_change_that_no_term_explains():
    """A uniform wave of 2 that is 3 a step later has an unexplained change of a half, whatever the time step."""
    u_0 = torch.full((1, 1, 8), 2.0)
    for dt in (0.1, 0.5):
        waves = replace(dataset("advection_1d"), times=(0.0, dt))
        found = violations(waves, torch.stack((u_0, u_0 + 1), dim=1), u_0)["residual"]
        torch.testing.assert_close(found, torch.full((1, 1, 1), 0.5))


def test_positivity_measures_how_far_below_zero():
    """A cell of -2 among eight is a mean violation of 1/4 over the RMS of the initial state; velocities may be so."""
    u_0 = torch.ones(1, 3, 8)
    u = torch.stack((u_0, u_0), dim=1)
    u[:, 1, 1, 3], u[:, 1, 2] = -2.0, -5.0
    assert violations(dataset("compressible_ns_1d"), u, u_0)["positivity"].tolist() == [[[0.0, 0.25]]]


@pytest.mark.parametrize(
    ("family", "obeys"),
    [
        ("diffusion_reaction_2d", lambda s: (pi * s).cos()),
        ("shallow_water_2d", lambda s: 2 + (2 * pi * s).cos()),
    ],
)
def test_boundary_mismatch_vanishes_for_fields_without_gradient_at_the_ends(family: str, obeys):
    """Fields that obey the condition have a mismatch of high order in dx; linear ones do not."""
    mismatch = {}
    for num_points in (16, 32):
        s = (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points
        for name, line in (("obeys", obeys(s)), ("breaks", 1 + s)):
            u = (line[:, None] * line).expand(1, 2, len(FAMILIES[family].fields), -1, -1)
            mismatch[name, num_points] = violations(dataset(family, num_points), u, u[:, 0])["boundary"].max()
    assert mismatch["obeys", 32] < mismatch["obeys", 16] / 8
    assert mismatch["breaks", 32] > mismatch["breaks", 16] / 3 > mismatch["obeys", 16]


def test_walls_ask_for_velocities_of_zero_and_nothing_of_what_they_enclose():
    """Linear velocities that vanish on the walls and a uniform density have no mismatch; uniform velocities have."""
    s = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    bubble = torch.minimum(s, 1 - s)
    v = bubble[:, None] * bubble
    flat = torch.ones_like(v)
    u = torch.stack((torch.stack((v, v, flat)), torch.stack((flat, v, flat))))[:, None].expand(-1, 2, -1, -1, -1)
    found = violations(dataset("incompressible_ns_2d"), u, u[:1, 0].expand(2, -1, -1, -1))["boundary"][:, 0]
    assert found[0].max() < 1e-12
    assert found[1, 0] > 1 and found[1, 1:].max() < 1e-12


def test_sorption_asks_for_its_ghost_values():
    """The steady line through 1 beyond the left end and D u_x beyond the right one has no mismatch."""
    slope = 1 / (9 + 5e-4 * 8)
    u = (1 - slope * torch.arange(1, 9, dtype=torch.float64)).expand(1, 2, 1, 8)
    assert violations(dataset("diffusion_sorption_1d"), u, u[:, 0])["boundary"].max() < 1e-12
    assert violations(dataset("diffusion_sorption_1d"), u.flip(-1), u[:, 0])["boundary"].max() > 0.1


def test_divergence_is_that_of_a_wave_over_its_cells():
    """A wave sin(2 pi x / L) has a slope of sin(2 pi dx / L) / dx times its RMS; the longer edge of a cell is 2 dx."""
    s = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    wave = (2 * pi * s).sin()[:, None].expand(16, 8)
    u = torch.stack((wave, 0 * wave, 0 * wave + 1))[None, None].expand(1, 2, -1, -1, -1)
    for length in (1.0, 3.0):
        flow = replace(dataset("incompressible_ns_2d"), grid=(16, 8), lengths=(length, length))
        found = violations(flow, u, u[:, 0])["divergence"]
        torch.testing.assert_close(found, torch.full_like(found, 2 * sin(2 * pi / 16)))


def test_noise_raises_the_residual():
    """One percent of noise on the solver's Burgers trajectories raises every violation."""
    u_0, _ = sample_initial_states("burgers_1d", range(2), (64,), seed=0)
    u = solve("burgers_1d", u_0.double(), {"nu": 0.01}, [0.0, 0.02, 0.04])
    noise = torch.randn(u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = Dataset("data", "burgers_1d", (), (), (0.0, 0.02), (64,), (1.0,), ("periodic",), {"nu": 0.01})
    truth, noisy = violations(law, u, u[:, 0]), violations(law, u + 0.01 * noise, u[:, 0])
    assert set(truth) == {"conservation", "residual"}
    assert all((noisy[name] > truth[name]).all() for name in truth)
