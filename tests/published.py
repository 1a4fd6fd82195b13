"""The README's table and figure of errors, from the published tables: `python tests/published.py` writes both."""

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from ups.data.card_text import equation_name
from ups.data.recognition import find_family
from ups.evaluation.studies import draw_seeds
from ups.evaluation.styles import svg_file
from ups.evaluation.tables import table
from ups.files import publish

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BASE = ROOT / "data" / "published" / "base"
FIGURE = BASE / "comparison.svg"
RUNS = ("data/base_0", "data/base_1", "data/base_2")  # columns of seeds.md
MEAN = "geometric mean"
START, END = "<!-- by `python tests/published.py` -->\n", "<!-- end -->\n"
POINTS = """\
- **Errors**: ours is lower for {rollouts} equations (single steps: {steps}); the geometric mean of the last column is
{mean} (single steps: {step_mean}).
- **Sizes**: operator and codec, for ten equations, have {operator} parameters (with statistics), steady model and
codec, for Darcy flow, {steady}; eleven FNOs {fno}, eleven U-Nets {unet}.
- **Times**: {shortest} to {longest} seconds of training per equation, for each of the three. Our operator predicts a
snapshot in {over_fno} of the FNO's time, and {over_solver} times as fast as our numerical solver on the same grid: by
equation {by_equation} times (nothing is compiled)."""

Rows = dict[str, dict[str, str]]


def rows_of(path: Path, heading: str) -> Rows:
    """The table below a heading of a Markdown file: by the first column, the cells of a row by column."""
    section = path.read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")]
    columns, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def equation_of(dataset: str) -> str:
    """The name of the equation of a published dataset."""
    family = find_family(f"{dataset}.h5")
    assert family is not None, dataset
    return equation_name(family.name)


def by_equation(rows: Rows) -> Rows:
    """The rows of datasets by their equations, the smallest ratio first."""
    datasets = sorted(rows.keys() - {MEAN}, key=lambda name: float(rows[name][MEAN]))
    return {equation_of(name): rows[name] for name in datasets}


def readme_section() -> str:
    """Markdown from the published tables: errors by equation, means of the ratios, sizes and times."""
    rollouts, steps = (rows_of(BASE / "seeds.md", heading) for heading in ("Rollout", "One step"))
    cells = [
        [equation, *(row[method].partition(" ±")[0] for method in ("ours", "fno", "unet")), row[MEAN]]
        for equation, row in by_equation(rollouts).items()
    ]
    tables = [BASE / f"table_seed_{seed}.md" for seed in range(3)]
    seconds = [value for path in tables for value in seconds_of(path)]
    costs = [rows_of(path, "Cost") for path in tables]
    speed_ups = [row["solver / ours"] for path in tables for row in rows_of(path, "Milliseconds per snapshot").values()]
    points = POINTS.format(
        rollouts=num_better(rollouts),
        steps=num_better(steps),
        mean=rollouts[MEAN][MEAN],
        step_mean=steps[MEAN][MEAN],
        **{method: costs[0][method]["parameters"] for method in ("operator", "steady", "fno", "unet")},
        shortest=min(seconds),
        longest=max(seconds),
        over_fno=span(each["operator"]["over fno"] for each in costs),
        over_solver=span(each["operator"]["speed up over solver"] for each in costs),
        by_equation=span(speed_ups),
    )
    lines = [fill(point, 120, subsequent_indent="  ") for point in points.split("\n-")]
    shown = table(["equation", "ours", "FNO", "U-Net", "ours / the better of them"], cells)
    return f"\n{shown}\n\n" + "\n-".join(lines) + "\n\n"


def span(cells: Iterable[str]) -> str:
    """The smallest and the largest number of a table's cells, or one if they look alike."""
    numbers = list(map(float, cells))
    return " to ".join(dict.fromkeys(f"{number:.2g}" for number in (min(numbers), max(numbers))))


def num_better(rows: Rows) -> str:
    """How many of the equations have a ratio below 1."""
    ratios = [float(row[MEAN]) for row in by_equation(rows).values()]
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"


def seconds_of(path: Path) -> list[int]:
    """Seconds of the shortest and of the longest training of a baseline: as long as ours per equation."""
    found = re.search(r"number of families, (\d+) to (\d+) s", path.read_text(encoding="utf-8"))
    assert found is not None, path
    return list(map(int, found.groups()))


def main() -> None:
    """Write the figure, and the section between its two marks in the README."""
    rows = by_equation(rows_of(BASE / "seeds.md", "Rollout"))
    ratios = {equation: [float(row[run]) for run in RUNS] for equation, row in rows.items()}
    with publish(FIGURE) as temporary:
        temporary.write_text(svg_file(draw_seeds(ratios)), encoding="utf-8")
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    text = f"{before}{START}{readme_section()}{END}{rest.partition(END)[2]}"
    with publish(README) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
