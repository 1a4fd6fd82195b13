"""What the README says in numbers is what the published tables say, and the project can be cited."""

import re
import tomllib
from itertools import pairwise
from math import log
from xml.etree import ElementTree

import pytest
import yaml

import ups
from tests.published import (
    BASE,
    FIGURE,
    MEAN,
    README,
    ROOT,
    RUNS,
    by_equation,
    equation_of,
    readme_section,
    rows_of,
)
from ups.data.pdebench import FAMILIES
from ups.evaluation.tables import geometric_mean

TABLES = [BASE / f"table_seed_{seed}.md" for seed in range(3)]
HEADINGS = {"Rollout": "Rollout: nRMSE on the test split", "One step": "One step: nRMSE on the test split"}
ROUNDING = 0.011  # relative, of ratios of two numbers with three digits


def shown_rows() -> dict[str, list[float]]:
    """Equation -> our error, FNO's, U-Net's and the ratio, as they stand in the README."""
    section = README.read_text(encoding="utf-8").partition("| equation ")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    return {name: list(map(float, numbers)) for name, *numbers in lines}


def errors_of_seeds(heading: str) -> dict[str, list[tuple[float, float, float]]]:
    """Equation -> error of ours, FNO and U-Net for each seed, from the tables of single seeds."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for path in TABLES:
        rows = rows_of(path, HEADINGS[heading])
        for dataset, row in rows.items():
            if dataset != MEAN:
                ours = float(row["operator"] or row["steady"])
                found.setdefault(equation_of(dataset), []).append((ours, float(row["fno"]), float(row["unet"])))
    return found


def test_the_readme_has_the_published_numbers():
    """Its section is what the script writes; after another run: `python tests/published.py`."""
    assert readme_section() in README.read_text(encoding="utf-8")


def test_every_row_follows_from_the_tables_of_single_seeds():
    """Means over the three seeds, and the geometric mean of ours over the better of both, of all eleven equations."""
    seeds, shown = errors_of_seeds("Rollout"), shown_rows()
    assert shown.keys() == seeds.keys() and len(shown) == len(FAMILIES) == 11
    for equation, numbers in shown.items():
        means = [sum(values) / 3 for values in zip(*seeds[equation], strict=True)]
        ratio = geometric_mean([ours / min(fno, unet) for ours, fno, unet in seeds[equation]])
        assert numbers == pytest.approx([*means, ratio], rel=ROUNDING), equation


@pytest.mark.parametrize(("heading", "number"), [("Rollout", 0), ("One step", 1)])
def test_the_means_follow_from_the_tables_of_single_seeds(heading: str, number: int):
    """The geometric mean over all equations and seeds, and for how many equations ours is better."""
    ratios = [[ours / min(rest) for ours, *rest in errors] for errors in errors_of_seeds(heading).values()]
    text = " ".join(README.read_text(encoding="utf-8").split())
    said = re.search(r"column is ([\d.]+) \(single steps: ([\d.]+)\)", text)
    assert float(said[number + 1]) == pytest.approx(geometric_mean(sum(ratios, [])), rel=ROUNDING)
    counts = re.search(r"lower for (\d+) of 11 equations \(single steps: (\d+) of 11\)", text)
    assert int(counts[number + 1]) == sum(geometric_mean(each) < 1 for each in ratios)


def test_the_figure_shows_the_published_ratios():
    """Its dots lie, from left to right on a log axis, where the ratios of the three seeds are; it is a small file."""
    rows = by_equation(rows_of(BASE / "seeds.md", "Rollout"))
    expected = {f"ratios {place}": [float(row[run]) for run in RUNS] for place, row in enumerate(rows.values())}
    root = ElementTree.fromstring(FIGURE.read_text(encoding="utf-8"))
    pairs = []
    for element in root.iter():
        if element.get("id") in expected:
            places = [float(use.get("x")) for use in element.iter() if use.tag.endswith("use")]
            pairs += zip(map(log, expected.pop(element.get("id"))), places, strict=True)
    assert not expected and len(pairs) == 33 and FIGURE.stat().st_size < 60_000
    (low, left), *_, (high, right) = sorted(pairs)
    assert [x for _, x in pairs] == pytest.approx([left + (r - low) / (high - low) * (right - left) for r, _ in pairs])
    assert all(one <= other for (_, one), (_, other) in pairwise(sorted(pairs)))


def test_times_are_those_of_the_makefile():
    """The README's first screen and `make run` tell the same time and size."""
    text, make = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    minutes, size = re.search(r"(\d+ to \d+ minutes on two CPU cores)[^']*'[^']*'([\d.]+ GB)", make).groups()
    assert f"`make run` takes {minutes} and {size}" in text


def test_the_project_can_be_cited():
    """CITATION.cff has the keys that the format needs, this version and license, and PDEBench as a reference."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["cff-version"] == "1.2.0"
    assert cited["version"] == ups.__version__ and "version" in project["dynamic"]
    assert cited["license"] == project["license"]
    (reference,) = cited["references"]
    assert "2210.07182" in reference["url"] and reference["year"] == 2022
