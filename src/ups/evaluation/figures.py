"""All figures of a report, from the arrays that the evaluation left."""

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ups.data.pdebench import FAMILIES
from ups.evaluation.plots import plot_errors, plot_snapshots, plot_spectra

DPI = 110


def draw_figures(folder: Path, datasets: dict[str, str]) -> dict[str, bytes]:
    """File name -> PNG page; `datasets` maps the name of each dataset to its family."""
    arrays = {name: dict(np.load(folder / f"{name}.npz")) for name in datasets}
    transient = {name: content for name, content in arrays.items() if not FAMILIES[datasets[name]].steady}
    figures = {"spectra.png": plot_spectra({name: _part(content, "spectrum") for name, content in arrays.items()})}
    if transient:
        curves = {name: _part(content, "curve") for name, content in transient.items()}
        figures["errors.png"] = plot_errors(curves, {name: content["times"][1:] for name, content in transient.items()})
    for name, content in arrays.items():
        rollouts = _part(content, "rollout")
        fields = FAMILIES[datasets[name]].fields
        figures[f"snapshots_{name}.png"] = plot_snapshots(
            name, fields, content["times"], rollouts.pop("truth"), rollouts
        )
    return {name: png(figure) for name, figure in figures.items()}


def png(figure: Figure) -> bytes:
    """The page as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _part(content: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{part}/"): value for key, value in content.items() if key.startswith(f"{part}/")}
