"""Text of a data card: sections with equation, domain, fields, splits, files and source of a dataset."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.data.families import Dataset, Family
from ups.data.partial import read_marker
from ups.data.pdebench import FAMILIES
from ups.data.published import read_published_files
from ups.data.sources import is_added
from ups.files import markdown_row

MAX_FILES = 4
MEBIBYTE = 2**20

BOUNDARY_WORDS = {
    "outflow": "outflow (zero gradient)",
    "zero_flux": "zero flux",
    "dirichlet": "Dirichlet (fixed value)",
    "cauchy": "Cauchy (fixed value, flux condition)",
    "wall": "wall (no slip)",
}
SOURCES = {
    "simulate": "simulated by ups.solvers",
    "folder": "found in the folder that the user named",
    "pdebench": "downloaded from PDEBench's data repository or a mirror of it",
}

STATISTICS = "mean, std: over the family's training split; of the logarithm where the scale is log"


GREEK = {"beta": "β", "nu": "ν", "rho": "ρ", "eta": "η", "zeta": "ζ", "mach": "M"}


def title_of(dataset: Dataset) -> str:
    """Equation and parameters in words, for example "Burgers 1D, ν = 0.01"; a variant's own boundary, if any."""
    base, _, variant = dataset.family.partition("-")
    parameters = [f"{GREEK.get(name, name)} = {value:g}" for name, value in dataset.parameters.items()]
    return ", ".join([equation_name(base), *([variant] if variant else []), *parameters])


def equation_name(family: str) -> str:
    """The name of a family in words, for example "Burgers 1D"."""
    equation = family.replace("_", " ").replace(" ns ", " Navier–Stokes ").replace("diffusion ", "diffusion–")
    return re.sub(r"(?<=\d)d$", "D", f"{equation[0].upper()}{equation[1:]}")


def titles_of(datasets: Iterable[Dataset]) -> dict[str, str]:
    """The title of each dataset by name, with that name where two have the same title."""
    titles = {dataset.name: title_of(dataset) for dataset in datasets}
    counts = Counter(titles.values())
    return {name: title if counts[title] == 1 else f"{title} ({name})" for name, title in titles.items()}


@dataclass(frozen=True)
class CardSection:
    """A heading, formulas that may hold LaTeX, plain lines, and a table whose first row names the columns."""

    title: str
    formulas: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Card:
    """A dataset with its splits, the statistics of its family, and the origin of its files.

    `sources` has size and MD5 of each file, `origin` one sentence per fact.
    """

    dataset: Dataset
    splits: dict[str, list[int]]
    statistics: dict[str, dict[str, dict[str, Any]]]
    sources: dict[str, dict[str, Any]]
    origin: tuple[str, ...]

    @property
    def family(self) -> Family:
        return FAMILIES[self.dataset.family]

    @property
    def sections(self) -> list[CardSection]:
        """All sections of the card, in order."""
        dataset, family = self.dataset, self.family
        parameters = ", ".join(_describe_parameter(family, *each) for each in dataset.parameters.items())
        counts = ", ".join(f"{name} {len(indices)}" for name, indices in self.splits.items())
        return [
            CardSection("Equation", formulas=family.formulas, lines=() if family.formulas else (family.equation,)),
            CardSection("Parameters", lines=(parameters or "none",)),
            CardSection("Domain", table=_describe_axes(dataset, family)),
            CardSection("Time", lines=(_describe_time(dataset, family),)),
            CardSection(
                "Fields" if family.units else "Fields (dimensionless)",
                lines=(STATISTICS,),
                table=_describe_fields(self),
            ),
            CardSection("Trajectories", lines=(f"{dataset.num_trajectories}: {counts}",)),
            CardSection("Part of the files that is used", lines=_describe_part(dataset)),
            CardSection("Files", lines=_describe_files(self)),
            CardSection("Source", lines=self.origin),
        ]


def card_of(name: str, datasets: dict[str, Any], statistics: dict[str, Any], source: str, folder: Path) -> Card:
    """The card of a dataset, from the receipt of all `datasets` and the `statistics` of families."""
    dataset = Dataset.from_json(datasets["datasets"][name])
    origin = find_origin(source, folder, dataset, datasets["sources"])
    return Card(dataset, datasets["splits"][name], statistics[dataset.family], datasets["sources"], origin)


def find_origin(source: str, folder: Path, dataset: Dataset, sources: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Origin of the files of a dataset: source of the run, agreement with the published MD5, parts of a file."""
    registry, origin = read_published_files(), [SOURCES[source]]
    named = [name for name in dataset.files if name in registry]
    if named and source != "simulate":
        agreeing = sum(registry[name].md5 == sources[name]["md5"] for name in named)
        given = sum(not is_added(name) for name in dataset.files)
        origin.append(f"{agreeing} of {given} files have the MD5 that PDEBench publishes")
    added = sum(count for name, count in zip(dataset.files, dataset.counts, strict=True) if is_added(name))
    origin += [f"{added} trajectories of the training split are simulated"] if added else []
    markers = [read_marker(folder / name) for name in dataset.files]
    origin += [f"partial: {marker}" for marker in markers if marker]
    return tuple(origin)


def card_markdown(card: Card) -> str:
    """A card as Markdown."""
    parts = [f"## `{card.dataset.name}`\n\nFamily `{card.family.name}`"]
    for section in card.sections:
        parts.append(f"**{section.title}**")
        if lines := section.formulas + section.lines:
            parts.append("\n".join(f"- {line}" for line in lines))
        if section.table:
            header, *rows = map(markdown_row, section.table)
            parts.append("\n".join([header, "| --- " * len(section.table[0]) + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def _with_unit(words: str, family: Family, name: str) -> str:
    """A value with the unit of what it is a value of, if that has one."""
    return f"{words} {family.units[name]}" if name in family.units else words


def _describe_parameter(family: Family, name: str, value: float) -> str:
    words = _with_unit(f"{name} = {value:g}", family, name)
    return f"{words} ({family.meanings[name]})" if name in family.meanings else words


def _describe_axes(dataset: Dataset, family: Family) -> tuple[tuple[str, ...], ...]:
    rows = [("axis", "length", "points", "spacing", "boundary")]
    for axis, length, points, boundary in zip(
        family.axes, dataset.lengths, dataset.grid, dataset.boundary, strict=True
    ):
        words = BOUNDARY_WORDS.get(boundary, boundary)
        sizes = (_with_unit(f"{size:.4g}", family, axis) for size in (length, length / points))
        rows.append((axis, next(sizes), f"{points}", next(sizes), words))
    return tuple(rows)


def _describe_time(dataset: Dataset, family: Family) -> str:
    if family.steady:
        return "steady: one solution for each input"
    duration = dataset.times[-1] - dataset.times[0]
    dt = duration / max(1, len(dataset.times) - 1)
    spans = [_with_unit(f"{span:.4g}", family, "t") for span in (dt, duration)]
    return f"{len(dataset.times)} snapshots, dt = {spans[0]}, duration {spans[1]}"


def _describe_part(dataset: Dataset) -> tuple[str, ...]:
    subsample, snapshots = dataset.subsample, dataset.stored_snapshots
    facts = []
    if (k := subsample.every_point) > 1:
        facts.append(f"points 0, {k}, {2 * k}, ... of each axis")
    if snapshots.start or snapshots.step > 1 or subsample.last_snapshot is not None:
        facts.append(f"snapshots {snapshots[0]} to {snapshots[-1]} in steps of {snapshots.step}")
    if subsample.first_trajectories is not None:
        facts.append(f"at most the first {subsample.first_trajectories} trajectories")
    return tuple(facts) or ("all points, snapshots and trajectories",)


def _describe_fields(card: Card) -> tuple[tuple[str, ...], ...]:
    """Rows of name, meaning, unit if any, scale, mean and standard deviation of every field and coefficient."""
    meanings, units = card.family.meanings, card.family.units
    rows = []
    for kind, role in (("fields", ""), ("coefficients", " (given)")):
        for name, fitted in card.statistics[kind].items():
            scale = "log" if fitted["log"] else "linear"
            row = [name, meanings.get(name, "") + role, scale, f"{fitted['mean']:.3g}", f"{fitted['std']:.3g}"]
            rows.append((*row[:2], *[units.get(name, "")] * bool(units), *row[2:]))
    return (("name", "meaning", *["unit"] * bool(units), "scale", "mean", "std"), *rows)


def _describe_files(card: Card) -> tuple[str, ...]:
    names = card.dataset.files
    shown = {name: f"{Path(name).name} (simulated)" if is_added(name) else name for name in names[:MAX_FILES]}
    lines = [f"{card.sources[name]['bytes'] / MEBIBYTE:.3g} MiB, {label}" for name, label in shown.items()]
    if len(names) > MAX_FILES:
        total = sum(card.sources[name]["bytes"] for name in names) / MEBIBYTE
        lines.append(f"and {len(names) - MAX_FILES} more, {total:.4g} MiB in all")
    return tuple(lines)
