"""Bars: one quantity per row, its number beside it."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOUR, GOOD, BAD, GREY = "#1f77b4", "#2ca02c", "#d62728", "#8c8c8c"
DPI = 110
SMALL, NORMAL = 8, 9  # font sizes in points


def figure_of(width: float, height: float) -> Figure:
    """An empty page, in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_bars(panel: Axes, names: list[str], values: list[float], words: list[str], colours: list[str]) -> None:
    """Horizontal bars, the first on top, each followed by its words."""
    rows = range(len(names))
    bars = panel.barh(rows, values, color=colours, height=0.7)
    panel.bar_label(bars, words, padding=3, fontsize=SMALL)
    panel.set_yticks(rows, names)
    panel.margins(x=0.25)
    tidy(panel)


def tidy(panel: Axes) -> None:
    """The first row on top, small type, no frame."""
    panel.invert_yaxis()
    panel.tick_params(labelsize=SMALL)
    panel.xaxis.label.set_fontsize(SMALL)
    panel.spines[["top", "right"]].set_visible(False)
