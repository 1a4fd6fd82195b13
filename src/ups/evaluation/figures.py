"""Figures of an evaluation: error curves, energy spectra and snapshots, one colour per method throughout."""

import io
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from ups.data.pdebench import FAMILIES

COLOURS = {
    "truth": "black",
    "persistence": "#8c8c8c",
    "linear": "#bcbd22",
    "unet": "#17becf",
    "fno": "#e377c2",
    "codec": "#2ca02c",
    "operator": "#1f77b4",
    "diffusion": "#ff7f0e",
    "consistency": "#9467bd",
    "steady": "#d62728",
}
OTHER_COLOUR = "#8c564b"
SMALL, NORMAL = 8, 9  # font sizes in points
DPI = 110
MAX_FIELDS = 3

Arrays = dict[str, np.ndarray]  # one per method


def plot_errors(curves: dict[str, Arrays], times: dict[str, np.ndarray]) -> Figure:
    """Plot nRMSE over time: one panel per dataset, one line (T,) per method."""
    figure, panels = panel_grid(list(curves), "time", "nRMSE")
    for name, panel in panels.items():
        steady = len(times[name]) == 1
        for method, errors in curves[name].items():
            marker = "o" if steady else None
            panel.plot(times[name], _positive(errors), color=colour_of(method), marker=marker, label=method)
        if steady:
            panel.set(xticks=[], xlabel="")
        _scale_axis(panel, curves[name])
    common_legend(figure)
    return figure


def _scale_axis(panel: Axes, curves: Arrays) -> None:
    """Scale the axis to the errors of the methods; the codec's error, if far below them, is given as text."""
    predicted = [errors for method, errors in curves.items() if method != "codec"]
    _log_axis(panel, np.concatenate(predicted or list(curves.values())))
    floor = np.nanmax(curves["codec"]) if "codec" in curves else np.inf
    if floor < panel.get_ylim()[0]:
        place = {"xy": (0.98, 0.03), "xycoords": "axes fraction", "ha": "right", "va": "bottom"}
        panel.annotate(f"codec below {floor:.0e}", color=colour_of("codec"), fontsize=8, **place)


def plot_spectra(spectra: dict[str, Arrays]) -> Figure:
    """Plot energy over radial wavenumber: one panel per dataset, `truth` and the methods as lines (K,)."""
    figure, panels = panel_grid(list(spectra), "wavenumber", "energy")
    for name, panel in panels.items():
        for method, energy in spectra[name].items():
            wavenumbers = np.arange(1, len(energy))  # shell 0 is the mean, at k = 0, which a log axis cannot show
            width = 2.6 if method == "truth" else 1.2
            panel.plot(wavenumbers, _positive(energy[1:]), color=colour_of(method), linewidth=width, label=method)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        _log_axis(panel, np.outer([1e-3, 1e3], spectra[name]["truth"][1:]))  # a diverged method must not hide the rest
    common_legend(figure)
    return figure


def plot_snapshots(
    name: str, fields: tuple[str, ...], times: np.ndarray, u_ref: np.ndarray, predictions: Arrays, errors: Arrays
) -> Figure:
    """Plot truth and predictions of one trajectory, arrays (T, C, *grid), and their nRMSE: `errors` (steps, C).

    1D: lines at three times, space-time errors and the mean nRMSE. 2D: the last snapshot and its errors, of at most
    three fields. 3D: the same on the middle plane of z.
    """
    if u_ref.ndim == 3:
        scores = {method: errors[method].mean(axis=0) for method in predictions}
        figure = _lines_and_errors(fields, times, u_ref, predictions, scores)
    else:
        scores = {method: errors[method][-1] for method in predictions}
        figure = _images_and_errors(fields[:MAX_FIELDS], u_ref, predictions, scores)
    details = [f"t = {times[-1]:.3g}"] * (len(times) > 1) + ["middle of z"] * (u_ref.ndim == 5)
    title = [_wrapped(name, int(9 * figure.get_figwidth()))] + [", ".join(details)] * (u_ref.ndim > 3)
    figure.suptitle("\n".join(title).strip(), fontsize=NORMAL + 1)
    return figure


def _lines_and_errors(
    fields: tuple[str, ...], times: np.ndarray, u_ref: np.ndarray, predictions: Arrays, scores: Arrays
) -> Figure:
    draws = [_draw_lines, partial(_draw_space_time, scores)] if len(times) > 1 else [_draw_lines]
    figure = new_figure(10, 0.9 + len(draws) * (0.5 + 1.5 * len(fields)))
    for draw, block in zip(draws, figure.subfigures(len(draws), 1, squeeze=False)[:, 0], strict=True):
        draw(block, fields, times, u_ref, predictions)
    common_legend(figure)
    return figure


def _draw_lines(
    block: SubFigure, fields: tuple[str, ...], times: np.ndarray, u_ref: np.ndarray, predictions: Arrays
) -> None:
    shown = sorted({0, (len(times) - 1) // 2, len(times) - 1})
    panels = block.subplots(len(fields), len(shown), sharex=True, sharey="row", squeeze=False)
    x = (np.arange(u_ref.shape[-1]) + 0.5) / u_ref.shape[-1]
    for row, field in enumerate(fields):
        for panel, index in zip(panels[row], shown, strict=True):
            tidy(panel)
            panel.plot(x, u_ref[index, row], color=colour_of("truth"), linewidth=2.6, label="truth")
            for method, u_pred in predictions.items():
                panel.plot(x, u_pred[index, row], color=colour_of(method), linewidth=1.2, label=method)
        values = u_ref[shown, row]
        margin = 0.15 * float(np.ptp(values)) or 1.0
        panels[row, 0].set_ylim(float(values.min()) - margin, float(values.max()) + margin)
        panels[row, 0].set_ylabel(field, fontsize=NORMAL)
    for column, index in enumerate(shown):
        panels[0, column].set_title(f"t = {times[index]:.3g}" if len(times) > 1 else "", fontsize=NORMAL)
        panels[-1, column].set_xlabel("x / L", fontsize=SMALL)


def _draw_space_time(
    scores: Arrays,
    block: SubFigure,
    fields: tuple[str, ...],
    times: np.ndarray,
    u_ref: np.ndarray,
    predictions: Arrays,
) -> None:
    panels = block.subplots(len(fields), 1 + len(predictions), sharex=True, sharey=True, squeeze=False)
    place = {"aspect": "auto", "extent": (0, 1, times[0], times[-1])}
    for row, field in enumerate(fields):
        truth = u_ref[:, row]
        _draw_truth(panels[row, :1], [truth], place)
        _draw_errors(panels[row, 1:], truth, [u_pred[:, row] for u_pred in predictions.values()], place)
        panels[row, 0].set_ylabel(f"{field}\ntime", fontsize=SMALL)
        for panel, (method, score) in zip(panels[row, 1:], scores.items(), strict=True):
            title = "" if row else f"{method} \N{MINUS SIGN} truth\n"
            panel.set_title(f"{title}nRMSE {score[row]:.3g}", fontsize=SMALL)
    panels[0, 0].set_title("truth", fontsize=SMALL)
    for panel in panels.flat:
        tidy(panel)
    for panel in panels[-1]:
        panel.set_xlabel("x / L", fontsize=SMALL)


def _images_and_errors(fields: tuple[str, ...], u_ref: np.ndarray, predictions: Arrays, scores: Arrays) -> Figure:
    """Two rows per field: truth and predictions, then the error below each prediction."""
    num_columns = 1 + len(predictions)
    figure = new_figure(1.2 + 1.7 * num_columns, 0.7 + 3.6 * len(fields))
    panels = figure.subplots(2 * len(fields), num_columns, squeeze=False)
    for channel, field in enumerate(fields):
        above, below = panels[2 * channel], panels[2 * channel + 1]
        truth = _last_plane(u_ref, channel)
        planes = [_last_plane(u_pred, channel) for u_pred in predictions.values()]
        _draw_truth(above, [truth, *planes], {})
        _draw_errors(below[1:], truth, planes, {})
        above[0].set_title("truth", fontsize=NORMAL)
        for upper, lower, (method, score) in zip(above[1:], below[1:], scores.items(), strict=True):
            upper.set_title(method, fontsize=NORMAL)
            lower.set_title(f"nRMSE {score[channel]:.3g}", fontsize=SMALL)
        above[0].set_ylabel(field, fontsize=NORMAL)
        below[0].set_axis_off()
        below[0].text(0.95, 0.5, "prediction\n\N{MINUS SIGN} truth", ha="right", va="center", fontsize=SMALL)
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
    return figure


def _draw_truth(panels: Sequence[Axes], planes: Sequence[np.ndarray], place: dict) -> None:
    """Truth first, then predictions, on the truth's colour scale."""
    _draw_images(panels, planes, {"cmap": "viridis", "vmin": planes[0].min(), "vmax": planes[0].max(), **place})


def _draw_errors(panels: Sequence[Axes], truth: np.ndarray, planes: Sequence[np.ndarray], place: dict) -> None:
    """Prediction minus truth on one diverging colour scale, four times the median RMS error: poor methods saturate."""
    errors = [plane - truth for plane in planes]
    sizes = [float(np.square(error, dtype=np.float64).mean() ** 0.5) for error in errors]
    limit = 4 * float(np.median([size for size in sizes if np.isfinite(size)] or [0.0])) or 1.0
    _draw_images(panels, errors, {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, **place})


def _draw_images(panels: Sequence[Axes], planes: Sequence[np.ndarray], style: dict) -> None:
    for panel, plane in zip(panels, planes, strict=True):
        image = panel.imshow(plane, origin="lower", interpolation="nearest", **style)
    if len(planes):
        bar = panels[0].figure.colorbar(image, ax=list(panels), pad=0.02, extend="both")
        bar.ax.tick_params(labelsize=SMALL - 1)


def panel_grid(names: list[str], xlabel: str, ylabel: str) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one titled panel per name, up to four in a row."""
    num_columns = min(4, max(len(names), 1))
    num_rows = -(-len(names) // num_columns)
    figure = new_figure(max(5.5, 2.8 * num_columns), 0.9 + 2.0 * num_rows)
    panels = {name: figure.add_subplot(num_rows, num_columns, i + 1) for i, name in enumerate(names)}
    for i, (name, panel) in enumerate(panels.items()):
        panel.set_title(_wrapped(name, 30), fontsize=SMALL)
        panel.set_xlabel(xlabel if i >= len(names) - num_columns else "", fontsize=SMALL)
        panel.set_ylabel(ylabel if i % num_columns == 0 else "", fontsize=SMALL)
        panel.grid(which="major", color="#e4e4e4", linewidth=0.6)
        tidy(panel)
    return figure, panels


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches."""
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def common_legend(figure: Figure) -> None:
    """One legend below all panels, with one entry per label."""
    handles: dict[str, Line2D] = {}
    for line in (line for panel in figure.axes for line in panel.get_lines()):
        handles.setdefault(line.get_label(), line)
    num_columns = max(1, int(figure.get_figwidth() / 1.1))
    place = {"loc": "outside lower center", "ncols": num_columns, "fontsize": NORMAL, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)


def tidy(panel: Axes) -> None:
    """Small tick labels, no frame above and on the right."""
    panel.tick_params(which="both", labelsize=SMALL)
    panel.spines[["top", "right"]].set_visible(False)


def _log_axis(panel: Axes, values: np.ndarray) -> None:
    """A logarithmic y axis over the full decades that contain the values."""
    panel.set_yscale("log")
    exponents = np.log10(values[np.isfinite(values) & (values > 0)])
    if len(exponents):
        panel.set_ylim(0.99 * 10.0 ** np.floor(exponents.min()), 1.01 * 10.0 ** (np.floor(exponents.max()) + 1))


def colour_of(method: str) -> str:
    """The colour of a method, the same in all figures."""
    return COLOURS.get(method, OTHER_COLOUR)


def _wrapped(name: str, width: int) -> str:
    return textwrap.fill(name.replace("_", "_ "), width=width).replace("_ ", "_")


def _positive(values: np.ndarray) -> np.ndarray:
    """The values that a log axis can show; NaN, a gap in the line, elsewhere."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _last_plane(u: np.ndarray, channel: int) -> np.ndarray:
    """One field of the last snapshot as an image (Y, X); of a volume the middle plane of z."""
    field = u[-1, channel]
    return (field[..., field.shape[-1] // 2] if field.ndim == 3 else field).T


def draw_figures(folder: Path, datasets: dict[str, str]) -> dict[str, bytes]:
    """File name -> PNG, from the arrays in `folder`; `datasets` maps the name of each dataset to its family."""
    arrays = {name: dict(np.load(folder / f"{name}.npz")) for name in datasets}
    figures = {"spectra.png": plot_spectra({name: _part(content, "spectrum") for name, content in arrays.items()})}
    if transient := [name for name in datasets if not FAMILIES[datasets[name]].steady]:
        curves = {name: _part(arrays[name], "curve") for name in transient}
        figures["errors.png"] = plot_errors(curves, {name: arrays[name]["times"][1:] for name in transient})
    for name, content in arrays.items():
        rollouts, errors = _part(content, "rollout"), _part(content, "nRMSE")
        family, truth = FAMILIES[datasets[name]], rollouts.pop("truth")
        fields = tuple(map(family.label, family.fields))
        figure = plot_snapshots(name, fields, content["shown"], truth, rollouts, errors)
        figures[f"snapshots_{name}.png"] = figure
    return {name: png(figure) for name, figure in figures.items()}


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _part(content: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{part}/"): value for key, value in content.items() if key.startswith(f"{part}/")}
