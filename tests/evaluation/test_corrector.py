"""The switch of the corrector: on where its draws are worth it on validation trajectories, off where they are not."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.evaluation.corrected import (
    FAMILY,
    NUM_POINTS,
    Denoise,
    flow_end,
    make_surrogate,
    posterior_mean,
    trajectories,
)
from tests.training.jobs import launched
from ups.config import CorrectorConfig
from ups.data.families import Dataset
from ups.evaluation import corrector, scores
from ups.evaluation.choice import choose, validation_sets
from ups.evaluation.corrector import Candidate
from ups.evaluation.predictions import Compute
from ups.surrogate.surrogate import Correction
from ups.surrogate.trained import corrections

NUM_TRAJECTORIES, NUM_STEPS = 12, 4
VALID, TEST = [2, 3, 7, 9, 10, 11], [1, 5]
DATASET = Dataset(
    "waves", FAMILY, ("a.h5",), (NUM_TRAJECTORIES,), (0.0, 1.0, 2.0, 3.0, 4.0), (NUM_POINTS,), (1.0,), ("periodic",), {}
)
SPLIT = {"train": [0, 4, 6, 8], "valid": VALID, "test": TEST}
CONFIG = CorrectorConfig(
    seed=0,
    batch_tokens=400,
    num_tokens=80 * NUM_POINTS,
    min_trajectories=4,
    ensemble_size=8,
    sigma_min=0.002,
    sample={"sigma": 10.0, "num_steps": 16},
    refine=[{"sigma": 0.5, "num_steps": 8}],
    residual_scales=[0.7, 1.0, 1.4],
    noise_correlations=[0.0, 1.0],
    max_crps=0.9,
    max_nrmse=1.0,
    max_high_band=1.2,
    max_miscalibration=1e6,
    student={
        "num_steps": [1, 2],
        "max_nrmse": 1.02,
        "max_crps": 1.05,
        "min_evaluations_ratio": 8.0,
        "min_wall_time_ratio": 0.1,
    },
)
BIASED, FAR = posterior_mean(1.0, 0.5), torch.Generator().manual_seed(11)


def noise(x: Tensor, sigma: Tensor) -> Tensor:
    """A denoiser whose residuals have nothing to do with the truth."""
    return 3 * torch.randn(x.shape, generator=FAR)


def fresh(mean: float, std: float) -> Callable[[int], Tensor]:
    """Residuals ~ N(mean, std^2), new at every step."""
    generator = torch.Generator().manual_seed(2)
    return lambda t: mean + std * torch.randn(NUM_TRAJECTORIES, NUM_POINTS, 1, generator=generator)


def kept(mean: float, std: float) -> Callable[[int], Tensor]:
    """Residuals ~ N(mean, std^2) that stay the same along a trajectory."""
    y = fresh(mean, std)(0)
    return lambda t: y


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict]:
    """Choose for an surrogate on trajectories with given residuals; `decide.read` is what was read."""

    def run(
        residual: Callable[[int], Tensor],
        denoise: Denoise,
        student: Denoise | None = None,
        config: CorrectorConfig = CONFIG,
        memory_gigabytes: float | None = None,
    ) -> dict:
        u = trajectories(residual, NUM_TRAJECTORIES, NUM_STEPS).numpy()

        class Reader:
            def __init__(self, folder: str, dataset: Dataset) -> None:
                self.dataset = dataset
                assert replace(dataset, times=DATASET.times) == DATASET

            def __enter__(self) -> "Reader":
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def read(self, index: int, start: int, stop: int) -> np.ndarray:
                run.read.append((index, stop))
                return u[index, start:stop]

        monkeypatch.setattr(scores, "TrajectoryReader", Reader)
        monkeypatch.setattr(corrector, "TIMED_ROUNDS", 1)
        entry = {"dataset": asdict(DATASET), "split": SPLIT, "condition": [0.0], "token_grid": [NUM_POINTS]}
        manifest = {"key": {"source files": {}}}
        cache = SimpleNamespace(datasets={DATASET.name: entry}, manifest=manifest)
        trained = SimpleNamespace(cache=lambda: cache)
        compute = Compute.of(launched(num_processes=1, memory_gigabytes=memory_gigabytes))
        sets = validation_sets(trained, "raw")
        decision = choose(tmp_path, make_surrogate(denoise, student), sets, config, compute)
        json.dumps(decision, allow_nan=False)
        return decision

    run.read = []
    return run


def chosen(decision: dict, method: str = "diffusion") -> dict:
    """Find the scores of what was decided on."""
    tried = decision["report"][FAMILY]["candidates"]
    correction = decision["families"][FAMILY][method]
    return next(one for one in tried if (one["method"], one["correction"]) == (method, correction))


def test_the_exact_denoiser_is_on_and_calibrated(decide: Callable[..., dict]):
    """Residuals of known mean and spread are sampled: spread-skill 1, fair CRPS 0.564 s of the operator's |N(m, s)|."""
    decision = decide(fresh(1.0, 0.5), BIASED)
    assert decision["families"][FAMILY]["diffusion"] == asdict(Correction("sample", 10.0, 0.002, 16, 1.0, 0.0))
    scores = chosen(decision)["scores"]["waves"]["one_step"]
    operator = decision["report"][FAMILY]["plain"]["waves"]["one_step"]
    assert scores["spread_skill"] == pytest.approx(1.0, abs=0.1)
    folded = torch.distributions.Normal(1.0, 0.5).sample((100_000,)).abs().mean().item()
    assert scores["CRPS"] / operator["MAE"] == pytest.approx(0.564 * 0.5 / folded, rel=0.1)


def test_a_grid_without_a_highest_band_has_no_limit_on_it(decide: Callable[..., dict], monkeypatch: pytest.MonkeyPatch):
    """Axes of 2 to 4 points have too few wavenumbers; the other limits decide."""
    compute = corrector.ScoreSuite.compute
    drop = lambda suite: {name: s for name, s in compute(suite).items() if name != corrector.HIGH_BAND}  # noqa: E731
    monkeypatch.setattr(corrector.ScoreSuite, "compute", drop)
    decision = decide(fresh(1.0, 0.5), BIASED, config=CONFIG.model_copy(update={"refine": [], "residual_scales": []}))
    assert decision["families"][FAMILY]["diffusion"]["mode"] == "sample"


def test_the_choice_does_not_depend_on_the_memory(decide: Callable[..., dict]):
    """Snapshot by snapshot and member by member all candidates have the scores that they have at once."""
    config = CONFIG.model_copy(update={"noise_correlations": [0.0, 0.8]})
    whole, parts = (decide(fresh(1.0, 0.5), BIASED, config=config, memory_gigabytes=m) for m in (1.0, 1e-9))
    assert parts["families"] == whole["families"]
    found, expected = (each["report"][FAMILY]["candidates"] for each in (parts, whole))
    for one, other in zip(found, expected, strict=True):
        for horizon, values in one["scores"]["waves"].items():
            assert values == pytest.approx(other["scores"]["waves"][horizon], rel=1e-5)


def test_a_denoiser_that_knows_nothing_is_off(decide: Callable[..., dict]):
    """Noise unrelated to the truth is never switched on, nor is the student then tried."""
    decision = decide(fresh(0.0, 0.5), noise, flow_end(0.0, 0.5))
    assert decision["families"] == {FAMILY: {"diffusion": {"mode": "off"}, "consistency": {"mode": "off"}}}
    report = decision["report"][FAMILY]
    assert report["decision"] == decision["families"][FAMILY]
    assert {one["method"] for one in report["candidates"]} == {"diffusion"}
    assert all("max_crps" in one["exceeded"] for one in report["candidates"])
    assert corrections(decision) == {}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max_crps", 0.564 * 0.5 / 1.017), ("max_nrmse", 0.5 / 1.118), ("max_high_band", 1.0)],
)
def test_every_limit_counts(decide: Callable[..., dict], limit: str, expected: float):
    """The exact denoiser of N(1, 0.5^2) is on where a limit is above what its four pairs reach, off where below."""
    for factor, mode in ((0.9, "off"), (1.1, "sample")):
        config = CONFIG.model_copy(
            update={"refine": [], "noise_correlations": [0.0], "residual_scales": [], limit: factor * expected}
        )
        decision = decide(fresh(1.0, 0.5), BIASED, config=config)
        assert decision["families"][FAMILY]["diffusion"]["mode"] == mode


@pytest.mark.parametrize(("rollout", "qualifies"), [(0.85, True), (0.7, False)])
def test_one_overconfident_horizon_keeps_it_off(monkeypatch: pytest.MonkeyPatch, rollout: float, qualifies: bool):
    """Spread-skill must be within 1 / 1.25 and 1.25 for one step and for rollouts, not on average alone."""
    good = {"nRMSE": 1.0, "MAE": 1.0, "CRPS": 0.5, "band_error_4": 1.0}
    scores = {"waves": {h: good | {"spread_skill": s} for h, s in {"one_step": 1.0, "rollout": rollout}.items()}}
    monkeypatch.setattr(corrector.Validation, "_scores", lambda *_: scores)
    config = CONFIG.model_copy(update={"max_miscalibration": 1.25})
    validation = corrector.Validation(make_surrogate(BIASED), [], config, Compute(torch.device("cpu"), memory=2**30))
    candidate = validation.candidate("diffusion", Correction("sample", 10.0, 0.002, 16, 1.0, 0.0))
    assert candidate.qualifies == qualifies


def test_constant_residuals_have_correlated_noise(decide: Callable[..., dict]):
    """Where the operator misses the same at every step, a member's noise stays the same too."""
    assert decide(kept(1.0, 0.5), BIASED)["families"][FAMILY]["diffusion"]["noise_correlation"] == 1.0


@pytest.mark.parametrize(("std", "scale"), [(0.5, 1.4), (1.0, 1.0), (2.0, 0.7)])
def test_residual_scale_calibrates(decide: Callable[..., dict], std: float, scale: float):
    """A denoiser of half the standard deviation gets the largest scale, twice it the smallest, the exact one 1."""
    config = CONFIG.model_copy(
        update={"max_nrmse": 2.0, "max_high_band": 3.0, "refine": [], "noise_correlations": [0.0]}
    )
    decision = decide(fresh(0.0, 1.0), posterior_mean(0.0, std), config=config)
    assert decision["families"][FAMILY]["diffusion"]["residual_scale"] == scale


@pytest.mark.parametrize(("std", "tried"), [(0.5, {1.0, 1.4}), (1.0, {0.7, 1.0, 1.4}), (2.0, {0.7, 1.0})])
def test_scales_that_cannot_calibrate_are_not_tried(decide: Callable[..., dict], std: float, tried: set[float]):
    """Of a denoiser of half the standard deviation no smaller scale is tried, of one of twice it no larger one."""
    limits = {"max_miscalibration": 1.4, "max_nrmse": 2.0, "max_high_band": 3.0}
    config = CONFIG.model_copy(update=limits | {"refine": [], "noise_correlations": [0.0]})
    report = decide(fresh(0.0, 1.0), posterior_mean(0.0, std), config=config)["report"][FAMILY]
    assert {one["correction"]["residual_scale"] for one in report["candidates"]} == tried


def test_only_the_two_most_promising_scales_are_tried(decide: Callable[..., dict]):
    """Half the standard deviation: of six scales those that bring the spread-skill ratio nearest to 1, about 2."""
    update = {"max_miscalibration": 4.0, "max_nrmse": 2.0, "max_high_band": 3.0, "refine": []}
    update |= {"noise_correlations": [0.0], "residual_scales": [0.7, 0.85, 1.4, 2.0, 2.1, 4.0]}
    config = CONFIG.model_copy(update=update)
    report = decide(fresh(0.0, 1.0), posterior_mean(0.0, 0.5), config=config)["report"][FAMILY]
    tried = {c["correction"]["residual_scale"] for c in report["candidates"] if c["method"] == "diffusion"}
    assert tried == {1.0, 2.0, 2.1}


@pytest.mark.parametrize("limit", ["max_nrmse", "max_high_band"])
def test_no_larger_scale_where_errors_exceed_their_limit(decide: Callable[..., dict], limit: str):
    """Residuals of mean 0 add the error of the ensemble's mean, and more with a larger scale, which would calibrate."""
    update = {"max_miscalibration": 4.0, "max_nrmse": 9.0, "max_high_band": 9.0, "refine": [], limit: 1.0}
    config = CONFIG.model_copy(update=update | {"noise_correlations": [0.0]})
    report = decide(fresh(0.0, 1.0), posterior_mean(0.0, 0.5), config=config)["report"][FAMILY]
    assert max(one["correction"]["residual_scale"] for one in report["candidates"]) == 1.0


def test_only_validation_trajectories_are_read(decide: Callable[..., dict]):
    """No training or test trajectory is opened, and every validation trajectory is."""
    decide(fresh(1.0, 0.5), BIASED, flow_end(1.0, 0.5))
    assert {index for index, _ in decide.read} == set(VALID)


@pytest.mark.parametrize(("num_snapshots", "count"), [(1, 4), (24, 4), (25, 5), (29, 5), (30, 6)])
def test_whole_trajectories_make_up_the_tokens(decide: Callable[..., dict], num_snapshots: int, count: int):
    """Of trajectories of 5 snapshots as many are read as have so many tokens in all, and at least four."""
    decide(fresh(1.0, 0.5), BIASED, config=CONFIG.model_copy(update={"num_tokens": num_snapshots * NUM_POINTS}))
    assert {index for index, _ in decide.read} == set(VALID[:count])


@pytest.mark.parametrize(("num_snapshots", "read"), [(1, 2), (3, 3), (5, 5), (24, 5)])
def test_trajectories_longer_than_the_tokens_give_their_first_snapshots(
    decide: Callable[..., dict], num_snapshots: int, read: int
):
    """A trajectory of 5 snapshots is read up to the number of tokens, but at least one step of it."""
    decide(fresh(1.0, 0.5), BIASED, config=CONFIG.model_copy(update={"num_tokens": num_snapshots * NUM_POINTS}))
    assert max(stop for _, stop in decide.read) == read


@pytest.mark.parametrize(("min_trajectories", "mode"), [(len(VALID), "sample"), (len(VALID) + 1, "off")])
def test_too_few_trajectories_decide_nothing(decide: Callable[..., dict], min_trajectories: int, mode: str):
    """The exact denoiser is on where there are as many as are asked for; with one less nothing is tried."""
    decision = decide(fresh(1.0, 0.5), BIASED, config=CONFIG.model_copy(update={"min_trajectories": min_trajectories}))
    report = decision["report"][FAMILY]
    assert decision["families"][FAMILY]["diffusion"]["mode"] == report["decision"]["diffusion"]["mode"] == mode
    assert report["num_trajectories"] == len(VALID) and ("candidates" in report) == bool(decide.read) == (mode != "off")


def test_an_exact_student_is_accepted(decide: Callable[..., dict]):
    """One evaluation that gives what the teacher gives in 16 is chosen, and held to be as good."""
    decision = decide(fresh(1.0, 0.5), BIASED, flow_end(1.0, 0.5))
    student, accept = decision["families"][FAMILY]["consistency"], decision["report"][FAMILY]["accept"]
    assert (student["mode"], student["sigma"], student["num_steps"]) == ("sample", 10.0, 1)
    assert accept["accepted"] and accept["evaluations"] == 16.0
    assert accept["nRMSE"] == pytest.approx(1.0, abs=0.02) and accept["CRPS"] == pytest.approx(1.0, abs=0.04)
    tried = [one["correction"] for one in decision["report"][FAMILY]["candidates"] if one["method"] == "consistency"]
    assert {correction["num_steps"] for correction in tried} == {1}, "one evaluation is enough"


@pytest.mark.parametrize(
    "limit", [{"max_nrmse": 0.9}, {"max_crps": 0.9}, {"min_evaluations_ratio": 17.0}, {"min_wall_time_ratio": 1e6}]
)
def test_every_limit_of_the_student_counts(decide: Callable[..., dict], limit: dict[str, float]):
    """The exact student, as good as its teacher in a sixteenth of the evaluations, fails where more is asked for."""
    student = CONFIG.student.model_copy(update=limit | {"num_steps": [1]})
    options = {"refine": [], "noise_correlations": [0.0], "residual_scales": []}
    config = CONFIG.model_copy(update=options | {"student": student})
    decision = decide(fresh(1.0, 0.5), BIASED, flow_end(1.0, 0.5), config)
    assert decision["report"][FAMILY]["accept"]["accepted"] is False


def test_the_wall_time_is_that_of_the_teacher_over_that_of_the_student(
    decide: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
):
    """A clock that counts network evaluations gives a step of the teacher 16 and one of the student 1."""
    evaluations = []

    def counted(denoise: Denoise) -> Denoise:
        return lambda x, sigma: evaluations.append(sigma) or denoise(x, sigma)

    def count(run: Callable[[], Tensor]) -> int:
        before = len(evaluations)
        run()
        return len(evaluations) - before

    monkeypatch.setattr(corrector, "in_turns", lambda runs, *_: {name: count(run) for name, run in runs.items()})
    config = CONFIG.model_copy(update={"refine": [], "noise_correlations": [0.0], "residual_scales": []})
    decision = decide(fresh(1.0, 0.5), counted(BIASED), counted(flow_end(1.0, 0.5)), config)
    assert decision["report"][FAMILY]["accept"]["wall_time"] == 16.0


def test_a_student_has_a_scale_of_its_own(decide: Callable[..., dict]):
    """A teacher of half the standard deviation is scaled by 1.4; its student of the exact one is not."""
    limits = {"max_nrmse": 2.0, "max_high_band": 3.0, "refine": [], "noise_correlations": [0.0]}
    config = CONFIG.model_copy(update=limits)
    found = decide(fresh(0.0, 1.0), posterior_mean(0.0, 0.5), flow_end(0.0, 1.0), config)["families"][FAMILY]
    assert [found[method]["residual_scale"] for method in ("diffusion", "consistency")] == [1.4, 1.0]


def test_a_scale_is_tried_if_it_fits_both_horizons(decide: Callable[..., dict]):
    """Spreads of 0.99 in a step and 0.70 in a rollout: 1.4 fits both up to a factor of 1.5, 0.7 and 2 only one."""
    change = {"residual_scales": [0.7, 1.0, 1.4, 2.0], "max_miscalibration": 1.2}
    config = CONFIG.model_copy(update=change | {"refine": [], "noise_correlations": [0.0]})
    report = decide(kept(1.0, 0.5), BIASED, config=config)["report"][FAMILY]
    assert {one["correction"]["residual_scale"] for one in report["candidates"]} == {1.0, 1.4}


def test_a_student_that_learned_nothing_is_off(decide: Callable[..., dict]):
    """The teacher stays on beside a student that is off, and not accepted."""
    decision = decide(fresh(1.0, 0.5), BIASED, noise)
    assert decision["families"][FAMILY]["diffusion"]["mode"] == "sample"
    assert decision["families"][FAMILY]["consistency"] == {"mode": "off"}
    assert decision["report"][FAMILY]["accept"]["accepted"] is False


def test_a_diverging_denoiser_is_off(decide: Callable[..., dict]):
    """Scores that are not finite switch the corrector off."""
    decision = decide(fresh(1.0, 0.5), lambda x, sigma: x * torch.nan)
    assert decision["families"][FAMILY]["diffusion"] == {"mode": "off"}


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((0.8, 1.0, True), (0.5, 0.0, False)),
        ((0.7, 1.0, True), (0.8, 0.0, True)),
        ((0.701, 0.1, True), (0.699, 0.5, True)),
        ((0.9, 0.5, False), (float("nan"), 0.0, False)),
    ],
    ids=["qualified first", "smaller CRPS", "equal CRPS: calibration", "not finite is last"],
)
def test_rank(better: tuple, worse: tuple):
    """Candidates are ordered by whether they qualify, their CRPS in per cent, and their calibration."""
    first, second = (
        Candidate(
            "diffusion",
            Correction("sample", 5.0, 0.002, 8, 1.0, 0.0),
            {},
            crps,
            crps,
            1.0,
            1.0,
            miscalibration,
            [] if qualifies else ["max_crps"],
        )
        for crps, miscalibration, qualifies in (better, worse)
    )
    assert first.rank < second.rank


def test_decisions_become_corrections():
    """What was decided reaches the surrogate by method and family."""
    correction = Correction("refine", 1.0, 0.002, 8, 1.4, 1.0)
    families = {"a": {"diffusion": asdict(correction), "consistency": {"mode": "off"}}}
    assert corrections({"families": families}) == {("diffusion", "a"): correction}
