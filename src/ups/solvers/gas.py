"""PDEBench's random initial states of compressible flow: density, pressure and velocities (2 + d, *grid)."""

from functools import reduce

import numpy as np

from ups.solvers.compressible import GAMMA
from ups.solvers.random_fields import fourier_field, solenoidal
from ups.solvers.sines import rescaled, sines, window

THINNEST = 0.01  # of the mean density or pressure: a rare field would else reach below zero


def random_gas(axes: list[np.ndarray], stream: np.random.Generator, mach: float | None) -> np.ndarray:
    """PDEBench's `Rand`: sums of sines in one dimension, Fourier fields at Mach number `mach` in two and three."""
    return sines_gas(axes[0], stream) if len(axes) == 1 else fourier_gas(axes, stream, mach)


def sines_gas(x: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """Three sums of sines: rho and p moved to b + m [0, 1], b and m log-uniform in 1..10 and 10..100; v as it is."""
    rho, p, v = (sines(x, stream, num_modes=3, P=0.5) for _ in range(3))
    m_rho, b_rho = 10 ** stream.uniform(0.0, 1.0, 2)
    m_p, b_p = 10 ** stream.uniform(1.0, 2.0, 2)
    return np.stack((b_rho + m_rho * rescaled(rho), b_p + m_p * rescaled(p), v))


def shock_tube(x: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """PDEBench's `Shock`: two constant states, log-uniform rho in 1..10, p in 10..100 and v in exp(-1/2)..exp(1/2).

    Each field has its own jump, at the fraction 1/4 + r/2 of the cells with the r of its right state.
    """
    r = stream.uniform(0.0, 1.0, (3, 2))
    states = np.stack((10 ** r[0], 10 ** (1 + r[1]), np.exp(r[2] - 0.5)))
    jump = np.floor(len(x) * (0.25 + 0.5 * r[:, 1]))
    return np.where(np.arange(len(x)) < jump[:, None], states[:, :1], states[:, 1:])


def fourier_gas(axes: list[np.ndarray], stream: np.random.Generator, mach: float) -> np.ndarray:
    """Smooth perturbations of a gas at rest with density rho_0 and temperature T_0, half of them in a window.

    rho = rho_0 (1 + delta F), p = rho_0 T_0 (1 + delta' F'), mean |v| = mach sqrt(Gamma T_0).
    """
    rho_0, T_0 = stream.uniform(0.1, 10.0, 2)
    delta_rho, delta_p = stream.uniform(0.01, 0.2, 2)
    p_0 = rho_0 * T_0
    rho = rho_0 * np.maximum(1 + delta_rho * fourier_field(axes, stream), THINNEST)
    p = p_0 * np.maximum(1 + delta_p * fourier_field(axes, stream), THINNEST)
    v = np.stack([fourier_field(axes, stream) for _ in axes])
    v *= mach * np.sqrt(GAMMA * T_0) / np.sqrt((v**2).sum(axis=0)).mean()
    if stream.uniform() < 0.5:
        edges = [window(x, stream.uniform(0.1, 0.45), stream.uniform(0.55, 0.9)) for x in axes]
        W = reduce(np.multiply.outer, edges)
        rho, p, v = W * rho + (1 - W) * rho_0, W * p + (1 - W) * p_0, W * v
    return np.stack((rho, p, *v))


def turbulent_gas(axes: list[np.ndarray], stream: np.random.Generator, mach: float) -> np.ndarray:
    """PDEBench's `Turb`: rho = 1, p = 1 / (Gamma mach^2), and a velocity without divergence of mean |v| = 1."""
    v = solenoidal(np.stack([fourier_field(axes, stream) for _ in axes]))
    v /= np.sqrt((v**2).sum(axis=0)).mean()
    rest = np.ones(v.shape[1:])
    return np.stack((rest, rest / (GAMMA * mach**2), *v))
