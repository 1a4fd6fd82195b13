"""Random fields from which PDEBench builds initial states: sums of sines, Fourier fields, Gaussian fields."""

from functools import reduce

import numpy as np

Sample = tuple[np.ndarray | None, dict[str, np.ndarray]]
"""Initial state (C, *grid), None for a steady equation, and the coefficients that are random too, by name."""


def sines(x: np.ndarray, generator: np.random.Generator, num_modes: int = 4, P: float = 0.1) -> np.ndarray:
    """Sum_j A_j sin(2 pi j c_j x / L' + phi_j), modulus with probability 0.1, random sign, window with probability P.

    c_j counts how often j = 1..num_modes comes up in two draws, and L' = x_{N-1} - x_0. Every mode has an amplitude and
    a phase, so a mode that does not come up adds a constant.
    """
    j = np.arange(1, num_modes + 1)
    c = np.bincount(generator.integers(1, num_modes + 1, size=2), minlength=num_modes + 1)[1:]
    A = generator.uniform(0.0, 1.0, num_modes)
    phi = generator.uniform(0.0, 2 * np.pi, num_modes)
    u = (A * np.sin(2 * np.pi * j * c * x[:, None] / (x[-1] - x[0]) + phi)).sum(axis=1)
    if generator.uniform() < 0.1:
        u = np.abs(u)
    u = u * generator.choice([-1.0, 1.0])
    if generator.uniform() < P:
        u = u * window(x, generator.uniform(0.1, 0.45), generator.uniform(0.55, 0.9))
    return u


def window(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """w(x) = (tanh((x - a) / 0.01) - tanh((x - b) / 0.01)) / 2, one between a and b and zero outside."""
    return 0.5 * (np.tanh((x - a) / 0.01) - np.tanh((x - b) / 0.01))


def rescaled(u: np.ndarray) -> np.ndarray:
    """`u` mapped linearly to [0, 1]."""
    return (u - u.min()) / (u.max() - u.min())


def fourier_field(axes: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """F = sum over m of |k|^p sin(k . x + phi), k = 2 pi m on the unit box, divided by the mean of |F|.

    All components of m are in -4..4 and none is 0; p = -1/2 in two and -1 in three dimensions; phi ~ U(0, 2 pi).
    """
    m = np.array([-4, -3, -2, -1, 1, 2, 3, 4])
    num_axes = len(axes)
    k_squared = reduce(np.add.outer, [(2 * np.pi * m) ** 2] * num_axes)
    phi = generator.uniform(0.0, 2 * np.pi, k_squared.shape)
    F = k_squared ** (-(num_axes - 1) / 4) * np.exp(1j * phi)
    for x in axes:  # each product replaces the first axis of modes by an axis of points at the end
        F = np.tensordot(F, np.exp(2j * np.pi * np.outer(m, x)), axes=(0, 0))
    return F.imag / np.abs(F.imag).mean()


def gaussian_field(
    shape: tuple[int, ...], generator: np.random.Generator, *, scale: float, smoothness: float
) -> np.ndarray:
    """Gaussian field of mean 0 and deviation 1 with amplitudes |m|^(-2 smoothness) where (|m| scale)^2 > 0.1."""
    m_squared = reduce(np.add.outer, [np.fft.fftfreq(points, 1 / points) ** 2 for points in shape])
    amplitude = np.where(m_squared * scale**2 > 0.1, np.maximum(m_squared, 1.0) ** -smoothness, 0.0)
    noise = generator.standard_normal((2, *shape))
    field = np.fft.fftn(amplitude * (noise[0] + 1j * noise[1])).real
    return (field - field.mean()) / field.std()


def solenoidal(v: np.ndarray) -> np.ndarray:
    """Velocity field (d, *grid) of a periodic box without its divergence: v_hat - k (k . v_hat) / |k|^2."""
    grid = v.shape[1:]
    v_hat = np.fft.fftn(v, axes=range(1, v.ndim))
    k = np.stack(np.meshgrid(*[np.fft.fftfreq(points, 1 / points) for points in grid], indexing="ij"))
    k_squared = np.maximum((k**2).sum(axis=0), 1.0)
    return np.fft.ifftn(v_hat - k * (k * v_hat).sum(axis=0) / k_squared, axes=range(1, v.ndim)).real
