"""PDEBench's metrics against hand-computed values, invariants and a slow second implementation."""

import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ups.metrics.errors import EPS, boundary_rms, nRMSE, rms
from ups.metrics.pdebench import MetricSuite, snapshot_errors
from ups.metrics.spectra import radial_spectrum

KEYS = {"nRMSE", "RMSE", "max_error", "cRMSE", "bRMSE", "fRMSE_low", "fRMSE_mid", "fRMSE_high"}
GRIDS = [(32,), (9,), (26, 28), (7, 10), (5, 6, 8)]


def random_pair(grid: tuple[int, ...], batch_size: int = 3) -> tuple[Tensor, Tensor]:
    """Draw a prediction and a reference (B, 2, 2, *grid) in float64."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch_size, 2, 2, *grid, generator=generator, dtype=torch.float64) for _ in range(2))


def measure(u_pred: Tensor, u_ref: Tensor) -> dict[str, float]:
    """Score one batch."""
    suite = MetricSuite()
    suite.add(snapshot_errors(u_pred, u_ref))
    return suite.compute()


def slow_boundary_error(error: Tensor) -> float:
    """Loop over the cells of one snapshot (*grid); a cell counts once per face it lies on."""
    total, num_cells = 0.0, 0
    for cell in product(*map(range, error.shape)):
        num_faces = sum((i == 0) + (i == n - 1) for i, n in zip(cell, error.shape, strict=True))
        total += num_faces * float(error[cell]) ** 2
        num_cells += num_faces
    return math.sqrt(total / num_cells)


def slow_shells(error: Tensor, pairs_once: bool) -> list[float]:
    """Loop over all modes of one snapshot (*grid), or over one of each pair k, -k, and add up each shell's energy."""
    error_hat = torch.fft.fftn(error) / error.numel()
    shells = [0.0] * math.ceil(min(error.shape) / 2)
    for index in product(*map(range, error.shape)):
        k = tuple(i - n if 2 * i > n else i for i, n in zip(index, error.shape, strict=True))
        shell = math.isqrt(sum(i * i for i in k))
        if shell < len(shells) and not (pairs_once and k < tuple(-i for i in k)):
            shells[shell] += abs(complex(error_hat[index])) ** 2
    return shells


def slow_suite(u_pred: Tensor, u_ref: Tensor) -> dict[str, float]:
    """Follow the written definitions, one snapshot at a time."""
    B, T, C = u_ref.shape[:3]
    rows = {name: [] for name in KEYS - {"max_error"}}
    for t, c in product(range(T), range(C)):
        errors = [u_pred[b, t, c] - u_ref[b, t, c] for b in range(B)]
        rms = [float((error**2).mean()) ** 0.5 for error in errors]
        rows["RMSE"].append(sum(rms) / B)
        rows["nRMSE"].append(sum(r / float((u_ref[b, t, c] ** 2).mean()) ** 0.5 for b, r in enumerate(rms)) / B)
        rows["cRMSE"].append(math.sqrt(sum(float(error.mean()) ** 2 for error in errors) / B))
        rows["bRMSE"].append(sum(map(slow_boundary_error, errors)) / B)
        shells = zip(*(slow_shells(error, pairs_once=True) for error in errors), strict=True)
        amplitudes = [math.sqrt(sum(energies) / B) for energies in shells]
        for name, band in (("low", amplitudes[:4]), ("mid", amplitudes[4:12]), ("high", amplitudes[12:])):
            rows[f"fRMSE_{name}"].append(sum(band) / len(band) if band else 0.0)
    means = {name: sum(values) / len(values) for name, values in rows.items()}
    return means | {"max_error": float((u_pred - u_ref).abs().max())}


def test_nRMSE_by_hand():  # noqa: N802
    """The error (3, 4) of the reference (6, 8) is half of it."""
    u_ref = torch.tensor([6.0, 8.0]).reshape(1, 1, 1, 2)
    u_pred = u_ref + torch.tensor([3.0, -4.0])
    assert rms(u_pred - u_ref).item() == pytest.approx(math.sqrt(12.5))
    assert nRMSE(u_pred, u_ref).item() == pytest.approx(0.5)


def test_suite_by_hand():
    """Two samples on four cells give the eight numbers computed on paper."""
    u_ref = torch.ones(2, 1, 1, 4)
    error = torch.tensor([[1.0, -1.0, 1.0, -1.0], [2.0, 2.0, 2.0, 2.0]]).reshape(2, 1, 1, 4)
    expected = {"nRMSE": 1.5, "RMSE": 1.5, "max_error": 2.0, "cRMSE": math.sqrt(2), "bRMSE": 1.5}
    # the first error is the Nyquist mode, beyond the shells 0 and 1; the second is mode 0 with amplitude 2
    expected |= {"fRMSE_low": math.sqrt(2) / 2, "fRMSE_mid": 0.0, "fRMSE_high": 0.0}
    assert measure(u_ref + error, u_ref) == pytest.approx(expected)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_suite_equals_plain_loops(grid: tuple[int, ...]):
    """The vectorised suite equals loops over samples, cells and modes."""
    u_pred, u_ref = random_pair(grid)
    assert measure(u_pred, u_ref) == pytest.approx(slow_suite(u_pred, u_ref), rel=1e-9)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_radial_spectrum_equals_plain_loops(grid: tuple[int, ...]):
    """Each shell holds the energy of all modes of the full spectrum with floor(|k|) = k."""
    u, _ = random_pair(grid, batch_size=1)
    expected = torch.tensor(slow_shells(u[0, 1, 0], pairs_once=False), dtype=u.dtype)
    assert torch.allclose(radial_spectrum(u)[0, 1, 0], expected)


@pytest.mark.parametrize("grid", [(16,), (16, 20), (12, 12, 14)], ids=str)
def test_radial_spectrum_keeps_the_energy(grid: tuple[int, ...]):
    """The shells of a field without modes beyond them add up to the mean of its square (Parseval)."""
    u_hat = torch.fft.rfftn(random_pair(grid)[0], dim=tuple(range(3, 3 + len(grid))))
    axes = [torch.fft.fftfreq(n, 1 / n) for n in grid[:-1]] + [torch.arange(grid[-1] // 2 + 1.0)]
    norm = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(dim=0).sqrt()
    u = torch.fft.irfftn(u_hat * (norm < min(grid) // 2), s=grid, dim=tuple(range(3, 3 + len(grid))))
    assert torch.allclose(radial_spectrum(u).sum(dim=-1), u.square().flatten(3).mean(dim=-1))


@pytest.mark.parametrize(("wavenumber", "band"), [(0, "low"), (3, "low"), (4, "mid"), (11, "mid"), (12, "high")])
@pytest.mark.parametrize("num_dims", [1, 2])
def test_sine_error_lies_in_its_band(wavenumber: int, band: str, num_dims: int):
    """The error 2 cos(2 pi k x) has the amplitude 1 in the band of k, shared by its shells, and none elsewhere."""
    x = torch.arange(48, dtype=torch.float64) / 48
    error = (1 + (wavenumber > 0)) * torch.cos(2 * math.pi * wavenumber * x).expand(1, 1, 1, *[48] * num_dims)
    metrics = measure(error, torch.zeros_like(error))
    num_shells = {"low": 4, "mid": 8, "high": 12}
    expected = {f"fRMSE_{name}": (name == band) / count for name, count in num_shells.items()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("split", [[1, 6], [3, 1, 3], [1] * 7], ids=str)
def test_batches_do_not_matter(split: list[int]):
    """Any split into batches gives the metrics and the curve of all samples at once."""
    u_pred, u_ref = random_pair((8, 9), batch_size=7)
    suites = [MetricSuite(), MetricSuite()]
    suites[0].add(snapshot_errors(u_pred, u_ref))
    for batch in zip(u_pred.split(split), u_ref.split(split), strict=True):
        suites[1].add(snapshot_errors(*batch))
    assert suites[1].num_trajectories == 7
    assert suites[1].compute() == pytest.approx(suites[0].compute(), rel=1e-12)
    assert torch.allclose(suites[1].curve(), suites[0].curve())


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_nRMSE_is_scale_invariant(scale: float):  # noqa: N802
    """A change of units leaves the nRMSE as it is."""
    u_pred, u_ref = random_pair((16,))
    assert torch.allclose(nRMSE(scale * u_pred, scale * u_ref), nRMSE(u_pred, u_ref))


def test_curve_is_nRMSE_over_time():  # noqa: N802
    """The curve is the mean of the nRMSE over samples and channels, and its mean is the metric."""
    u_pred, u_ref = random_pair((16,))
    suite = MetricSuite()
    suite.add(snapshot_errors(u_pred, u_ref))
    assert torch.allclose(suite.curve(), nRMSE(u_pred, u_ref).mean(dim=(0, 2)))
    assert suite.curve().mean().item() == pytest.approx(suite.compute()["nRMSE"])


def test_max_error_is_a_maximum():
    """One wrong cell in one of many snapshots and batches is the maximum error, undiluted."""
    suite = MetricSuite()
    for spike in (0.0, -7.0, 1.0):
        u_pred = torch.zeros(2, 3, 2, 8)
        u_pred[1, 2, 0, 5] = spike
        suite.add(snapshot_errors(u_pred, torch.zeros_like(u_pred)))
    assert suite.compute()["max_error"] == 7.0


def test_boundary_by_hand():
    """On 3 x 4 cells a corner counts twice among the 14 face cells, an edge cell once, an inner cell never."""
    for cell, count in {(0, 0): 2, (2, 3): 2, (0, 1): 1, (1, 3): 1, (1, 1): 0}.items():
        u_pred = torch.zeros(1, 1, 1, 3, 4)
        u_pred[0, 0, 0, *cell] = 1.0
        assert boundary_rms(u_pred).item() == pytest.approx(math.sqrt(count / 14))


def test_vanishing_reference_is_clamped_and_counted():
    """Beside a reference without signal errors are divided by EPS of its scale, and each such snapshot is counted."""
    u_ref = torch.ones(2, 3, 2, 8)
    u_ref[0, 1, 1] = 0.0
    suite = MetricSuite()
    suite.add(snapshot_errors(u_ref + EPS, u_ref))
    suite.add(snapshot_errors(u_ref + EPS, u_ref))
    assert suite.clamped == 2
    assert suite.curve()[1].item() == pytest.approx(0.25, rel=0.1)


def test_perfect_prediction_has_no_error():
    """Every metric of the reference itself is zero, also in bands that the grid cannot hold."""
    _, u_ref = random_pair((20, 20))
    assert measure(u_ref, u_ref) == dict.fromkeys(KEYS, 0.0)


def test_diverged_prediction_is_not_hidden():
    """One NaN makes every metric NaN, so no gate can pass on it."""
    u_pred, u_ref = random_pair((28,))
    u_pred[1, 0, 0, 0] = math.nan
    assert all(math.isnan(value) for value in measure(u_pred, u_ref).values())


@pytest.mark.parametrize("shape", [(2, 4, 1, 8, 8), (2, 3, 2, 8, 8)], ids=str)
def test_wrong_shapes_are_refused(shape: tuple[int, ...]):
    """Other times or channels than those seen before are an error."""
    suite = MetricSuite()
    suite.add(snapshot_errors(torch.zeros(2, 3, 1, 8, 8), torch.zeros(2, 3, 1, 8, 8)))
    with pytest.raises(ValueError, match="expected"):
        suite.add(snapshot_errors(torch.zeros(shape), torch.zeros(shape)))


def test_unequal_tensors_are_refused_with_their_shapes():
    """Prediction and reference of two shapes are an error that names both and what was expected."""
    line = "expected two tensors (B, T, C, *grid) of one shape, got (2, 3, 1, 8) and (2, 4, 1, 8)"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        snapshot_errors(torch.zeros(2, 3, 1, 8), torch.zeros(2, 4, 1, 8))


def test_no_trajectory_is_no_metric():
    """Without any trajectory there is nothing to compute."""
    with pytest.raises(ValueError, match="^expected at least one trajectory, got none: .* before asking for metrics$"):
        MetricSuite().compute()


def test_a_reference_of_eps_is_not_clamped():
    """Only a reference below EPS of the largest in time is counted."""
    u_ref, sizes = torch.ones(1, 3, 1, 8, dtype=torch.float64), torch.tensor([7, 7 * EPS, 3 * EPS], dtype=torch.float64)
    errors = replace(snapshot_errors(u_ref, u_ref), rms_ref=sizes.reshape(1, 3, 1))
    suite = MetricSuite()
    suite.add(errors)
    assert suite.clamped == 1
