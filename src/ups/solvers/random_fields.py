"""Random fields on two- and three-dimensional grids, as PDEBench draws them, from one NumPy stream per trajectory."""

from functools import reduce

import numpy as np

LARGEST_MODE = 4


def fourier_field(axes: list[np.ndarray], stream: np.random.Generator) -> np.ndarray:
    """F = sum over m of |k|^p sin(k . x + phi), k = 2 pi m on the unit box, divided by the mean of |F|.

    All components of m are in -4..4 and none is 0; p = -1/2 in two and -1 in three dimensions; phi ~ U(0, 2 pi).
    """
    m = np.array([i for i in range(-LARGEST_MODE, LARGEST_MODE + 1) if i])
    num_axes = len(axes)
    k_squared = reduce(np.add.outer, [(2 * np.pi * m) ** 2] * num_axes)
    phi = stream.uniform(0.0, 2 * np.pi, k_squared.shape)
    F = k_squared ** (-(num_axes - 1) / 4) * np.exp(1j * phi)
    for x in axes:  # each product replaces the first axis of modes by an axis of points at the end
        F = np.tensordot(F, np.exp(2j * np.pi * np.outer(m, x)), axes=(0, 0))
    return F.imag / np.abs(F.imag).mean()


def gaussian_field(
    shape: tuple[int, ...], stream: np.random.Generator, *, scale: float, smoothness: float
) -> np.ndarray:
    """Gaussian field of mean 0 and deviation 1 with amplitudes |m|^(-2 smoothness) where (|m| scale)^2 > 0.1."""
    m_squared = reduce(np.add.outer, [np.fft.fftfreq(points, 1 / points) ** 2 for points in shape])
    amplitude = np.where(m_squared * scale**2 > 0.1, np.maximum(m_squared, 1.0) ** -smoothness, 0.0)
    noise = stream.standard_normal((2, *shape))
    field = np.fft.fftn(amplitude * (noise[0] + 1j * noise[1])).real
    return (field - field.mean()) / field.std()


def solenoidal(v: np.ndarray) -> np.ndarray:
    """Velocity field (d, *grid) of a periodic box without its divergence: v_hat - k (k . v_hat) / |k|^2."""
    grid = v.shape[1:]
    v_hat = np.fft.fftn(v, axes=range(1, v.ndim))
    k = np.stack(np.meshgrid(*[np.fft.fftfreq(points, 1 / points) for points in grid], indexing="ij"))
    k_squared = np.maximum((k**2).sum(axis=0), 1.0)
    return np.fft.ifftn(v_hat - k * (k * v_hat).sum(axis=0) / k_squared, axes=range(1, v.ndim)).real
