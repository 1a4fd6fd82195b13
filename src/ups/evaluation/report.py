"""The report of a run: one HTML page that holds its tables, figures and animations and loads nothing else."""

import base64
import html
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from ups.data.card_text import Card, titles_of
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.evaluation import report_tables as tables
from ups.evaluation.examples import ROLES
from ups.evaluation.figures import (
    Arrays,
    limits,
    plane_of,
    plot_errors,
    plot_parity,
    plot_rates,
    plot_spectra,
    plot_trajectories,
    read_arrays,
    symmetric_limits,
)
from ups.evaluation.predictions import plain_method
from ups.evaluation.report_tables import Scores
from ups.evaluation.styles import svg
from ups.evaluation.tables import STRONG, number
from ups.files import place_of, read_json
from ups.runs.run import training_seconds
from ups.runs.stage_cache import Receipt, trained_receipts

FILM_BYTES = 12 * 2**20  # of all animations together, before compression
COLOUR_MAPS = {"value": "viridis", "error": "RdBu_r"}


@dataclass(frozen=True)
class Results:
    """What a run has written, and with `baselines` those of `--pipeline baselines`, if it was run.

    `arrays` is the folder of arrays for figures, `cards` the data card of each dataset, `stages` the receipts of the
    trained stages, `machine` the environment, `others` the data roots of the runs to compare with. `folder` is that of
    `evaluation.folder`, if its files were scored instead of the test split; `rates` are the curves by which the sizes
    of the codec were chosen, if it has a tolerance.
    """

    metrics: list[dict[str, Any]]
    verdict: dict[str, Any]
    corrector: dict[str, Any]
    arrays: Path
    cards: dict[str, Card]
    baseline_metrics: list[dict[str, Any]]
    baseline_arrays: Path | None
    costs: dict[str, Any]
    stages: dict[str, Receipt]
    data_root: Path
    machine: dict[str, Any]
    others: list[Path]
    folder: Path | None
    rates: dict[str, Any] | None

    @property
    def scored(self) -> str:
        """The trajectories that were scored, in words."""
        return "the test split" if self.folder is None else f"all trajectories in {self.folder}"


def render(results: Results, advance: Callable[[int], None]) -> str:
    """The page as HTML; `advance(1)` follows each dataset."""
    scores = Scores(results.metrics, results.baseline_metrics)
    grades = {name: grade["grade"] for name, grade in results.verdict.get("grades", {}).items()}
    titles = titles_of(card.dataset for card in results.cards.values())
    names = tables.worst_first(scores, grades)
    overview = tables.overview(scores, titles, grades, results.costs, results.scored)
    environment = Environment(
        loader=PackageLoader("ups.evaluation", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"data": _data_address, "json": json.dumps, "formula": formula_svg}
    sections = []
    for name in names:
        section = _section(results, scores, name, FILM_BYTES // len(names))
        sections.append(section | {"name": name, "title": titles[name]})
        advance(1)
    further = [
        tables.gate_rows(results.verdict["gates"]),
        tables.corrector_rows(results.corrector),
        *([tables.cost_rows(results.costs)] if results.costs else []),
        tables.stage_rows(results.stages, results.data_root),
        tables.pairs("environment", "Environment", results.machine.items()),
        tables.record_rows([*results.metrics, *results.baseline_metrics]),
    ]
    if results.others:
        runs = {"this run": scores} | {str(root): scores_of(root) for root in results.others}
        further.insert(0, tables.run_rows(runs, titles))
    return environment.get_template("report.html.jinja").render(
        overview=overview,
        names=names,
        equations=[results.cards[name].family.equation for name in names],
        grades=grades,
        verdict=results.verdict,
        subject="a run" if results.folder is None else f"the files in {results.folder}",
        headline=_headline(results, names, grades, titles),
        sections=sections,
        tables=further,
        limits=list(_limits(results, scores, titles)),
        maps={kind: palette(name) for kind, name in COLOUR_MAPS.items()},
        style=_resource("report.css"),
        script=_resource("report.js"),
    )


def _headline(results: Results, names: list[str], grades: dict[str, str], titles: dict[str, str]) -> str:
    """How many datasets have which grade, the worst one, and the time of training."""
    counts = Counter(grades.get(name, tables.UNGRADED) for name in names)
    graded = ", ".join(f"{counts[grade]} {grade}" for grade in (*tables.GRADES[::-1], tables.UNGRADED) if counts[grade])
    folders = [place_of(results.data_root, receipt) for receipt in trained_receipts(results.stages).values()]
    seconds = sum(map(training_seconds, folders))
    duration = f"{number(seconds)} seconds" if seconds < 120 else f"{number(seconds / 60)} minutes"
    worst = f"{len(names)} datasets: {graded}. Worst: {titles[names[0]]}" if len(names) > 1 else f"1 dataset: {graded}"
    return f"{worst}. Training took {duration}."


def _section(results: Results, scores: Scores, name: str, film_bytes: int) -> dict[str, Any]:
    """All that the page shows of one dataset, below its title."""
    card, arrays = results.cards[name], read_arrays(results.arrays / f"{name}.npz")
    family = card.dataset.family
    for kind in STRONG if results.baseline_arrays else ():
        arrays |= _curves_of(kind, plain_method(family), results.baseline_arrays / kind / f"{name}.npz")
    figures: dict[str, Figure] = {} if card.family.steady else {"Error over time": plot_errors({name: arrays})}
    figures["Energy spectrum"] = plot_spectra({name: arrays})
    if results.rates is not None:
        figures["Codec: error over latents kept"] = plot_rates(family, results.rates)
    film = None
    if "median/truth" in arrays:
        figures["Predicted over true values"] = plot_parity(family, arrays)
        figures["Worst, median and best trajectory"] = plot_trajectories(name, family, arrays)
        film = film_of(family, arrays, film_bytes)
    return {
        "grade": results.verdict.get("grades", {}).get(name, {"grade": tables.UNGRADED, "reasons": []}),
        "ensemble": scores.ensemble(name),
        "scores": tables.score_rows(scores, name),
        "figures": {caption: svg(figure) for caption, figure in figures.items()},
        "film": film,
        "card": card,
    }


def _curves_of(kind: str, method: str, path: Path) -> Arrays:
    """Errors over time and spectrum of a baseline, under its name."""
    if not path.is_file():
        return {}
    arrays = read_arrays(path)
    return {f"{part}/{kind}": arrays[f"{part}/{method}"] for part in ("curve", "band", "spectrum")}


def film_of(family: str, arrays: Arrays, max_bytes: int) -> dict[str, Any]:
    """An animation of the kept trajectories, as images of 8 bits: truth on the scale of a field, and error.

    An image has the fields side by side and the snapshots below one another, in 1D as single lines. The error e is
    stored as the square root of |e| / a with its sign, a being the largest error shown: small errors keep their digits,
    and truth plus error is the prediction.
    """
    fields, roles = FAMILIES[family].fields, [role for role in ROLES if f"{role}/truth" in arrays]
    frames = _frames(arrays, len(roles), max_bytes)
    truths, errors = [], []
    for role in roles:
        truth = arrays[f"{role}/truth"][frames].astype(np.float64)
        truths.append(truth)
        errors.append(arrays[f"{role}/prediction"][frames] - truth)
    trajectories = []
    for role, truth, error in zip(roles, truths, errors, strict=True):
        scales = [limits([truth[:, c]]) for c in range(len(fields))]
        shown = [symmetric_limits([error[:, c]])[1] for c in range(len(fields))]
        largest = [_largest(error[:, c], high - low) for c, (low, high) in enumerate(scales)]
        values = [(truth[:, c] - low) / (high - low) * 255 for c, (low, high) in enumerate(scales)]
        signed = [np.nan_to_num(np.clip(error[:, c] / a, -1, 1), nan=1.0) for c, a in enumerate(largest)]
        roots = [127.5 + 127.5 * np.sign(e) * np.sqrt(np.abs(e)) for e in signed]
        content = {"truth": _strip(values), "error": _strip(roots), "nRMSE": _part_of_steps(arrays, role, frames)}
        trajectories.append({"role": role, "scales": scales, "shown": shown, "largest": largest, **content})
    return {
        "fields": fields,
        "is_1d": truths[0].ndim == 3,
        "size": plane_of(truths[0][0, 0]).shape[::-1] if truths[0].ndim > 3 else (truths[0].shape[-1], 1),
        "times": [float(f"{time:.4g}") for time in arrays["shown"][frames]],
        "trajectories": trajectories,
    }


def _frames(arrays: Arrays, num_trajectories: int, max_bytes: int) -> np.ndarray:
    """The snapshots of an animation, evenly spaced, so many that it does not exceed `max_bytes`."""
    count, num_values = len(arrays["shown"]), arrays["median/truth"][0].size
    allowed = max(2, max_bytes // (2 * num_trajectories * num_values))
    return np.unique(np.linspace(0, count - 1, min(count, allowed)).astype(int))


def _largest(error: np.ndarray, bound: float) -> float:
    return min(float(np.abs(error[np.isfinite(error)]).max(initial=0.0)), bound) or 1.0


def _part_of_steps(arrays: Arrays, role: str, frames: np.ndarray) -> list[float | None]:
    """The nRMSE of each snapshot shown, mean over fields; None for the initial one, which is given."""
    times, errors = arrays["times"], arrays[f"{role}/nRMSE"].mean(axis=-1)
    steps = np.searchsorted(times, arrays["shown"][frames]) - (len(times) - len(errors))
    return [float(f"{errors[k]:.3g}") if k >= 0 and np.isfinite(errors[k]) else None for k in steps]


def _strip(fields: list[np.ndarray]) -> str:
    """Fields (F, X), (F, X, Y) or (F, X, Y, 1) of numbers up to 255 as one PNG: (F, C X) or (F Y, C X)."""
    if fields[0].ndim == 2:
        pixels = np.concatenate(fields, axis=1)
    else:
        pixels = np.concatenate([np.concatenate([plane_of(u) for u in field]) for field in fields], axis=1)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def palette(name: str) -> str:
    """256 colours of a colour map as hexadecimal digits."""
    colours = mpl.colormaps[name](np.linspace(0, 1, 256))[:, :3]
    return np.rint(255 * colours).astype(np.uint8).tobytes().hex()


@cache
def formula_svg(formula: str) -> str:
    """A formula as an SVG element with shapes for letters, whose fonts browsers lack; other text as escaped HTML."""
    if "$" not in formula:
        return html.escape(formula)
    figure, buffer = Figure(figsize=(0.1, 0.1)), io.StringIO()
    figure.text(0, 0, formula, fontsize=11)
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": formula}):
        metadata = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.02, metadata=metadata)
    text = buffer.getvalue()
    return re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.S).replace("#000000", "currentColor")


def _data_address(text: str, kind: str) -> str:
    """A text as an address that holds it."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _resource(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def scores_file(root: Path) -> Path:
    """The file with the scores of the run in a data root.

    Raises:
        DataFault: it has none.
    """
    path = root / "08_reporting" / "metrics.json"
    if not path.is_file():
        raise DataFault(f"{path} does not exist: name data roots of finished runs in report.compare")
    return path


def scores_of(root: Path) -> Scores:
    """The scores of the run in a data root; raises as `scores_file`."""
    return Scores(read_json(scores_file(root)), [])


def _limits(results: Results, scores: Scores, titles: dict[str, str]) -> Iterator[str]:
    """What the page does not show, in sentences."""
    yield (
        "The scores hold for the test split of these datasets: the same equations, parameters, grids and times as in "
        "training, from other initial conditions. Nothing is said of others, nor of longer rollouts."
        if results.folder is None
        else "The scores hold for these files, whose parameters, grids and times may be others than those of training. "
        "Nothing is said of longer rollouts. Correctors take part with `evaluation.folder_correctors=true` alone."
    )
    yield (
        "Intervals resample the trajectories that were scored; data, split and training were not repeated. "
        "`kedro run --pipeline seeds` compares several seeds."
    )
    few = [titles[name] for name in scores.families if "[" not in scores.cell(name, "codec", "nRMSE", "rollout")]
    if few:
        yield f"Too few trajectories for an interval: {'; '.join(few)}."
    if results.folder is not None:
        yield "FNO and U-Net have no scores of these files."
    elif not results.baseline_metrics:
        yield "FNO and U-Net were not trained here: `kedro run --pipeline baselines` adds them, and times per snapshot."
    if not results.verdict.get("grades"):
        yield "The verdict has no grades: it was written by an earlier version."
