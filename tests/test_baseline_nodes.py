"""Nodes of pipeline `baselines`: what baselines may use, and which learning rate they get."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.test_parameters import typed
from tests.training.jobs import launched
from ups.config import LaunchConfig
from ups.data.latent_cache import LatentCache
from ups.errors import Diverged, GateFailed
from ups.evaluation import costs
from ups.performance import pace
from ups.performance.pace import TIMED_FRACTIONS
from ups.pipelines import baselines
from ups.runs.run import Run
from ups.training.stages.operator import horizon_at

CONFIG = typed().baselines


@pytest.fixture
def launch() -> LaunchConfig:
    """One process."""
    return launched(num_processes=1)


def test_a_budget_is_what_the_trained_models_took(launch: LaunchConfig, tmp_path: Path):
    """Steps are those of the run that made the model, whatever the parameters say now; families share evenly."""
    ours = {}
    for stage, steps in (("codec", 10), ("operator", 100), ("steady", 30)):
        folder = tmp_path / stage
        folder.mkdir()
        Run(folder, stage, "", {"steps": steps}, {}, launch, "cpu", tmp_path).write()
        ours[stage] = {"stage": stage, "path": stage}
    pace = {"seconds_per_step": {"codec": 0.3, "operator": 0.2, "steady": 0.1}}
    cache = {"transient": ["burgers_1d", "advection_1d"], "steady": ["darcy_2d"]}
    seconds = baselines.budget(pace, cache, tmp_path, **ours)
    assert seconds == pytest.approx({"burgers_1d": 1 + 10, "advection_1d": 1 + 10, "darcy_2d": 1 + 3})


def test_baselines_are_timed_as_they_unroll(launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their lengths are not known yet: still the steps that are timed unroll like those of a whole training."""
    monkeypatch.setattr(pace, "seconds_per_step", lambda step, stages, *rest: stages)
    stages = baselines.measure_pace({"transient": ["burgers_1d"], "steady": []}, CONFIG, launch, tmp_path, tmp_path)
    assert set(stages) == {"fno/burgers_1d", "unet/burgers_1d", "linear/burgers_1d"}
    unroll = CONFIG.unroll.model_copy(update={"horizon": 5, "start": 0.5})
    for stage in stages.values():
        steps = stage["config"]["steps"]
        assert [horizon_at(int(fraction * steps), steps, unroll) for fraction in TIMED_FRACTIONS] == [1, 1, 2, 4]


def test_a_learning_rate_that_diverges_is_not_chosen(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its trial is worse than all others and ends nothing; the model is trained with the best of the rest."""

    def train_stage(stage: str, section, inputs: dict, launch: LaunchConfig, data_root: Path) -> dict:
        if section.learning_rate == 0.1:
            raise Diverged("loss nan")
        (data_root / "metrics.jsonl").write_text(json.dumps({"step": 1, "valid_loss": section.learning_rate}) + "\n")
        return {"path": ".", "steps": section.steps, "rate": section.learning_rate}

    monkeypatch.setattr(baselines, "train_stage", train_stage)
    config = CONFIG.model_copy(update={"learning_rates": [0.001, 0.01, 0.1], "max_learning_rates": 3})
    pace = {"seconds_per_step": {"fno/burgers_1d": 0.1}}
    fields = {"transient": ["burgers_1d"], "steady": []}
    receipts = baselines.baseline_trainer("fno")(fields, pace, {"burgers_1d": 20.0}, config, launch, tmp_path)
    assert receipts["burgers_1d"]["steps"] == 200
    assert receipts["burgers_1d"]["rate"] == receipts["burgers_1d"]["learning_rate"] == 0.001


@pytest.mark.parametrize(("optimum", "tried"), [(0.01, 3), (0.05, 4), (0.0005, 5), (1e-9, 6)])
def test_the_grid_of_learning_rates_grows_until_the_best_is_inside(optimum: float, tried: int):
    """Losses grow with the distance from the optimum: it lies inside, or as many as allowed have been tried."""
    trials: dict[float, float] = {}
    while (rate := baselines.next_rate(trials, CONFIG)) is not None:
        trials[rate] = abs(math.log(rate / optimum))
    assert len(trials) == tried
    best = min(trials, key=lambda rate: trials[rate])
    assert (min(trials) < best < max(trials)) == (tried < CONFIG.max_learning_rates)


@pytest.mark.parametrize(("cpu", "fails"), [(110.0, False), (80.0, True)])
def test_a_comparison_at_unequal_time_fails(cpu: float, fails: bool):
    """CPU seconds within 15 % are equal; others end the run, with the times in the message."""
    training = {
        "ours": {"wall": 1.0, "cpu": 100.0},
        "fno": {"wall": 9.0, "cpu": cpu},
        "unet": {"wall": 1.0, "cpu": 100.0},
    }
    with pytest.raises(GateFailed, match=r"factor of 1.25.*fno 80 s") if fails else nullcontext():
        baselines.require_equal_time({"training": training}, CONFIG, "", "")


def test_costs_are_measured_anew_for_models_that_are_compiled(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Times of eager models are not those of compiled ones: each way is measured once."""
    measured = []

    def total_costs(*_: object, compiled: bool) -> dict:
        measured.append(compiled)
        return {"methods": {}, "training": {}, "milliseconds_per_snapshot": {}, "compiled": compiled}

    monkeypatch.setattr(costs, "total_costs", total_costs)
    monkeypatch.setattr(LatentCache, "open", lambda *_: None)
    monkeypatch.setattr(baselines, "trained_stages", lambda *_: None)
    monkeypatch.setattr(baselines, "_compiles", lambda where: True)
    receipts = dict.fromkeys(baselines.KINDS, {})
    found = []
    for compiles in (False, True, False):
        how = launch.model_copy(update={"compile": compiles})
        fields = {"path": "fields", "key": {}}
        found.append(baselines.measure_costs(fields, {}, how, tmp_path, tmp_path, **receipts)["compiled"])
    assert found == [False, True, False] and measured == [False, True]
