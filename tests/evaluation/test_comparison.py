"""The comparison: refused without baselines, ours is one method, ratios and means are right."""

import math

import pytest

from tests.evaluation.conftest import unpadded
from tests.evaluation.test_figures import cut_texts, legend, render
from ups.errors import DataFault
from ups.evaluation.comparison import (
    best,
    comparison_text,
    draw_comparison,
    errors_of,
    limits_text,
    training_time_text,
)
from ups.evaluation.costs import snapshot_costs

ERRORS = {"persistence": 1.0, "linear": 0.5, "unet": 0.2, "fno": 0.4, "operator": 0.1, "diffusion": 0.05}
COSTS = {
    "methods": {
        "operator": {
            "training_seconds": 10.0,
            "parameters": 1200,
            "datasets": 3,
            "milliseconds_per_snapshot": 3.0,
            "over_fno": 1.5,
            "speed_up_over_solver": 0.25,
        },
    },
    "milliseconds_per_snapshot": {"flow": {"fno": 2.0, "unet": 8.0, "operator": 1.0, "diffusion": 0.5, "solver": 7.0}},
    "compiled": False,
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
    lines = unpadded(comparison_text(errors_of(found, []), COSTS, "note"))
    assert sum(line.endswith("| 0.25 | 0.5 |") for line in lines) == 2
    assert sum(line.startswith("| geometric mean") and line.endswith("| 0.5 | 1 |") for line in lines) == 2


def test_ours_is_compared_with_the_best_of_further_baselines_too():
    """0.1 / 0.05 where the transformer is best, 0.1 / 0.2 where it has no score; without it there is no such column."""
    found = records("a", ERRORS | {"transformer": 0.05}) + records("b", ERRORS)
    lines = unpadded(comparison_text(errors_of(found, []), COSTS, "note"))
    assert sum(line.endswith("| ours / best network |") for line in lines) == 2
    assert sum(line.startswith("| a ") and line.endswith("| 0.25 | 0.5 | 2 |") for line in lines) == 2
    assert sum(line.startswith("| b ") and line.endswith("| 0.25 | 0.5 | 0.5 |") for line in lines) == 2
    assert "best network" not in comparison_text(errors_of(records("a", ERRORS), []), COSTS, "note")


def test_a_model_on_its_limits_is_shown_without_them():
    """One row for the model whose rollouts touch a limit, with both errors, of which one is not finite."""
    found = records("a", {"fno": 0.4, "unet": 0.2})
    found += [r | {"metric": "nRMSE_without_limits", "value": None} for r in found if r["method"] == "unet"]
    found += [r | {"metric": metric, "value": 0.5} for r in found[:4] for metric in ("limited_steps", "limited_values")]
    rows = [line for line in unpadded(limits_text(found)) if line.startswith("| a ")]
    assert rows == ["| a | unet | 0.5 | 0.5 | 0.2 | not finite |"]
    assert "No rollout did." in limits_text(records("a", ERRORS))


def test_costs_have_a_line_per_method():
    """Every cost in its column."""
    lines = unpadded(comparison_text(errors_of(records("a", ERRORS), []), COSTS, "note"))
    assert "| operator | 10 | 1,200 | 3 | 3 | 1.5 | 0.25 |" in lines


def test_times_are_compared_on_the_same_datasets():
    """Twice the FNO's time on the one dataset it is for, though less than the FNO's mean over all."""
    all_times = [{"fno": 1.0, "solver": 8.0, "diffusion": 2.0}, {"fno": 100.0, "solver": 100.0}]
    found = snapshot_costs("diffusion", [times for times in all_times if "diffusion" in times])
    assert found == {"datasets": 1, "milliseconds_per_snapshot": 2.0, "over_fno": 2.0, "speed_up_over_solver": 4.0}
    assert snapshot_costs("fno", all_times) == pytest.approx(
        {"datasets": 2, "milliseconds_per_snapshot": 10.0, "over_fno": 1.0, "speed_up_over_solver": 8**0.5}
    )


def test_the_best_of_no_finite_error_is_none():
    """What is absent (infinite), off (NaN) or diverged (None) is never the best."""
    values = {"fno": float("inf"), "unet": float("nan"), "operator": None, "steady": 0.5, "linear": 0.1}
    assert best(values, ("fno", "unet", "operator")) is None
    assert best(values, ("fno", "unet", "steady")) == 0.5


def test_every_dataset_is_beside_its_solver():
    """The operator takes half the FNO's time for a snapshot, and a seventh of the solver's."""
    lines = unpadded(comparison_text(errors_of(records("a", ERRORS), []), COSTS, "note"))
    assert "| flow | 1 | 2 | 8 | 7 | 0.5 | 7 |" in lines


def test_a_family_without_solver_has_no_time_of_it():
    """A user's own family: its cell stays empty, and the mean is over the others."""
    all_times = {
        "flow": {"fno": 2.0, "unet": 8.0, "operator": 1.0, "solver": 7.0},
        "own": {"fno": 2.0, "unet": 8.0, "operator": 4.0},
    }
    assert snapshot_costs("operator", list(all_times.values()))["speed_up_over_solver"] == pytest.approx(7.0)
    costs = COSTS | {"milliseconds_per_snapshot": all_times}
    lines = unpadded(comparison_text(errors_of(records("a", ERRORS), []), costs, "note"))
    assert "| own | 4 | 2 | 8 | | 2 | |" in lines


def test_what_is_not_finite_is_said():
    """A diverged method has no ratio, and no mean leaves it out; the others keep theirs."""
    found = records("a", ERRORS | {"operator": None}) + records("b", ERRORS)
    errors = errors_of(found, [])
    lines = unpadded(comparison_text(errors, COSTS, ""))
    counts = {name: next(ln for ln in lines if ln.startswith(f"| {name} |")).count("not finite") for name in "ab"}
    assert counts == {"a": 3, "b": 0}
    assert sum(line.startswith("| geometric mean") and line.count("not finite") == 2 for line in lines) == 2
    assert len(draw_comparison(errors, {"a": "A", "b": "B"}).axes) == 2


def test_the_figure_names_equations_and_shows_all_methods():
    """Labels are titles in whole words, none is cut, and the axes begin at the decade of the smallest error drawn."""
    errors = errors_of([*records("a", ERRORS), *records("b", ERRORS)], [])
    errors |= {("a", "codec", "rollout"): 1e-8}
    figure = draw_comparison(errors, {"a": "Diffusion–reaction 1D, ν = 0.5, ρ = 1", "b": "Darcy 2D"})
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert labels == ["Diffusion–reaction\n1D, ν = 0.5, ρ = 1", "Darcy 2D"]
    assert legend(figure) == list(ERRORS) and cut_texts(figure) == [] and render(figure)
    assert {panel.get_ylim()[0] for panel in figure.axes} == {0.99 * 1e-2}


def test_a_method_that_is_off_everywhere_is_not_drawn():
    """The figure's legend names only methods with a number."""
    errors = errors_of(records("a", ERRORS), [])
    off = {key: math.nan if key[1] == "diffusion" else value for key, value in errors.items()}
    for found, expected in ((errors, set(ERRORS)), (off, set(ERRORS) - {"diffusion"})):
        assert set(legend(draw_comparison(found, {"a": "A"}))) == expected


def test_training_times_are_those_of_the_contenders():
    """Ours beside the strong baselines, on the clock and of the CPU."""
    times = {name: {"wall": wall, "cpu": 600.0} for name, wall in (("fno", 664.0), ("ours", 1110.4), ("unet", 823.0))}
    expected = "ours 1,110 s (CPU 600 s), unet 823 s (CPU 600 s), fno 664 s (CPU 600 s)"
    assert training_time_text(times | {"linear": {"wall": 9.0, "cpu": 9.0}}) == expected
