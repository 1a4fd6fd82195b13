"""What the tables of scores show where the corrector is off."""

from io import StringIO

import pytest
from rich.console import Console

from tests.evaluation.conftest import unpadded
from ups.evaluation.comparison import comparison_text, errors_of
from ups.evaluation.tables import geometric_mean, number, score_table, verdict_text

NO_COSTS = {"methods": {}, "milliseconds_per_snapshot": {}, "compiled": False}


def record(method: str, horizon: str, value: float | None, dataset: str = "burgers", **more: str) -> dict:
    """Build one nRMSE record."""
    where = {"dataset": dataset, "family": "burgers_1d", "method": method, "horizon": horizon}
    return where | {"metric": "nRMSE", "value": value} | more


def shown(records: list[dict], grades: dict[str, dict] | None = None) -> list[str]:
    """The lines of the table in a terminal of 80 columns."""
    console = Console(file=StringIO(), width=80)
    console.print(score_table(records, "nRMSE", "the test split", grades))
    return [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]


def test_a_corrector_that_is_off_is_called_off():
    """The operator's scores are not shown again under another name; where it is on its own are, the best marked."""
    horizons = ("one_step", "rollout")
    records = [record("operator", horizon, 0.1) for horizon in horizons]
    records += [record("diffusion", horizon, 0.1, mode="off") for horizon in horizons]
    records += [record("consistency", horizon, 0.2, mode="sample") for horizon in horizons]
    lines = [line.split() for line in shown(records)]
    assert lines[2:] == [
        ["operator", "diffusion", "consistency"],
        ["burgers"],
        ["one", "step", "0.1*", "off", "0.2"],
        ["rollout", "0.1*", "off", "0.2"],
    ]


def test_the_table_fits_into_80_columns():
    """With six methods, the longest name and a grade no line is cut or longer, and every number is in its column."""
    name = "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train"
    methods = ("persistence", "operator", "diffusion", "consistency", "selected")
    records = [record(method, horizon, 1.2345e-05, name) for method in methods for horizon in ("one_step", "rollout")]
    records += [record("steady", "one_step", None, "darcy", family="darcy_2d")]
    records += [record("steady", "one_step", 1.2345e-05, "flow", family="darcy_2d")]
    grades = {name: {"grade": "good"}, "darcy": {"grade": "unusable"}, "flow": {"grade": "good"}}
    lines = shown(records, grades)
    assert max(map(len, lines)) == 80 and "selected: members that fit the PDE" in " ".join(lines)
    assert lines[lines.index("flow: good") + 1].split() == ["solution", "1.23e-05*"]
    assert f"{name}: good" in lines and "darcy: unusable" in lines
    assert lines[lines.index("darcy: unusable") + 1].split() == ["solution", "not", "finite"]
    (header,) = (line for line in lines if "persistence" in line)
    row = lines[lines.index(f"{name}: good") + 1]
    ends = [header.index(method) + len(method) for method in methods]
    assert all(row[end - 1] == "5" and row[end] == "*" for end in ends)


def test_the_verdict_is_a_page():
    """The same numbers in Markdown, with the grade of every dataset and the gates that do not hold."""
    grades = {"burgers": {"grade": "weak", "reasons": ["too slow"]}}
    text = verdict_text([record("operator", "rollout", 0.5)], "nRMSE", "these files", {"grades": grades})
    assert "| burgers | weak | rollout | 0.5* |" in unpadded(text)
    assert text.startswith("# nRMSE on these files") and text.endswith("- burgers: too slow\n")


def test_the_comparison_says_off_too():
    """A corrector that is off has no number beside the baselines, and is not the best of ours."""
    values = {"persistence": 1.0, "linear": 0.8, "unet": 0.4, "fno": 0.2, "operator": 0.1, "diffusion": 0.05}
    records = [
        record(method, horizon, value) for method, value in values.items() for horizon in ("one_step", "rollout")
    ]
    records = [one | ({"mode": "off"} if one["method"] == "diffusion" else {}) for one in records]
    lines = unpadded(comparison_text(errors_of(records, []), NO_COSTS, ""))
    assert lines.count("| burgers | 1 | 0.8 | 0.4 | 0.2 | 0.1 | off | 0.5 | 0.5 |") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (-999.6, "-1,000"), (999.4, "999"), (12345.6, "12,346"), (-12345.6, "-12,346")],
)
def test_large_numbers_have_all_their_digits(value: float, text: str):
    """Three digits below a thousand in magnitude; above it whole numbers, of either sign, without powers of ten."""
    assert number(value) == text


@pytest.mark.parametrize("values", [[], [1.0, None], [0.0, None]])
def test_no_mean_of_what_is_not_there(values: list[float | None]):
    """A geometric mean of nothing, or of a number that is not finite, is none."""
    assert geometric_mean(values) is None


def test_mean_with_an_error_of_zero():
    """(1 * 4)^(1/2) = 2, and (2 * 0)^(1/2) = 0: a model without any error is the best, not one without a rank."""
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([2.0, 0.0]) == 0.0
