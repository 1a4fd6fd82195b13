"""Data cards: one page per dataset, its description on the left and its first training trajectory on the right."""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.mathtext import MathTextParser

from ups.data.card_text import Card, CardSection, card_markdown, card_of
from ups.data.families import Dataset, Family
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault
from ups.files import publish

WIDTH, TEXT_WIDTH, HEIGHT, DPI = 13.2, 5.0, 7.0, 110  # inches, and pixels per inch
MARGIN = 0.22
LINE, MATH_LINE, GAP = 0.165, 0.225, 0.12
SMALL, NORMAL, LARGE = 7.5, 8.5, 12  # font sizes in points
CHARACTER = 0.064  # mean width in inches of a character of size SMALL
MAX_TIMES = 256  # rows of a space-time image
MAX_POINTS = 256  # points per axis of an image, about its pixels
GREY = "#666666"


def write_cards(
    folder: Path, raw: Path, datasets: dict, statistics: dict, source: str, advance: Callable[[int], None]
) -> None:
    """Write `<dataset>.png` for every dataset and `cards.md` with the text of all; `advance(1)` follows each."""
    texts = ["# Data cards\n"]
    for name in datasets["datasets"]:
        card = card_of(name, datasets, statistics, source, raw)
        figure = draw_card(card, *read_sample(raw, card.dataset, card.splits["train"][0]))
        with publish(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png")
        texts.append(f"{card_markdown(card)}\n![{name}](data_cards/{quote(name)}.png)\n")
        advance(1)
    with publish(folder / "cards.md") as temporary:
        temporary.write_text("\n".join(texts), encoding="utf-8")


def read_sample(raw: Path, dataset: Dataset, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times (K,), snapshots (K, C, *grid) and coefficients (C, *grid) of the trajectory to show.

    K is at most 256 in 1D, else 3: the first, the middle and the last snapshot. In 3D, grid is the middle plane of z;
    of longer axes it has at most 256 points.
    """
    count = min(MAX_TIMES if len(dataset.grid) == 1 else 3, len(dataset.times))
    shown = np.unique(np.linspace(0, len(dataset.times) - 1, count).astype(int))
    with TrajectoryReader(raw, dataset) as reader:
        u = np.concatenate([_plane(reader.read(index, k, k + 1), dataset) for k in shown.tolist()])
        return np.asarray(dataset.times)[shown], u, _plane(reader.read_coefficients(index), dataset)


def _plane(values: np.ndarray, dataset: Dataset) -> np.ndarray:
    plane = values[..., dataset.grid[2] // 2] if len(dataset.grid) == 3 else values
    strides = [slice(None, None, -(-points // MAX_POINTS)) for points in dataset.grid[:2]]
    return plane[(..., *strides)].copy()


def draw_card(card: Card, times: np.ndarray, u: np.ndarray, coefficients: np.ndarray) -> Figure:
    """One landscape page with the text of a card and the images of `times`, `u`, `coefficients` from `read_sample`."""
    column = _Column()
    column.write(_printable(card.dataset.name), LARGE, weight="bold", leading=0.24)
    column.write(f"family {card.family.name}", NORMAL, color=GREY)
    _expect_formulas(card.family)
    for section in card.sections:
        column.add(section)
    figure = Figure(figsize=(WIDTH, max(HEIGHT, column.bottom + MARGIN)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for x, y, words, style in column.placed:
        figure.text(x / WIDTH, 1 - y / figure.get_figheight(), words, va="top", **style)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
    _, right = figure.subfigures(1, 2, width_ratios=(TEXT_WIDTH, WIDTH - TEXT_WIDTH))
    draw = _draw_lines if len(card.dataset.grid) == 1 else _draw_planes
    draw(right, card, times, u, coefficients)
    volume = ", middle of z" if len(card.dataset.grid) == 3 else ""
    right.suptitle(f"trajectory {card.splits['train'][0]}, the first of the training split{volume}", fontsize=NORMAL)
    return figure


def _expect_formulas(family: Family) -> None:
    for formula in family.formulas:
        try:
            MathTextParser("path").parse(formula)
        except ValueError as error:
            what = f"family {family.name}: formula {formula!r} is no LaTeX that Matplotlib reads"
            raise ConfigFault(f"{what}; correct or remove it ({str(error).strip().splitlines()[-1]})") from None


@dataclass
class _Column:
    """Lines of text with their positions in inches from the top left corner, filled downwards."""

    bottom: float = MARGIN
    placed: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)

    def write(self, words: str, size: float, *, leading: float = LINE, **style: Any) -> None:
        """Add a paragraph, wrapped at the width of the column."""
        width = int((TEXT_WIDTH - 2 * MARGIN) / (CHARACTER * size / SMALL))
        style |= {"fontsize": size, "parse_math": False}
        for line in textwrap.wrap(words.replace("_", "_ "), width):
            self.placed.append((MARGIN, self.bottom, line.replace("_ ", "_"), style))
            self.bottom += leading

    def add(self, section: CardSection) -> None:
        """Add a heading, its formulas, lines and table."""
        self.bottom += GAP
        self.write(section.title, NORMAL, weight="bold")
        for formula in section.formulas:
            self.placed.append((MARGIN, self.bottom, formula, {"fontsize": NORMAL}))
            self.bottom += MATH_LINE
        for line in section.lines:
            self.write(_printable(line), SMALL)
        widths = [max(map(len, cells)) * CHARACTER + 0.16 for cells in zip(*section.table, strict=True)]
        for number, row in enumerate(section.table):
            for x, cell in zip(np.cumsum([MARGIN, *widths]), row, strict=False):
                style = {"fontsize": SMALL, "parse_math": False, "color": "black" if number else GREY}
                self.placed.append((float(x), self.bottom, cell, style))
            self.bottom += LINE


def _draw_lines(right: SubFigure, card: Card, times: np.ndarray, u: np.ndarray, coefficients: np.ndarray) -> None:
    """Space-time images of the fields of a 1D dataset; a field with one snapshot is a curve."""
    names = (*card.family.fields, *card.family.coefficients)
    panels = right.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for panel, name, values in zip(panels, names, [*u.swapaxes(0, 1), *coefficients[:, None]], strict=True):
        _tidy(panel, card.family.label(name))
        if len(values) > 1:
            extent = (0, 1, times[0], times[-1])
            image = panel.imshow(values, origin="lower", aspect="auto", interpolation="nearest", extent=extent)
            panel.set_ylabel("time", fontsize=SMALL)
            right.colorbar(image, ax=panel, pad=0.02, aspect=30).ax.tick_params(labelsize=SMALL)
        else:
            panel.plot((np.arange(values.shape[1]) + 0.5) / values.shape[1], values[0], color="#1f77b4")
    panels[-1].set_xlabel("x / length", fontsize=SMALL)


def _draw_planes(right: SubFigure, card: Card, times: np.ndarray, u: np.ndarray, coefficients: np.ndarray) -> None:
    """Images of every field: one column per field, or one row per field if at most two fields change in time."""
    titles = [f", t = {time:.3g}" if len(times) > 1 else "" for time in times]
    given = {name: [("", values.T)] for name, values in zip(card.family.coefficients, coefficients, strict=True)}
    fields = {}
    for name, snapshots in zip(card.family.fields, u.swapaxes(0, 1), strict=True):
        fields[name] = [(title, values.T) for title, values in zip(titles, snapshots, strict=True)]
    images = given | fields if card.family.steady else fields | given  # titles and planes (Y, X) of each field
    longest = max(map(len, images.values()))
    by_column = len(images) > 2 or longest == 1
    shape = (longest, len(images)) if by_column else (len(images), longest)
    panels = right.subplots(*shape, squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for place, (name, planes) in zip(panels.T if by_column else panels, images.items(), strict=True):
        for panel, (title, plane) in zip(place, planes, strict=False):
            panel.set_axis_on()
            image = panel.imshow(plane, origin="lower", interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            right.colorbar(image, ax=panel, pad=0.02, aspect=20).ax.tick_params(labelsize=SMALL - 1)
            _tidy(panel, f"{card.family.label(name)}{title}")


def _tidy(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=SMALL)
    panel.tick_params(labelsize=SMALL)


def _printable(words: str) -> str:
    """Text with characters outside ASCII, which a font may lack, replaced by `?`."""
    return re.sub(r"[^ -~]", "?", words)
