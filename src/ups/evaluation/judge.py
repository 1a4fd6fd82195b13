"""The verdict: every gate on every family it applies to, decided from metric records alone."""

from collections.abc import Sequence
from math import isfinite

from ups.config import Gate

Key = tuple[str, str, str, str]


def judge(records: Sequence[dict], gates: Sequence[Gate], families: dict[str, bool]) -> dict:
    """Compare the worst dataset of each family with the threshold of each gate.

    `families` maps every family under test to whether it is steady. A missing record or baseline, a value that is not
    finite and a baseline of zero fail the gate, with the value None. A verdict without any gate is not passed.
    """
    values = _by_key(records)
    datasets = {family: sorted({r["dataset"] for r in records if r["family"] == family}) for family in families}
    verdicts = [
        _verdict(gate, family, _worst(gate, datasets[family], values))
        for gate in gates
        for family, steady in families.items()
        if gate.applies_to in ("all", "steady" if steady else "transient")
    ]
    return {"passed": bool(verdicts) and all(verdict["passed"] for verdict in verdicts), "gates": verdicts}


def _by_key(records: Sequence[dict]) -> dict[Key, float | None]:
    values: dict[Key, float | None] = {}
    for record in records:
        key = (record["dataset"], record["method"], record["metric"], record["horizon"])
        if key in values:
            raise ValueError(f"expected one record per dataset, method, metric and horizon, got two for {key}")
        values[key] = record["value"]
    return values


def _verdict(gate: Gate, family: str, value: float | None) -> dict:
    return {
        "name": gate.name,
        "family": family,
        "value": value,
        "threshold": gate.at_most,
        "passed": value is not None and value <= gate.at_most,
    }


def _worst(gate: Gate, datasets: Sequence[str], values: dict[Key, float | None]) -> float | None:
    """Largest score over the datasets of a family; None where one has none, or there is no dataset."""
    scores = [_score(gate, dataset, values) for dataset in datasets]
    known = [score for score in scores if score is not None]
    return max(known) if known and len(known) == len(scores) else None


def _score(gate: Gate, dataset: str, values: dict[Key, float | None]) -> float | None:
    value = _finite(values.get((dataset, gate.method, gate.metric, gate.horizon)))
    if gate.relative_to is None or value is None:
        return value
    baseline = _finite(values.get((dataset, gate.relative_to, gate.metric, gate.horizon)))
    return _finite(value / baseline) if baseline else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
