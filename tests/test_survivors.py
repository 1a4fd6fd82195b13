"""The published score of the mutation test and its table of survivors."""

import csv
import json
from pathlib import Path

import pytest

from tests.survivors import changed_lines, write_survivors

DIFF = "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n def f(x):\n-    return x + 1\n+    return x - 1\n"
CHANGE = ("ups.a.f", "return x + 1", "return x - 1")


def test_changed_lines_of_a_diff():
    """The code before and after, without the headers and the lines that stay."""
    assert changed_lines(DIFF) == CHANGE[1:]


def test_verdict_of_a_change_is_kept(tmp_path: Path):
    """A verdict written into the table holds for the same change of the same function in the next run, for no other."""
    other = ("ups.a.g", *CHANGE[1:])
    assert "write a verdict" in write_survivors(tmp_path, {"killed": 9, "total": 10}, [CHANGE])
    table = tmp_path / "survivors.csv"
    table.write_text(table.read_text().replace("return x - 1,", 'return x - 1,"equivalent, x is 0"'))
    assert write_survivors(tmp_path, {"killed": 9, "total": 10}, [CHANGE]) is None
    assert "for 1 mutants: ups.a.g" in write_survivors(tmp_path, {"killed": 9, "total": 10}, [CHANGE, other])
    with table.open() as file:
        assert [row[3] for row in csv.reader(file)] == ["verdict", "equivalent, x is 0", ""]


@pytest.mark.parametrize(("killed", "passed"), [(85, True), (84, False)])
def test_least_score(tmp_path: Path, killed: int, passed: bool):
    """Fewer than 85 % of killed mutants fail."""
    remedy = write_survivors(tmp_path, {"killed": killed, "total": 100}, [])
    assert (remedy is None) == passed
    assert json.loads((tmp_path / "score.json").read_text())["killed_percent"] == killed
