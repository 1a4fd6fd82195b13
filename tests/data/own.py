"""A family that is not PDEBench's, Korteweg-de Vries, and trajectories of it from a spectral solver."""

from pathlib import Path

import numpy as np

from ups.data.families import Family

NUM_POINTS, LENGTH, DT = 32, 2.0, 0.02
X = (np.arange(NUM_POINTS) + 0.5) * LENGTH / NUM_POINTS
KDV = Family(
    "kdv_1d",
    "u_t + u u_x + delta^2 u_xxx = 0",
    fields=["u"],
    axes=["x"],
    boundary="periodic",
    parameters=["delta"],
    conserved=["u"],
    meanings={"u": "surface elevation"},
    units={"u": "m", "x": "m", "t": "s"},
)


def solve_kdv(count: int, num_snapshots: int, delta: float, seed: int = 0, substeps: int = 60) -> np.ndarray:
    """Snapshots u (N, T, X) from random sines, by Strang splitting: exact dispersion, Runge-Kutta advection."""
    generator, k = np.random.default_rng(seed), 2 * np.pi * np.fft.rfftfreq(NUM_POINTS, LENGTH / NUM_POINTS)
    amplitude, phase = generator.normal(size=(count, 3, 1)), generator.uniform(0, 2 * np.pi, (count, 3, 1))
    u = 0.3 * (amplitude * np.sin(2 * np.pi * np.arange(1, 4)[:, None] * X / LENGTH + phase)).sum(1)
    h, u_hat, snapshots = DT / substeps, np.fft.rfft(u), [u]
    half_dispersion, resolved = np.exp(0.5j * delta**2 * k**3 * h), k < 2 / 3 * k.max()

    def advection(u_hat: np.ndarray) -> np.ndarray:
        return -0.5j * k * resolved * np.fft.rfft(np.fft.irfft(u_hat, NUM_POINTS) ** 2)

    for _ in range(num_snapshots - 1):
        for _ in range(substeps):
            u_hat = half_dispersion * u_hat
            k_1 = advection(u_hat)
            k_2 = advection(u_hat + h / 2 * k_1)
            k_3 = advection(u_hat + h / 2 * k_2)
            u_hat = half_dispersion * (u_hat + h / 6 * (k_1 + 2 * k_2 + 2 * k_3 + advection(u_hat + h * k_3)))
        snapshots.append(np.fft.irfft(u_hat, NUM_POINTS))
    return np.stack(snapshots, axis=1)


DELTA = 0.1
U, T = solve_kdv(4, 5, DELTA).astype(np.float32), DT * np.arange(5)


def write_npz(folder: Path) -> Path:
    """A small file of the family: all of its content as arrays."""
    path = folder / "named.npz"
    np.savez(path, u=U, x=X, t=T, delta=DELTA, family="kdv_1d")
    return path
