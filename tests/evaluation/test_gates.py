"""The verdict of gates over metric records; a model replaces the champion only if paired errors say so."""

import json
import math
from typing import Any

import pytest
import torch

from ups.config.evaluation import Gate
from ups.errors import DataFault
from ups.evaluation.gates import compare, errors_of, judge, why_hopeless

BURGERS, DARCY = {"burgers_1d": False}, {"darcy_2d": True}


def record(value: float | None, method: str = "operator", dataset: str = "a", **changes: Any) -> dict[str, Any]:
    """Build one line of the metric records."""
    defaults = {"family": "burgers_1d", "metric": "nRMSE", "horizon": "rollout", "num_trajectories": 4}
    return {**defaults, "dataset": dataset, "method": method, "value": value, **changes}


def gate(**changes: Any) -> Gate:
    """Build the gate: rollout nRMSE of the operator at most 0.5, else unusable, except for the changes."""
    defaults = {"name": "accurate", "method": "operator", "metric": "nRMSE", "horizon": "rollout"}
    others = {"relative_to": None, "at_most": 0.5, "applies_to": "transient", "otherwise": "unusable"}
    return Gate(**{**defaults, **others, **changes})


RELATIVE = gate(relative_to="persistence")

CASES = {
    "below": (gate(), [record(0.4)], 0.4, True),
    "equal": (gate(), [record(0.5)], 0.5, True),
    "above": (gate(), [record(0.6)], 0.6, False),
    "other metric only": (gate(), [record(0.1, metric="RMSE")], None, False),
    "other horizon only": (gate(), [record(0.1, horizon="one_step")], None, False),
    "other method only": (gate(), [record(0.1, method="codec")], None, False),
    "NaN": (gate(), [record(math.nan)], None, False),
    "infinite": (gate(), [record(math.inf)], None, False),
    "minus infinity": (gate(), [record(-math.inf)], None, False),
    "null": (gate(), [record(None)], None, False),
    "ratio below": (RELATIVE, [record(1.0), record(4.0, "persistence")], 0.25, True),
    "ratio above": (RELATIVE, [record(3.0), record(4.0, "persistence")], 0.75, False),
    "no baseline": (RELATIVE, [record(0.1)], None, False),
    "baseline zero": (RELATIVE, [record(0.1), record(0.0, "persistence")], None, False),
    "both zero": (RELATIVE, [record(0.0), record(0.0, "persistence")], None, False),
    "baseline NaN": (RELATIVE, [record(0.1), record(math.nan, "persistence")], None, False),
    "ratio overflows": (RELATIVE, [record(1e308), record(1e-308, "persistence")], None, False),
}


@pytest.mark.parametrize(("rule", "records", "value", "passed"), CASES.values(), ids=CASES.keys())
def test_gate(rule: Gate, records: list[dict], value: float | None, passed: bool):
    """A gate holds where the value is finite and at most the limit; whatever is missing fails."""
    verdict = judge(records, [rule], BURGERS)
    (line,) = verdict["gates"]
    comparison = line.pop("comparison")
    assert line == {
        "name": "accurate",
        "dataset": "a",
        "family": "burgers_1d",
        "value": value,
        "limit": 0.5,
        "passed": passed,
    }
    assert comparison.startswith("rollout nRMSE of operator") and comparison.endswith(", at most 0.5")
    assert verdict["passed"] is passed
    assert verdict["grades"]["a"]["grade"] == ("good" if passed else "unusable")
    json.dumps(verdict, allow_nan=False)


def test_latents_that_are_not_rounded_have_no_gate_on_rounding():
    """Without records of the rounding its gate is not checked; with one that is not finite it fails."""
    rounding, records = gate(name="rounding", method="rounding", relative_to="operator", at_most=0.1), [record(0.4)]

    def found(*of_rounding: dict) -> list[tuple[str, bool]]:
        verdict = judge([*records, *of_rounding], [gate(), rounding], BURGERS)
        return [(line["name"], line["passed"]) for line in verdict["gates"]]

    assert found() == [("accurate", True)]
    assert found(record(None, "rounding"))[1:] == [("rounding", False)]
    assert found(record(0.041, "rounding"))[1:] == [("rounding", False)]
    assert found(record(0.04, "rounding"))[1:] == [("rounding", True)]


def test_each_dataset_has_a_grade_of_its_own():
    """One of two datasets of a family misses the limit: only it is unusable, and says why."""
    grades = judge([record(0.6), record(0.1, dataset="b")], [gate()], BURGERS)["grades"]
    reason = "accurate: rollout nRMSE of operator: 0.6, at most 0.5"
    assert grades["a"] == {"family": "burgers_1d", "grade": "unusable", "reasons": [reason]}
    assert grades["b"] == {"family": "burgers_1d", "grade": "good", "reasons": []}


def test_a_number_belongs_to_its_dataset():
    """The persistence of another dataset is none to compare with."""
    verdict = judge([record(0.1), record(1.0, "persistence", "b")], [RELATIVE], BURGERS)
    assert [line["value"] for line in verdict["gates"]] == [None, None]


@pytest.mark.parametrize(
    ("otherwise", "grade", "passed"), [("weak", "weak", True), ("fail", "weak", False), ("unusable", "unusable", False)]
)
def test_what_follows_from_a_gate_that_does_not_hold(otherwise: str, grade: str, passed: bool):
    """Weak is a grade alone; failed and unusable fail the run too."""
    verdict = judge([record(0.6)], [gate(otherwise=otherwise)], BURGERS)
    assert (verdict["grades"]["a"]["grade"], verdict["passed"]) == (grade, passed)


def test_the_worst_reason_comes_first():
    """Of a weak, a failing and an unusable reason the grade is that of the worst, and so is their order."""
    gates = [gate(name=otherwise, otherwise=otherwise) for otherwise in ("weak", "unusable", "fail")]
    grade = judge([record(0.6)], gates, BURGERS)["grades"]["a"]
    assert [reason.split(":")[0] for reason in grade["reasons"]] == ["unusable", "fail", "weak"]
    assert grade["grade"] == "unusable"


@pytest.mark.parametrize(("applies_to", "judged"), [("transient", ["a"]), ("steady", ["d"]), ("all", ["a", "d"])])
def test_gate_applies_to_its_kind_of_family(applies_to: str, judged: list[str]):
    """A gate judges the steady families, the transient ones or all, as it says; the others have no grade but weak."""
    records = [record(0.1), record(0.1, family="darcy_2d", dataset="d")]
    verdict = judge(records, [gate(applies_to=applies_to)], BURGERS | DARCY)
    assert [line["dataset"] for line in verdict["gates"]] == judged
    assert {name: entry["grade"] for name, entry in verdict["grades"].items()} == {
        name: "good" if name in judged else "weak" for name in ("a", "d")
    }


@pytest.mark.parametrize("gates", [[], [gate(applies_to="steady")]], ids=["no gate", "no gate that applies"])
def test_nothing_judged_is_not_passed(gates: list[Gate]):
    """A verdict that rests on no gate at all is not passed."""
    verdict = judge([record(0.1)], gates, BURGERS)
    assert not verdict["passed"] and verdict["gates"] == []
    assert verdict["grades"]["a"]["reasons"] == ["no gate applies to it"]


def test_family_without_records_fails():
    """A family under test that has no record at all is unusable, under its own name."""
    grades = judge([record(0.1)], [gate()], BURGERS | {"advection_1d": False})["grades"]
    assert {name: entry["grade"] for name, entry in grades.items()} == {"a": "good", "advection_1d": "unusable"}


def test_a_family_without_records_fails_the_gates_on_physics_too():
    """Where nothing is known it is not known either that a family conserves nothing."""
    assert judge([], [gate(metric="conservation_drift")], BURGERS)["gates"][0]["value"] is None


def test_family_not_under_test_is_ignored():
    """Records of a family that is not under test change nothing."""
    verdict = judge([record(0.1), record(9.0, family="other", dataset="other_a")], [gate()], BURGERS)
    assert verdict["passed"] and set(verdict["grades"]) == {"a"}


def test_contradicting_records_are_refused():
    """Two records of the same number are an error, not a choice."""
    with pytest.raises(ValueError, match="one record per dataset"):
        judge([record(0.1), record(0.9)], [gate()], BURGERS)


@pytest.mark.parametrize("mode", ["off", "sample", None])
def test_a_corrector_that_is_off_has_no_gates(mode: str | None):
    """Its numbers are the operator's; nor has one that was not trained. One that is on must have what is asked for."""
    records = [record(0.9)] + ([] if mode is None else [record(0.9, "diffusion", mode=mode)])
    gates = [gate(method="diffusion"), gate(method="diffusion", metric="CRPS")]
    values = [line["value"] for line in judge(records, gates, BURGERS)["gates"]]
    assert values == ([0.9, None] if mode == "sample" else [])


@pytest.mark.parametrize("metric", ["conservation_drift", "positivity"])
def test_physics_is_judged_where_the_equation_has_it(metric: str):
    """Only where some method has the number; then a method without it fails."""
    rule = gate(metric=metric)
    assert judge([record(0.1)], [rule], BURGERS)["gates"] == []
    records = [record(0.1), record(0.1, "codec", metric=metric)]
    assert [line["value"] for line in judge(records, [rule], BURGERS)["gates"]] == [None]


def test_the_better_baseline_counts():
    """Of FNO and U-Net the smaller finite error; on a dataset without baselines there is nothing to compare."""
    rule = gate(relative_to="baselines", at_most=1.0)
    ours = [record(0.3), record(0.3, dataset="b")]
    baselines = [record(0.2, "fno"), record(None, "unet"), record(0.1, "linear")]
    (line,) = judge(ours, [rule], BURGERS, baselines)["gates"]
    assert (line["dataset"], line["value"]) == ("a", pytest.approx(1.5))
    assert line["comparison"] == "rollout nRMSE of operator / the better of FNO and U-Net: 1.5, at most 1"


@pytest.mark.parametrize(("ours", "passed"), [(0.3, True), (None, False)])
def test_baselines_that_diverged_are_beaten_by_what_is_finite(ours: float | None, passed: bool):
    """Where neither FNO nor U-Net is finite a finite score is 0 relative to them; one that diverged too fails."""
    baselines = [record(None, "fno"), record(None, "unet")]
    (line,) = judge([record(ours)], [gate(relative_to="baselines", at_most=1.0)], BURGERS, baselines)["gates"]
    assert (line["value"], line["passed"]) == (0.0 if passed else None, passed)


@pytest.mark.parametrize("other", ["baselines", "champion"])
def test_other_trajectories_are_not_compared(other: str):
    """After another split of the same data the gate is not checked: as many trajectories are not the same ones."""
    ours = [record(0.3, trajectories=[0.3], digest="these")]
    for digest, checked in (("these", True), ("others", False)):
        theirs = [record(0.2, "operator" if other == "champion" else "fno", trajectories=[0.2], digest=digest)]
        assert bool(judge(ours, [gate(relative_to=other)], BURGERS, **{other: theirs})["gates"]) == checked


def champion(errors: list[float | None], ours: list[float | None]) -> dict[str, Any]:
    """The line of a gate against a champion with these errors of single trajectories."""
    rule = gate(relative_to="champion", at_most=1.05, otherwise="fail")
    records = [[record(0.0, trajectories=values)] for values in (ours, errors)]
    return judge(records[0], [rule], BURGERS, champion=records[1])["gates"][0]


@pytest.mark.parametrize(("factor", "passed"), [(1.04, True), (1.06, False)])
def test_the_champion_is_met_trajectory_by_trajectory(factor: float, passed: bool):
    """Errors 6 % above the champion's on the same trajectories are too much, 4 % are not; the interval is said."""
    errors = [0.1 * (1 + index) for index in range(10)]
    line = champion(errors, [factor * error for error in errors])
    assert (line["value"], line["passed"]) == (pytest.approx(factor), passed)
    assert f"same trajectories (95 % interval {factor:.3g} to {factor:.3g})" in line["comparison"]


@pytest.mark.parametrize("ours", [[0.1], [0.1, None], []], ids=["other trajectories", "not finite", "none"])
def test_a_champion_on_other_trajectories_cannot_be_met(ours: list[float | None]):
    """Without a pair for every trajectory there is no number, and the gate fails."""
    assert champion([0.1, 0.2], ours)["value"] is None


@pytest.mark.parametrize(("last", "passed"), [(1.04, True), (1.06, False)])
def test_a_champion_that_diverged_is_met_where_it_is_finite(last: float, passed: bool):
    """The trajectory that it lost is left out, which is said; the others decide."""
    line = champion([None, 0.1, 0.1], [9.0, 0.1 * last, 0.1 * last])
    assert (line["value"], line["passed"]) == (pytest.approx(last), passed)
    assert "same trajectories, 1 of 3 left out where it diverged: " in line["comparison"]


def test_a_champion_that_diverged_everywhere_is_beaten_by_what_is_finite():
    """Finite errors are 0 relative to it; an error that is not finite fails all the same."""
    assert [champion([None, None], ours)["value"] for ours in ([0.1, 0.2], [0.1, None])] == [0.0, None]


def test_a_hopeless_run_stops_early():
    """Something not finite, or nothing usable: after a few trajectories there is no hope for all of them."""
    good, bad, lost = (record(value, dataset=name) for value, name in ((0.1, "a"), (0.9, "b"), (None, "c")))
    stopped = {
        name: bool(why_hopeless(judge(records, [gate()], BURGERS)))
        for name, records in {"some": [good, bad], "all": [bad], "lost": [good, lost], "none": [good]}.items()
    }
    assert stopped == {"some": False, "all": True, "lost": True, "none": False}


def errors(factors: dict[str, float], count: int = 40, noise: float = 0.02, seed: int = 0) -> dict[str, Any]:
    """Errors of one dataset per family: the same trajectories each time, times a factor, with own noise."""
    base = torch.rand(count, generator=torch.Generator().manual_seed(99), dtype=torch.float64) + 0.1
    own = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        f"data of {family}": {
            "family": family,
            "trajectories": family,
            "nRMSE": (factor * base * (noise * own).exp()).tolist(),
        }
        for family, factor in factors.items()
    }


CHAMPION = errors({"advection_1d": 1.0, "darcy_2d": 1.0})


def test_lower_errors_win():
    """10 % lower everywhere: the ratio is 0.9 and its interval narrow, although errors differ by a factor of 10."""
    decision = compare(errors({"advection_1d": 0.9, "darcy_2d": 0.9}, seed=1), CHAMPION, 1.02)
    assert decision.is_better and decision.ratio == pytest.approx(0.9, abs=0.01)
    low, high = decision.interval
    assert 0.88 < low < decision.ratio < high < 0.92


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_equal_or_larger_errors_do_not_win(factor: float):
    """An interval that reaches 1 proves nothing."""
    decision = compare(errors({"advection_1d": factor, "darcy_2d": factor}, seed=1), CHAMPION, 1.02)
    assert not decision.is_better and "not surely better" in decision.reason


def test_no_family_may_pay_for_the_others():
    """Half the error of one family does not make up for 5 % more of another, which is named; 1 % is allowed."""
    decision = compare(errors({"advection_1d": 0.5, "darcy_2d": 1.05}), CHAMPION, 1.02)
    assert not decision.is_better and decision.reason == "it is worse on darcy_2d by 5 %"
    assert compare(errors({"advection_1d": 0.5, "darcy_2d": 1.01}), CHAMPION, 1.02).is_better


def test_a_new_family_is_no_obstacle_a_lost_one_is():
    """The champion's test trajectories count, all of them."""
    more = errors({"advection_1d": 0.9, "darcy_2d": 0.9, "burgers_1d": 5.0}, seed=1)
    assert compare(more, CHAMPION, 1.02).is_better
    decision = compare(errors({"advection_1d": 0.5}), CHAMPION, 1.02)
    assert not decision.is_better and decision.reason.endswith("test trajectories of data of darcy_2d")


def test_errors_of_other_trajectories_are_not_compared():
    """Another split of the same data."""
    new = errors({"advection_1d": 0.5, "darcy_2d": 0.5})
    new["data of darcy_2d"]["trajectories"] = "other"
    assert not compare(new, CHAMPION, 1.02).is_better


def test_a_prediction_that_diverges_does_not_win():
    """One trajectory without a finite error is infinitely worse."""
    new = errors({"advection_1d": 0.5, "darcy_2d": 0.5})
    new["data of advection_1d"]["nRMSE"][3] = None
    assert compare(new, CHAMPION, 1.02).reason == "it is worse on advection_1d by inf %"
    old = errors({"advection_1d": 1.0, "darcy_2d": 1.0})
    old["data of advection_1d"]["nRMSE"][4] = None
    assert compare(new, old, 1.02).reason == "it is worse on advection_1d by inf %"


def test_a_champion_that_diverges_can_be_replaced():
    """Trajectories on which it diverged, alone or with the new model, are no obstacle."""
    old, new = errors({"advection_1d": 1.0, "darcy_2d": 1.0}), errors({"advection_1d": 0.9, "darcy_2d": 0.9}, seed=1)
    old["data of advection_1d"]["nRMSE"][3] = old["data of advection_1d"]["nRMSE"][5] = None
    new["data of advection_1d"]["nRMSE"][5] = None
    decision = compare(new, old, 1.02)
    assert decision.is_better and decision.ratio == pytest.approx(0.9, abs=0.01)


def changed(found: dict[str, Any], start: int, factor: float | None) -> dict[str, Any]:
    """Errors of one dataset, from trajectory `start` on times a factor; None: they are lost."""
    ((name, entry),) = found.items()
    tail = [None if factor is None else factor * error for error in entry["nRMSE"][start:]]
    return {name: entry | {"nRMSE": entry["nRMSE"][:start] + tail}}


@pytest.mark.parametrize(("num_kept", "is_better"), [(0, True), (5, True), (20, True), (39, False), (40, False)])
def test_to_stay_finite_is_to_win(num_kept: int, is_better: bool):
    """Where the champion lost most trajectories 1 % more error on the others are no obstacle; one says nothing."""
    old = errors({"advection_1d": 1.0})
    decision = compare(errors({"advection_1d": 1.01}, seed=1), changed(old, num_kept, None), 1.02)
    assert decision.is_better == is_better
    lost = f"(0.5 on {40 - num_kept} of 40 test trajectories, where only the champion diverged)"
    assert (lost in decision.reason) == (num_kept < 40)


def test_wins_count_as_trajectories():
    """Seven that the champion lost are too few, eight are enough; those that both lost do not count."""
    for num_lost, found in ((33, False), (32, True)):
        new, lost = errors({"advection_1d": 0.9}), changed(errors({"advection_1d": 1.0}), 0, None)
        assert compare(changed(new, 40 - num_lost, None), lost, 1.02).is_better == found


def test_few_trajectories_prove_nothing():
    """Three have no interval."""
    decision = compare(errors({"advection_1d": 0.5}, count=3), errors({"advection_1d": 1.0}, count=3), 1.02)
    assert decision.reason == "3 test trajectories prove nothing: at least 8 are needed"


def card(test: list[int]) -> dict[str, Any]:
    """The families of a card: one dataset of each of two."""
    common = {"grid": [8], "times": [0.0, 1.0], "subsample": {}, "counts": [9], "split": {"test": test}}
    return {
        family: {"datasets": [common | {"name": f"data of {family}", "files": [f"{family}.hdf5"]}]}
        for family in ("advection_1d", "darcy_2d")
    }


def records() -> list[dict[str, Any]]:
    """Scores of several methods, metrics and horizons."""
    return [
        {"dataset": f"data of {family}", "method": method, "metric": metric, "horizon": horizon, "trajectories": [x]}
        for family, methods in {"advection_1d": ("operator", "codec"), "darcy_2d": ("steady", "codec")}.items()
        for x, method in enumerate(methods)
        for metric in ("nRMSE", "MAE")
        for horizon in ("one_step", "rollout")
    ]


def test_errors_are_those_of_rollouts_without_corrector():
    """Of the operator or the steady model."""
    found = errors_of(records(), card([1]), {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"})
    assert {name: entry["nRMSE"] for name, entry in found.items()} == {
        "data of advection_1d": [0],
        "data of darcy_2d": [0],
    }


def test_trajectories_are_known_by_their_files_and_numbers():
    """Another split or another content of the file are other trajectories."""
    md5 = {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"}
    one, same, split, file = (
        errors_of(records(), card(test), files)["data of advection_1d"]["trajectories"]
        for test, files in (([1], md5), ([1], md5), ([2], md5), ([1], md5 | {"advection_1d.hdf5": "c"}))
    )
    assert one == same and len({one, split, file}) == 3


def test_missing_scores_are_one_line():
    """A dataset that was not scored is named, with the command."""
    with pytest.raises(DataFault, match="no scores of data of darcy_2d: run `kedro run --pipeline evaluation`"):
        errors_of(records()[:8], card([1]), {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"})
