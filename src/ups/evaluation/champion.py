"""Whether a model is better than the registered champion: paired errors of test trajectories, and no worse family."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ups.errors import DataFault
from ups.evaluation.entries import scored_trajectories, trajectories_digest
from ups.evaluation.predictions import plain_method
from ups.metrics.bootstrap import MIN_TRAJECTORIES, bootstrap_interval

Errors = dict[str, dict[str, Any]]
"""By dataset: `family`, `trajectories` (a hash that says which ones were predicted) and their `nRMSE`."""


@dataclass(frozen=True)
class Decision:
    """Whether the new model is better, and why in a few words.

    `ratio` is the geometric mean over test trajectories of its nRMSE over that of the champion, with its 95 %
    bootstrap `interval`; None where the models cannot be compared.
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
    times the champion's. Trajectories on which the champion alone diverged count only for the families.
    """
    missing = [name for name in champion if new.get(name, {}).get("trajectories") != champion[name]["trajectories"]]
    if missing:
        return Decision(False, f"it has no errors on the champion's test trajectories of {', '.join(missing)}")
    pairs = {name: _paired(new[name]["nRMSE"], champion[name]["nRMSE"]) for name in champion}
    families = sorted({entry["family"] for entry in champion.values()})
    ratios = {
        family: _ratio_of_means([pairs[name] for name, entry in champion.items() if entry["family"] == family])
        for family in families
    }
    worse = [f"{family} by {100 * (ratio - 1):.3g} %" for family, ratio in ratios.items() if ratio > max_family_ratio]
    logs = torch.cat([torch.log(errors[0] / errors[1]) for errors in pairs.values()])
    logs = logs[~logs.isneginf() & ~logs.isnan()]
    if worse:
        return Decision(False, f"it is worse on {', '.join(worse)}")
    ends = bootstrap_interval(logs, statistic=np.mean, seed=0)
    if ends is None:
        return Decision(False, f"{len(logs)} test trajectories prove nothing: at least {MIN_TRAJECTORIES} are needed")
    ratio, interval = math.exp(logs.mean().item()), (math.exp(ends[0]), math.exp(ends[1]))
    shown = f"its nRMSE is {ratio:.3g} ({interval[0]:.3g} to {interval[1]:.3g}) times the champion's"
    return Decision(interval[1] < 1, shown if interval[1] < 1 else f"{shown}: not surely better", ratio, interval)


def _paired(new: list[float | None], champion: list[float | None]) -> torch.Tensor:
    """Errors (2, N), infinite where a prediction diverged."""
    rows = [[math.inf if error is None else error for error in errors] for errors in (new, champion)]
    return torch.tensor(rows, dtype=torch.float64)


def _ratio_of_means(pairs: list[torch.Tensor]) -> float:
    """Mean error of the new model over that of the champion, where not both diverged; infinite if it alone did."""
    errors = torch.cat(pairs, 1)
    new, champion = errors[:, ~errors.isinf().all(0)]
    if new.isinf().any():
        return math.inf
    return (new.mean() / champion.mean()).item() if len(new) else 1.0
