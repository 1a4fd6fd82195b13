"""Selection is on only where it is proven to help; costs and errors are those of what was done."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path

import h5py
import pytest
import torch
from torch import Tensor

from tests.data.conftest import write_file
from tests.evaluation.conftest import unpadded
from tests.solvers.exact import shift
from ups.config import SelectionConfig
from ups.data.families import Dataset
from ups.data.layouts import POSITIONS_DATASET
from ups.data.trajectories import find_datasets
from ups.diffusion import Normal
from ups.evaluation import search
from ups.evaluation.predictions import Compute
from ups.evaluation.scores import TrajectorySet
from ups.evaluation.search import DIVERGED, DatasetSearch, SearchResults, step_errors, trajectory_error
from ups.evaluation.selection import (
    by_initial_condition,
    decide,
    initial_conditions,
    selection_figure,
    selection_text,
)
from ups.evaluation.styles import png
from ups.metrics.bootstrap import MIN_TRAJECTORIES
from ups.models.sizes import Domain
from ups.surrogate.surrogate import Correction, Setting

CONFIG = SelectionConfig.model_validate(
    {
        "seed": 0,
        "sampler": "consistency",
        "if_corrector_off": {"sigma": 5.0, "num_steps": 1},
        "sigma_min": 0.02,
        "sizes": [1, 2, 4],
        "beam": {"width": 2, "successors": 2},
        "max_trajectories": 8,
        "batch_tokens": 4096,
    }
)
DATASET = Dataset("waves", "advection_1d", ("f",), (9,), (0.0, 0.05, 0.1), (32,), (1.0,), ("periodic",), {"beta": 0.5})
SETTING = Setting("advection_1d", Domain("advection_1d", (32,), (True,)), torch.zeros(10, 32, 0), torch.zeros(10, 1))


@dataclass(frozen=True)
class Shifts:
    """Latents are the fields (B, 1, X); the exact solution, with noise of a random size unless it is the operator."""

    def encode(self, u: Tensor, family: str) -> Tensor:
        return u

    decode = encode

    def plain_step(self, setting: Setting):
        return lambda z: 1.5 * shift(z, torch.tensor(0.025), 1.0)

    def consistency_step(self, setting: Setting, correction: Correction, normal: Normal):
        def step(z: Tensor, origins: Tensor | None = None) -> Tensor:
            size = 0.2 * torch.special.ndtr(normal(len(z), 1, 1))
            return shift(z, torch.tensor(0.025), 1.0) + size * normal(*z.shape)

        return step

    diffusion_step = consistency_step


def truth() -> Tensor:
    """Ten waves of random phase (10, 3, 1, 32)."""
    x = torch.arange(32) / 32
    phase = torch.rand(10, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    return (2 * pi * (x - 0.5 * torch.tensor(DATASET.times)[:, None, None] - phase)).sin()


@dataclass(frozen=True)
class Waves:
    """A batch of these waves, of which `num_steps` steps are read at once."""

    num_steps: int = 2
    members_at_once: int = 4
    setting: Setting = SETTING
    num_times: int = len(DATASET.times)

    def read(self, start: int, stop: int) -> Tensor:
        return truth()[:, start:stop]


def search_with(surrogate: Shifts) -> DatasetSearch:
    """Members of this surrogate on the waves."""
    correction = Correction("sample", 5.0, 0.02, 1, 1.0, 0.0)
    return DatasetSearch(surrogate, DATASET, correction, CONFIG, Compute(torch.device("cpu"), memory=2**30))


@pytest.fixture(scope="module")
def results() -> SearchResults:
    """Errors of every search method on noisy shifts."""
    dataset_search, batches = search_with(Shifts()), [Waves()]
    score, ratios = dataset_search.fit(batches)
    assert ratios["residual"] > 1 and score.weights["residual"] > 0
    return dataset_search.run(batches, score)


def test_every_way_has_errors_and_seconds_of_every_trajectory(results: SearchResults):
    """All ways at all sizes, ten trajectories each."""
    ways = {(way, size) for way in ("mean", "best", "weighted", "oracle") for size in (1, 2, 4)}
    assert set(results.errors) == ways | {("operator", 1), ("single", 1), ("beam", 4)} == set(results.seconds)
    assert all(len(errors) == 10 and errors.isfinite().all() for errors in results.errors.values())
    assert all(seconds > 0 for seconds in results.seconds.values())


def test_no_way_pays_for_the_comparison_with_the_truth(monkeypatch: pytest.MonkeyPatch):
    """A clock that only the comparison moves shows no time at all."""
    clock = [0.0]

    def compared(u: Tensor, u_ref: Tensor) -> Tensor:
        clock[0] += 1.0
        return step_errors(u, u_ref)

    monkeypatch.setattr(search, "step_errors", compared)
    monkeypatch.setattr(search, "now", lambda device: clock[0])
    dataset_search, batches = search_with(Shifts()), [Waves()]
    score, _ = dataset_search.fit(batches)
    seconds = dataset_search.run(batches, score).seconds
    assert clock[0] > 0 and set(seconds.values()) == {0.0}


def test_slabs_change_no_error(results: SearchResults):
    """Step by step and member by member every way has the errors and the rank correlations of all at once."""
    dataset_search, batches = search_with(Shifts()), [Waves(num_steps=1, members_at_once=1)]
    found = dataset_search.run(batches, dataset_search.fit(batches)[0])
    assert found.errors.keys() == results.errors.keys()
    assert all(torch.allclose(found.errors[way], errors) for way, errors in results.errors.items())
    assert torch.allclose(found.rank_correlations[0], results.rank_correlations[0])


def test_members_are_not_scored_on_the_noise_that_the_score_was_fitted_on():
    """The generators of `fit` and `run` have different seeds, for this configuration and for that of the next seed."""
    seeds = []

    class Seeds(Shifts):
        def consistency_step(self, setting: Setting, correction: Correction, normal: Normal):
            seeds.append(normal(1, 8)[0])
            return super().consistency_step(setting, correction, normal)

    for seed in (0, 1):
        config = CONFIG.model_copy(update={"seed": seed})
        dataset_search, batches = replace(search_with(Seeds()), config=config), [Waves()]
        dataset_search.run(batches, dataset_search.fit(batches)[0])
    fits, runs = seeds[::3], seeds[1::3]
    assert len(seeds) == 6 and not any(torch.equal(one, other) for one in fits for other in runs)


def test_ways_agree_where_there_is_nothing_to_choose(results: SearchResults):
    """With one member all ways give that member."""
    first = results.errors["mean", 1]
    assert all(torch.allclose(results.errors[way, 1], first) for way in ("best", "weighted", "oracle"))


def test_the_oracle_bounds_the_choice_and_violations_find_noise(results: SearchResults):
    """No choice beats the oracle; where candidates differ by how noisy they are, the residual tells them apart."""
    assert (results.errors["oracle", 4] <= results.errors["best", 4]).all()
    assert torch.cat(results.rank_correlations).mean() > 0.5
    assert results.errors["best", 4].mean() < results.errors["single", 1].mean()
    assert results.errors["beam", 4].mean() < results.errors["single", 1].mean()


def test_what_diverged_counts_as_a_thousand():
    """A NaN has the error DIVERGED, and so has what is larger."""
    u_ref = torch.ones(3, 2, 1, 4)
    u = torch.stack((u_ref[0], torch.full((2, 1, 4), torch.nan), torch.full((2, 1, 4), 1e30)))
    assert trajectory_error(step_errors(u, u_ref)[:, 1:]).tolist() == [0.0, DIVERGED, DIVERGED]


def errors(best: float, mean: float = 1.0, operator: float = 1.0, count: int = 32) -> dict[tuple[str, int], Tensor]:
    """Errors of `count` trajectories about these values, with noise that is not shared."""
    generator = torch.Generator().manual_seed(0)

    def about(value: float) -> Tensor:
        return value + 0.01 * torch.randn(count, generator=generator, dtype=torch.float64)

    single = {("single", 1): about(1.2), ("operator", 1): about(operator), ("best", 1): about(0.1)}
    return single | {("mean", 4): about(mean), ("best", 4): about(best), ("oracle", 4): about(0.01)}


def test_selection_is_on_where_it_beats_everything():
    """Better than the mean, a single member and the operator: on, with its gains; one member is no choice."""
    decision = decide(errors(best=0.8), seed=0)
    assert decision["is_on"] and (decision["method"], decision["num_members"]) == ("best", 4)
    assert decision["gains"]["mean"]["value"] == pytest.approx(0.2, abs=0.02)
    assert decision["gains"]["single"]["low"] > 0.3


@pytest.mark.parametrize("rivals", [{"best": 1.1}, {"best": 1.0}, {"best": 0.8, "operator": 0.7}, {"best": 1.3}])
def test_selection_is_off_where_a_rival_is_as_good(rivals: dict[str, float]):
    """A better or equally good mean, or a better operator, leaves it off."""
    assert not decide(errors(**rivals), seed=0)["is_on"]


def test_selection_is_off_where_too_few_trajectories_speak_for_it():
    """One trajectory less than an interval takes leaves it off, with gains that have none."""
    assert decide(errors(best=0.8, count=MIN_TRAJECTORIES), seed=0)["is_on"]
    decision = decide(errors(best=0.8, count=MIN_TRAJECTORIES - 1), seed=0)
    assert not decision["is_on"]
    assert all(set(gain) == {"value"} and gain["value"] > 0 for gain in decision["gains"].values())


def test_an_initial_condition_counts_once():
    """Errors 1, 2 of the conditions a, b and 5, 7 of b, c have the means 1, 3.5, 7."""
    key, (a, b, c) = ("single", 1), (("waves", i) for i in range(3))
    parts = [([a, b], {key: torch.tensor([1.0, 2.0])}), ([b, c], {key: torch.tensor([5.0, 7.0])})]
    assert by_initial_condition(parts)[key].tolist() == [1.0, 3.5, 7.0]


@pytest.mark.parametrize("count", [MIN_TRAJECTORIES - 2, MIN_TRAJECTORIES])
def test_datasets_that_start_alike_prove_no_more_than_one(count: int):
    """Three datasets with the same initial conditions and errors are decided on like one of them."""
    part = ([("waves", i) for i in range(count)], errors(best=0.8, count=count))
    one, three = (decide(by_initial_condition([part] * num), seed=0) for num in (1, 3))
    assert three["is_on"] == one["is_on"] == (count == MIN_TRAJECTORIES)
    assert three["num_initial_conditions"] == count
    assert all(three["gains"][rival] == pytest.approx(gain) for rival, gain in one["gains"].items())


def test_equal_positions_start_alike_but_for_batches(tmp_path: Path):
    """Positions count in the published file or its block, whatever part is here; batch files have their own."""

    def keep(*positions: int) -> Callable[[h5py.File], object]:
        return lambda file: file.create_dataset(POSITIONS_DATASET, data=positions)

    write_file(tmp_path, "advection_1d", "1D_Advection_Sols_beta0.1.hdf5", count=10)
    write_file(tmp_path, "advection_1d", "1D_Advection_Sols_beta0.2.hdf5", count=3, edit=keep(2, 5, 9))
    write_file(tmp_path, "incompressible_ns_2d", count=3)
    write_file(tmp_path, "compressible_ns_1d", count=3, edit=keep(7, 999, 1007))
    datasets = find_datasets(tmp_path, [path.name for path in tmp_path.iterdir()])
    found = {
        name: initial_conditions(TrajectorySet(tmp_path, dataset, (0, 2), [], SETTING.domain))
        for name, dataset in datasets.items()
    }
    whole, some = found["1D_Advection_Sols_beta0.1"], found["1D_Advection_Sols_beta0.2"]
    assert whole == [("advection_1d", 0), ("advection_1d", 2)] and some == [("advection_1d", 2), ("advection_1d", 9)]
    (batch,) = (name for name, dataset in datasets.items() if dataset.family == "incompressible_ns_2d")
    assert found[batch] == [(batch, 0), (batch, 2)]
    assert [("compressible_ns_1d", 7)] * 2 in found.values()


@dataclass(frozen=True)
class Diverges(Shifts):
    """The same, but half of the members are NaN after a step."""

    def consistency_step(self, setting: Setting, correction: Correction, normal: Normal):
        def step(z: Tensor, origins: Tensor | None = None) -> Tensor:
            is_lost = normal(len(z), 1, 1) < 0
            return shift(z, torch.tensor(0.025), 1.0).masked_fill(is_lost, torch.nan)

        return step


def test_diverged_members_are_never_chosen():
    """Where half of the members are lost, errors stay numbers, and the best is no worse than any that is left."""
    dataset_search = search_with(Diverges())
    score, _ = dataset_search.fit([Waves()])
    results = dataset_search.run([Waves()], score)
    assert all(errors.isfinite().all() for errors in results.errors.values())
    has_left = results.errors["oracle", 4] < DIVERGED
    assert has_left.any()
    assert (results.errors["best", 4][has_left] < 0.01).all() and (results.errors["weighted", 4][has_left] < 0.01).all()
    assert all(weight >= 0 and math.isfinite(weight) for weight in score.weights.values())


def test_the_report_holds_for_nothing():
    """Where no family can be selected for, there is still a text and a page."""
    assert selection_text({"families": {}, "datasets": {}, "records": []}).startswith("# Choosing")
    assert png(selection_figure([], {}))[:4] == b"\x89PNG"


def test_the_report_says_how_many_initial_conditions_there_are():
    """A family that is better but off has its number beside the least, and gains without an interval."""
    families = {
        "burgers_1d": decide(errors(best=0.8, count=MIN_TRAJECTORIES - 1), seed=0),
        "advection_1d": decide(errors(best=0.8), seed=0),
    }
    text = selection_text({"families": families, "datasets": {}, "records": []})
    few, enough = (next(line for line in unpadded(text) if name in line) for name in families)
    assert f"fewer than {MIN_TRAJECTORIES} have none" in text
    assert f"| off | best | 4 | {MIN_TRAJECTORIES - 1} |" in few and "[" not in few
    assert "| on | best | 4 | 32 |" in enough and enough.count("[") == 3


def test_the_report_has_no_number_for_what_cannot_be_told():
    """A violation without a ratio to the reference's is there with its weight alone."""
    ratios = {"residual": (0.5, 12.0), "mass": (0.25, None)}
    parts = {name: {"weight": weight, "ratio_to_reference": ratio} for name, (weight, ratio) in ratios.items()}
    quality = {"sampler": "diffusion", "corrector": "sample", "rank_correlation": {"value": 0.5}, "violations": parts}
    lines = unpadded(selection_text({"families": {}, "datasets": {"waves": quality}, "records": []}))
    assert any(line.endswith("| residual 0.5 (12), mass 0.25 (no number) | 0.5 |") for line in lines)
