"""Which fields have a drift of their integral, and what counts as the time and the cost of a method."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ups.data.families import Dataset
from ups.evaluation import costs
from ups.evaluation.examples import Example, chosen, description, statistics
from ups.evaluation.predictions import Slab
from ups.evaluation.scores import TrajectorySet
from ups.evaluation.violations import conserved_channels
from ups.metrics.suite import ScoreSuite, Truth
from ups.models.sizes import Domain
from ups.runs.run import append_metrics, training_cpu_seconds, training_seconds

GAS = Dataset("gas", "compressible_ns_2d", ("a.h5",), (4,), (0.0, 1.0), (8, 8), (1.0, 1.0), ("periodic",) * 2, {})
PARAMETERS = {"codec": 1, "operator": 10, "steady": 100, "diffusion": 1000, "consistency": 10_000}


def test_only_closed_domains_conserve():
    """A periodic gas keeps the integral of its density; one that flows out at an end of one axis does not."""
    assert conserved_channels(GAS) == [0]
    assert conserved_channels(replace(GAS, boundary=("periodic", "outflow"))) == []
    assert conserved_channels(replace(GAS, family="diffusion_reaction_1d", boundary=("periodic",))) == []


@pytest.mark.parametrize(
    ("grid", "shape"), [((1000,), (64, 2, 250)), ((300, 8), (12, 2, 75, 8)), ((8, 8, 6), (12, 2, 8, 8, 1))], ids=str
)
def test_arrays_for_figures_do_not_grow_with_the_trajectory(grid: tuple[int, ...], shape: tuple[int, ...]):
    """Of 400 snapshots some times and points are left, the first and the last time among them."""
    dataset = replace(GAS, grid=grid, times=tuple(range(400)))
    example, number = Example(dataset), torch.arange(400.0)
    u = number[:, None, None].expand(-1, 2, math.prod(grid)).unflatten(2, grid)
    for start in range(0, 399, 100):
        target = u[start + 1 : start + 101]
        example.add("truth", Slab(start, target[None], u[:1], u[None, :1], target, target[:1]), target)
    kept, shown = example.snapshots("truth"), description(dataset)["shown"]
    assert kept.shape == shape
    assert kept.reshape(shape[0], -1)[:, 0].tolist() == shown.tolist()
    assert {0, 399} <= set(shown)


def test_worst_median_and_best_trajectory():
    """Trajectories are ranked by their error, a diverged one last; of one trajectory there is only the median."""
    assert chosen(torch.tensor([3.0, 1.0, math.nan, 2.0, 5.0])) == {"worst": 2, "median": 0, "best": 1}
    assert chosen(torch.tensor([7.0])) == {"median": 0}


def test_figures_have_the_mean_error_and_spectrum_over_trajectories():
    """Errors of 0.5 and 1.5 at each of two times have the mean 1 and the band from 0.5 to 1.5; spectra are means."""
    suite = ScoreSuite(num_dims=1, batch_size=1, conserved=(), seed=0)
    x = torch.linspace(0, 2 * math.pi, 17, dtype=torch.float64)[:-1]
    u_ref = (2**0.5 * torch.cos(3 * x)).expand(2, 2, 1, 16)
    u_pred = u_ref * torch.tensor([1.5, 2.5]).reshape(2, 1, 1, 1)
    suite.add(suite.reduce(u_pred, Truth(u_ref)))
    arrays = statistics({("operator", "rollout"): suite})
    assert arrays["curve/operator"] == pytest.approx([1.0, 1.0])
    assert arrays["band/operator"] == pytest.approx(np.array([[0.5, 0.5], [1.5, 1.5]]))
    factor = arrays["spectrum/operator"][3] / arrays["spectrum/truth"][3]
    assert factor == pytest.approx((1.5**2 + 2.5**2) / 2)


@pytest.fixture
def costs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`costs_of(surrogate, compiled=)` are the costs of `PARAMETERS`: two per second, four per second of a core."""
    weights = {stage: {"w": torch.zeros(count)} for stage, count in PARAMETERS.items()}
    monkeypatch.setattr(costs, "load", lambda path: {"weights": weights[path.parent.name]})
    monkeypatch.setattr(costs, "training_seconds", lambda path: PARAMETERS[path.name] / 2)
    monkeypatch.setattr(costs, "training_cpu_seconds", lambda path: PARAMETERS[path.name] / 4)
    monkeypatch.setattr(costs, "held_out", lambda *_: [SimpleNamespace(dataset=GAS)])
    times = dict.fromkeys(("operator", "steady", "diffusion", "consistency", "fno"), 1.0)
    monkeypatch.setattr(costs, "milliseconds_per_snapshot", lambda *_: times)
    stages = {stage: {"path": stage} for stage in PARAMETERS}

    def total(surrogate: object = None, *, compiled: bool = False) -> dict[str, Any]:
        trained = SimpleNamespace(stages=stages, data_root=Path(), surrogate=lambda _: surrogate, cache=lambda: None)
        return costs.total_costs(trained, {}, {}, None, "cpu", Path(), compiled=compiled)

    return total


def test_a_method_costs_all_that_it_builds_on(costs_of: Callable[..., dict[str, Any]]):
    """Every method contains its codec, a corrector also the operator and the steady model, a student its teacher."""
    methods = costs_of()["methods"]
    expected = {"operator": 11, "steady": 101, "diffusion": 1111, "consistency": 11_111}
    assert {name: method["parameters"] for name, method in methods.items()} == expected
    assert {name: 2 * method["training_seconds"] for name, method in methods.items()} == expected


def test_our_training_is_that_of_codec_operator_and_steady_model(costs_of: Callable[..., dict[str, Any]]):
    """Seconds and CPU seconds of 111 parameters, without the correctors, which FNO and U-Net do not have."""
    assert costs_of()["training"] == {"ours": {"wall": 111 / 2, "cpu": 111 / 4}}


@pytest.mark.parametrize("compiled", [True, False])
def test_models_are_compiled_on_request(costs_of: Callable[..., dict[str, Any]], compiled: bool):
    """Once before times are measured, or not at all, as the costs say."""
    calls = []
    found = costs_of(SimpleNamespace(compile=lambda: calls.append(True)), compiled=compiled)
    assert len(calls) == found["compiled"] == compiled


def test_times_are_those_of_one_snapshot_of_one_trajectory(monkeypatch: pytest.MonkeyPatch):
    """Six seconds for two steps of each of three trajectories are one second; of more than four only four are timed."""
    dataset = replace(GAS, family="advection_1d", grid=(8,), times=(0.0, 1.0, 2.0), parameters={"beta": 1.0})
    for num_trajectories, milliseconds in ((3, 1000.0), (9, 750.0)):
        each = TrajectorySet(Path(), dataset, tuple(range(num_trajectories)), [], Domain("advection_1d", (8,), (True,)))
        monkeypatch.setattr(costs, "_rollouts", lambda name, ours, timed, device: {"operator": len(timed.indices)})
        monkeypatch.setattr(costs, "in_turns", lambda contenders, *_: dict.fromkeys(contenders, 6.0))
        found = costs.milliseconds_per_snapshot(None, each, {}, each, torch.device("cpu"))
        assert found == {"operator": milliseconds, "solver": milliseconds}


@pytest.mark.parametrize(("num_trajectories", "solved"), [(3, 3), (9, 4)])
def test_the_solver_solves_as_many_trajectories_as_are_counted(num_trajectories: int, solved: int):
    """Of three all three, of more than four only four, at all times of the dataset."""
    dataset = replace(GAS, family="advection_1d", grid=(8,), times=(0.0, 0.1, 0.2), parameters={"beta": 1.0})
    each = TrajectorySet(Path(), dataset, tuple(range(num_trajectories)), [], Domain("advection_1d", (8,), (True,)))
    assert costs._solution(each)().shape == (solved, 3, 1, 8)


def test_seconds_of_training_follow_from_the_logged_rates(tmp_path: Path):
    """20 steps at 10 per second and 10 more at 5 are four seconds, of which half a core and two cores computed."""
    append_metrics(tmp_path, 20, {"steps_per_second": 10.0, "cpu_cores": 0.5})
    append_metrics(tmp_path, 20, {"valid_loss": 1.0})
    append_metrics(tmp_path, 30, {"steps_per_second": 5.0, "cpu_cores": 2.0})
    assert training_seconds(tmp_path) == 4.0
    assert training_cpu_seconds(tmp_path) == 2 * 0.5 + 2 * 2.0


@pytest.mark.parametrize(("fno", "unet", "ratio"), [(100.0, 200.0, 1.0), (80.0, 200.0, 1.25), (100.0, 260.0, 1.3)])
def test_unequal_training_times_are_seen(fno: float, unet: float, ratio: float):
    """The largest ratio of CPU seconds, where the U-Net may have twice the time."""
    training = {name: {"wall": 1.0, "cpu": cpu} for name, cpu in (("ours", 100.0), ("fno", fno), ("unet", unet))}
    assert costs.ratio_of_times(training, {"fno": 1.0, "unet": 2.0, "linear": 0.1}) == pytest.approx(ratio)
