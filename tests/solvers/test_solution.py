from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from ups.errors import ConfigFault
from ups.solvers import SIMULATED_FAMILIES, draw, solve
from ups.solvers.families import PROBLEMS

torch.set_num_threads(1)

SHARED = Path(__file__).parents[2].parent / "shared" / "pdebench"
COEFFICIENTS = {"beta": 0.7, "nu": 0.02, "rho": 2.0}
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="PDEBench's sample files are not here")


def nRMSE(u: torch.Tensor, u_ref: torch.Tensor) -> float:  # noqa: N802
    """RMSE over space divided by the reference's RMS, averaged over trajectories, snapshots and fields."""
    space = tuple(range(3, u.ndim))
    return ((u - u_ref).square().mean(space).sqrt() / u_ref.square().mean(space).sqrt()).mean().item()


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_a_solution_does_not_depend_on_its_batch(family):
    """A trajectory is the same alone and among others, and the progress adds up to all snapshots."""
    done = []
    times = [0.0] if PROBLEMS[family].steady else [0.0, 0.1, 0.25]
    u_0, drawn = draw(family, range(3), (8,) * PROBLEMS[family].num_axes, seed=0)
    u = solve(family, u_0, {**COEFFICIENTS, **drawn}, times, done.append)
    last = {name: value[2:] for name, value in drawn.items()}
    alone = solve(family, None if u_0 is None else u_0[2:], {**COEFFICIENTS, **last}, times)
    assert torch.allclose(alone[0], u[2], atol=1e-6)
    assert sum(done) == 3 * len(times)


@pytest.mark.parametrize("family", [name for name in SIMULATED_FAMILIES if not PROBLEMS[name].steady])
def test_a_solution_starts_at_u_0_in_its_precision(family):
    """The first snapshot is u_0 itself, and the result has its dtype."""
    u_0, drawn = draw(family, range(2), (8,) * PROBLEMS[family].num_axes, seed=0)
    u = solve(family, u_0, {**COEFFICIENTS, **drawn}, [1.0, 1.1])
    assert u.shape == (2, 2, *u_0.shape[1:])
    assert torch.equal(u[:, 0], u_0)
    assert u.dtype == torch.float32


def test_coefficients_may_differ_between_trajectories():
    """One value per trajectory gives the same as one call per value."""
    u_0, _ = draw("burgers_1d", range(2), (16,), seed=0)
    u = solve("burgers_1d", u_0, {"nu": torch.tensor([0.1, 1.0])}, [0.0, 0.3])
    for i, nu in enumerate((0.1, 1.0)):
        assert torch.allclose(solve("burgers_1d", u_0[i : i + 1], {"nu": nu}, [0.0, 0.3])[0], u[i], atol=1e-6)


@pytest.mark.parametrize(
    ("family", "coefficients", "times", "message"),
    [
        ("wave_1d", {}, [0.0, 1.0], "'wave_1d' cannot be simulated; families that can: advection_1d"),
        ("burgers_1d", {}, [0.0, 1.0], "missing: nu"),
        ("burgers_1d", {"nu": torch.ones(3)}, [0.0, 1.0], "must be a number or 2 values"),
        ("burgers_1d", {"nu": 1.0}, [0.0, 0.0], "times must increase"),
        ("diffusion_reaction_2d", {}, [0.0, 1.0], "needs u_0 of shape"),
        ("darcy_2d", {"nu": 1.0, "beta": 1.0}, [0.0], "permeability"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(family, coefficients, times, message):
    """A wrong family, coefficient, time or shape ends in a ConfigFault of one line."""
    with pytest.raises(ConfigFault, match=message) as fault:
        solve(family, torch.ones(2, 1, 8), coefficients, times)
    assert "\n" not in str(fault.value)


@needs_shared
@pytest.mark.parametrize(
    ("family", "name", "coefficients"),
    [
        ("advection_1d", "1D_Advection_Sols_beta0.4.hdf5", {"beta": 0.4}),
        ("burgers_1d", "1D_Burgers_Sols_Nu0.01.hdf5", {"nu": 0.01}),
        ("diffusion_reaction_1d", "ReacDiff_Nu0.5_Rho1.0.hdf5", {"nu": 0.5, "rho": 1.0}),
    ],
)
def test_tensor_families_follow_pdebench(family, name, coefficients):
    """From PDEBench's first states the solver arrives at PDEBench's later ones within 5 %."""
    with h5py.File(SHARED / name) as file:
        u_ref = torch.from_numpy(file["tensor"][:3])[:, :, None]
        times = file["t-coordinate"][: u_ref.shape[1]]
    assert nRMSE(solve(family, u_ref[:, 0], coefficients, times), u_ref) < 0.05


@needs_shared
@pytest.mark.parametrize(
    ("family", "name", "order"),
    [
        ("diffusion_reaction_2d", "2D_diff-react_NA_NA.h5", (0, 1, 4, 3, 2)),
        ("shallow_water_2d", "2D_rdb_NA_NA.h5", (0, 1, 4, 2, 3)),
    ],
)
def test_group_families_follow_pdebench(family, name, order):
    """From PDEBench's first states the solver arrives at PDEBench's later ones within 5 %."""
    with h5py.File(SHARED / name) as file:
        u_ref = torch.from_numpy(np.stack([file[group]["data"][:11] for group in ("0000", "0001")])).permute(order)
        times = file["0000/grid/t"][:11]
    assert nRMSE(solve(family, u_ref[:, 0], {}, times), u_ref) < 0.05


@needs_shared
def test_darcy_follows_pdebench():
    """From PDEBench's permeabilities the solver arrives at PDEBench's almost steady states within 5 %."""
    with h5py.File(SHARED / "2D_DarcyFlow_beta1.0_Train.hdf5") as file:
        nu, u_ref = torch.from_numpy(file["nu"][:4]), torch.from_numpy(file["tensor"][:4])[:, :, None]
    assert nRMSE(solve("darcy_2d", None, {"nu": nu, "beta": 1.0}, [0.0]), u_ref) < 0.05
