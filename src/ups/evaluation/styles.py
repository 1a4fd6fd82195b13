"""Style of all figures: colours and dashes of methods, panels, axes and legends, export as PNG and SVG.

The colours can be told apart by colour-blind people (Okabe and Ito), and so can the dashes.
"""

import io
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLOURS = {
    "truth": "black",
    "persistence": "#8c8c8c",
    "linear": "#a6761d",
    "unet": "#56b4e9",
    "fno": "#009e73",
    "transformer": "#882255",
    "normalized_unet": "#332288",
    "normalized_fno": "#117733",
    "codec": "#999933",
    "operator": "#0072b2",
    "diffusion": "#e69f00",
    "consistency": "#cc79a7",
    "selected": "#661100",
    "steady": "#d55e00",
    "adapted": "#004c8c",
    "before": "#5d3a9b",
    "scratch": "#e66100",
}
OTHER_COLOUR = "#8c564b"
DASHES = {  # on and off, in line widths; methods without an entry have a solid line
    "persistence": (4, 2),
    "linear": (1, 3),
    "codec": (1, 1),
    "unet": (6, 1, 1, 1),
    "diffusion": (5, 2),
    "consistency": (2, 2),
    "selected": (3, 1, 1, 1),
}
GRID = "#80808050"
SMALL, NORMAL = 8, 9  # font sizes in points
DPI = 110
KEPT = "\u00a0=\u00a0"  # an equals sign between spaces at which no line is broken


def colour_of(method: str) -> str:
    """The colour of a method, the same in all figures."""
    return COLOURS.get(method, OTHER_COLOUR)


def line_of(method: str) -> dict[str, Any]:
    """The label, colour and dashes of a method's line; dashes let a line below show through."""
    dashes = {"dashes": DASHES[method]} if method in DASHES else {}
    return {"label": method, "color": colour_of(method), "linewidth": 1.5, **dashes}


def panel_grid(titles: dict[str, str], xlabel: str, ylabel: str) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one titled panel per name, up to four in a row."""
    num_columns = min(4, max(len(titles), 1))
    num_rows = -(-len(titles) // num_columns)
    figure = new_figure(max(4.2, 2.8 * num_columns), 1.2 + 2.0 * num_rows)
    panels = {name: figure.add_subplot(num_rows, num_columns, i + 1) for i, name in enumerate(titles)}
    for i, (name, panel) in enumerate(panels.items()):
        panel.set_title(wrapped(titles[name], 34), fontsize=SMALL)
        panel.set_xlabel(xlabel if i >= len(titles) - num_columns else "", fontsize=SMALL)
        panel.set_ylabel(ylabel if i % num_columns == 0 else "", fontsize=SMALL)
        panel.grid(which="major", color=GRID, linewidth=0.6)
        tidy(panel)
    return figure, panels


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """An empty figure, width and height in inches; `layout` None: its maker places the panels."""
    return Figure(figsize=(width, height), dpi=120, layout=layout)


def common_legend(figure: Figure, note: str = "") -> None:
    """One legend below all panels, with one entry per label, and a note below it."""
    handles: dict[str, Line2D] = {}
    for line in (line for panel in figure.axes for line in panel.get_lines()):
        handles.setdefault(line.get_label(), line)
    num_columns = max(1, int(figure.get_figwidth() / 1.4))
    place = {"loc": "outside lower center", "ncols": num_columns, "fontsize": NORMAL, "frameon": False}
    legend = figure.legend(handles.values(), handles.keys(), handlelength=3, **place)
    legend.set_title(wrapped(note, int(14 * figure.get_figwidth())), {"size": SMALL})


def tidy(panel: Axes) -> None:
    """Small tick labels, no frame above and on the right."""
    panel.tick_params(which="both", labelsize=SMALL)
    panel.spines[["top", "right"]].set_visible(False)


def log_axes(panels: Sequence[Axes], values: np.ndarray, smallest: float, largest: float = np.inf) -> None:
    """One logarithmic y axis for all panels, over the full decades that contain the values within the limits."""
    shown = np.clip(values[np.isfinite(values) & (values > 0)], smallest, largest)
    for panel in panels:
        panel.set_yscale("log")
        if len(shown):
            decades = np.log10(shown)
            panel.set_ylim(0.99 * 10.0 ** np.floor(decades.min()), 1.01 * 10.0 ** (np.floor(decades.max()) + 1))


def positive(values: np.ndarray) -> np.ndarray:
    """The values that a log axis can show; NaN, a gap in the line, elsewhere."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def wrapped(words: str, width: int) -> str:
    """Words in lines of at most `width` characters; names are broken after an underscore, "nu = 0.01" is not."""
    breakable = words.replace("_", "_ ").replace(" = ", KEPT)
    lines = [line for text in breakable.split("\n") for line in textwrap.wrap(text, width)]
    return "\n".join(lines).replace("_ ", "_").replace(KEPT, " = ")


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG element on no background, with text as text; what is black has the colour of the page."""
    return _svg(figure, transparent=True).replace("#000000", "currentColor")


def svg_file(figure: Figure) -> str:
    """The figure as an SVG file, with text as text; on white, because a page that shows it may be dark."""
    return _svg(figure, facecolor="white") + "\n"


def _svg(figure: Figure, **options: Any) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ups"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, **options)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
