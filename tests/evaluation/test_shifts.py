"""Shifted trajectories, their errors, and what a warning is worth."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.evaluation.test_coverage import measure
from tests.evaluation.test_external import LAUNCH
from tests.untrained import receipt
from ups.config import ShiftsConfig
from ups.data.families import Dataset
from ups.evaluation.scores import held_out
from ups.evaluation.shifts import (
    AUROC,
    Case,
    Shift,
    compressed,
    errors_of_case,
    shifts_of,
    shifts_text,
    simulate_case,
    summarize,
)
from ups.metrics.errors import nRMSE
from ups.pipelines.studies import score_shifts
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import Trained

FACTORS = {"parameters": [0.5], "amplitudes": [3.0], "wavenumbers": [2], "noises": [0.3]}
FACTORS |= {"time_steps": [2.0], "grids": [2]}
CONFIG = ShiftsConfig(seed=0, num_trajectories=[3, 2, 1], unshifted=2, **FACTORS)
ADVECTION = Dataset(
    "1D_Advection_Sols_beta0.5",
    "advection_1d",
    ("a",),
    (9,),
    (0.0, 0.1, 0.2),
    (64,),
    (1.0,),
    ("periodic",),
    {"beta": 0.5},
)


def energies(u: Tensor) -> Tensor:
    """Energy by wavenumber, without the mean."""
    return torch.fft.rfft(u).abs().square()[..., 1:]


def test_AUROC_counts_pairs():  # noqa: N802
    """Of the four pairs of a large and another error two are in order and one is tied."""
    assert AUROC([1.0, 2.0, 2.0, 0.0], [True, True, False, False]) == 2.5 / 4
    assert math.isnan(AUROC([1.0, 2.0], [True, True]))


@pytest.mark.parametrize("times", [2, 4])
def test_compression_multiplies_wavenumbers(times: int):
    """A cosine that is even about the ends of its axis keeps its shape, with `times` as many waves."""
    x = (torch.arange(64) + 0.5) / 64
    u = torch.cos(2 * math.pi * x)[None, None]
    found = energies(compressed(u, times)[0, 0])
    assert int(found.argmax()) + 1 == times
    assert compressed(u, times).shape == u.shape


def test_amplitudes_are_multiplied():
    """A field by the factor; a positive field's logarithm about its mean."""
    u = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(0)) + 0.1
    changed = Shift("amplitude", 3.0).change(u, [False, True], torch.Generator())
    assert torch.allclose(changed[:, 0], 3 * u[:, 0])
    log, log_before = changed[:, 1].log(), u[:, 1].log()
    assert torch.allclose(log.mean(-1), log_before.mean(-1), atol=1e-5)
    assert torch.allclose(log.std(-1), 3 * log_before.std(-1), rtol=1e-4)


def test_noise_has_its_share():
    """The RMS of what is added is the factor times that of the fluctuation."""
    u = 2 + torch.sin(torch.linspace(0, 20, 4096))[None, None]
    added = Shift("noise", 0.3).change(u, [False], torch.Generator().manual_seed(0)) - u
    assert float(added.std() / u.std()) == pytest.approx(0.3, rel=0.05)


def test_a_shift_changes_one_thing():
    """Parameter, time step or grid of the dataset, by its factor."""
    assert Shift("parameter", 3.0, "beta").of(ADVECTION) == replace(ADVECTION, parameters={"beta": 1.5})
    assert Shift("time step", 2.0).of(ADVECTION).times == (0.0, 0.2, 0.4)
    assert Shift("grid", 2).of(ADVECTION).grid == (128,)
    assert Shift("amplitude", 2.0).of(ADVECTION) == ADVECTION


def test_shifted_trajectories_solve_the_shifted_equation():
    """With three times the speed the solution moves by 1.5 t; other shifts have other initial states."""
    case = simulate_case(replace(ADVECTION, grid=(256,)), Shift("parameter", 3.0, "beta"), 2, seed=0)
    moved = torch.stack([torch.roll(case.u[0, 0, 0], round(1.5 * t * 256)) for t in (0.0, 0.1, 0.2)])
    error = (case.u[0, :, 0] - moved).square().mean().sqrt() / moved.square().mean().sqrt()
    assert case.dataset.parameters == {"beta": 1.5} and error < 0.05
    other = simulate_case(ADVECTION, Shift("none", 1.0), 2, seed=0)
    assert not torch.allclose(other.u[:, 0], simulate_case(ADVECTION, Shift("noise", 1e-9), 2, seed=0).u[:, 0])


def test_steady_families_are_shifted_by_their_coefficients():
    """Permeability with other amplitudes; there is no time step to change."""
    steady = {"lengths": (1.0, 1.0), "boundary": ("dirichlet",) * 2, "parameters": {"beta": 1.0}}
    dataset = Dataset("d", "darcy_2d", ("d",), (9,), (0.0,), (16, 16), **steady)
    assert "time step" not in {shift.kind for shift in shifts_of(dataset, CONFIG)}
    case = simulate_case(dataset, Shift("amplitude", 2.0), 2, seed=0)
    assert case.u.shape == (2, 1, 1, 16, 16) and case.coefficients.shape == (2, 1, 16, 16)
    ratio = case.coefficients.flatten(1).amax(1) / case.coefficients.flatten(1).amin(1)
    assert torch.allclose(ratio, torch.tensor(10.0**2), rtol=1e-3)


def test_every_shift_is_scored(trained: Path):
    """Of all families that are trained: errors, scores and warnings of each trajectory, and a table of all."""
    stages = {stage: receipt(trained, stage) for stage in ("codec", "operator", "steady")}
    inputs = (receipt(trained, "latent_cache"), {"families": measure(trained)}, CONFIG, LAUNCH, trained)
    found, text = score_shifts(*inputs, **stages)
    count = {name: sum(r["family"] == name for r in found["records"]) for name in ("advection_1d", "darcy_2d")}
    assert count == {"advection_1d": 7, "darcy_2d": 6}
    for record in found["records"]:
        expected = CONFIG.num_trajectories[int(record["family"][-2]) - 1] * (2 if record["kind"] == "none" else 1)
        assert len(record["errors"]) == len(record["scores"]) == len(record["warned"]) == expected
        assert record["kind"] != "time step" or any(reason.startswith("dt = ") for reason in record["reasons"])
    assert text == shifts_text(found["summary"]) and text.count("\n|") == len(found["summary"]) + 2


def case_and_step(trained: Path, family: str) -> tuple[Surrogate, Case, Callable[[Tensor], Tensor]]:
    """The models, two trajectories of a family without shift, and the step of their operator or steady model."""
    stages = {stage: receipt(trained, stage) for stage in ("codec", "operator", "steady")}
    models = Trained(receipt(trained, "latent_cache"), stages, trained)
    (each,) = (each for each in held_out(models.cache(), trained / "01_raw") if each.dataset.family == family)
    model, case = models.surrogate("cpu"), simulate_case(each.dataset, Shift("none", 1.0), 2, seed=0)
    given = model.encode(case.u[:, 0], family)[..., :0]
    if case.coefficients is not None:
        given = model.encode(case.coefficients, family, "coefficients")
    condition = torch.tensor(each.condition).expand(2, -1)
    return model, case, model.plain_step(Setting(family, each.domain, given, condition))


@torch.no_grad()
def test_an_error_is_that_of_the_rollout(trained: Path):
    """Steps one by one from the encoded initial state, compared in physical units with the snapshots after it."""
    model, case, step = case_and_step(trained, "advection_1d")
    z, expected = model.encode(case.u[:, 0], "advection_1d"), []
    for u_ref in case.u[:, 1:].split(1, dim=1):
        z = step(z)
        expected.append(nRMSE(model.decode(z, "advection_1d")[:, None], u_ref))
    errors = errors_of_case(model, case, (True,), torch.device("cpu"))
    assert torch.allclose(errors, torch.stack(expected).mean((0, 2, 3)))


@torch.no_grad()
def test_an_error_of_a_steady_family_is_that_of_the_solution(trained: Path):
    """One step from zero with the encoded coefficients, compared in physical units."""
    model, case, step = case_and_step(trained, "darcy_2d")
    solution = model.decode(step(torch.zeros_like(model.encode(case.u[:, 0], "darcy_2d"))), "darcy_2d")
    errors = errors_of_case(model, case, (False, False), torch.device("cpu"))
    assert torch.allclose(errors, nRMSE(solution[:, None], case.u).mean((1, 2)))


ROW = {"family": "burgers_1d", "dataset": "b", "parameter": None, "factor": 1.0}


def test_one_diverged_prediction_is_not_the_median():
    """Without shift 0.1, 0.1 and not finite: an error of 0.4 is large all the same."""
    none = ROW | {"kind": "none", "errors": [0.1, 0.1, None], "scores": [0.0] * 3, "warned": [False] * 3}
    shifted = ROW | {"kind": "grid", "errors": [0.4, 0.2], "scores": [9.0, 5.0], "warned": [True, False]}
    assert summarize([none, shifted])[0]["large_errors"] == 2 / 5


def test_the_summary_counts_hits_and_false_alarms():
    """Large: above three times the median without shift; one of two large errors is warned of, one of three others."""
    none = ROW | {"kind": "none", "errors": [0.1, 0.1], "scores": [0.0, 1.0], "warned": [False, False]}
    shifted = ROW | {
        "kind": "grid",
        "errors": [0.2, 0.4, None],
        "scores": [5.0, 9.0, 0.5],
        "warned": [True, True, False],
    }
    of_family, of_all, without = summarize([none, shifted])
    assert of_family | {"group": "all"} == of_all
    assert of_all["AUROC"] == pytest.approx((3 + 1) / 6)
    assert (of_all["hits"], of_all["false_alarms_unshifted"], of_all["false_alarms_shifted"]) == (0.5, 0.0, 1.0)
    assert without["num_trajectories"] == 2 and without["AUROC"] is None
