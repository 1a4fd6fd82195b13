"""Figures of an evaluation: errors over time, spectra, trajectories and parity, for the PNG pages and the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ups.data.pdebench import FAMILIES
from ups.evaluation.examples import BAND, ROLES
from ups.evaluation.styles import (
    NORMAL,
    SMALL,
    colour_of,
    common_legend,
    line_of,
    log_axes,
    new_figure,
    panel_grid,
    png,
    positive,
    tidy,
    wrapped,
)

ENERGY_RANGE = 1e-8  # of the largest energy: what is below is round-off of 32-bit numbers
SMALLEST_ERROR = 1e-4  # that an axis shows
BINS = 60  # per axis, of values in a parity plot

Arrays = dict[str, np.ndarray]


def plot_errors(datasets: dict[str, Arrays]) -> Figure:
    """Plot nRMSE over time, one panel per dataset with a line per method, all on one scale.

    `datasets` has for each name the arrays of `ups.evaluation.examples`.
    """
    figure, panels = panel_grid(_titles(datasets), "time", "nRMSE")
    for name, panel in panels.items():
        times = datasets[name]["times"]
        steady = len(times) == 1
        for method, errors in shown_curves(datasets[name]).items():
            shown = times[-len(errors) :]
            panel.plot(shown, positive(errors), marker="o" if steady else None, **line_of(method))
            low, high = (positive(end) for end in datasets[name][f"band/{method}"])
            panel.fill_between(shown, low, high, color=colour_of(method), alpha=0.15, linewidth=0)
        if steady:
            panel.set(xticks=[], xlabel="")
    curves = [errors for arrays in datasets.values() for errors in shown_curves(arrays).values()]
    log_axes(list(panels.values()), np.concatenate(curves), SMALLEST_ERROR)
    low, high = (f"{100 * quantile:.0f}" for quantile in BAND)
    note = f"rollouts: mean over trajectories and fields; band: {low} to {high} % of the trajectories"
    common_legend(figure, note)
    return figure


def shown_curves(arrays: Arrays) -> Arrays:
    """The errors over time (T,) by method, without those of a codec that are too small for the axis."""
    curves = _part(arrays, "curve")
    return {m: errors for m, errors in curves.items() if m != "codec" or np.nanmax(errors) > SMALLEST_ERROR}


def plot_spectra(datasets: dict[str, Arrays]) -> Figure:
    """Plot energy over radial wavenumber: one panel per dataset, `truth` and the methods as lines (K,)."""
    figure, panels = panel_grid(_titles(datasets), "wavenumber", "energy")
    for name, panel in panels.items():
        spectra = _part(datasets[name], "spectrum")
        for method, energy in spectra.items():
            wavenumbers = np.arange(1, len(energy))  # shell 0 is the mean, at k = 0, which a log axis cannot show
            style = line_of(method) | ({"linewidth": 4.0, "alpha": 0.35} if method == "truth" else {})
            panel.plot(wavenumbers, positive(energy[1:]), **style)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        truth = spectra["truth"][1:]
        largest = float(truth.max())
        log_axes([panel], np.maximum(truth, ENERGY_RANGE * largest), ENERGY_RANGE * largest, 10 * largest)
    common_legend(figure, "rollouts: mean over trajectories and predicted times")
    return figure


def plot_trajectories(name: str, family: str, arrays: Arrays) -> Figure:
    """Plot truth, prediction and error of every field for the worst, median and best trajectory of a dataset.

    1D: the last snapshot as a line, then space-time images. 2D: snapshots in the middle and at the end. 3D: the same on
    the middle plane of z. Every row has one colour scale.
    """
    fields, columns = FAMILIES[family].fields, trajectory_columns(arrays)
    is_1d, steady = arrays["median/truth"].ndim == 3, len(arrays["shown"]) == 1
    kinds = ["last"] * is_1d + ["truth", "prediction", "error"] * (not (is_1d and steady))
    figure, panels = _grid(len(kinds) * len(fields), len(columns), *((2.6, 1.1) if is_1d else (1.4, 1.4)))
    for channel, field in enumerate(fields):
        rows = panels[len(kinds) * channel :][: len(kinds)]
        truths, predictions = ([column[part][:, channel] for column in columns.values()] for part in (0, 1))
        values = {"truth": truths, "prediction": predictions}
        values["error"] = [p - t for p, t in zip(predictions, truths, strict=True)]
        for kind, row in zip(kinds, rows, strict=True):
            if kind == "last":
                _draw_lines(row, truths, predictions)
            else:
                _draw_images(row, kind, values, arrays["shown"] if is_1d else None)
            row[0].set_ylabel(f"{field}\n{kind}" + "\ntime" * (is_1d and kind != "last"), fontsize=SMALL)
        for panel, (_, _, errors) in zip(rows[-1], columns.values(), strict=False):
            panel.set_xlabel(f"nRMSE {errors[channel]:.3g}", fontsize=SMALL, labelpad=-8)  # between the two ticks
            panel.tick_params(labelbottom=True)
    for panel, title in zip(panels[0], columns, strict=False):
        panel.set_title(title, fontsize=SMALL)
    plane = ", middle of z" * (len(FAMILIES[family].axes) == 3)
    figure.suptitle(f"{arrays['title']}{plane}\n{name}", fontsize=NORMAL, y=1 - 0.06 / figure.get_figheight(), va="top")
    note = wrapped(NRMSE_NOTE, int(15 * figure.get_figwidth()))
    figure.text(0.1 / figure.get_figwidth(), 0.06 / figure.get_figheight(), note, fontsize=SMALL, va="bottom")
    return figure


def _grid(num_rows: int, num_columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """Panels of a size in inches, with a narrow one for the colour bar at the end of each row.

    The places are computed here, for a layout engine takes seconds for a hundred panels and draws everything twice.
    """
    left, right, top, gap = 0.75, 0.5, 0.85, 0.22
    whole_width = max(left + right + num_columns * (width + 0.1) + 0.1, 4.6)
    bottom = 0.55 + 0.14 * -(-len(NRMSE_NOTE) // int(15 * whole_width))
    whole_height = top + bottom + num_rows * (height + gap)
    figure = new_figure(whole_width, whole_height, layout=None)
    edges = {"left": left / whole_width, "right": 1 - right / whole_width}
    edges |= {"top": 1 - top / whole_height, "bottom": bottom / whole_height}
    ratios = [1.0] * num_columns + [0.06]
    spaces = {"wspace": 0.1, "hspace": gap / height, "width_ratios": ratios}
    panels = figure.subplots(num_rows, num_columns + 1, squeeze=False, gridspec_kw=edges | spaces)
    for panel in panels.flat:
        tidy(panel)
        panel.tick_params(labelbottom=False)
    for panel in panels[:, 1:-1].flat:
        panel.tick_params(labelleft=False)
    return figure, panels


NRMSE_NOTE = (
    "nRMSE below a column: of that field alone, in 1D over all times, else at the time shown. The table has the mean "
    "over all fields, times and trajectories. Trajectories are ranked by their own mean. Axes: x to the right and "
    "y upwards, from 0 to 1 in units of the domain's length."
)


def trajectory_columns(arrays: Arrays) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Title -> truth and prediction (F, C, *grid) and nRMSE (C,): a column per trajectory and, in 2D, time shown."""
    columns = {}
    times, shown = arrays["times"], arrays["shown"]
    for role in (role for role in ROLES if f"{role}/truth" in arrays):
        truth, prediction, errors = (arrays[f"{role}/{part}"] for part in ("truth", "prediction", "nRMSE"))
        if truth.ndim == 3:
            time = f", t = {times[-1]:.3g}" * (len(shown) > 1)
            columns[f"{role} trajectory{time}"] = truth, prediction, errors.mean(axis=0)
            continue
        for frame in sorted({len(shown) // 2, len(shown) - 1}):
            step = int(np.searchsorted(times, shown[frame])) - (len(times) - len(errors))
            part = slice(frame, frame + 1)
            time = f"\nt = {shown[frame]:.3g}" * (len(shown) > 1)
            columns[f"{role}{time}"] = truth[part], prediction[part], errors[step]
    return columns


def _draw_lines(panels: Sequence[Axes], truths: list[np.ndarray], predictions: list[np.ndarray]) -> None:
    """Truth and prediction at the last time over x, on the scale of all truths; there is no colour bar."""
    low, high = limits([truth[-1] for truth in truths])
    margin = 0.1 * (high - low)
    for panel, truth, prediction in zip(panels, truths, predictions, strict=False):
        x = (np.arange(len(truth[-1])) + 0.5) / len(truth[-1])
        panel.plot(x, truth[-1], color="black", linewidth=3.0, alpha=0.35)
        panel.plot(x, np.clip(prediction[-1], low - 9 * margin, high + 9 * margin), color=colour_of("operator"))
        panel.set(xlim=(0, 1), ylim=(low - margin, high + margin), xticks=[0, 1])
    panels[-1].set_axis_off()


def _draw_images(panels: Sequence[Axes], kind: str, values: dict[str, list[np.ndarray]], times: Arrays | None) -> None:
    """A row of images on one scale: that of the truth, for errors one symmetric about zero; 1D over `times`."""
    low, high = limits(values["truth"]) if kind != "error" else symmetric_limits(values["error"])
    style = {"cmap": "viridis" if kind != "error" else "RdBu_r", "vmin": low, "vmax": high, "origin": "lower"}
    extent = (0, 1, 0, 1) if times is None else (0, 1, times[0], times[-1])
    for panel, value in zip(panels, values[kind], strict=False):
        plane = plane_of(value[-1]) if times is None else value
        image = panel.imshow(plane, interpolation="none", extent=extent, aspect="auto", **style)
        panel.set_xticks([0, 1])
        if times is None:
            panel.set_yticks([0, 1])
    bar = panels[0].figure.colorbar(image, cax=panels[-1])
    bar.ax.tick_params(labelsize=SMALL - 1, labelbottom=False)


def limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Smallest and largest value."""
    low, high = min(float(value.min()) for value in values), max(float(value.max()) for value in values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def symmetric_limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """-a and a, where 99 % of the finite absolute values are at most a."""
    sizes = np.concatenate([np.abs(value[np.isfinite(value)]).ravel() for value in values])
    largest = float(np.quantile(sizes, 0.99)) if len(sizes) else 0.0
    return (-largest, largest) if largest > 0 else (-1.0, 1.0)


def plane_of(field: np.ndarray) -> np.ndarray:
    """A field (X, Y) or, of one plane, (X, Y, 1) as an image (Y, X)."""
    return field.reshape(field.shape[:2]).T


def plot_parity(family: str, arrays: Arrays) -> Figure:
    """Plot predicted over true values of the kept trajectories, one panel per field: the number of points by colour."""
    fields, roles = FAMILIES[family].fields, [role for role in ROLES if f"{role}/truth" in arrays]
    num_columns = min(2, len(fields))
    num_rows = -(-len(fields) // num_columns)
    figure = new_figure(0.6 + 2.2 * num_columns, 0.7 + 2.4 * num_rows)
    for channel, field in enumerate(fields):
        panel = figure.add_subplot(num_rows, num_columns, channel + 1)
        tidy(panel)
        first = min(1, len(arrays["shown"]) - 1)  # rollouts start from the truth
        truth, prediction = (
            np.concatenate([arrays[f"{role}/{part}"][first:, channel].ravel() for role in roles])
            for part in ("truth", "prediction")
        )
        low, high = limits([truth])
        counts, _, _ = np.histogram2d(prediction, truth, BINS, [(low, high)] * 2)
        shown = np.ma.masked_equal(np.log10(np.maximum(counts, 0.1)), -1)
        panel.imshow(shown, cmap="cividis_r", origin="lower", interpolation="none", extent=(low, high, low, high))
        panel.plot([low, high], [low, high], color="black", linewidth=0.8)
        outside = np.mean(~((prediction >= low) & (prediction <= high)))
        panel.set_title(f"{field}" + f"\n{outside:.1%} outside" * bool(outside > 0), fontsize=SMALL)
        panel.set_xlabel("truth", fontsize=SMALL)
        panel.set_ylabel("prediction" * (channel % num_columns == 0), fontsize=SMALL)
    title = f"{', '.join(roles)} trajectory, predicted times; dark: many points"
    figure.suptitle(wrapped(title, int(16 * figure.get_figwidth())), fontsize=SMALL)
    return figure


def plot_rates(family: str, rates: dict[str, Any]) -> Figure:
    """Plot the least error of the codec over latents per grid point: a panel per field group, a line per patch.

    `rates` is what `ups.training.stages.codec.measure_rates` returns; a dot marks what it has chosen, at the
    lower edge where the error is smaller.
    """
    groups = [name for name in rates["errors"] if name.split("/")[0] == family]
    figure, panels = panel_grid({name: name for name in groups}, "latents per grid point", "RMS error / std")
    for name, panel in panels.items():
        chosen = rates["chosen"][name]
        for patch, errors in rates["errors"][name].items():
            points = int(patch) ** len(FAMILIES[family].axes)
            panel.plot(np.arange(len(errors)) / points, positive(np.array(errors)), label=f"patch of {points} points")
            if int(patch) == chosen["patch"]:
                kept = chosen["components"]
                panel.plot([kept / points], [max(errors[kept], SMALLEST_ERROR)], "ko", label="chosen")
    curves = [np.array(errors) for name in groups for errors in rates["errors"][name].values()]
    log_axes(list(panels.values()), np.concatenate(curves), SMALLEST_ERROR)
    common_legend(figure, "principal components of the training split")
    return figure


def draw_figures(folder: Path, datasets: dict[str, str]) -> dict[str, bytes]:
    """File name -> PNG, from the arrays in `folder`; `datasets` maps the name of each dataset to its family."""
    arrays = {name: read_arrays(folder / f"{name}.npz") for name in datasets}
    figures = {"spectra.png": plot_spectra(arrays)}
    if transient := {name: arrays[name] for name in datasets if not FAMILIES[datasets[name]].steady}:
        figures["errors.png"] = plot_errors(transient)
    for name, content in arrays.items():
        if "median/truth" in content:
            figures[f"snapshots_{name}.png"] = plot_trajectories(name, datasets[name], content)
    return {name: png(figure) for name, figure in figures.items()}


def read_arrays(path: Path) -> Arrays:
    """The arrays of one dataset that `ups.evaluation.scores` has written."""
    with np.load(path) as content:
        return dict(content)


def _titles(datasets: dict[str, Arrays]) -> dict[str, str]:
    return {name: f"{arrays['title']}\n{name}" for name, arrays in datasets.items()}


def _part(content: Arrays, part: str) -> Arrays:
    return {key.removeprefix(f"{part}/"): value for key, value in content.items() if key.startswith(f"{part}/")}
