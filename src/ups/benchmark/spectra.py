"""What vectorised metrics spare: the spectrum of PDEBench's fRMSE against a loop over its modes."""

import math
import time
from collections.abc import Callable
from itertools import product
from statistics import median

import torch
from torch import Tensor

from ups.benchmark.records import Record, record
from ups.metrics.spectra import error_spectra

SHAPES = {"snapshot": (1, 1, 1, 128, 128), "trajectory": (1, 20, 2, 128, 128)}


def spectra_records(rounds: int, seed: int) -> list[Record]:
    """Spectra per second of `error_spectra`, which gives the full one too, against the loop; both in turns."""
    return [_record(f"fRMSE_of_{name}_over_loop", shape, rounds, seed) for name, shape in SHAPES.items()]


def _record(name: str, shape: tuple[int, ...], rounds: int, seed: int) -> Record:
    error = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    seconds: tuple[list[float], list[float]] = ([], [])
    sides = (error_spectra, looped_spectrum)
    for number in range(rounds + 1):
        for position in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[position].append(_seconds(sides[position], error))
    fast, slow = (math.prod(shape[:3]) / median(side[1:]) for side in seconds)  # the first round warms up
    return record(name, fast, "spectra/s", slow)


def looped_spectrum(error: Tensor) -> Tensor:
    """Energy of the shells of one quadrant of modes, mode by mode: (..., n, n) -> (..., n / 2)."""
    num_shells = error.shape[-1] // 2
    error_hat = torch.fft.fftn(error, dim=(-2, -1), norm="forward")
    shells = error.new_zeros(*error.shape[:-2], num_shells)
    for k in product(range(num_shells), repeat=2):
        shell = math.isqrt(k[0] ** 2 + k[1] ** 2)
        if shell < num_shells:
            shells[..., shell] += error_hat[..., k[0], k[1]].abs().square()
    return shells


def _seconds(spectrum: Callable[[Tensor], object], error: Tensor) -> float:
    start = time.perf_counter()
    spectrum(error)
    return time.perf_counter() - start
