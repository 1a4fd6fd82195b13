import numpy as np
import pytest
import torch

from ups.errors import ConfigFault
from ups.solvers import SIMULATED_FAMILIES, draw
from ups.solvers.families import PROBLEMS
from ups.solvers.sines import rescaled, sines, window

torch.set_num_threads(1)


def drawn(family: str, indices, seed: int = 0) -> torch.Tensor:
    """What is random of a family: the initial states, for Darcy the permeabilities."""
    mach = 0.5 if family.startswith("compressible") else None
    u_0, coefficients = draw(family, indices, (16,) * PROBLEMS[family].num_axes, seed, mach=mach)
    return coefficients["nu"] if u_0 is None else u_0


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_a_trajectory_depends_on_seed_and_index_alone(family):
    """Trajectory 5 starts from the same state alone, in another order and among others; another seed changes it."""
    together = drawn(family, range(8))
    assert torch.equal(drawn(family, [5])[0], together[5])
    assert torch.equal(drawn(family, [7, 5]), together[[7, 5]])
    assert not torch.equal(drawn(family, range(8), seed=1), together)


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_states_have_the_fields_of_the_family(family):
    """States come as finite float32 (B, C, *grid), permeabilities as (B, X, Y)."""
    problem = PROBLEMS[family]
    states = drawn(family, range(3))
    fields = () if problem.steady else (problem.num_fields,)
    assert states.shape == (3, *fields, *(16,) * problem.num_axes)
    assert states.dtype == torch.float32
    assert states.isfinite().all()


def test_the_one_dimensional_families_share_their_states():
    """Advection and Burgers start from the same states, reaction-diffusion from the same rescaled to [0, 1]."""
    u_0 = drawn("advection_1d", range(4))
    assert torch.equal(drawn("burgers_1d", range(4)), u_0)
    low, high = u_0.amin(-1, keepdim=True), u_0.amax(-1, keepdim=True)
    assert torch.allclose(drawn("diffusion_reaction_1d", range(4)), (u_0 - low) / (high - low), atol=1e-6)


def test_sines_are_the_same_function_on_every_grid():
    """Random numbers do not depend on the resolution: refining the grid refines the same function."""
    coarse, fine = ((np.arange(n) + 0.5) / n for n in (512, 1536))
    for i in range(8):
        u_coarse = sines(coarse, np.random.default_rng(i))
        u_fine = sines(fine, np.random.default_rng(i))[1::3]
        assert np.abs(u_coarse - u_fine).mean() < 0.02


def test_sines_have_the_published_spread():
    """Mean offset and spatial deviation are both about 0.47, as in PDEBench's one-dimensional files."""
    u_0, _ = draw("advection_1d", range(2000), (64,), seed=0)
    assert u_0.std(-1).mean().item() == pytest.approx(0.47, abs=0.04)
    assert u_0.mean(-1).abs().median().item() == pytest.approx(0.47, abs=0.1)


def test_window_opens_between_its_edges():
    """The window is one between its edges, one half on them and zero outside."""
    w = window(np.array([0.0, 0.2, 0.5, 0.8, 1.0]), 0.2, 0.8)
    np.testing.assert_allclose(w, [0.0, 0.5, 1.0, 0.5, 0.0], atol=1e-12)


def test_rescaled_touches_zero_and_one():
    """The smallest value becomes 0 and the largest 1."""
    np.testing.assert_allclose(rescaled(np.array([-2.0, 0.0, 2.0])), [0.0, 0.5, 1.0])


def test_permeability_is_one_or_a_tenth():
    """Permeabilities take the values 0.1 and 1, each on about half of the area."""
    _, coefficients = draw("darcy_2d", range(300), (16, 16), seed=0)
    assert set(coefficients["nu"].unique().tolist()) == {torch.tensor(0.1).item(), 1.0}
    assert (coefficients["nu"] == 1).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_the_dam_has_its_radius():
    """Water of height 2 stands on an area of pi R^2 and of height 1 elsewhere, with R between 0.3 and 0.7."""
    u_0, coefficients = draw("shallow_water_2d", range(8), (64, 64), seed=0)
    area = (u_0 - 1).double().mean((1, 2, 3)) * 25
    assert torch.allclose((area / torch.pi).sqrt(), coefficients["dam_radius"], atol=5e-3)
    assert ((coefficients["dam_radius"] > 0.3) & (coefficients["dam_radius"] < 0.7)).all()
    assert u_0.unique().min() == 1 and u_0.unique().max() == 2


def test_no_two_dams_are_the_same_on_coarse_cells():
    """Different radii are different states on 32 x 32 cells."""
    u_0, _ = draw("shallow_water_2d", range(64), (32, 32), seed=0)
    assert len(u_0.flatten(1).unique(dim=0)) == 64


def test_a_grid_of_the_wrong_dimension_is_refused():
    """A grid that does not fit the family ends in a ConfigFault."""
    with pytest.raises(ConfigFault, match="1 axes"):
        draw("burgers_1d", [0], (8, 8), seed=0)
