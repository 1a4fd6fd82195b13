"""PDEBench's published mode against loops over its formulas, one snapshot, cell and mode at a time."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.metrics.pdebench import CompatSuite, MetricSuite, snapshot_errors

BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}
GRIDS = [(32,), (9,), (20,), (28, 26), (8, 10), (26, 24, 28), (4, 6, 8)]


def random_pair(grid: tuple[int, ...], batch_size: int, num_times: int = 2) -> tuple[Tensor, Tensor]:
    """Draw a prediction and a reference (B, T, 2, *grid) in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, num_times, 2, *grid)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def measure(u_pred: Tensor, u_ref: Tensor, batch_size: int, num_initial: int = 1) -> dict[str, float]:
    """Score samples that come at once."""
    suite = CompatSuite(u_ref.ndim - 3, batch_size, num_initial)
    suite.add(snapshot_errors(u_pred, u_ref))
    return suite.compute()


def slow_faces(error: np.ndarray) -> tuple[float, int]:
    """Sum of squares over the first and last cells of each axis, and how many there are."""
    total, count = 0.0, 0
    for axis, side in product(range(error.ndim), (0, -1)):
        face = np.take(error, side, axis=axis)
        for cell in product(*map(range, face.shape)):
            total += face[cell] ** 2
            count += 1
    return total, count


def slow_shells(error: np.ndarray) -> list[float]:
    """Energy of each shell of one snapshot: of all modes of `rfft` in 1D, of a quadrant or octant in 2D and 3D."""
    if error.ndim == 1:
        return [abs(complex(mode)) ** 2 for mode in np.fft.rfft(error)]
    error_hat = np.fft.fftn(error)
    shells = [0.0] * math.ceil(min(error.shape) / 2)
    for k in product(*(range(math.ceil(n / 2)) for n in error.shape)):
        shell = math.isqrt(sum(i * i for i in k))
        if shell < len(shells):
            shells[shell] += abs(complex(error_hat[k])) ** 2
    return shells


def slow_batch(u_pred: np.ndarray, u_ref: np.ndarray) -> dict[str, float]:
    """Metrics of one batch (B, T, C, *grid) with its initial snapshots."""
    B, T, C, n = *u_ref.shape[:3], math.prod(u_ref.shape[3:])
    rows: dict[str, list[float]] = {}
    for t, c in product(range(T), range(C)):
        errors = [u_pred[b, t, c] - u_ref[b, t, c] for b in range(B)]
        rms = [math.sqrt((error**2).sum() / n) for error in errors]
        row = {
            "RMSE": sum(rms) / B,
            "nRMSE": sum(r / math.sqrt((u_ref[b, t, c] ** 2).sum() / n) for b, r in enumerate(rms)) / B,
            "cRMSE": math.sqrt(sum((u_pred[b, t, c].sum() - u_ref[b, t, c].sum()) ** 2 for b in range(B)) / B) / n,
            "max_error": max(abs(error).max() for error in errors),
        }
        if u_ref.ndim < 6:
            row["bRMSE"] = sum(math.sqrt(total / count) for total, count in map(slow_faces, errors)) / B
        amplitudes = [math.sqrt(sum(e) / B) / n for e in zip(*map(slow_shells, errors), strict=True)]
        bands = {name: amplitudes[start:stop] for name, (start, stop) in BANDS.items()}
        row |= {f"fRMSE_{name}": sum(band) / len(band) for name, band in bands.items() if band}
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    if u_ref.ndim == 6:
        faces = [[[slow_faces(u_pred[b, t, c] - u_ref[b, t, c]) for c in range(C)] for b in range(B)] for t in range(T)]
        roots = [[math.sqrt(sum(total for total, _ in f) / f[0][1]) for f in row] for row in faces]
        rows["bRMSE"] = [sum(row) / B for row in roots]
    return {name: float(sum(values) / len(values)) for name, values in rows.items()}


def slow_suite(u_pred: Tensor, u_ref: Tensor, batch_size: int, num_initial: int) -> dict[str, float]:
    """Prepend exact snapshots and average over batches, of which the last may be smaller."""
    initial = torch.ones_like(u_ref[:, :1]).repeat(1, num_initial, *[1] * (u_ref.ndim - 2))
    pairs = [torch.cat([initial, u], 1).numpy() for u in (u_pred, u_ref)]
    starts = range(0, len(u_ref), batch_size)
    batches = [slow_batch(*(u[start : start + batch_size] for u in pairs)) for start in starts]
    return {name: sum(batch[name] for batch in batches) / len(batches) for name in batches[0]}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_suite_equals_plain_loops(grid: tuple[int, ...]):
    """The vectorised suite equals the loops to 1e-6 in one, two and three dimensions."""
    u_pred, u_ref = random_pair(grid, batch_size=3)
    expected = slow_suite(u_pred, u_ref, batch_size=2, num_initial=1)
    assert measure(u_pred.float(), u_ref.float(), batch_size=2) == pytest.approx(expected, rel=1e-6)
    assert measure(u_pred, u_ref, batch_size=2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_initial", [0, 1, 3])
def test_initial_snapshots_count_as_exact(num_initial: int):
    """Each metric is that of the loops over the predicted snapshots and the initial ones before them."""
    u_pred, u_ref = random_pair((12, 8), batch_size=2, num_times=4)
    expected = slow_suite(u_pred, u_ref, batch_size=2, num_initial=num_initial)
    assert measure(u_pred, u_ref, 2, num_initial) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("grid", [(16,), (12, 10), (6, 8, 6)], ids=str)
@pytest.mark.parametrize("num_initial", [1, 10])
def test_nRMSE_converts_to_that_of_MetricSuite(grid: tuple[int, ...], num_initial: int):  # noqa: N802
    """With whole batches, of T snapshots T_0 initial, nRMSE of `CompatSuite` = that of `MetricSuite` (T - T_0) / T."""
    u_pred, u_ref = random_pair(grid, batch_size=6, num_times=5)
    suite = MetricSuite()
    suite.add(snapshot_errors(u_pred, u_ref))
    expected = suite.compute()["nRMSE"] * 5 / (5 + num_initial)
    assert measure(u_pred, u_ref, 3, num_initial)["nRMSE"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("split", [[1, 6], [3, 1, 3], [1] * 7], ids=str)
def test_only_the_batch_size_of_pdebench_matters(split: list[int]):
    """However the samples arrive, they are put into batches of three."""
    u_pred, u_ref = random_pair((8, 9), batch_size=7)
    suite = CompatSuite(2, batch_size=3)
    for batch in zip(u_pred.split(split), u_ref.split(split), strict=True):
        suite.add(snapshot_errors(*batch))
    assert suite.compute() == pytest.approx(measure(u_pred, u_ref, batch_size=3), rel=1e-12)
    assert suite.compute()["cRMSE"] != pytest.approx(measure(u_pred, u_ref, batch_size=7)["cRMSE"], rel=1e-3)


def test_a_half_batch_weighs_like_a_whole_one():
    """Errors 1, 1 and 4 in batches of two have the mean (1 + 4) / 2, times 1 / 2 for the initial snapshot."""
    u_ref = torch.ones(3, 1, 1, 4)
    u_pred = u_ref + torch.tensor([1.0, 1.0, 4.0]).reshape(3, 1, 1, 1)
    assert measure(u_pred, u_ref, batch_size=2)["nRMSE"] == pytest.approx(1.25)


def test_bands_without_a_shell_have_no_value():
    """On 20 cells rfft has modes 0 to 10, so there is no high band; on 24 it is Nyquist's mode alone."""
    assert "fRMSE_high" not in measure(*random_pair((20,), batch_size=1), batch_size=1)
    assert "fRMSE_high" in measure(*random_pair((24,), batch_size=1), batch_size=1)


def test_no_trajectory_is_no_metric():
    """Without any trajectory there is nothing to compute."""
    with pytest.raises(ValueError, match="at least one trajectory"):
        CompatSuite(1, batch_size=2).compute()


def test_max_error_of_small_errors():
    """Errors of 0.1 and 0.3 in batches of one have the mean maximum 0.2, times 1 / 2 for the initial snapshot."""
    u_ref = torch.ones(2, 1, 1, 4, dtype=torch.float64)
    u_pred = u_ref + torch.tensor([0.1, -0.3], dtype=torch.float64).reshape(2, 1, 1, 1)
    assert measure(u_pred, u_ref, batch_size=1)["max_error"] == pytest.approx(0.1)
