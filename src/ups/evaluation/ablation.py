"""The ablation: what each variant of the operator scores on the validation split, relative to base."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from ups.config import BASE, EvaluationConfig
from ups.data.pdebench import FAMILIES
from ups.evaluation.evaluate import held_out
from ups.evaluation.markdown import geometric_mean, number, ratio, table
from ups.evaluation.predict import HORIZONS
from ups.evaluation.score import Trained, score_subjects

METRIC, METHOD = "nRMSE", "operator"
NOTE = (
    "Validation split, physical units. First table: geometric mean over families of nRMSE divided by that of base with "
    "the same seed, below 1 is better; time of a step, the mean over the training, measured in turns. Second table: "
    "nRMSE of one step / of the rollout."
)


def score_variant(folder: Path, trained: Trained, config: EvaluationConfig, device: str, raw: Path) -> dict[str, Any]:
    """{"row": {"one_step", "rollout": {family: nRMSE}, "parameters"}} of one operator."""
    transient = [s for s in held_out(trained.cache(), raw, "valid") if not FAMILIES[s.dataset.family].steady]
    emulator = trained.emulator(device)
    assert emulator.operator is not None
    records = score_subjects(folder, emulator, transient, config, device)
    row: dict[str, Any] = {horizon: _by_family(records, horizon) for horizon in HORIZONS}
    row["parameters"] = sum(parameter.numel() for parameter in emulator.operator.parameters())
    return {"row": row}


def _by_family(records: list[dict[str, Any]], horizon: str) -> dict[str, float | None]:
    """NRMSE of each family, the mean over its datasets; None where one is not finite."""
    values = defaultdict(list)
    for record in records:
        if (record["method"], record["metric"], record["horizon"]) == (METHOD, METRIC, horizon):
            values[record["family"]].append(record["value"])
    return {family: None if None in found else fmean(found) for family, found in values.items()}


def compare(rows: list[dict[str, Any]], seconds_per_step: dict[str, float]) -> list[dict[str, Any]]:
    """The rows with "relative" and "milliseconds_per_step".

    "relative" is {horizon: geometric mean over families of nRMSE over that of base}, None if one is not finite; base is
    the row of variant `base` with the same seed.
    """
    bases = {row["seed"]: row for row in rows if row["variant"] == BASE}
    return [
        row
        | {"relative": {horizon: _relative(row[horizon], bases[row["seed"]][horizon]) for horizon in HORIZONS}}
        | {"milliseconds_per_step": 1000 * seconds_per_step[row["variant"]]}
        for row in rows
    ]


def _relative(errors: dict[str, float | None], base: dict[str, float | None]) -> float | None:
    return geometric_mean([ratio(errors[family], base[family]) for family in base])


def ablation_text(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per variant and seed, first summed up, then family by family."""
    lines = ["# Ablation of the operator", "", NOTE, ""]
    columns = ["variant", "changed", "seed", "one step", "rollout", "parameters", "ms per step"]
    lines += [*table(columns, map(_summary, rows), num_names=2), ""]
    families = list(rows[0]["one_step"])
    return "\n".join([*lines, *table(["variant", "seed", *families], map(_errors, rows))]) + "\n"


def _summary(row: dict[str, Any]) -> list[str]:
    relative = [number(row["relative"][horizon]) for horizon in HORIZONS]
    cost = [f"{row['parameters']:,}", number(row["milliseconds_per_step"])]
    return [row["variant"], ", ".join(_changes(row["overrides"])), row["seed"], *relative, *cost]


def _errors(row: dict[str, Any]) -> list[str]:
    cells = [" / ".join(number(row[horizon][family]) for horizon in HORIZONS) for family in row["one_step"]]
    return [row["variant"], row["seed"], *cells]


def _changes(overrides: dict[str, Any], place: str = "") -> list[str]:
    """`model.levels=2` for {"model": {"levels": 2}}."""
    changes = []
    for name, value in overrides.items():
        inside = isinstance(value, dict)
        changes += _changes(value, f"{place}{name}.") if inside else [f"{place}{name}={json.dumps(value)}"]
    return changes
