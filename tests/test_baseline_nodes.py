"""Nodes of pipeline `baselines`: what baselines may use, and which learning rate they get."""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.test_parameters import typed
from tests.training.jobs import launched
from ups.config import BaselinesConfig, LaunchConfig
from ups.config.baselines import Trial, is_measured, neighbours, next_candidate
from ups.data.latent_cache import LatentCache
from ups.errors import Diverged, GateFailed
from ups.evaluation import costs
from ups.performance import pace
from ups.performance.pace import TIMED_FRACTIONS
from ups.pipelines import baselines
from ups.runs.run import Run, append_metrics, saved_validation
from ups.training.stages.operator import horizon_at

SIZES = {"learning_rate": 3.0, "hidden_channels": 2.0, "modes": 2.0}
CONFIG = typed().baselines.model_copy(update={"factors": SIZES})
OPERATOR, STEADY = typed().operator, typed().steady


@pytest.fixture
def launch() -> LaunchConfig:
    """One process."""
    return launched(num_processes=1)


def test_a_budget_is_what_the_trained_models_took(launch: LaunchConfig, tmp_path: Path):
    """Steps are those that made the model, fewer than configured with early stopping; families share evenly."""
    ours = {}
    for stage, steps in (("codec", 10), ("operator", 100), ("steady", 30)):
        folder = tmp_path / stage
        folder.mkdir()
        Run(folder, stage, "", {"steps": 2 * steps}, {}, launch, "cpu", tmp_path).write()
        append_metrics(folder, steps // 2, {"valid_loss": 0.2})
        append_metrics(folder, steps, {"valid_loss": 0.3})
        ours[stage] = {"stage": stage, "path": stage}
    pace = {"seconds_per_step": {"codec": 0.3, "operator": 0.2, "steady": 0.1}}
    cache = {"transient": ["burgers_1d", "advection_1d"], "steady": ["darcy_2d"]}
    seconds = baselines.budget(pace, cache, tmp_path, **ours)
    assert seconds == pytest.approx({"burgers_1d": 1 + 10, "advection_1d": 1 + 10, "darcy_2d": 1 + 3})


def test_a_trial_is_judged_by_the_weights_that_it_saves(tmp_path: Path):
    """The last ones, or with early stopping the best."""
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.2)):
        append_metrics(tmp_path, step, {"valid_loss": loss})
        append_metrics(tmp_path, step, {"loss": loss})
    assert (saved_validation(tmp_path, None), saved_validation(tmp_path, 1)) == (0.2, 0.1)


def test_baselines_are_timed_as_they_unroll(launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their lengths are not known yet: still the steps that are timed unroll like those of a whole training."""
    monkeypatch.setattr(pace, "seconds_per_step", lambda step, stages, *rest: stages)
    unroll = OPERATOR.unroll.model_copy(update={"horizon": 5, "start": 0.5})
    operator = OPERATOR.model_copy(update={"unroll": unroll, "history": ["burgers_1d"]})
    fields = {"transient": ["burgers_1d"], "steady": []}
    stages = baselines.measure_pace(fields, CONFIG, operator, STEADY, launch, tmp_path, tmp_path)
    changed = {"fno": ("hidden_channels", "modes"), "unet": ("hidden_channels",), "linear": ()}
    sizes = {f"{kind}/burgers_1d/{name}{sign}1" for kind, names in changed.items() for name in names for sign in "+-"}
    assert set(stages) == {f"{kind}/burgers_1d" for kind in changed} | sizes
    for stage in stages.values():
        steps = stage["config"]["steps"]
        assert stage["config"]["history"] and stage["config"]["unroll"]["horizon"] == 5
        assert [horizon_at(int(fraction * steps), steps, unroll) for fraction in TIMED_FRACTIONS] == [1, 1, 2, 4]


def test_baselines_start_from_what_the_operator_starts_from():
    """Two snapshots of transient families that have a history, and of their variants; a steady family has none."""
    operator = OPERATOR.model_copy(update={"history": ["burgers_1d", "darcy_2d"]})
    sections = {
        family: CONFIG.section("fno", family, 9, CONFIG.start("fno", family), operator, STEADY)
        for family in ("burgers_1d", "burgers_1d-64", "advection_1d", "darcy_2d")
    }
    assert [section.history for section in sections.values()] == [True, True, False, False]
    assert {section.noise for section in sections.values()} == {operator.noise}


@pytest.mark.parametrize("mirrored", [True, False])
def test_baselines_see_the_images_that_our_models_see(mirrored: bool):
    """Those of a steady family as many as the steady model, whatever the operator sees."""
    models = (
        OPERATOR.model_copy(update={"symmetries": mirrored}),
        STEADY.model_copy(update={"symmetries": not mirrored}),
    )
    seen = [CONFIG.section("fno", family, 9, {}, *models).symmetries for family in ("burgers_1d", "darcy_2d")]
    assert seen == [mirrored, not mirrored]


def test_a_training_that_ended_early_is_timed_as_far_as_it_went(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its last steps, which may be slower, were never made."""
    folder = tmp_path / "operator"
    folder.mkdir()
    Run(folder, "operator", "", {"steps": 200}, {}, launch, "cpu", tmp_path).write()
    append_metrics(folder, 45, {"valid_loss": 0.4, "valid_loss/burgers_1d": 0.1, "valid_loss/advection_1d": 0.7})
    append_metrics(folder, 90, {"steps_per_second": 4.0, "cpu_cores": 2.0})
    append_metrics(folder, 90, {"valid_loss": 0.3, "valid_loss/burgers_1d": 0.2, "valid_loss/advection_1d": 0.4})
    monkeypatch.setattr(pace, "seconds_per_step", lambda step, stages, *rest: stages)
    fields, ours = {"transient": [], "steady": []}, {"operator": {"stage": "operator", "path": "operator"}}
    stages = baselines.measure_pace(fields, CONFIG, OPERATOR, STEADY, launch, tmp_path, tmp_path, **ours)
    assert (stages["operator"]["num_steps"], stages["operator"]["config"]["steps"]) == (90, 200)
    losses = [{"burgers_1d": 0.1, "advection_1d": 0.7}, {"burgers_1d": 0.2, "advection_1d": 0.4}]
    assert stages["operator"]["validations"] == losses and stages["operator"]["cpu_seconds"] == 45.0


@pytest.mark.parametrize(("diverges_late", "chosen"), [([], 0.001), ([0.001], 0.01), ([0.001, 0.01], None)])
def test_a_learning_rate_that_diverges_is_not_chosen(
    launch: LaunchConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    diverges_late: list[float],
    chosen: float | None,
):
    """Its trial ends nothing; the model is trained with the best that does not diverge in the whole training either."""

    def train_stage(stage: str, section, inputs: dict, launch: LaunchConfig, data_root: Path) -> dict:
        if section.learning_rate == 0.1 or (section.steps == 200 and section.learning_rate in diverges_late):
            raise Diverged("loss nan")
        (data_root / "metrics.jsonl").write_text(json.dumps({"step": 1, "valid_loss": section.learning_rate}) + "\n")
        return {"path": ".", "steps": section.steps, "rate": section.learning_rate}

    monkeypatch.setattr(baselines, "train_stage", train_stage)
    config = CONFIG.model_copy(update={"factors": {"learning_rate": 10.0}, "max_trials": 3})
    pace = {"seconds_per_step": {"fno/burgers_1d": 0.1}}
    fields = {"transient": ["burgers_1d"], "steady": []}
    parts = pace, {"burgers_1d": 20.0}, config, OPERATOR, STEADY, launch, tmp_path
    train = partial(baselines.baseline_trainer("fno"), fields, *parts)
    if chosen is None:
        with pytest.raises(Diverged, match="fno of burgers_1d: every training diverged; lower baselines.learning_rate"):
            train()
        return
    trained = train()["burgers_1d"]
    assert trained["steps"] == 200
    assert trained["rate"] == trained["values"]["learning_rate"] == chosen


def test_values_that_were_chosen_before_have_no_trials(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their model alone is timed, and is trained once; other families and kinds have trials."""
    values = {"learning_rate": 0.03, "hidden_channels": 16, "modes": (32, 16, 8)}
    config = BaselinesConfig.model_validate(CONFIG.model_dump() | {"chosen": {"fno": {"burgers_1d": values}}})
    monkeypatch.setattr(pace, "seconds_per_step", lambda step, stages, *rest: stages)
    fields = {"transient": ["advection_1d", "burgers_1d"], "steady": []}
    timed = baselines.measure_pace(fields, config, OPERATOR, STEADY, launch, tmp_path, tmp_path)
    assert [name for name in timed if "fno/burgers" in name] == ["fno/burgers_1d"]
    assert (
        len([name for name in timed if "fno/advection" in name]) == len([n for n in timed if "unet/burgers" in n]) + 2
    )
    assert timed["fno/burgers_1d"]["config"]["model"]["modes"] == [32, 16, 8]
    assert config.values("fno", "burgers_1d-64", {}) == values and config.start("fno", "burgers_1d-64") == {}
    trained = []
    monkeypatch.setattr(baselines, "train_stage", lambda stage, section, *rest: trained.append(section) or {})
    speed = {"seconds_per_step": {"fno/burgers_1d": 0.1}}
    train = baselines.baseline_trainer("fno")
    alone = {"transient": ["burgers_1d"], "steady": []}
    receipts = train(alone, speed, {"burgers_1d": 20.0}, config, OPERATOR, STEADY, launch, tmp_path)
    (section,) = trained
    assert (section.steps, section.learning_rate, section.model.hidden_channels) == (200, 0.03, 16)
    assert receipts == {"burgers_1d": {"values": values, "trials": 0, "settled": True}}


@pytest.mark.parametrize(("diverging", "rate"), [([0.03], 0.01), ([0.03, 0.01], 0.0033), ([0.03, 0.01, 0.0033], None)])
def test_a_smaller_rate_is_taken_where_a_chosen_one_diverges(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diverging: list[float], rate: float | None
):
    """A third of it, then a ninth, with the chosen sizes; then the kind and the family are named."""
    values = {"learning_rate": 0.03, "hidden_channels": 16}

    def train_stage(stage: str, section, *rest) -> dict:
        if section.learning_rate in diverging:
            raise Diverged("loss nan")
        return {"steps": section.steps, "sizes": section.model.hidden_channels}

    monkeypatch.setattr(baselines, "train_stage", train_stage)
    config = BaselinesConfig.model_validate(CONFIG.model_dump() | {"chosen": {"fno": {"burgers_1d": values}}})
    pace, fields = {"seconds_per_step": {"fno/burgers_1d": 0.1}}, {"transient": ["burgers_1d"], "steady": []}
    parts = pace, {"burgers_1d": 20.0}, config, OPERATOR, STEADY, launch, tmp_path
    train = partial(baselines.baseline_trainer("fno"), fields, *parts)
    if rate is None:
        with pytest.raises(Diverged, match="fno of burgers_1d: every training diverged; lower baselines.learning_rate"):
            train()
        return
    found = {"values": values | {"learning_rate": rate}, "trials": 0, "settled": False}
    assert train() == {"burgers_1d": {"steps": 200, "sizes": 16} | found}


@pytest.mark.parametrize(
    ("kind", "values"), [("unet", {"modes": (8, 8, 8)}), ("fno", {"modes": 8}), ("fno", {"hidden_channels": 0.5})]
)
def test_impossible_values_are_refused(kind: str, values: dict):
    """A size that the kind has not, or of another type."""
    with pytest.raises(ValueError, match=next(iter(values))):
        BaselinesConfig.model_validate(CONFIG.model_dump() | {"chosen": {kind: {"burgers_1d": values}}})


@pytest.mark.parametrize(("optimum", "tried"), [((0, 0), 5), ((0, 1), 6), ((2, -1), 8), ((90, 0), 9)])
def test_trials_go_on_until_the_best_is_inside(optimum: tuple[int, int], tried: int):
    """Losses grow with the distance from the optimum: all neighbours of known pace are tried, or as many as allowed."""
    trials: list[Trial] = []
    while (candidate := next_candidate(trials, {"learning_rate": 0, "modes": 0}, 9)) is not None:
        trials.append((candidate, math.dist(candidate.values(), optimum)))
    assert len(trials) == tried
    best, _ = min(trials, key=lambda trial: trial[1])
    is_inside = all(each in [candidate for candidate, _ in trials] for each in neighbours(best) if is_measured(each))
    assert is_inside == (optimum != (90, 0)) and (tuple(best.values()) == optimum) == is_inside


def test_kinds_without_a_time_share_are_not_trained(launch: LaunchConfig, tmp_path: Path):
    """Nothing is started for a kind that `time_shares` leaves out; those that the comparison needs must be there."""
    fields = {"transient": ["burgers_1d"], "steady": []}
    assert (
        baselines.baseline_trainer("transformer")(
            fields, {}, {"burgers_1d": 1.0}, CONFIG, OPERATOR, STEADY, launch, tmp_path
        )
        == {}
    )
    with pytest.raises(ValueError, match="missing: unet"):
        BaselinesConfig.model_validate(CONFIG.model_dump() | {"time_shares": {"fno": 1.0, "linear": 1.0}})


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


def test_costs_are_measured_anew_for_other_models(
    launch: LaunchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Times of eager models are not those of compiled ones: each is measured once, and again after a new training."""
    measured = []

    def total_costs(*_: object, compiled: bool) -> dict:
        measured.append(compiled)
        return {"methods": {}, "training": {}, "milliseconds_per_snapshot": {}, "compiled": compiled}

    monkeypatch.setattr(costs, "total_costs", total_costs)
    monkeypatch.setattr(LatentCache, "open", lambda *_: None)
    monkeypatch.setattr(baselines, "trained_stages", lambda *_: None)
    monkeypatch.setattr(baselines, "_compiles", lambda where: True)
    models = dict.fromkeys(baselines.KINDS, {}) | {"fno": {"burgers_1d": {"path": "fno"}}, "steady": {"untrained": ""}}
    (tmp_path / "fno").mkdir()

    def measure(compiles: bool) -> bool:
        how, fields = launch.model_copy(update={"compile": compiles}), {"path": "fields", "key": {}}
        return baselines.measure_costs(fields, {}, how, tmp_path, tmp_path, **models)["compiled"]

    assert [measure(compiles) for compiles in (False, True, False)] == [False, True, False]
    assert measured == [False, True]
    append_metrics(tmp_path / "fno", 10, {"steps_per_second": 5.0, "cpu_cores": 1.0})
    assert not measure(False) and measured == [False, True, False]
