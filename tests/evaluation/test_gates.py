"""The verdict of gates over metric records."""

import json
import math

import pytest

from ups.config.evaluation import Gate
from ups.evaluation.gates import judge


def record(value: float | None, method: str = "operator", dataset: str = "burgers_a", **changes: object) -> dict:
    """Build one line of the metric records."""
    defaults = {"family": "burgers_1d", "metric": "nRMSE", "horizon": "rollout", "num_trajectories": 4}
    return {**defaults, "dataset": dataset, "method": method, "value": value, **changes}


def gate(**changes: object) -> Gate:
    """Build the gate: rollout nRMSE of the operator at most 0.5, except for the changes."""
    defaults = {"name": "accurate", "method": "operator", "metric": "nRMSE", "horizon": "rollout"}
    return Gate(**{**defaults, "relative_to": None, "at_most": 0.5, "applies_to": "transient", **changes})


RELATIVE = gate(relative_to="persistence")

CASES = {
    "below": (gate(), [record(0.4)], 0.4, True),
    "equal": (gate(), [record(0.5)], 0.5, True),
    "above": (gate(), [record(0.6)], 0.6, False),
    "no record at all": (gate(), [], None, False),
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
    "baseline infinite": (RELATIVE, [record(0.1), record(math.inf, "persistence")], None, False),
    "baseline of another dataset": (RELATIVE, [record(0.1), record(1.0, "persistence", "burgers_b")], None, False),
    "ratio overflows": (RELATIVE, [record(1e308), record(1e-308, "persistence")], None, False),
    "worst dataset counts": (gate(), [record(0.6), record(0.1, dataset="burgers_b")], 0.6, False),
    "one dataset without the metric": (gate(), [record(0.1), record(0.1, "codec", "burgers_b")], None, False),
    "one dataset NaN": (gate(), [record(0.1), record(math.nan, dataset="burgers_b")], None, False),
}


@pytest.mark.parametrize(("rule", "records", "value", "passed"), CASES.values(), ids=CASES.keys())
def test_gate(rule: Gate, records: list[dict], value: float | None, passed: bool):
    """A gate passes when the worst dataset is finite and at most the threshold; whatever is missing fails."""
    verdict = judge(records, [rule], {"burgers_1d": False})
    line = {"name": "accurate", "family": "burgers_1d", "value": value, "threshold": 0.5, "passed": passed}
    assert verdict == {"passed": passed, "gates": [line]}
    json.dumps(verdict, allow_nan=False)


@pytest.mark.parametrize(
    ("applies_to", "judged"),
    [("transient", ["burgers_1d"]), ("steady", ["darcy_2d"]), ("all", ["burgers_1d", "darcy_2d"])],
)
def test_gate_applies_to_its_kind_of_family(applies_to: str, judged: list[str]):
    """A gate judges the steady families, the transient ones or all, as it says."""
    records = [record(0.1), record(0.1, family="darcy_2d", dataset="darcy_a")]
    verdict = judge(records, [gate(applies_to=applies_to)], {"burgers_1d": False, "darcy_2d": True})
    assert [line["family"] for line in verdict["gates"]] == judged
    assert verdict["passed"]


def test_gate_without_family_is_left_out():
    """A gate that applies to no family present is neither listed nor counted."""
    verdict = judge([record(0.1)], [gate(), gate(name="solves", applies_to="steady")], {"burgers_1d": False})
    assert verdict["passed"]
    assert [line["name"] for line in verdict["gates"]] == ["accurate"]


@pytest.mark.parametrize("gates", [[], [gate(applies_to="steady")]], ids=["no gate", "no gate that applies"])
def test_nothing_judged_is_not_passed(gates: list[Gate]):
    """A verdict that rests on no gate at all is not passed."""
    assert judge([record(0.1)], gates, {"burgers_1d": False}) == {"passed": False, "gates": []}


def test_family_without_records_fails():
    """A family under test that has no record at all fails its gates."""
    verdict = judge([record(0.1)], [gate()], {"burgers_1d": False, "advection_1d": False})
    assert not verdict["passed"]
    assert [line["passed"] for line in verdict["gates"]] == [True, False]


def test_family_not_under_test_is_ignored():
    """Records of a family that is not under test change nothing."""
    verdict = judge([record(0.1), record(9.0, family="other", dataset="other_a")], [gate()], {"burgers_1d": False})
    assert verdict["passed"]


def test_one_failed_gate_fails_the_verdict():
    """The verdict is passed only if every gate is."""
    verdict = judge([record(0.1)], [gate(), gate(name="strict", at_most=0.01)], {"burgers_1d": False})
    assert [line["passed"] for line in verdict["gates"]] == [True, False]
    assert not verdict["passed"]


def test_contradicting_records_are_refused():
    """Two records of the same number are an error, not a choice."""
    with pytest.raises(ValueError, match="one record per dataset"):
        judge([record(0.1), record(0.9)], [gate()], {"burgers_1d": False})


def test_a_corrector_that_is_off_is_judged_by_the_operator():
    """Its nRMSE is the operator's and counts; a gate on what only an ensemble has fails, as all that is missing."""
    records = [record(0.4), record(0.4, "diffusion", mode="off")]
    gates = [gate(method="diffusion"), gate(method="diffusion", metric="CRPS")]
    verdict = judge(records, gates, {"burgers_1d": False})
    assert [(line["value"], line["passed"]) for line in verdict["gates"]] == [(0.4, True), (None, False)]
