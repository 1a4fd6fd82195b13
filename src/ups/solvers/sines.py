"""PDEBench's random sums of sines on a line, and the window that cuts them."""

import numpy as np


def sines(x: np.ndarray, stream: np.random.Generator, num_modes: int = 4, P: float = 0.1) -> np.ndarray:
    """Sum_j A_j sin(2 pi j c_j x / L' + phi_j), sometimes its absolute value, a random sign, windowed at rate `P`.

    c_j counts how often j = 1..num_modes comes up in two draws, and L' = x_{N-1} - x_0. Every mode has an amplitude and
    a phase, so a mode that does not come up adds a constant.
    """
    j = np.arange(1, num_modes + 1)
    c = np.bincount(stream.integers(1, num_modes + 1, size=2), minlength=num_modes + 1)[1:]
    A = stream.uniform(0.0, 1.0, num_modes)
    phi = stream.uniform(0.0, 2 * np.pi, num_modes)
    u = (A * np.sin(2 * np.pi * j * c * x[:, None] / (x[-1] - x[0]) + phi)).sum(axis=1)
    if stream.uniform() < 0.1:
        u = np.abs(u)
    u = u * stream.choice([-1.0, 1.0])
    if stream.uniform() < P:
        u = u * window(x, stream.uniform(0.1, 0.45), stream.uniform(0.55, 0.9))
    return u


def window(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """w(x) = (tanh((x - a) / 0.01) - tanh((x - b) / 0.01)) / 2, one between a and b and zero outside."""
    return 0.5 * (np.tanh((x - a) / 0.01) - np.tanh((x - b) / 0.01))


def rescaled(u: np.ndarray) -> np.ndarray:
    """`u` moved and stretched to [0, 1]."""
    return (u - u.min()) / (u.max() - u.min())
