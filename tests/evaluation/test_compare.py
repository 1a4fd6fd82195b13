"""The comparison: refused without baselines, ours is one method, ratios and means are right."""

import pytest

from ups.errors import DataFault
from ups.evaluation.compare import comparison, draw_comparison, errors_of, logged

ERRORS = {"persistence": 1.0, "linear": 0.5, "unet": 0.2, "fno": 0.4, "operator": 0.1, "diffusion": 0.05}
COSTS = {
    "methods": {
        "fno": {"milliseconds_per_frame": 2.0, "parameters": 1200},
        "operator": {"milliseconds_per_frame": 3.0},
    },
    "milliseconds_per_frame": {"flow": {"fno": 2.0, "unet": 8.0, "operator": 1.0, "diffusion": 0.5, "solver": 7.0}},
}


def records(dataset: str, errors: dict[str, float | None], family: str = "burgers_1d") -> list[dict]:
    """The same nRMSE at both horizons."""
    keys = [(method, horizon, value) for method, value in errors.items() for horizon in ("one_step", "rollout")]
    where = {"dataset": dataset, "family": family, "metric": "nRMSE"}
    return [where | {"method": m, "horizon": h, "value": v} for m, h, v in keys]


@pytest.mark.parametrize("missing", ["persistence", "linear", "unet", "fno"])
def test_no_table_without_its_baselines(missing: str):
    """A dataset without one of the baselines is named, with the remedy."""
    found = records("a", {method: value for method, value in ERRORS.items() if method != missing})
    with pytest.raises(DataFault, match=rf"{missing} on a: run `kedro run --pipeline baselines`"):
        errors_of(found, [])


def test_a_steady_dataset_has_no_persistence():
    """What would persist?"""
    found = records("d", {"linear": 3.0, "unet": 2.0, "fno": 1.0, "steady": 1.5}, "darcy_2d")
    assert errors_of(found, [])["d", "steady", "rollout"] == 1.5


def test_ours_is_the_operator_beside_the_fno_and_the_better_of_both():
    """0.1 / 0.4 and 0.1 / 0.2, though diffusion is better on this very test split; means are geometric."""
    found = records("a", ERRORS) + records("b", ERRORS | {"operator": 0.4})
    lines = comparison(errors_of(found, []), COSTS, "note").splitlines()
    assert sum(line.endswith("| 0.25 | 0.5 |") for line in lines) == 2
    assert sum(line.startswith("| geometric mean") and line.endswith("| 0.5 | 1 |") for line in lines) == 2


def test_costs_are_beside_those_of_the_fno():
    """Milliseconds over the FNO's; what was not measured stays empty."""
    lines = comparison(errors_of(records("a", ERRORS), []), COSTS, "note").splitlines()
    assert "| operator |  |  | 3 |  | 1.5 |" in lines
    assert "| fno |  | 1,200 | 2 |  | 1 |" in lines


def test_every_family_is_beside_its_solver():
    """The operator takes half the FNO's time for a frame, and a seventh of the solver's."""
    lines = comparison(errors_of(records("a", ERRORS), []), COSTS, "note").splitlines()
    assert "| flow | 1 | 2 | 8 | 7 | 0.5 | 7 |" in lines


def test_what_is_not_finite_is_said():
    """A diverged method has no ratio, and no mean leaves it out; the others keep theirs."""
    found = records("a", ERRORS | {"operator": None}) + records("b", ERRORS)
    errors = errors_of(found, [])
    lines = comparison(errors, COSTS, "").splitlines()
    counts = {name: next(ln for ln in lines if ln.startswith(f"| {name} |")).count("not finite") for name in "ab"}
    assert counts == {"a": 3, "b": 0}
    assert sum(line.startswith("| geometric mean") and line.count("not finite") == 2 for line in lines) == 2
    assert len(draw_comparison(errors).axes) == 2


def test_logged_seconds_of_ours_are_those_of_both_models():
    """The operator and the steady model together had as long as the baselines of all families."""
    seconds = {"operator": 1010.4, "steady": 100.0, "diffusion": 5.0, "fno": 664.0, "unet": 823.0}
    costs = {method: {"training_seconds": value} for method, value in seconds.items()}
    assert logged(costs) == "ours 1,110 s, unet 823 s, fno 664 s"
    assert logged({method: costs[method] for method in ("operator", "fno", "unet")}).startswith("ours 1,010 s")
