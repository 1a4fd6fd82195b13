"""The verdict: every gate on every family it applies to, decided from metric records alone."""

from collections.abc import Sequence

from ups.config.evaluation import Gate
from ups.evaluation.tables import finite, ratio

Key = tuple[str, str, str, str]  # dataset, method, metric, horizon


def judge(records: Sequence[dict], gates: Sequence[Gate], families: dict[str, bool]) -> dict:
    """Compare the worst dataset of each family with the threshold of each gate.

    `families` maps every family under test to whether it is steady. A missing metric or baseline, a value that is not
    finite and a baseline of zero fail the gate, with the value None. A verdict without any gate is not passed.

    Raises:
        ValueError: two records of one dataset, method, metric and horizon.
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
        values[key] = finite(record["value"])
    return values


def _verdict(gate: Gate, family: str, value: float | None) -> dict:
    passed = value is not None and value <= gate.at_most
    return {"name": gate.name, "family": family, "value": value, "threshold": gate.at_most, "passed": passed}


def _worst(gate: Gate, datasets: Sequence[str], values: dict[Key, float | None]) -> float | None:
    """Largest value over the datasets of a family; None where one has none, or there is no dataset."""
    found = [_value(gate, dataset, values) for dataset in datasets]
    return None if None in found else max(found, default=None)


def _value(gate: Gate, dataset: str, values: dict[Key, float | None]) -> float | None:
    value = values.get((dataset, gate.method, gate.metric, gate.horizon))
    if gate.relative_to is None:
        return value
    return finite(ratio(value, values.get((dataset, gate.relative_to, gate.metric, gate.horizon))))
