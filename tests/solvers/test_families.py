import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.solvers.exact import shift
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader, find_datasets
from ups.errors import ConfigFault
from ups.metrics.errors import nRMSE
from ups.solvers import SIMULATED_FAMILIES, families, sample_initial_states, solve
from ups.solvers.families import PROBLEMS
from ups.solvers.numerics import integrate

torch.set_num_threads(1)

SHARED = Path(__file__).parents[2].parent / "shared" / "pdebench"
COEFFICIENTS = {"beta": 0.7, "nu": 0.02, "rho": 2.0, "eta": 0.1, "zeta": 0.05}
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="PDEBench's sample files are not here")


def drawn(family: str, count: int) -> tuple[torch.Tensor | None, dict]:
    """The first states of a family on eight points per axis, and all its coefficients."""
    parameters = {"mach": 0.5}
    u_0, fields = sample_initial_states(
        family, range(count), (8,) * PROBLEMS[family].num_axes, seed=0, parameters=parameters
    )
    return u_0, {**COEFFICIENTS, **fields}


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_a_solution_does_not_depend_on_its_batch(family):
    """A trajectory is the same alone and among others."""
    times = [0.0] if PROBLEMS[family].steady else [0.0, 0.1, 0.25]
    u_0, coefficients = drawn(family, 3)
    u = solve(family, u_0, coefficients, times)
    last = {name: value[2:] if isinstance(value, torch.Tensor) else value for name, value in coefficients.items()}
    alone = solve(family, None if u_0 is None else u_0[2:], last, times)
    assert torch.allclose(alone[0], u[2], atol=1e-6)


def test_neighbouring_seeds_share_no_trajectory():
    """Trajectories 0 to 7 of seed 1 are not 1 to 8 of seed 0, as they would be with the sum of seed and index."""
    first, second = (sample_initial_states("burgers_1d", range(9), (16,), seed)[0] for seed in (0, 1))
    assert not any(torch.equal(u, v) for u in first for v in second)


@pytest.mark.parametrize("family", [name for name in SIMULATED_FAMILIES if not PROBLEMS[name].steady])
def test_a_solution_starts_at_u_0_in_its_precision(family):
    """The first snapshot is u_0 itself, and the result has its dtype."""
    u_0, coefficients = drawn(family, 2)
    u = solve(family, u_0, coefficients, [1.0, 1.1])
    assert u.shape == (2, 2, *u_0.shape[1:])
    assert torch.equal(u[:, 0], u_0)
    assert u.dtype == torch.float32


EXCHANGED = {"compressible_ns_2d": [0, 1, 3, 2], "incompressible_ns_2d": [1, 0, 2]}  # fields; others have no vectors


@pytest.mark.parametrize("family", [name for name in SIMULATED_FAMILIES if PROBLEMS[name].num_axes == 2])
def test_axes_can_be_exchanged(family):
    """On cells that are not square, a state with x and y exchanged, and all vectors, stays the exchanged state."""
    order, times = EXCHANGED.get(family, slice(None)), [0.0] if PROBLEMS[family].steady else [0.0, 0.1, 0.3]
    u_0, fields = sample_initial_states(family, range(2), (8, 12), seed=0, parameters={"mach": 0.5})
    c = {"beta": 1.0, "eta": 0.0, "zeta": 0.0, **{name: value.double() for name, value in fields.items()}}
    other = c | {name: c[name].mT for name in fields if c[name].ndim > 1}
    if "force_x" in c:
        other |= {"force_x": c["force_y"].mT, "force_y": c["force_x"].mT}
    u_0, v_0 = (None, None) if u_0 is None else (u_0.double(), u_0.double().mT[:, order])
    u, v = solve(family, u_0, c, times), solve(family, v_0, other, times)
    # A step of shallow water goes first along x, then along y, as in PDEBench's generator.
    assert torch.allclose(v.mT[:, :, order], u, atol=0.02 if family == "shallow_water_2d" else 1e-10)


def test_intermediate_snapshots_change_nothing():
    """A dam breaks alike whether or not snapshots are taken on the way, though momenta are not among their fields.

    Their times shorten steps, which changes the error of the scheme on cells as coarse as these.
    """
    u_0, _ = sample_initial_states("shallow_water_2d", [0], (16, 16), seed=0)
    seldom, often = (solve("shallow_water_2d", u_0.double(), {}, times)[:, -1] for times in ([0, 1], [0, 0.4, 0.7, 1]))
    assert torch.allclose(seldom, often, atol=0.02)


LIMITS = {
    "advection_1d": ({"beta": -2.0}, [7.0], (8,), 0.4 / (2 * 8)),
    "burgers_1d": ({"nu": 1.0}, [-2.0], (8,), 0.5 / (2 * 8)),
    "diffusion_reaction_1d": ({"nu": 2.0, "rho": 5.0}, [0.5], (8,), 0.004 / 5),
    "compressible_ns_1d": ({"eta": 1.0, "zeta": 1.0}, [3.0, 1.8, -2.0], (8,), 0.3 / (3 * 4)),
    "compressible_ns_2d": ({"eta": 1.0, "zeta": 1.0}, [3.0, 1.8, -4.0, 1.0], (8, 16), 0.3 / (5 * 8)),
    "diffusion_reaction_2d": ({}, [2.0, 9.0], (8, 16), 1 / (4 * 5e-3 * (4**2 + 8**2) + 3 * 2**2 + 1)),
    "shallow_water_2d": ({}, [4.0, 4.0, -12.0], (10, 20), 0.9 / max((1 + 2) * 2, (3 + 2) * 4)),
    "incompressible_ns_2d": ({"force_x": 0.0, "force_y": 0.0}, [1.0, 2.0, 3.0], (8, 16), 0.12 / 16),
}


@pytest.mark.parametrize("family", LIMITS)
def test_time_steps_have_their_limit_by_hand(family):
    """The largest step of a uniform state is the CFL number over the sum or largest of (|v| + c) / dx, c the sound."""
    coefficients, values, grid, expected = LIMITS[family]
    u = torch.tensor(values, dtype=torch.float64).reshape(1, -1, *[1] * len(grid)).expand(2, -1, *grid)
    c = {name: torch.full((1, 1, *[1] * len(grid)), value) for name, value in coefficients.items()}
    _, limit = PROBLEMS[family].stepper(c, PROBLEMS[family].box(grid))
    assert limit(u).flatten().tolist() == pytest.approx([expected] * 2)


def test_coefficients_may_differ_between_trajectories():
    """One value per trajectory gives the same as one call per value."""
    u_0, _ = sample_initial_states("burgers_1d", range(2), (16,), seed=0)
    u = solve("burgers_1d", u_0, {"nu": np.array([0.1, 1.0])}, [0.0, 0.3])
    for i, nu in enumerate((0.1, 1.0)):
        assert torch.allclose(solve("burgers_1d", u_0[i : i + 1], {"nu": nu}, [0.0, 0.3])[0], u[i], atol=1e-6)


def test_a_state_that_is_not_finite_is_refused():
    """A NaN in the initial state is told before anything is computed."""
    u_0 = torch.tensor([[[0.0, torch.nan, 1.0, 2.0]]])
    with pytest.raises(ConfigFault, match="finite"):
        solve("burgers_1d", u_0, {"nu": 0.1}, [0.0, 1.0])


def test_the_number_of_threads_is_left_as_it_was(monkeypatch):
    """A solution is computed in one thread; afterwards the caller's number holds again, also after a fault."""
    torch.set_num_threads(2)
    seen = []

    def counted(*arguments):
        seen.append(torch.get_num_threads())
        return integrate(*arguments)

    monkeypatch.setattr(families, "integrate", counted)
    solve("burgers_1d", torch.ones(1, 1, 8), {"nu": 0.1}, [0.0, 0.1])
    with pytest.raises(ConfigFault):
        solve("burgers_1d", torch.ones(1, 1, 8), {}, [0.0, 0.1])
    assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    torch.set_num_threads(1)


def test_the_number_advanced_together_does_not_matter(monkeypatch):
    """Trajectories advanced one by one or all together are the same, each with its own coefficients."""
    u_0, coefficients = drawn("incompressible_ns_2d", 3)
    together = solve("incompressible_ns_2d", u_0, coefficients, [0.0, 0.2])
    monkeypatch.setattr(families, "CHUNK_VALUES", 1)
    assert torch.allclose(solve("incompressible_ns_2d", u_0, coefficients, [0.0, 0.2]), together, atol=1e-6)


def test_a_coefficient_has_one_value_for_all_or_one_for_each(monkeypatch):
    """As many values as trajectories advanced together are refused: they belong to no trajectory in particular."""
    monkeypatch.setattr(families, "CHUNK_VALUES", 16)
    with pytest.raises(ConfigFault, match="must be a number or 4 values"):
        solve("burgers_1d", torch.ones(4, 1, 8), {"nu": torch.ones(2)}, [0.0, 0.1])


def test_a_field_may_be_given_once_for_all():
    """One force or permeability for all trajectories gives the same as a copy for each."""
    u_0, coefficients = drawn("incompressible_ns_2d", 2)
    once = coefficients | {name: coefficients[name][0] for name in ("force_x", "force_y")}
    each = coefficients | {name: coefficients[name][:1].expand(2, -1, -1) for name in ("force_x", "force_y")}
    solutions = [solve("incompressible_ns_2d", u_0, c, [0.0, 0.2]) for c in (once, each)]
    assert torch.equal(*solutions)
    nu, beta = drawn("darcy_2d", 1)[1]["nu"], torch.tensor([1.0, 2.0])
    u = solve("darcy_2d", None, {"nu": nu[0], "beta": beta}, [0.0])
    assert torch.allclose(u, solve("darcy_2d", None, {"nu": nu.expand(2, -1, -1), "beta": beta}, [0.0]))


def test_a_boundary_that_cannot_be_chosen_is_refused():
    """A boundary that a family does not have is a ConfigFault."""
    with pytest.raises(ConfigFault, match="the boundary of burgers_1d cannot be chosen"):
        solve("burgers_1d", torch.ones(2, 1, 8), {"nu": 0.1}, [0.0, 1.0], boundary="outflow")


@pytest.mark.parametrize(
    ("family", "coefficients", "times", "message"),
    [
        ("wave_1d", {}, [0.0, 1.0], "'wave_1d' cannot be simulated; families that can: advection_1d"),
        ("burgers_1d", {}, [0.0, 1.0], "missing: nu"),
        ("burgers_1d", {"nu": torch.ones(3)}, [0.0, 1.0], "must be a number or 2 values"),
        ("burgers_1d", {"nu": 1.0}, [0.0, 0.0], "times must increase and be finite"),
        ("diffusion_reaction_2d", {}, [0.0, 1.0], "needs u_0 of shape"),
        ("darcy_2d", {"nu": 1.0, "beta": 1.0}, [0.0], "permeability"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(family, coefficients, times, message):
    """A wrong family, coefficient, time or shape ends in a ConfigFault of one line."""
    with pytest.raises(ConfigFault, match=message) as fault:
        solve(family, torch.ones(2, 1, 8), coefficients, times)
    assert "\n" not in str(fault.value)


def random_part(family: str, indices, seed: int = 0) -> torch.Tensor:
    """What is random of a family: the initial states, for Darcy the permeabilities."""
    parameters = {"mach": 0.5}
    u_0, coefficients = sample_initial_states(
        family, indices, (16,) * PROBLEMS[family].num_axes, seed, parameters=parameters
    )
    return coefficients["nu"] if u_0 is None else u_0


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_a_trajectory_depends_on_seed_and_index_alone(family):
    """Trajectory 5 starts from the same state alone, in another order and among others; another seed changes it."""
    together = random_part(family, range(8))
    assert torch.equal(random_part(family, [5])[0], together[5])
    assert torch.equal(random_part(family, [7, 5]), together[[7, 5]])
    assert not torch.equal(random_part(family, range(8), seed=1), together)


@pytest.mark.parametrize("family", SIMULATED_FAMILIES)
def test_states_have_the_fields_of_the_family(family):
    """States come as finite float32 (B, C, *grid), permeabilities as (B, X, Y)."""
    problem = PROBLEMS[family]
    states = random_part(family, range(3))
    fields = () if problem.steady else (problem.num_fields,)
    assert states.shape == (3, *fields, *(16,) * problem.num_axes)
    assert states.dtype == torch.float32
    assert states.isfinite().all()


def test_the_one_dimensional_families_share_their_states():
    """Advection and Burgers start from the same states, reaction-diffusion from the same rescaled to [0, 1]."""
    u_0 = random_part("advection_1d", range(4))
    assert torch.equal(random_part("burgers_1d", range(4)), u_0)
    low, high = u_0.amin(-1, keepdim=True), u_0.amax(-1, keepdim=True)
    assert torch.allclose(random_part("diffusion_reaction_1d", range(4)), (u_0 - low) / (high - low), atol=1e-6)


def test_a_grid_of_the_wrong_dimension_is_refused():
    """A grid that does not fit the family ends in a ConfigFault."""
    with pytest.raises(ConfigFault, match="1 axes"):
        sample_initial_states("burgers_1d", [0], (8, 8), seed=0)


BARS = {
    "advection_1d": 0.02,
    "burgers_1d": 0.02,
    "diffusion_reaction_1d": 0.02,
    "diffusion_sorption_1d": 0.02,
    "diffusion_reaction_2d": 0.02,
    "shallow_water_2d": 0.001,
    "compressible_ns_1d": 0.1,
    "compressible_ns_2d": 0.1,
    "compressible_ns_3d": 0.2,
    "incompressible_ns_2d": 0.2,
}


def stored(family: str, count: int) -> tuple[torch.Tensor, dict, tuple[float, ...]]:
    """The first trajectories of PDEBench's sample file of a family, their coefficients and times."""
    names = [path.name for path in SHARED.iterdir() if re.fullmatch(FAMILIES[family].file_pattern, path.name)]
    dataset = next(iter(find_datasets(SHARED, sorted(names)[:1]).values()))
    with TrajectoryReader(SHARED, dataset) as reader:
        u = torch.from_numpy(np.stack([reader.read(i) for i in range(count)]))
        fields = torch.from_numpy(np.stack([reader.read_coefficients(i) for i in range(count)])).unbind(1)
    given = dict(zip(FAMILIES[family].coefficients, fields, strict=True))
    return u, {**dataset.parameters, **given}, dataset.times


def test_every_transient_family_has_a_bar():
    """No family is left out of the comparison with PDEBench."""
    assert set(BARS) == {name for name in SIMULATED_FAMILIES if not PROBLEMS[name].steady}


@needs_shared
@pytest.mark.parametrize("family", BARS)
def test_solutions_follow_pdebench(family):
    """From PDEBench's first states the solver arrives at PDEBench's later ones, within the bar of the family."""
    u_ref, coefficients, times = stored(family, 1 if family == "compressible_ns_3d" else 2)
    u_ref, times = u_ref[:, : 1 + len(times) // 2], times[: 1 + len(times) // 2]
    assert nRMSE(solve(family, u_ref[:, 0], coefficients, times), u_ref).mean() < BARS[family]


@needs_shared
def test_an_exact_shift_differs_from_pdebench():
    """PDEBench's advection blurs: its own scheme follows it much closer than the exact solution does."""
    u_ref, coefficients, times = stored("advection_1d", 8)
    beta, start = coefficients["beta"], u_ref[:, 0]
    generator = solve("advection_1d", start, coefficients, times)
    exact = torch.stack([shift(start, torch.tensor(beta * (time - times[0])), 1.0) for time in times], dim=1)
    assert nRMSE(generator, u_ref).mean() < 1e-3
    assert nRMSE(exact, u_ref).mean() > 5e-3


@needs_shared
def test_darcy_follows_pdebench():
    """From PDEBench's permeabilities the solver arrives at PDEBench's almost steady states: 2 % for the median."""
    u_ref, coefficients, _ = stored("darcy_2d", 16)
    assert nRMSE(solve("darcy_2d", None, coefficients, [0.0]), u_ref).median() < 0.02
