"""Tables of the report: cells as text, for HTML, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ups.data.pdebench import FAMILIES
from ups.evaluation.corrector import rank_of
from ups.evaluation.entries import comparable
from ups.evaluation.predictions import HORIZONS, plain_method
from ups.evaluation.tables import number, ratio
from ups.files import WEIGHTS, place_of
from ups.models.weights import load
from ups.runs.run import Run, trained_steps, training_seconds
from ups.runs.stage_cache import Receipt, trained_receipts
from ups.surrogate.trained import OFF

Records = list[dict[str, Any]]
Key = tuple[str, str, str, str]  # dataset, method, metric, horizon

GRADES = ("unusable", "weak", "good")
UNGRADED = "not graded"
CORRECTORS = ("consistency", "diffusion")
RIVALS = ("persistence", "fno", "unet")
ABSENT = "–"
CALIBRATED = 1.25  # a spread-skill ratio between 1 / 1.25 and 1.25, the limit on validation data


@dataclass(frozen=True)
class ReportTable:
    """Rows of text below `columns`; `best` are the places (row, column) to mark."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    @property
    def csv(self) -> str:
        """The table as comma-separated values."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([self.columns, *self.rows])
        return buffer.getvalue()

    @property
    def latex(self) -> str:
        """The table as a LaTeX `tabular` for the package booktabs."""
        return tabulate(self.rows, self.columns, tablefmt="latex_booktabs", disable_numparse=True) + "\n"


class Scores:
    """Metric records of a run and of its baselines, by dataset, method, metric and horizon."""

    def __init__(self, metrics: Records, baseline_metrics: Records) -> None:
        self.families = {r["dataset"]: r["family"] for r in metrics}
        self.num_trajectories = {r["dataset"]: r["num_trajectories"] for r in metrics}
        # Baselines of an earlier run on other trajectories are left out.
        every = (*metrics, *comparable(baseline_metrics, metrics))
        self.records: dict[Key, dict[str, Any]] = {
            (r["dataset"], r["method"], r["metric"], r["horizon"]): r for r in every
        }

    def value(self, dataset: str, method: str, metric: str, horizon: str) -> float | None:
        """A metric; None where the method was not scored, and where it is not finite."""
        return self.records.get((dataset, method, metric, horizon), {}).get("value")

    def cell(self, dataset: str, method: str, metric: str, horizon: str) -> str:
        """A metric with its 95 % interval."""
        record = self.records.get((dataset, method, metric, horizon))
        if record is None:
            return ABSENT
        interval = f" [{number(record['low'])}, {number(record['high'])}]" if record.get("low") is not None else ""
        return f"{number(record['value'])}{interval}"

    def digest(self, dataset: str, method: str) -> str | None:
        """What identifies the trajectories on which rollouts were scored."""
        return self.records.get((dataset, method, "nRMSE", "rollout"), {}).get("digest")

    def methods(self, dataset: str) -> list[str]:
        """The methods that were scored on a dataset, without correctors that are off."""
        found = [(key[1], r) for key, r in self.records.items() if key[0] == dataset]
        return list(dict.fromkeys(method for method, record in found if record.get("mode") != OFF))

    def ensemble(self, dataset: str) -> str:
        """Whether the ensemble with the lowest CRPS is calibrated in rollouts, in words."""
        methods = [m for m in CORRECTORS if m in self.methods(dataset)]
        scored = {m: self.value(dataset, m, "CRPS", "rollout") for m in methods}
        finite = {method: value for method, value in scored.items() if value is not None}
        if not finite:
            return "not finite" if methods else "off"
        method = min(finite, key=finite.__getitem__)
        spread = self.value(dataset, method, "spread_skill", "rollout")
        if spread is None:
            return f"{method}: not finite"
        words = "too narrow" if spread < 1 / CALIBRATED else "too wide" if spread > CALIBRATED else "calibrated"
        return f"{method}: {words} ({number(spread)})"


OVERVIEW = (
    "dataset",
    "grade",
    "one step",
    "rollout",
    "persistence",
    "FNO",
    "U-Net",
    "ensemble (spread/skill)",
    "ms per snapshot",
)
OVERVIEW_NOTE = (
    "nRMSE on {scored}: RMSE over the RMS of the truth, mean over fields, times and trajectories; 0 is perfect, "
    "predicting zero scores 1. In brackets the 95 % interval over trajectories; too few have none. "
    "Columns persistence (nothing changes), FNO and U-Net: rollouts, trained at equal cost. Bold with a star: the best "
    "rollout of the row. Ensemble: its spread over its error in rollouts, 1 if it can be trusted; off where "
    "it brought nothing on validation data. Sorted: worst first."
)


def overview(
    scores: Scores, titles: dict[str, str], grades: dict[str, str], costs: dict[str, Any], scored: str
) -> ReportTable:
    """One row per dataset, worst first: by grade, then by the error of the rollout; `scored` names the trajectories."""
    rows, best = [], set()
    for dataset in worst_first(scores, grades):
        ours = plain_method(scores.families[dataset])
        cells = [scores.cell(dataset, method, "nRMSE", "rollout") for method in (ours, *RIVALS)]
        values = [scores.value(dataset, method, "nRMSE", "rollout") for method in (ours, *RIVALS)]
        finite = [value for value in values if value is not None]
        best |= {(len(rows), 3 + i) for i, value in enumerate(values) if value is not None and value == min(finite)}
        one_step = (
            ABSENT if FAMILIES[scores.families[dataset]].steady else scores.cell(dataset, ours, "nRMSE", HORIZONS[0])
        )
        milliseconds = costs.get("milliseconds_per_snapshot", {}).get(dataset, {}).get(ours)
        time = ABSENT if milliseconds is None else number(milliseconds)
        rivals = [cell.partition(" [")[0] for cell in cells[1:]]
        grade = grades.get(dataset, UNGRADED)
        rows.append([titles[dataset], grade, one_step, cells[0], *rivals, scores.ensemble(dataset), time])
    return ReportTable("overview", "Datasets", OVERVIEW, rows, OVERVIEW_NOTE.format(scored=scored), frozenset(best))


def worst_first(scores: Scores, grades: dict[str, str]) -> list[str]:
    """Datasets by grade, then by the error of the rollout; an error that is not finite is the worst."""

    def badness(dataset: str) -> tuple[int, float]:
        error = scores.value(dataset, plain_method(scores.families[dataset]), "nRMSE", "rollout")
        grade = grades.get(dataset, UNGRADED)
        return (GRADES.index(grade) if grade in GRADES else len(GRADES)), -(float("inf") if error is None else error)

    return sorted(scores.families, key=badness)


SHOWN = {  # metric of rollouts -> its column
    "max_error": "max error",
    "VRMSE": "VRMSE",
    "correlation_time": "correlated steps",
    "conservation_drift": "drift of integrals",
    "CRPS": "CRPS",
    "spread_skill": "spread/skill",
    "coverage": "coverage",
}


def score_rows(scores: Scores, dataset: str) -> ReportTable:
    """All methods on one dataset: nRMSE of one step and of the rollout, further metrics of the rollout."""
    metrics = {m: c for m, c in SHOWN.items() if any(key[0] == dataset and key[2] == m for key in scores.records)}
    steady = FAMILIES[scores.families[dataset]].steady
    columns = ["method", *(["nRMSE"] if steady else ["nRMSE, one step", "nRMSE, rollout"]), *metrics.values()]
    rows = []
    for method in scores.methods(dataset):
        errors = [scores.cell(dataset, method, "nRMSE", horizon) for horizon in HORIZONS[steady:]]
        others = [scores.cell(dataset, method, metric, "rollout").partition(" [")[0] for metric in metrics]
        if set(errors) != {ABSENT}:  # rounding has no rollouts, of which a steady solution is one
            rows.append([method, *errors, *others])
    values = {i: scores.value(dataset, row[0], "nRMSE", "rollout") for i, row in enumerate(rows) if row[0] != "codec"}
    lowest = min((value for value in values.values() if value is not None), default=None)
    best = frozenset(
        (i, len(HORIZONS[steady:])) for i, value in values.items() if value is not None and value == lowest
    )
    count = scores.num_trajectories[dataset]
    note = f"Trajectories: {count}. The codec alone is a floor: it decodes the truth, and predicts nothing."
    return ReportTable(f"scores_{dataset}", "Scores", columns, rows, note, best)


def corrector_rows(report: dict[str, Any]) -> ReportTable:
    """The decision for each family and method, and the validation scores behind it."""
    columns = ["family", "method", "decision", "network evaluations", "CRPS", "nRMSE", "high band", "limits exceeded"]
    rows = []
    for family, entry in report.items():
        for method, decision in entry["decision"].items():
            candidates = [c for c in entry.get("candidates", []) if c["method"] == method]
            own = [c for c in candidates if c["correction"] == decision]
            shown = own[0] if own else min(candidates, key=_rank, default=None)
            steps = str(decision["num_steps"]) if own else ABSENT
            ratios = [number(shown[key]) for key in ("crps", "nrmse", "high_band")] if shown else [ABSENT] * 3
            untried = "no teacher" if entry.get("candidates") else "too few validation trajectories"
            exceeded = ", ".join(shown["exceeded"]) or "none" if shown else untried
            rows.append([family, method, decision["mode"], steps, *ratios, exceeded])
    note = (
        "On validation data, over the model without corrector: CRPS over its MAE, nRMSE, error in the highest band of "
        "wavenumbers; below 1 is better. A corrector that is off has the scores of its best candidate. "
        "No teacher: the consistency model is not tried where diffusion is off."
    )
    return ReportTable("correctors", "Correctors", columns, rows, note)


def _rank(candidate: dict[str, Any]) -> tuple[bool, float, float]:
    return rank_of(*(candidate[key] for key in ("mean_crps", "miscalibration", "exceeded")))


def gate_rows(gates: Records) -> ReportTable:
    """Every gate with its value, limit and outcome; failed ones first."""
    keys = list(dict.fromkeys(key for gate in gates for key in gate if key != "passed"))
    ordered = sorted(gates, key=lambda gate: gate["passed"])
    rows = [["passed" if gate["passed"] else "failed", *(text_of(gate.get(key)) for key in keys)] for gate in ordered]
    return ReportTable("gates", "Gates", ["outcome", *keys], rows)


def cost_rows(costs: dict[str, Any]) -> ReportTable:
    """Training seconds, parameters and time per snapshot of each method, as `--pipeline baselines` measured them."""
    rows = [
        [
            name,
            *(text_of(c[key]) for key in ("training_seconds", "parameters", "milliseconds_per_snapshot", "over_fno")),
        ]
        for name, c in costs.get("methods", {}).items()
    ]
    columns = ["method", "training seconds", "parameters", "ms per snapshot", "ms over those of FNO"]
    note = "Measured by the pipeline baselines; means over the datasets that a method predicts are geometric."
    return ReportTable("costs", "Costs of the methods", columns, rows, note)


def run_rows(runs: dict[str, Scores], titles: dict[str, str]) -> ReportTable:
    """Rollout errors of several runs side by side; the first is this one, whose error divides the others'."""
    rows, best, (first, *_) = [], set(), runs.values()
    for dataset in first.families:
        ours = plain_method(first.families[dataset])
        values = [scores.value(dataset, ours, "nRMSE", "rollout") for scores in runs.values()]
        digests = [scores.digest(dataset, ours) for scores in runs.values()]
        same = {i: value for i, value in enumerate(values) if value is not None and digests[i] == digests[0]}
        best |= {(len(rows), 1 + i) for i, value in same.items() if value == min(same.values())}
        cells = [scores.cell(dataset, ours, "nRMSE", "rollout") for scores in runs.values()]
        pairs = zip(values[1:], digests[1:], strict=True)
        factors = (ratio(value, values[0]) if digest == digests[0] else None for value, digest in pairs)
        words = [f"{cell} (× {number(x)})" if x else cell for cell, x in zip(cells[1:], factors, strict=True)]
        rows.append([titles[dataset], cells[0], *words])
    note = (
        "nRMSE of rollouts without corrector, with 95 % intervals; in parentheses the factor to this run, where both "
        "were scored on the same trajectories. Bold with a star: the best of the runs on the trajectories of this one."
    )
    return ReportTable("runs", "Runs side by side", ["dataset", *runs], rows, note, frozenset(best))


def record_rows(records: Records) -> ReportTable:
    """Every metric record, for download."""
    columns = ["dataset", "method", "horizon", "metric", "value", "low", "high", "num_trajectories"]
    rows = [["" if r.get(key) is None else str(r[key]) for key in columns] for r in records]
    return ReportTable("all_scores", "All scores", columns, rows)


def text_of(value: Any) -> str:
    """A cell: numbers with three digits, nothing for None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ABSENT if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def pairs(name: str, title: str, entries: Iterable[tuple[str, Any]]) -> ReportTable:
    """A table of names and values."""
    return ReportTable(name, title, ["", "value"], [[key, text_of(value)] for key, value in entries])


def stage_rows(receipts: dict[str, Receipt], data_root: Path) -> ReportTable:
    """Steps, time, parameters and seed of every stage that was trained."""
    rows = []
    for stage, receipt in trained_receipts(receipts).items():
        folder = place_of(data_root, receipt)
        run, weights = Run.read(folder), load(folder / WEIGHTS)["weights"]
        numbers = (trained_steps(folder), training_seconds(folder), sum(value.numel() for value in weights.values()))
        rows.append([stage, *map(text_of, numbers), str(run.config["seed"]), run.device])
    columns = ["stage", "steps", "seconds of training steps", "parameters", "seed", "device"]
    return ReportTable("stages", "Training", columns, rows, "Seconds without validation, compilation and start.")
