"""The table of what ensembles are worth on the test split, beside the operator alone."""

from collections.abc import Iterator
from typing import Any

from ups.evaluation.candidates import HIGH_BAND
from ups.evaluation.markdown import number, ratio, table
from ups.evaluation.predict import HORIZONS, plain_method

ENSEMBLES = ("diffusion", "consistency")
COLUMNS = ("dataset", "method", "horizon", "CRPS", "nRMSE", "high band", "spread-skill", "coverage")
NOTE = (
    "CRPS over the MAE of the operator, which is the CRPS of its one prediction; nRMSE and error in the highest band "
    "of wavenumbers of the ensemble's mean over the operator's, below 1 is better. In a steady family the steady model "
    "is meant. Half of the members have the noise of the others negated; within a half they are independent, and CRPS, "
    "spread-skill and coverage are means over the two halves. Calibrated halves of M members have spread-skill 1 and "
    "coverage (M - 1) / (M + 1): 0.6 for 4. Where a method is off it is the operator, and has no line; why is in "
    "`corrector.json`."
)


def uncertainty(records: list[dict[str, Any]]) -> str:
    """Markdown: a line per dataset, ensemble and horizon, from records of the test split."""
    values = {(r["dataset"], r["method"], r["horizon"], r["metric"]): r["value"] for r in records}
    families = {r["dataset"]: r["family"] for r in records}
    lines = table(COLUMNS, _rows(values, families), num_names=3)
    return "\n".join(["## Uncertainty on the test split", "", NOTE, "", *lines, ""])


def _rows(values: dict[tuple[str, str, str, str], float | None], families: dict[str, str]) -> Iterator[list[str]]:
    for dataset, family in sorted(families.items()):
        for method in ENSEMBLES:
            for horizon in HORIZONS:
                own, alone = (dataset, method, horizon), (dataset, plain_method(family), horizon)
                if (*own, "CRPS") in values:
                    pairs = (("CRPS", "MAE"), ("nRMSE", "nRMSE"), (HIGH_BAND, HIGH_BAND))
                    ratios = [ratio(values[*own, ours], values[*alone, theirs]) for ours, theirs in pairs]
                    absolute = [values[*own, metric] for metric in ("spread_skill", "coverage")]
                    yield [*own, *map(number, (*ratios, *absolute))]
