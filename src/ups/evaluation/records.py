"""Records of scores: one dictionary per dataset, method, metric and horizon, as they stand in `metrics.json`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ups.data.families import Dataset
from ups.evaluation.predictions import HORIZONS, Stepper, corrector_mode, plain_method, trained_correctors
from ups.evaluation.tables import GRADES, finite, geometric_mean
from ups.metrics.suite import Score, ScoreSuite
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import OFF

WITHOUT_LIMITS = "nRMSE_without_limits"
Suites = dict[tuple[str, str], ScoreSuite]
"""(method, horizon) -> its running metrics."""


class LimitCount:
    """Counts how many states of one method the limits of `StateStatistics` change.

    `free` has the running metrics of the same method without limits, None where no limit has changed a state.
    """

    def __init__(self, surrogate: Surrogate, family: str, device: torch.device) -> None:
        model = surrogate.model(family)
        assert model is not None
        self._statistics, self._counts = model.statistics, torch.zeros(3, device=device)
        self.free: ScoreSuite | None = None

    @property
    def any(self) -> bool:
        """Whether a limit has changed a state."""
        return bool(self._counts[1] > 0)

    def of(self, stepper: Stepper) -> Stepper:
        """The same stepper, whose steps are counted."""
        return self._with("limited", self._counts, stepper)

    def without_limits(self, stepper: Stepper) -> Stepper:
        """The same stepper without limits."""
        return self._with("limits", False, stepper)

    def _with(self, name: str, value: Tensor | bool, stepper: Stepper) -> Stepper:
        """The same stepper; an attribute of the statistics has this value during its steps."""

        def step_of(setting: Setting) -> Callable[[Tensor], Tensor]:
            step, usual = stepper.step_of(setting), getattr(self._statistics, name)

            def changed(z: Tensor) -> Tensor:
                setattr(self._statistics, name, value)
                try:
                    return step(z)
                finally:
                    setattr(self._statistics, name, usual)

            return changed

        return Stepper(step_of, stepper.num_members)

    def scores(self) -> dict[str, Score]:
        """Share of the states that a limit has changed, and of their values; the nRMSE without limits, if there is one.

        The nRMSE is not finite where predictions without limits diverge.
        """
        num_states, num_limited, limited_values = self._counts.tolist()
        shares = {"limited_steps": num_limited / num_states, "limited_values": limited_values / num_states}
        free = {} if self.free is None else {WITHOUT_LIMITS: self.free.compute()["nRMSE"]}
        return {name: Score(share, None) for name, share in shares.items()} | free


def records_of(
    surrogate: Surrogate, dataset: Dataset, suites: Suites, limited: Mapping[tuple[str, str], LimitCount]
) -> list[dict[str, Any]]:
    """Records of the scored methods, and of correctors that are off, which predict what the plain model does.

    `limited` counts, by method and horizon, what limits have changed; codec and persistence have none.
    """
    modes = {method: corrector_mode(surrogate, method, dataset.family) for method in trained_correctors(surrogate)}
    records = []
    for (method, horizon), suite in suites.items():
        mode = {"mode": modes[method]} if method in modes else {}
        count = limited.get((method, horizon))
        records += [record | mode for record in records_of_method(dataset, method, horizon, suite, count)]
    plain = [record for record in records if record["method"] == plain_method(dataset.family)]
    off = [method for method, mode in modes.items() if mode == OFF]
    return records + [record | {"method": method, "mode": OFF} for method in off for record in plain]


def records_of_method(
    dataset: Dataset, method: str, horizon: str, suite: ScoreSuite, limited: LimitCount | None = None
) -> Iterator[dict[str, Any]]:
    """The records of one method and horizon; without `limited`, of predictions from a file, nothing of limits."""
    scores = suite.compute() | ({} if limited is None else limited.scores())
    for metric, score in scores.items():
        record = {"family": dataset.family, "dataset": dataset.name, "method": method, "metric": metric}
        record |= {"horizon": horizon, "value": finite(score.value)}
        record["num_trajectories"] = suite.metrics.num_trajectories
        if metric == "nRMSE":
            record["trajectories"] = [finite(value) for value in suite.of_trajectories(metric).tolist()]
        interval = {} if score.interval is None else dict(zip(("low", "high"), score.interval, strict=True))
        yield record | {end: finite(value) for end, value in interval.items()}


def summary(records: list[dict[str, Any]], verdict: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What runs are compared by: errors, numbers of datasets of each grade and of gates missed; and grades as text.

    Errors are the nRMSE of every method on each dataset, and of the operator and the steady model the geometric mean
    over all datasets. What is not finite is left out.
    """
    scored = [r for r in records if r["metric"] == "nRMSE" and r.get("mode") != OFF]
    finite_ones = [record for record in scored if record["value"] is not None]
    metrics = {"/".join(("test", r["dataset"], r["method"], r["horizon"], "nRMSE")): r["value"] for r in finite_ones}
    for horizon in HORIZONS:
        plain = [r["value"] for r in scored if r["horizon"] == horizon and r["method"] == plain_method(r["family"])]
        if (mean := geometric_mean(plain)) is not None:
            metrics[f"test/{horizon}_nRMSE"] = mean
    grades = {dataset: entry["grade"] for dataset, entry in verdict["grades"].items()}
    metrics |= {f"test/datasets_{grade}": float(list(grades.values()).count(grade)) for grade in GRADES}
    metrics["test/gates_missed"] = float(sum(not gate["passed"] for gate in verdict["gates"]))
    tags = {f"grade.{dataset}": grade for dataset, grade in grades.items()}
    return metrics, tags | {"verdict": "passed" if verdict["passed"] else "failed"}
