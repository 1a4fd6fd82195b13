"""Learning curves of adapted networks."""

from typing import Any

from ups.evaluation.adaptation import adapt_text, curves_of, draw_curves

ERRORS = {
    ("a", "before", 0): 0.9,
    ("a", "persistence", 0): 1.2,
    ("a", "adapted", 4): 0.2,
    ("a", "adapted", 8): 0.1,
    ("a", "scratch", 4): 0.5,
    ("a", "scratch", 8): 0.4,
    ("b", "persistence", 0): 1.5,
    ("b", "adapted", 4): 0.3,
    ("b", "scratch", 4): 0.3,
}
NETWORKS = {"a": {"4": "burgers_1d", "8": "advection_1d"}, "b": {"4": "advection_1d"}}
ADAPTED = {
    "steps": 12,
    "datasets": {
        name: {"networks": {n: {"adapted": {"donor": donor}} for n, donor in donors.items()}}
        for name, donors in NETWORKS.items()
    },
}


def records() -> list[dict[str, Any]]:
    """Records of the errors, and others that are not of rollouts."""
    found = []
    for (dataset, method, count), value in ERRORS.items():
        record = {"dataset": dataset, "method": method, "learned_from": count, "metric": "nRMSE", "value": value}
        record |= {"num_trajectories": 5}
        found += [record | {"horizon": "rollout"}, record | {"horizon": "one_step", "value": 9.0}]
    return found


def test_curves_are_of_rollouts():
    """By dataset and method, over the number of trajectories learned from."""
    curves = curves_of(records())
    assert curves["a"]["adapted"] == {4: 0.2, 8: 0.1}
    assert curves["a"]["before"] == {0: 0.9} and "before" not in curves["b"]


def test_the_table_divides_by_scratch():
    """Each row has adapted / scratch, the last table its geometric mean: sqrt(0.4 * 1) = 0.632 and 0.25."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in adapt_text(records(), ADAPTED).splitlines()]
    assert ["a", "burgers_1d", "4", "1.2", "0.9", "0.2", "0.5", "0.4"] in rows
    assert ["b", "advection_1d", "4", "1.5", "", "0.3", "0.3", "1"] in rows
    assert ["4", "0.632", "2"] in rows and ["8", "0.25", "1"] in rows


def test_the_figure_has_a_panel_per_dataset():
    """Errors that do not depend on the number are horizontal lines; a missing method has none."""
    panels = {panel.get_title(): panel.get_lines() for panel in draw_curves(records()).axes}
    assert {name: len(lines) for name, lines in panels.items()} == {"a": 4, "b": 3}
    assert len({line.get_color() for line in panels["a"]}) == 4
    adapted = next(line for line in panels["a"] if line.get_label() == "adapted")
    assert list(adapted.get_xdata()) == [4, 8] and list(adapted.get_ydata()) == [0.2, 0.1]
