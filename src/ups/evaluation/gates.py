"""Decisions on models from their scores: the verdict of gates on a run, and whether a model replaces the champion.

Gates and grades are decided from metric records alone. A model is compared with the registered champion by paired
errors of test trajectories.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config.evaluation import Gate
from ups.errors import DataFault
from ups.evaluation.entries import comparable, scored_trajectories, trajectories_digest
from ups.evaluation.predictions import plain_method
from ups.evaluation.tables import GRADES, STRONG, finite, number, ratio
from ups.metrics.bootstrap import MIN_TRAJECTORIES, bootstrap_interval, ratio_of_means
from ups.metrics.suite import OF_PHYSICS
from ups.surrogate.trained import OFF

GOOD, WEAK, UNUSABLE = GRADES
CORRECTORS = ("diffusion", "consistency")
WIN = 0.5  # ratio of errors where the champion alone diverged: its error counts as twice that of the new model
SHOWN = {"one_step": "one-step", "rollout": "rollout"}

Records = Sequence[dict[str, Any]]
Key = tuple[str, str, str, str]  # dataset, method, metric, horizon
Errors = dict[str, dict[str, Any]]
"""By dataset: `family`, `trajectories` (a hash that says which ones were predicted) and their `nRMSE`."""


@dataclass(frozen=True)
class Scores:
    """Records by key: of the run, of the baselines and of the champion, where there are any of these two."""

    own: dict[Key, dict[str, Any]]
    baselines: dict[Key, dict[str, Any]]
    champion: dict[Key, dict[str, Any]]


def judge(
    records: Records, gates: Sequence[Gate], families: dict[str, bool], baselines: Records = (), champion: Records = ()
) -> dict[str, Any]:
    """Check all gates on every dataset, grade it by those that do not hold, and pass or fail the run.

    `families` maps every family under test to whether it is steady; a family without records is judged under its own
    name. A missing score and one that is not finite fail a gate, with the value None. Not checked are gates on a
    corrector that is off or was not trained, on the rounding of latents that are not rounded, on conservation or
    positivity where the PDE has none, and against baselines or a champion that have no scores of the same trajectories.
    A champion is compared with on the trajectories where it is finite. Finite scores are 0 relative to baselines or a
    champion that diverged everywhere.

    Returns:
        - "passed": every gate holds whose `otherwise` is not `weak`, and there is at least one gate
        - "grades": {dataset: {"family", "grade", "reasons"}}; the grade is `unusable` where a gate with that
          `otherwise` does not hold, `weak` where another one does not hold, or none was checked, else `good`
        - "gates": [{"name", "dataset", "family", "value", "limit", "passed", "comparison"}]

    Raises:
        ValueError: two records of one dataset, method, metric and horizon.
    """
    scores = Scores(_by_key(records), *(_by_key(comparable(others, records)) for others in (baselines, champion)))
    datasets = {record["dataset"]: record["family"] for record in records if record["family"] in families}
    datasets |= {family: family for family in families if family not in datasets.values()}
    grades, lines, passed = {}, [], True
    for dataset, family in sorted(datasets.items()):
        kinds = ("all", "steady" if families[family] else "transient")
        checked = [gate for gate in gates if gate.applies_to in kinds and _applies(gate, dataset, scores)]
        found = [_check(gate, dataset, family, scores) for gate in checked]
        missed = [(gate, line) for gate, line in zip(checked, found, strict=True) if not line["passed"]]
        grades[dataset] = {"family": family, **_grade(missed, is_checked=bool(found))}
        passed &= all(gate.otherwise == WEAK for gate, _ in missed)
        lines += found
    return {"passed": passed and bool(lines), "grades": grades, "gates": lines}


def why_hopeless(first: dict[str, Any]) -> list[str]:
    """Reasons to stop after the verdict on a few trajectories; none if the verdict on all may still be passed.

    A score that is not finite for some trajectories is not finite for all; a run that is unusable everywhere is not
    worth the time of the full evaluation.
    """
    lost = [f"{line['dataset']}: {line['comparison']}" for line in first["gates"] if line["value"] is None]
    grades = first["grades"]
    if lost or any(entry["grade"] != UNUSABLE for entry in grades.values()):
        return lost
    return [f"{dataset}: {entry['reasons'][0]}" for dataset, entry in grades.items()]


def _by_key(records: Records) -> dict[Key, dict[str, Any]]:
    by_key: dict[Key, dict[str, Any]] = {}
    for record in records:
        key = (record["dataset"], record["method"], record["metric"], record["horizon"])
        if key in by_key:
            raise ValueError(f"expected one record per dataset, method, metric and horizon, got two for {key}")
        by_key[key] = record
    return by_key


def _applies(gate: Gate, dataset: str, scores: Scores) -> bool:
    """Whether there is something to check: all but a score that is missing although it should be there."""
    of_dataset = [record for record in scores.own.values() if record["dataset"] == dataset]
    of_method = [record for record in of_dataset if record["method"] == gate.method]
    if gate.method in CORRECTORS and all(record.get("mode") == OFF for record in of_method):
        return False
    if gate.method == "rounding" and not of_method:
        return False
    if gate.metric in OF_PHYSICS and of_dataset and gate.metric not in {record["metric"] for record in of_dataset}:
        return False
    others = {"baselines": scores.baselines, "champion": scores.champion}.get(gate.relative_to or "")
    return others is None or any(key[0] == dataset for key in others)


def _check(gate: Gate, dataset: str, family: str, scores: Scores) -> dict[str, Any]:
    value, what = _compared(gate, dataset, scores)
    shown = "missing or not finite" if value is None else number(value)
    line = {"name": gate.name, "dataset": dataset, "family": family, "value": value, "limit": gate.at_most}
    passed = value is not None and value <= gate.at_most
    return line | {"passed": passed, "comparison": f"{what}: {shown}, at most {gate.at_most:g}"}


def _compared(gate: Gate, dataset: str, scores: Scores) -> tuple[float | None, str]:
    """The value of a gate, and in words what is compared."""
    key = (dataset, gate.method, gate.metric, gate.horizon)
    own, what = _value(scores.own, key), f"{SHOWN[gate.horizon]} {gate.metric} of {gate.method}"
    if gate.relative_to is None:
        return own, what
    if gate.relative_to == "baselines":
        keys = [(dataset, kind, gate.metric, gate.horizon) for kind in STRONG]
        known = [_value(scores.baselines, key) for key in keys if key in scores.baselines]
        return _over_best(own, known), f"{what} / the better of FNO and U-Net"
    if gate.relative_to == "champion":
        value, interval = _paired(scores.own.get(key), scores.champion.get(key))
        return value, f"{what} / the champion's, same trajectories{interval}"
    other = _value(scores.own, (dataset, gate.relative_to, gate.metric, gate.horizon))
    return finite(ratio(own, other)), f"{what} / {gate.relative_to}"


def _value(records: dict[Key, dict[str, Any]], key: Key) -> float | None:
    return finite(records[key]["value"]) if key in records else None


def _over_best(own: float | None, known: list[float | None]) -> float | None:
    """A score over the lowest of `known`; 0 for a finite score where none of them is finite."""
    best = min((value for value in known if value is not None), default=math.inf if known else None)
    return finite(ratio(own, best))


def _paired(own: dict[str, Any] | None, champion: dict[str, Any] | None) -> tuple[float | None, str]:
    """Ratio of the mean errors where the champion is finite, and in words what is left out and its 95 % interval."""
    errors = [[] if record is None else record["trajectories"] for record in (own, champion)]
    if len(errors[0]) != len(errors[1]) or not errors[0] or None in errors[0]:
        return None, ""
    ours, theirs = _both(*errors)
    kept = theirs.isfinite()
    lost = "" if kept.all() else f", {int((~kept).sum())} of {len(kept)} left out where it diverged"
    if not kept.any():
        return 0.0, lost
    ours, theirs = ours[kept], theirs[kept]
    ends = bootstrap_interval(ours, theirs, statistic=ratio_of_means, seed=0)
    interval = "" if ends is None else f" (95 % interval {number(ends[0])} to {number(ends[1])})"
    return finite(ratio(float(ours.mean()), float(theirs.mean()))), f"{lost}{interval}"


def _grade(missed: list[tuple[Gate, dict[str, Any]]], *, is_checked: bool) -> dict[str, Any]:
    """The grade and its reasons, the worst first."""
    missed = sorted(missed, key=lambda pair: (UNUSABLE, "fail", WEAK).index(pair[0].otherwise))
    reasons = [f"{gate.name}: {line['comparison']}" for gate, line in missed]
    if not is_checked:
        return {"grade": WEAK, "reasons": ["no gate applies to it"]}
    grade = UNUSABLE if any(gate.otherwise == UNUSABLE for gate, _ in missed) else WEAK if missed else GOOD
    return {"grade": grade, "reasons": reasons}


@dataclass(frozen=True)
class Decision:
    """Whether the new model is better, and why in a few words.

    `ratio` is the geometric mean over test trajectories of its nRMSE over that of the champion, `WIN` where the
    champion alone diverged, with its 95 % bootstrap `interval`; None where the models cannot be compared.
    """

    is_better: bool
    reason: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None


def errors_of(metrics: list[dict[str, Any]], families: dict[str, Any], source_files: dict[str, str]) -> Errors:
    """The rollout nRMSE of every test trajectory, without corrector; of steady families that of the solution.

    `families` are those of a model's card, `source_files` have the MD5 of every raw file.

    Raises:
        DataFault: a dataset of the card has no scores.
    """
    scores = {
        (r["dataset"], r["method"]): r["trajectories"]
        for r in metrics
        if r["metric"] == "nRMSE" and r["horizon"] == "rollout"
    }
    errors = {}
    for family, entry in families.items():
        for dataset in entry["datasets"]:
            key = dataset["name"], plain_method(family)
            if key not in scores:
                raise DataFault(f"metrics.json has no scores of {key[0]}: run `kedro run --pipeline evaluation`")
            chosen = scored_trajectories(dataset, source_files, dataset["split"]["test"])
            errors[key[0]] = {"family": family, "trajectories": trajectories_digest(chosen), "nRMSE": scores[key]}
    return errors


def compare(new: Errors, champion: Errors, max_family_ratio: float) -> Decision:
    """Compare a model with the champion on the test trajectories of the champion.

    It is better if the interval of the ratio is below 1 and no family's mean error is more than `max_family_ratio`
    times the champion's. Trajectories on which both diverged do not count.
    """
    missing = [name for name in champion if new.get(name, {}).get("trajectories") != champion[name]["trajectories"]]
    if missing:
        return Decision(False, f"it has no errors on the champion's test trajectories of {', '.join(missing)}")
    pairs = {name: _both(new[name]["nRMSE"], champion[name]["nRMSE"]) for name in champion}
    families = sorted({entry["family"] for entry in champion.values()})
    ratios = {
        family: _ratio_of_means([pairs[name] for name, entry in champion.items() if entry["family"] == family])
        for family in families
    }
    worse = [f"{family} by {100 * (ratio - 1):.3g} %" for family, ratio in ratios.items() if ratio > max_family_ratio]
    if worse:
        return Decision(False, f"it is worse on {', '.join(worse)}")
    logs, num_won = _log_ratios(torch.cat(list(pairs.values()), 1))
    ends = bootstrap_interval(logs, statistic=np.mean, seed=0)
    if ends is None:
        return Decision(False, f"{len(logs)} test trajectories prove nothing: at least {MIN_TRAJECTORIES} are needed")
    ratio, interval = math.exp(logs.mean().item()), (math.exp(ends[0]), math.exp(ends[1]))
    shown = f"its nRMSE is {ratio:.3g} ({interval[0]:.3g} to {interval[1]:.3g}) times the champion's"
    shown += (
        f" ({WIN} on {num_won} of {len(logs)} test trajectories, where only the champion diverged)" if num_won else ""
    )
    return Decision(interval[1] < 1, shown if interval[1] < 1 else f"{shown}: not surely better", ratio, interval)


def _both(new: list[float | None], champion: list[float | None]) -> Tensor:
    """Errors (2, N), infinite where a prediction diverged."""
    rows = [[math.inf if error is None else error for error in errors] for errors in (new, champion)]
    return torch.tensor(rows, dtype=torch.float64)


def _log_ratios(errors: Tensor) -> tuple[Tensor, int]:
    """Logarithms of the ratios of errors (2, N) where not both diverged, and where the champion alone did."""
    won = errors[0].isfinite() & errors[1].isinf()
    logs = torch.where(won, math.log(WIN), torch.log(errors[0] / errors[1]))
    return logs[~logs.isneginf() & ~logs.isnan()], int(won.sum())


def _ratio_of_means(pairs: list[Tensor]) -> float:
    """Mean error of the new model over that of the champion, where not both diverged; infinite if it alone did."""
    errors = torch.cat(pairs, 1)
    new, champion = errors[:, ~errors.isinf().all(0)]
    if new.isinf().any():
        return math.inf
    return (new.mean() / champion.mean()).item() if len(new) else 1.0
