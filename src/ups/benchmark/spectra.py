"""What vectorised metrics spare: the spectrum of PDEBench's fRMSE against a loop over its modes."""

import math
from itertools import product

import torch
from torch import Tensor

from ups.benchmark.records import Record, record
from ups.evaluation.costs import in_turns
from ups.metrics.spectra import error_spectra

SHAPES = {"snapshot": (1, 1, 1, 128, 128), "trajectory": (1, 20, 2, 128, 128)}


def spectra_records(rounds: int, seed: int) -> list[Record]:
    """Spectra per second of `error_spectra`, which gives the full one too, against the loop; both in turns."""
    return [_record(f"fRMSE_of_{name}_over_loop", shape, rounds, seed) for name, shape in SHAPES.items()]


def _record(name: str, shape: tuple[int, ...], rounds: int, seed: int) -> Record:
    error = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sides = {"fast": lambda: error_spectra(error), "loop": lambda: looped_spectrum(error)}
    seconds = in_turns(sides, rounds, error.device)
    num_spectra = math.prod(shape[:3])
    return record(name, num_spectra / seconds["fast"], "spectra/s", num_spectra / seconds["loop"])


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
