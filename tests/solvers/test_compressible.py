from math import exp, pi, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.solvers import compressible, sample_initial_states, solve
from ups.solvers.compressible import GAMMA, conserved, hllc, primitive, viscous_change
from ups.solvers.random_fields import solenoidal

torch.set_num_threads(1)

INVISCID = {"eta": 0.0, "zeta": 0.0}
VISCOUS = {"eta": 0.02, "zeta": 0.01}


def centres(num_points: int, low: float = 0.0, length: float = 1.0) -> Tensor:
    """Centres of equal cells."""
    return low + length * (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points


def waves(num_axes: int, num_points: int) -> Tensor:
    """One smooth gas (1, 2 + d, *grid) whose fields differ from each other."""
    grid = torch.meshgrid(*[2 * pi * centres(num_points)] * num_axes, indexing="ij")
    phase = sum((axis + 1) * x for axis, x in enumerate(grid))
    fields = [1 + 0.3 * phase.sin(), 1 + 0.2 * phase.cos()]
    return torch.stack(fields + [0.5 * (x + axis).sin() for axis, x in enumerate(grid)])[None]


def half_wave(p: float, rho_k: float, p_k: float) -> float:
    """Change of velocity through the shock or rarefaction from state k to pressure p (Toro, 4.6 and 4.7)."""
    if p > p_k:
        return (p - p_k) * sqrt(2 / ((GAMMA + 1) * rho_k) / (p + (GAMMA - 1) / (GAMMA + 1) * p_k))
    c = sqrt(GAMMA * p_k / rho_k)
    return 2 * c / (GAMMA - 1) * ((p / p_k) ** ((GAMMA - 1) / (2 * GAMMA)) - 1)


def side(s: float, p: float, v: float, state: tuple[float, float, float]) -> tuple[float, float, float]:
    """Density, pressure and velocity at x / t = s left of the contact, for a left state (rho, p, v)."""
    rho_k, p_k, v_k = state
    c, q = sqrt(GAMMA * p_k / rho_k), (GAMMA - 1) / (GAMMA + 1)
    if p > p_k:
        shock = v_k - c * sqrt((GAMMA + 1) / (2 * GAMMA) * p / p_k + (GAMMA - 1) / (2 * GAMMA))
        return state if s < shock else (rho_k * (p / p_k + q) / (q * p / p_k + 1), p, v)
    if s < v_k - c:
        return state
    if s > v - c * (p / p_k) ** ((GAMMA - 1) / (2 * GAMMA)):
        return rho_k * (p / p_k) ** (1 / GAMMA), p, v
    fan = 2 / (GAMMA + 1) + q / c * (v_k - s)
    v_fan = 2 / (GAMMA + 1) * (c + (GAMMA - 1) / 2 * v_k + s)
    return rho_k * fan ** (2 / (GAMMA - 1)), p_k * fan ** (2 * GAMMA / (GAMMA - 1)), v_fan


def riemann(s: float, left: tuple[float, float, float], right: tuple[float, float, float]) -> tuple[float, ...]:
    """Exact solution (rho, p, v) at x / t = s of two constant states, its pressure found by bisection."""
    low, high = 1e-9, 1e6
    for _ in range(200):
        p = 0.5 * (low + high)
        if half_wave(p, *left[:2]) + half_wave(p, *right[:2]) + right[2] - left[2] > 0:
            high = p
        else:
            low = p
    v = 0.5 * (left[2] + right[2] + half_wave(p, *right[:2]) - half_wave(p, *left[:2]))
    if s < v:
        return side(s, p, v, left)
    rho, p, v = side(-s, p, -v, (right[0], right[1], -right[2]))
    return rho, p, -v


@pytest.mark.parametrize(
    ("left", "right", "time", "allowed"),
    [
        ((1.0, 1.0, 0.0), (0.125, 0.1, 0.0), 0.4, 0.01),
        ((1.0, 1.0, 0.75), (0.125, 0.1, 0.0), 0.3, 0.02),
        ((1.0, 0.4, -1.0), (1.0, 0.4, 1.0), 0.3, 0.02),
        ((1.0, 1000.0, 0.0), (1.0, 0.01, 0.0), 0.012, 0.06),
    ],
)
def test_a_shock_tube_follows_the_exact_solution(left, right, time, allowed):
    """Mean errors of density, pressure and velocity are small against the exact solution's range."""
    x = centres(400, -1.0, 2.0)
    u_0 = torch.where(x < 0, torch.tensor(left)[:, None], torch.tensor(right)[:, None])[None].double()
    u = solve("compressible_ns_1d", u_0, INVISCID, [0.0, time], boundary="outflow")[0, 1]
    exact = torch.tensor([riemann(s, left, right) for s in (x / time).tolist()], dtype=torch.float64).T
    assert ((u - exact).abs().mean(1) / (exact.amax(1) - exact.amin(1)) < allowed).all()


def test_a_moving_density_wave_converges_at_second_order():
    """At constant pressure and velocity a density wave is carried along, at second order, 1.8 with a limiter."""
    errors = []
    for num_points in (32, 64, 128):
        x = centres(num_points, -1.0, 2.0)
        blur = torch.sinc(torch.tensor(1 / num_points))  # the mean of a sine over a cell
        u_0 = torch.stack((1 + 0.2 * blur * (pi * x).sin(), torch.ones_like(x), torch.ones_like(x)))[None]
        rho = solve("compressible_ns_1d", u_0, INVISCID, [0.0, 0.5])[0, 1, 0]
        errors.append((rho - 1 - 0.2 * blur * (pi * (x - 0.5)).sin()).abs().mean())
    orders = torch.stack(errors[:-1]).log2() - torch.stack(errors[1:]).log2()
    assert orders.min() > 1.8


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_mass_energy_and_momentum_are_kept(num_axes):
    """On a periodic domain the sums of rho, E and rho v stay what they were to round-off, with viscosity."""
    u = solve(f"compressible_ns_{num_axes}d", waves(num_axes, 12), VISCOUS, [0.0, 0.2])[0]
    before, after = (conserved(state).flatten(1).mean(1) for state in u)
    assert torch.allclose(after, before, rtol=0, atol=1e-13)
    assert (u[1] - u[0]).abs().max() > 0.1


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_a_plane_wave_is_one_dimensional(axis):
    """A wave along one axis of a box is the wave of the one-dimensional solver; the coarser axes stay uniform."""
    wave = waves(1, 16)
    line = solve("compressible_ns_1d", wave.repeat(1, 1, 2), VISCOUS, [0.0, 0.2])[0, 1, :, :16]
    u_0 = torch.zeros(1, 5, 16, 4, 4, dtype=torch.float64)
    u_0[:, [0, 1, axis]] = wave[..., None, None].expand(-1, -1, -1, 4, 4)
    u = solve("compressible_ns_3d", u_0.transpose(2, axis), VISCOUS, [0.0, 0.2])[0, 1].transpose(1, axis - 1)
    assert torch.allclose(u[[0, 1, axis]], line[..., None, None].expand(-1, -1, 4, 4), atol=1e-10)


def test_each_trajectory_has_its_viscosity(monkeypatch):
    """Trajectories with different coefficients are the same together, line by line and alone."""
    u_0 = torch.cat((waves(2, 8), waves(2, 8)))
    eta, zeta = torch.tensor([0.1, 0.01]), torch.tensor([0.0, 0.05])
    u = solve("compressible_ns_2d", u_0, {"eta": eta, "zeta": zeta}, [0.0, 0.1])
    monkeypatch.setattr(compressible, "LINE_VALUES", 1)
    for i in range(2):
        alone = solve("compressible_ns_2d", u_0[i : i + 1], {"eta": eta[i], "zeta": zeta[i]}, [0.0, 0.1])
        assert torch.allclose(alone[0], u[i], atol=1e-12)


@pytest.mark.parametrize("across", [2, 3])
def test_a_shear_wave_decays_at_the_rate_eta(across):
    """A weak velocity across its own variation decays by exp(-eta (2 pi)^2 t) at density 1."""
    x = centres(32)
    u_0 = torch.zeros(1, 4, 32, 32, dtype=torch.float64)
    u_0[:, :2] = 1
    wave = 1e-4 * (2 * pi * x).sin()
    u_0[:, across] = wave if across == 2 else wave[:, None]
    u = solve("compressible_ns_2d", u_0, {"eta": 0.02, "zeta": 0.5}, [0.0, 0.5])[0, 1, across]
    assert (u.std() / u_0[0, across].std()).item() == pytest.approx(exp(-0.02 * (2 * pi) ** 2 * 0.5), rel=0.01)


def test_a_longitudinal_wave_decays_at_the_rate_zeta_and_four_thirds_of_eta():
    """At density 1 and hardly any pressure a weak velocity along itself decays by exp(-(zeta + 4 eta / 3) pi^2 t)."""
    x = centres(32, -1.0, 2.0)
    u_0 = torch.stack((torch.ones_like(x), torch.full_like(x, 1e-4), 1e-4 * (pi * x).sin()))[None]
    u = solve("compressible_ns_1d", u_0, {"eta": 0.03, "zeta": 0.02}, [0.0, 1.0])[0, 1, 2]
    assert (u.std() / u_0[0, 2].std()).item() == pytest.approx(exp(-0.06 * pi**2), rel=0.01)


def test_stress_has_the_viscosity_of_its_direction():
    """Momentum along x gains (rho viscosity v_xx), and energy what that does to v^2 / 2 and to heat: nothing in sum."""
    x = centres(64)
    W = torch.stack((torch.full_like(x, 2.0), torch.ones_like(x), (2 * pi * x).sin()))[..., None]
    change = viscous_change(W, 1 / 64, True, torch.tensor([[[0.3]]], dtype=torch.float64))[..., 0]
    eigenvalue = -((2 * 64 * torch.sin(torch.tensor(pi / 64))) ** 2)
    assert torch.allclose(change[2], 2 * 0.3 * eigenvalue * W[2, :, 0], atol=1e-5)
    assert torch.allclose(change[1], 2 * 0.3 * (2 * pi) ** 2 * (4 * pi * x).cos(), atol=0.1)  # rho viscosity (v v_x)_x
    assert change[1].mean().abs() < 1e-12
    assert change[0].abs().max() == 0


def test_density_and_pressure_stay_positive():
    """Strong shocks and thin gas leave density and pressure above zero, periodic or open."""
    u_0, _ = sample_initial_states("compressible_ns_2d", range(4), (16, 16), seed=0, parameters={"mach": 3.0})
    for boundary in ("periodic", "outflow"):
        u = solve("compressible_ns_2d", u_0, INVISCID, [0.0, 0.1, 0.2], boundary=boundary)
        assert u.isfinite().all()
        assert u[:, :, :2].min() > 0


def test_open_ends_let_waves_out():
    """A pulse in a gas at rest has left an open tube, but not a periodic one."""
    x = centres(100, -1.0, 2.0)
    pulse = 1 + 0.1 * torch.exp(-100 * x**2)
    u_0 = torch.stack((pulse ** (1 / GAMMA), pulse, torch.zeros_like(x)))[None]
    left = {
        boundary: solve("compressible_ns_1d", u_0, INVISCID, [0.0, 1.5], boundary=boundary)[0, 1, 1].std()
        for boundary in ("periodic", "outflow")
    }
    assert left["outflow"] < 0.05 * left["periodic"]


@pytest.mark.parametrize(("speed", "end"), [(5.0, 0), (-5.0, -1)])
def test_through_an_open_end_flows_the_gas_of_the_end(speed, end):
    """Where supersonic gas of uniform pressure comes in, density stays as it is: the ends are mirrored outside."""
    rho = torch.linspace(1.0, 2.0, 16, dtype=torch.float64)
    u_0 = torch.stack((rho, torch.ones_like(rho), torch.full_like(rho, speed)))[None]
    u = solve("compressible_ns_1d", u_0, INVISCID, [0.0, 0.1], boundary="outflow")[0, 1]
    assert u[0, end].item() == pytest.approx(rho[end].item(), abs=1e-12)
    assert (u[0] - rho).abs().max() > 0.1


def test_hllc_is_consistent():
    """Between equal states the numerical flux is the physical one, at rest and in supersonic flow either way."""
    for v in (0.3, 4.0, -4.0):
        rho, p, w = 2.0, 1.5, -0.4
        W = torch.tensor([rho, p, v, w], dtype=torch.float64)[:, None]
        E = conserved(W)[1, 0].item()
        expected = torch.tensor([rho * v, (E + p) * v, rho * v * v + p, rho * v * w], dtype=torch.float64)
        assert torch.allclose(hllc(W, W, 2)[:, 0], expected)


def test_hllc_keeps_a_contact_at_rest():
    """Between two densities at one pressure and rest nothing flows but the pressure."""
    W_L, W_R = (torch.tensor([rho, 1.5, 0.0], dtype=torch.float64)[:, None] for rho in (1.0, 5.0))
    assert torch.allclose(hllc(W_L, W_R, 2)[:, 0], torch.tensor([0.0, 0.0, 1.5], dtype=torch.float64), atol=1e-15)


def test_conserved_and_primitive_are_inverse():
    """Density, pressure and velocities survive the way to conserved fields and back."""
    W = waves(3, 4)[0]
    assert torch.allclose(primitive(conserved(W)), W, atol=1e-14)


@pytest.mark.parametrize("num_axes", [2, 3])
def test_speed_is_the_mach_number(num_axes):
    """Where no window cuts it, the mean speed is mach sqrt(Gamma T_0); a window only lowers it."""
    u, _ = sample_initial_states(
        f"compressible_ns_{num_axes}d", range(12), (12,) * num_axes, seed=3, parameters={"mach": 0.5}
    )
    speed = u[:, 2:].square().sum(1).sqrt().flatten(1).mean(1).numpy()
    T_0 = np.array([np.random.default_rng([3, i]).uniform(0.1, 10.0, 2)[1] for i in range(12)])
    ratio = speed / (0.5 * np.sqrt(GAMMA * T_0))
    assert np.isclose(ratio, 1, atol=1e-5).any()
    assert (ratio < 1 + 1e-5).all()


def test_outside_its_window_a_gas_is_at_rest():
    """About half of the gases have a window; there density and pressure are rho_0 and rho_0 T_0 in the corner."""
    u, _ = sample_initial_states("compressible_ns_2d", range(40), (12, 12), seed=3, parameters={"mach": 0.5})
    rho_0, T_0 = np.stack([np.random.default_rng([3, i]).uniform(0.1, 10.0, 2) for i in range(40)], axis=1)
    corner = u[..., 0, 0].numpy()
    has_window = np.abs(corner[:, 2:]).max(axis=1) < 1e-3
    assert 12 <= has_window.sum() <= 28
    np.testing.assert_allclose(corner[has_window, 0], rho_0[has_window], rtol=1e-3)
    np.testing.assert_allclose(corner[has_window, 1], (rho_0 * T_0)[has_window], rtol=1e-3)


def test_sines_gas_stays_in_its_range():
    """Density lies between 1 and 20, pressure between 10 and 200, and velocities have either sign."""
    u, _ = sample_initial_states("compressible_ns_1d", range(200), (64,), seed=0)
    assert 1 <= u[:, 0].min() < 1.5
    assert u[:, 0].max() <= 20
    assert 10 <= u[:, 1].min() < 15
    assert u[:, 1].max() <= 200
    assert u[:, 2].min() < 0 < u[:, 2].max()


def test_shock_tubes_have_two_states():
    """Each field has one jump in the middle half of the tube, and the velocity is always positive."""
    u, _ = sample_initial_states("compressible_ns_1d", range(50), (64,), seed=0, start="Shock")
    jumps = u.diff(dim=-1) != 0
    assert (jumps.sum(-1) == 1).all()
    place = jumps.float().argmax(-1)
    assert place.min() >= 15
    assert place.max() <= 48
    assert u[:, 2].min() > 0.6


def test_shock_tubes_jump_where_their_right_states_say():
    """Of 64 cells density jumps at 64 (1/4 + r/2) for the right density 10^r, pressure for 10^(1 + r)."""
    u, _ = sample_initial_states("compressible_ns_1d", range(50), (64,), seed=0, start="Shock")
    r = u[:, :2, -1].double().log10() - torch.tensor([0.0, 1.0])
    place = (u[:, :2].diff(dim=-1) != 0).float().argmax(-1) + 1
    assert torch.equal(place, (64 * (0.25 + 0.5 * r)).floor().long())


def test_turbulence_has_its_mach_number():
    """Density 1, pressure 1 / (Gamma M^2) and mean speed 1, without divergence."""
    u, _ = sample_initial_states("compressible_ns_3d", [0], (12,) * 3, seed=0, parameters={"mach": 0.5}, start="Turb")
    assert torch.allclose(u[:, 0], torch.ones(()))
    assert torch.allclose(u[:, 1], torch.tensor(1 / (GAMMA * 0.25)))
    assert u[:, 2:].square().sum(1).sqrt().mean().item() == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose(solenoidal(u[0, 2:].numpy()), u[0, 2:].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("compressible_ns_2d", {}, "needs a Mach number above 0, got None"),
        ("compressible_ns_3d", {"parameters": {"mach": 0.0}}, "needs a Mach number above 0"),
        ("compressible_ns_1d", {"start": "Turb"}, "start must be one of Rand, Shock"),
    ],
)
def test_a_gas_that_cannot_be_drawn_is_refused(family, options, message):
    """A missing Mach number or an unknown start is a ConfigFault."""
    with pytest.raises(ConfigFault, match=message):
        sample_initial_states(family, [0], (8,) * int(family[-2]), 0, **options)
