"""What the tables of scores show where the corrector is off."""

from io import StringIO

import pytest
from rich.console import Console

from tests.evaluation.conftest import unpadded
from ups.evaluation.comparison import comparison_text, errors_of
from ups.evaluation.tables import geometric_mean, number, score_table

NO_COSTS = {"methods": {}, "milliseconds_per_snapshot": {}, "compiled": False}


def record(method: str, horizon: str, value: float | None, dataset: str = "burgers", **more: str) -> dict:
    """Build one nRMSE record."""
    where = {"dataset": dataset, "family": "burgers_1d", "method": method, "horizon": horizon}
    return where | {"metric": "nRMSE", "value": value, **more}


def shown(records: list[dict]) -> list[list[str]]:
    """The cells of the table's rows."""
    console = Console(file=StringIO(), width=200)
    console.print(score_table(records, "nRMSE", "the test split"))
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines if line.startswith("\u2502")]


def test_a_corrector_that_is_off_is_called_off():
    """The operator's scores are not shown again under another name; where it is on its own are."""
    horizons = ("one_step", "rollout")
    records = [record("operator", horizon, 0.1) for horizon in horizons]
    records += [record("diffusion", horizon, 0.1, mode="off") for horizon in horizons]
    records += [record("consistency", horizon, 0.2, mode="sample") for horizon in horizons]
    assert shown(records) == [["burgers", "0.1", "off", "0.2"], ["", "0.1", "", "0.2"]]


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


@pytest.mark.parametrize("values", [[], [1.0, None], [2.0, 0.0]])
def test_no_mean_of_what_is_not_there(values: list[float | None]):
    """A geometric mean of nothing, of a number that is not finite or of zero is none."""
    assert geometric_mean(values) is None
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
