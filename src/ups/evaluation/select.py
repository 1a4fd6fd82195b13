"""Whether choosing among candidates helps: decided per family on the validation split, confirmed on the test split."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.data.pdebench import FAMILIES
from ups.data.splits import BLOCKS
from ups.data.trajectories import TrajectoryReader
from ups.emulator import Correction, Emulator
from ups.evaluation.evaluate import Subject, batches, held_out
from ups.evaluation.predict import mode
from ups.evaluation.rewards import Physics
from ups.evaluation.score import Trained
from ups.evaluation.scorer import Scorer
from ups.evaluation.trials import Batch, Key, Outcome, Trial, sampler_of
from ups.metrics.bootstrap import bootstrap_interval, mean
from ups.progress import ProgressBar
from ups.solvers import SIMULATED_FAMILIES

CHOOSING = ("best", "weighted", "beam")
InitialCondition = tuple[str, int]
Part = tuple[list[InitialCondition], dict[Key, Tensor]]  # of one dataset: N initial conditions, errors (N,)


@torch.no_grad()
def select_all(trained: Trained, config: SelectionConfig, device: str, raw: Path) -> dict[str, Any]:
    """Compute-accuracy curves of every dataset, the decision of every family, and its test where that is on.

    Families whose equation we do not know have no rewards; steady ones no candidates: both are left out.

    Returns:
        {"families": {family: decision}, "datasets": {dataset: what the rewards are worth}, "records": [...]}
    """
    emulator, cache = trained.emulator(device), trained.cache()
    valid, test = (_transient(held_out(cache, raw, split), config.max_trajectories) for split in ("valid", "test"))
    scorers: dict[str, Scorer] = {}
    parts: dict[str, list[Part]] = {}
    datasets: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    with ProgressBar("select", len(valid) + len(test), "datasets") as bar:
        for subject in valid:
            name, trial = subject.dataset.name, _trial(subject, emulator, config, device)
            scorers[name], ratios = trial.fit(_batches(subject, trial))
            outcome = trial.run(_batches(subject, trial), scorers[name])
            parts.setdefault(subject.dataset.family, []).append((initial_conditions(subject), outcome.errors))
            drawn = {"sampler": config.sampler, "corrector": mode(emulator, config.sampler, subject.dataset.family)}
            datasets[name] = drawn | _worth(outcome, scorers[name], ratios, config.seed)
            records += _records(subject, "valid", outcome, trial)
            bar.advance(1)
        families = {family: decide(by_initial_condition(some), config.seed) for family, some in parts.items()}
        confirmed: dict[str, list[Part]] = {}
        for subject in test:
            decision, trial = families[subject.dataset.family], _trial(subject, emulator, config, device)
            if decision["is_on"]:
                outcome = trial.run(_batches(subject, trial), scorers[subject.dataset.name])
                part = (initial_conditions(subject), outcome.errors)
                confirmed.setdefault(subject.dataset.family, []).append(part)
                records += _compared(_records(subject, "test", outcome, trial), decision)
            bar.advance(1)
    for family, some in confirmed.items():
        families[family] |= _confirmed(families[family], by_initial_condition(some), config.seed)
    return {"families": families, "datasets": datasets, "records": records}


def decide(errors: dict[Key, Tensor], seed: int) -> dict[str, Any]:
    """Whether to choose, and how, from validation errors (N,) of a family, one per initial condition.

    The way with the smallest mean error is on if it beats the mean of as many members, a single member and the operator
    alone: the 95 % interval of each paired difference lies above 0. Too few for an interval prove nothing.
    """
    ways = [key for key in errors if key[0] in CHOOSING and key[1] > 1]
    count = len(next(iter(errors.values())))
    if not ways:
        return {"is_on": False, "num_initial_conditions": count}
    method, size = min(ways, key=lambda key: float(errors[key].mean()))
    gains = _gains(errors, (method, size), seed)
    return {
        "is_on": all("low" in gain and gain["low"] > 0 for gain in gains.values()),
        "method": method,
        "num_members": size,
        "gains": gains,
        "num_initial_conditions": count,
    }


def _confirmed(decision: dict[str, Any], errors: dict[Key, Tensor], seed: int) -> dict[str, Any]:
    """What the chosen way gains on the test split."""
    gains = _gains(errors, (decision["method"], decision["num_members"]), seed)
    return {"test_gains": gains, "test_num_initial_conditions": len(errors["single", 1])}


def initial_conditions(subject: Subject) -> list[InitialCondition]:
    """What trajectories that start alike have in common, in whatever dataset of a family, as the splits have it.

    It is the position in the published file, but for the files of a batch dataset, which are drawn one after another.
    """
    dataset = subject.dataset
    if FAMILIES[dataset.family].layout == "batch":
        return [(dataset.name, index) for index in subject.trajectories]
    block = BLOCKS.get(dataset.family, 2**63)
    with TrajectoryReader(subject.folder, dataset) as reader:
        return [(dataset.family, reader.origin(index) % block) for index in subject.trajectories]


def by_initial_condition(parts: list[Part]) -> dict[Key, Tensor]:
    """Errors (N,) of a family's N initial conditions, means over the trajectories that start from each.

    Datasets that share them are no independent evidence: pooled, their intervals would be too narrow.
    """
    places: dict[InitialCondition, int] = {}
    index = torch.tensor([places.setdefault(one, len(places)) for conditions, _ in parts for one in conditions])
    counts = index.bincount()

    def means(errors: Tensor) -> Tensor:
        return errors.new_zeros(len(places)).index_add(0, index, errors) / counts

    return {key: means(torch.cat([errors[key] for _, errors in parts])) for key in parts[0][1]}


def _gains(errors: dict[Key, Tensor], chosen: Key, seed: int) -> dict[str, dict[str, float]]:
    """Over each rival the mean of the paired difference in error, with its 95 % interval."""
    gains = {}
    for rival in (("mean", chosen[1]), ("single", 1), ("operator", 1)):
        difference = errors[rival] - errors[chosen]
        gains[rival[0]] = {"value": float(difference.mean()), **_interval(difference, seed)}
    return gains


def _interval(values: Tensor, seed: int) -> dict[str, float]:
    """The ends "low" and "high" of the 95 % interval of the mean; none of them for too few values."""
    ends = bootstrap_interval(values, mean, seed)
    return {} if ends is None else dict(zip(("low", "high"), ends, strict=True))


def _transient(subjects: list[Subject], max_trajectories: int) -> list[Subject]:
    known = [s for s in subjects if s.dataset.family in SIMULATED_FAMILIES and not FAMILIES[s.dataset.family].steady]
    return [replace(subject, trajectories=subject.trajectories[:max_trajectories]) for subject in known]


def _trial(subject: Subject, emulator: Emulator, config: SelectionConfig, device: str) -> Trial:
    """Candidates are drawn as the corrector decided, and where it is off as the configuration says."""
    start = config.where_off
    otherwise = Correction("sample", start.sigma, config.sigma_min, start.num_steps, 1.0, 0.0)
    correction = emulator.corrections.get((config.sampler, subject.dataset.family), otherwise)
    sampler = sampler_of(emulator, config.sampler, correction)
    return Trial(emulator, Physics.of(subject.dataset), sampler, config, torch.device(device))


def _batches(subject: Subject, trial: Trial) -> Iterator[Batch]:
    return batches(trial.emulator, subject, trial.config.batch_tokens // trial.num_members, trial.device)


def _worth(outcome: Outcome, scorer: Scorer, ratios: dict[str, float | None], seed: int) -> dict[str, Any]:
    """Rank correlation of score and error with its interval, and per reward its weight and ratio to the truth's."""
    rho = torch.cat(outcome.rank_correlations)
    rewards = {name: {"weight": scorer.weights[name], "ratio_to_truth": ratio} for name, ratio in ratios.items()}
    return {"rank_correlation": {"value": float(rho.mean()), **_interval(rho, seed)}, "rewards": rewards}


def _records(subject: Subject, split: str, outcome: Outcome, trial: Trial) -> list[dict[str, Any]]:
    """One record per way to choose; `evaluations` and `seconds` are per trajectory."""
    num_steps, records = len(subject.dataset.times) - 1, []
    for (method, size), errors in outcome.errors.items():
        record = {
            "family": subject.dataset.family,
            "dataset": subject.dataset.name,
            "split": split,
            "method": method,
            "num_members": size,
            "evaluations": num_steps * (1 if method == "operator" else size * trial.sampler.evaluations),
            "seconds": outcome.seconds[method, size] / len(errors),
            "nRMSE": float(errors.mean()),
            **_interval(errors, trial.config.seed),
            "num_trajectories": len(errors),
        }
        records.append(record)
    return records


def _compared(records: list[dict[str, Any]], decision: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of the chosen way, and of what it has to beat."""
    size = decision["num_members"]
    shown = {(decision["method"], size), ("mean", size), ("single", 1), ("operator", 1)}
    return [record for record in records if (record["method"], record["num_members"]) in shown]
