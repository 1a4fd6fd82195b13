"""Errors of models and the trajectories they belong to: of data roots, of registered versions, of other models."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ups.data.latent_cache import LatentCache
from ups.data.sources import is_added
from ups.errors import DataFault
from ups.evaluation.tables import STRONG, WITHOUT_SAMPLING
from ups.files import read_json
from ups.metrics.bootstrap import bootstrap_interval


def scored_trajectories(dataset: dict[str, Any], source_files: dict[str, str], test: list[int]) -> dict[str, Any]:
    """What makes predicted trajectories the same: MD5 of their files, the part of the files that is read, numbers.

    `dataset` is as `dataclasses.asdict(Dataset)`, `source_files` have the MD5 of its files by name. Files that were
    simulated for training do not count: their trajectories are behind all others.
    """
    chosen = {name: dataset[name] for name in ("grid", "times", "subsample")}
    files = zip(dataset["files"], dataset["counts"], strict=True)
    given = {name: count for name, count in files if not is_added(name)}
    return chosen | {"counts": list(given.values()), "files": [source_files[name] for name in given], "test": test}


def trajectories_digest(chosen: dict[str, Any]) -> str:
    """Hash of what `scored_trajectories` returns: errors with the same hash may be compared."""
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def with_digests(records: list[dict[str, Any]], cache: LatentCache) -> list[dict[str, Any]]:
    """Records of scores on the test split; `digest` says which trajectories of its dataset that is."""
    files, digests = cache.manifest["key"]["source files"], {}
    for name, entry in cache.datasets.items():
        digests[name] = trajectories_digest(scored_trajectories(entry["dataset"], files, entry["split"]["test"]))
    return [record | {"digest": digests[record["dataset"]]} for record in records]


def comparable(others: Iterable[dict[str, Any]], own: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `others`, records of baselines or of another run, that are of the same trajectories as `own`."""
    digests = {record["dataset"]: record.get("digest") for record in own}
    return [other for other in others if digests.get(other["dataset"], "") == other.get("digest")]


@dataclass(frozen=True)
class Source:
    """A raw file, as datasets.json names it."""

    md5: str


@dataclass(frozen=True)
class Described:
    """`datasets.json` of a data root: datasets as `dataclasses.asdict(Dataset)`, raw files and splits, all by name."""

    datasets: dict[str, dict[str, Any]]
    sources: dict[str, Source]
    splits: dict[str, dict[str, list[int]]]

    @classmethod
    def below(cls, root: Path) -> "Described":
        """That of a data root; raises `DataFault` if it is missing or damaged."""
        return read_json(root / "04_feature" / "datasets.json", cls)

    def test_trajectories(self, dataset: str) -> dict[str, Any]:
        """What `scored_trajectories` says of the test split of a dataset."""
        source_files = {name: source.md5 for name, source in self.sources.items()}
        return scored_trajectories(self.datasets[dataset], source_files, self.splits[dataset]["test"])


@dataclass(frozen=True)
class Record:
    """A score as in metrics.json; None is a number that is not finite. Not all metrics have an interval."""

    dataset: str
    method: str
    metric: str
    horizon: str
    value: float | None
    num_trajectories: int
    low: float | None = None
    high: float | None = None
    digest: str | None = None  # of the trajectories, see `with_digests`; None in files that users write


@dataclass(frozen=True)
class Scores:
    """What `ups score --output` writes."""

    method: str
    dataset: str
    trajectories: dict[str, Any]
    records: list[Record]


@dataclass(frozen=True)
class Entry:
    """The nRMSE of one model on one dataset by horizon, and the digest of the trajectories that were predicted.

    `trajectories` are as `scored_trajectories`; None for a registered version, of which the digest alone is known.
    """

    model: str
    dataset: str
    errors: dict[str, Record]
    digest: str
    trajectories: dict[str, Any] | None


def entries_in(name: str, root: Path) -> list[Entry]:
    """The entries of a data root: `name` for its operator and steady model, and its FNO and U-Net where it has them.

    Raises:
        DataFault: there is no evaluation, a file is damaged, or the scores are not of the test split of the data root.
    """
    metrics, baselines = (root / "08_reporting" / file for file in ("metrics.json", "baseline_metrics.json"))
    if not metrics.is_file():
        remedy = f"run `kedro run --pipeline full --params data_root={root}` with its --env"
        raise DataFault(f"{metrics} does not exist: {remedy}, or correct leaderboard.data_roots")
    records = read_json(metrics, list[Record])
    records += read_json(baselines, list[Record]) if baselines.is_file() else []
    described, errors = Described.below(root), defaultdict[tuple[str, str], dict[str, Record]](dict)
    for record in records:
        if record.metric == "nRMSE" and record.method in (*WITHOUT_SAMPLING, *STRONG):
            model = name if record.method in WITHOUT_SAMPLING else f"{record.method} in {name}"
            errors[model, record.dataset][record.horizon] = record
    if not errors:
        raise DataFault(f"{metrics} has no scores of an operator or steady model: run `kedro run --pipeline full`")
    paths = {model: metrics if model == name else baselines for model, _ in errors}
    return [
        _entry(model, of_model, _test_trajectories(described, of_model, paths[model]), paths[model])
        for (model, _), of_model in errors.items()
    ]


def _test_trajectories(described: Described, errors: dict[str, Record], path: Path) -> dict[str, Any]:
    record = next(iter(errors.values()))
    known = described.test_trajectories(record.dataset) if record.dataset in described.splits else None
    if known is None or trajectories_digest(known) != record.digest:
        what = f"{path} has scores of other test trajectories of {record.dataset} than datasets.json"
        again = "evaluation" if path.name == "metrics.json" else "baselines"
        raise DataFault(f"{what}: run `kedro run --pipeline {again} --params data_root={path.parents[1]}`")
    return known


def _entry(model: str, errors: dict[str, Record], trajectories: dict[str, Any], path: Path) -> Entry:
    if "rollout" not in errors:
        raise DataFault(f"{path} has no nRMSE of rollouts of {model}; evaluate or score them again")
    return Entry(model, errors["rollout"].dataset, errors, trajectories_digest(trajectories), trajectories)


def entries_of_version(model: str, errors: dict[str, dict[str, Any]]) -> list[Entry]:
    """The entries of a registered version, from the rollout errors of its test trajectories."""
    return [
        Entry(model, dataset, {"rollout": _mean_of(dataset, found["nRMSE"])}, found["trajectories"], None)
        for dataset, found in errors.items()
    ]


def _mean_of(dataset: str, errors: list[float | None]) -> Record:
    if None in errors:
        return Record(dataset, "", "nRMSE", "rollout", None, len(errors))
    interval = bootstrap_interval(torch.tensor(errors, dtype=torch.float64), statistic=np.mean, seed=0)
    return Record(dataset, "", "nRMSE", "rollout", fmean(errors), len(errors), *(interval or ()))


def entry_of_scores(path: Path, known: Iterable[Entry]) -> Entry:
    """The entry of another model, from a file that `ups score --output` wrote.

    Raises:
        DataFault: the file is missing or damaged, or its dataset is not among those of the `known` entries.
    """
    if not path.is_file():
        raise DataFault(f"{path} does not exist: write it by `ups score PREDICTIONS --dataset FILE --output {path}`")
    scores, datasets = read_json(path, Scores), dict.fromkeys(entry.dataset for entry in known)
    if scores.dataset not in datasets:
        what = f"{path} has scores on {scores.dataset}, which no run of the leaderboard has"
        raise DataFault(f"{what}: add its data root to leaderboard.data_roots; known: {', '.join(datasets)}")
    errors = {record.horizon: record for record in scores.records if record.metric == "nRMSE"}
    return _entry(scores.method, errors, scores.trajectories, path)
