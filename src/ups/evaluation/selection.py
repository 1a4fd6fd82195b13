"""Whether choosing ensemble members by their violations of physics lowers the error: decision per family, and a report.

Decided on the validation split, confirmed once on the test split. Datasets with the same initial conditions are pooled.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ups.config import LaunchConfig, SelectionConfig
from ups.data.families import base_of
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.evaluation.predictions import Batch, Compute, corrector_mode
from ups.evaluation.scores import TrajectorySet, batches, held_out
from ups.evaluation.search import DatasetSearch, Key, SearchResults
from ups.evaluation.selected import SearchChoice
from ups.evaluation.styles import common_legend, panel_grid
from ups.evaluation.tables import number, table
from ups.evaluation.violations import PhysicsScore
from ups.metrics.bootstrap import MIN_TRAJECTORIES, bootstrap_interval
from ups.metrics.errors import EPS
from ups.runs.progress import ProgressBar
from ups.solvers import SIMULATED_FAMILIES
from ups.surrogate.trained import Trained

SEARCH_METHODS = ("best", "weighted", "beam")
RIVALS = ("mean", "single", "operator")
InitialCondition = tuple[str, int]
DatasetErrors = tuple[list[InitialCondition], dict[Key, Tensor]]  # N initial conditions, errors (N,)


@torch.no_grad()
def select_all(trained: Trained, config: SelectionConfig, launch: LaunchConfig, raw: Path) -> dict[str, Any]:
    """Error over cost of every search method, the decision of every family, and the test of each decision to search.

    Left out are families without a residual of their equation, steady ones, whose solution is no rollout, and those for
    which the sampler was not trained.

    Returns:
        {"families": {family: decision}, "datasets": {dataset: quality of the score}, "records": [...],
        "choices": {dataset: `SearchChoice` of a family whose decision is to search}}
    """
    compute, cache = Compute.of(launch), trained.cache()
    surrogate = compute.limited(trained.surrogate(compute.device))
    sampler = {"diffusion": surrogate.denoiser, "consistency": surrogate.student}[config.sampler]
    known = set(sampler.rows) if sampler is not None else set()
    valid, test = (_searched(held_out(cache, raw, split), config, known) for split in ("valid", "test"))
    errors, test_errors = defaultdict(list), defaultdict(list)
    scores, datasets, choices, records = {}, {}, {}, []
    with ProgressBar("select", len(valid) + len(test), "datasets") as bar:
        for each in valid:
            name, family = each.dataset.name, each.dataset.family
            search = DatasetSearch.of(surrogate, each.dataset, config, compute)
            scores[name], ratios = search.fit(_batches(each, search))
            results = search.run(_batches(each, search), scores[name])
            errors[family].append((initial_conditions(each), results.errors))
            sampled = {"sampler": config.sampler, "corrector": corrector_mode(surrogate, config.sampler, family)}
            datasets[name] = sampled | _score_quality(results, scores[name], ratios, config.seed)
            records += _records(each, "valid", results, search)
            bar.advance(1)
        families = {family: decide(by_initial_condition(some), config.seed) for family, some in errors.items()}
        for each in test:
            name, family = each.dataset.name, each.dataset.family
            search = DatasetSearch.of(surrogate, each.dataset, config, compute)
            if families[family]["is_on"]:
                choices[name] = SearchChoice.of(config, families[family], scores[name]).to_json()
                results = search.run(_batches(each, search), scores[name])
                test_errors[family].append((initial_conditions(each), results.errors))
                # Of the test split only the chosen method and its rivals are reported: nothing is chosen on it.
                chosen = families[family]["method"], families[family]["num_members"]
                shown = (chosen, *_rivals(chosen))
                found = _records(each, "test", results, search)
                records += [record for record in found if (record["method"], record["num_members"]) in shown]
            bar.advance(1)
    for family, some in test_errors.items():
        means, decision = by_initial_condition(some), families[family]
        decision["test_gains"] = _gains(means, (decision["method"], decision["num_members"]), config.seed)
        decision["test_num_initial_conditions"] = len(means["single", 1])
    return {"families": families, "datasets": datasets, "records": records, "choices": choices}


def decide(errors: dict[Key, Tensor], seed: int) -> dict[str, Any]:
    """Whether to search, and how, from validation errors (N,) of a family, one per initial condition.

    The search method with the smallest mean error is on if it beats all rivals: the mean of as many members, a single
    member and the operator alone. To beat means that the 95 % interval of the paired difference lies above 0; with too
    few initial conditions for an interval the decision is off.
    """
    options = [key for key in errors if key[0] in SEARCH_METHODS and key[1] > 1]
    count = len(next(iter(errors.values())))
    if not options:
        return {"is_on": False, "num_initial_conditions": count}
    method, size = min(options, key=lambda key: float(errors[key].mean()))
    gains = _gains(errors, (method, size), seed)
    is_on = all("low" in gain and gain["low"] > 0 for gain in gains.values())
    chosen = {"is_on": is_on, "method": method, "num_members": size}
    return chosen | {"gains": gains, "num_initial_conditions": count}


def initial_conditions(trajectory_set: TrajectorySet) -> list[InitialCondition]:
    """An identifier of each trajectory's initial condition, equal across the datasets of a family that share it.

    It is the position in the published file; in layout `batch`, where all differ, it is the index in the dataset.
    """
    dataset = trajectory_set.dataset
    if FAMILIES[dataset.family].layout == "batch":
        return [(dataset.name, index) for index in trajectory_set.indices]
    block = FAMILIES[dataset.family].initial_condition_block or 2**63
    with TrajectoryReader(trajectory_set.folder, dataset) as reader:
        return [(dataset.family, reader.published_position(index) % block) for index in trajectory_set.indices]


def by_initial_condition(parts: list[DatasetErrors]) -> dict[Key, Tensor]:
    """Errors (N,) of a family's N initial conditions, means over the trajectories that start from each.

    Trajectories that share one are not independent: pooled, their intervals would be too narrow.
    """
    places: dict[InitialCondition, int] = {}
    index = torch.tensor([places.setdefault(one, len(places)) for conditions, _ in parts for one in conditions])
    counts = index.bincount()

    def means(errors: Tensor) -> Tensor:
        return errors.new_zeros(len(places)).index_add(0, index, errors) / counts

    return {key: means(torch.cat([errors[key] for _, errors in parts])) for key in parts[0][1]}


def _gains(errors: dict[Key, Tensor], chosen: Key, seed: int) -> dict[str, dict[str, float]]:
    """Mean of the paired difference in error to each rival, with its 95 % interval."""
    rivals = zip(RIVALS, _rivals(chosen), strict=True)
    return {name: _mean_with_interval(errors[rival] - errors[chosen], seed) for name, rival in rivals}


def _rivals(chosen: Key) -> list[Key]:
    """What a search method must beat: the mean of as many members, a single member, the operator alone."""
    return [(name, chosen[1] if name == "mean" else 1) for name in RIVALS]


def _mean_with_interval(values: Tensor, seed: int) -> dict[str, float]:
    return {"value": float(values.mean()), **_interval(values, seed)}


def _interval(values: Tensor, seed: int) -> dict[str, float]:
    """The ends "low" and "high" of the 95 % interval of the mean; nothing for too few values."""
    ends = bootstrap_interval(values, statistic=np.mean, seed=seed)
    return {} if ends is None else dict(zip(("low", "high"), ends, strict=True))


def _searched(sets: list[TrajectorySet], config: SelectionConfig, known: set[str]) -> list[TrajectorySet]:
    """The sets of transient families that are `known` to the sampler and whose equation has a residual."""
    transient = [each for each in sets if not FAMILIES[each.dataset.family].steady and each.dataset.family in known]
    chosen = [each for each in transient if base_of(each.dataset.family) in SIMULATED_FAMILIES]
    return [replace(each, indices=each.indices[: config.max_trajectories]) for each in chosen]


def _batches(trajectory_set: TrajectorySet, search: DatasetSearch) -> Iterator[Batch]:
    batch_tokens, compute = search.config.batch_tokens // search.num_members, search.compute
    return batches(search.surrogate, trajectory_set, batch_tokens, compute, search.num_members)


def _score_quality(
    results: SearchResults, score: PhysicsScore, ratios: dict[str, float | None], seed: int
) -> dict[str, Any]:
    """Rank correlation of score and error with its interval; per violation its weight and ratio to the reference's."""
    rho = torch.cat(results.rank_correlations)
    parts = {name: {"weight": score.weights[name], "ratio_to_reference": ratio} for name, ratio in ratios.items()}
    return {"rank_correlation": _mean_with_interval(rho, seed), "violations": parts}


def _records(
    trajectory_set: TrajectorySet, split: str, results: SearchResults, search: DatasetSearch
) -> list[dict[str, Any]]:
    """One record per search method and rival; `evaluations` of networks and `seconds` are per trajectory."""
    dataset, per_member = trajectory_set.dataset, 1 + search.correction.num_steps
    where = {"family": dataset.family, "dataset": dataset.name, "split": split}
    records = []
    for (method, size), errors in results.errors.items():
        evaluations = (len(dataset.times) - 1) * (1 if method == "operator" else size * per_member)
        costs = {"evaluations": evaluations, "seconds": results.seconds[method, size] / len(errors)}
        error = {"nRMSE": float(errors.mean()), **_interval(errors, search.config.seed)}
        way = {"method": method, "num_members": size}
        records.append(where | way | costs | error | {"num_trajectories": len(errors)})
    return records


DECISION_NOTE = f"""Search is on where the best search method on the validation split beats the mean of as
many members, a single member and the operator alone: gains are differences in nRMSE, and the 95 % intervals of all
three lie above 0. Intervals are over initial conditions, each with the mean over the family's datasets that start from
it; fewer than {MIN_TRAJECTORIES} have none, and leave the search off."""
SCORE_NOTE = f"""Rank correlation of score and error among the members of a trajectory; for each violation its weight
and, in brackets, the members' violation over that of the reference: no number where the reference's is below round-off
({EPS:g}), or a member diverged."""
STYLES = {  # colour (Okabe and Ito), marker
    "mean": ("#0072b2", "o"),
    "best": ("#e69f00", "s"),
    "weighted": ("#cc79a7", "^"),
    "beam": ("#d55e00", "D"),
    "oracle": ("#009e73", "v"),
    "operator": ("black", "x"),
}


def selection_text(found: dict[str, Any]) -> str:
    """Markdown: the decisions, the quality of the score, and the numbers behind the figure."""
    decisions, scores = _decision_table(found["families"]), _score_table(found["datasets"])
    parts = ["# Choosing ensemble members by physics", DECISION_NOTE, decisions, SCORE_NOTE, scores]
    return "\n\n".join([*parts, _error_table(found["records"]), "![curves](selection/selection.png)"]) + "\n"


def selection_figure(records: list[dict[str, Any]], titles: dict[str, str]) -> Figure:
    """Validation nRMSE over network evaluations per trajectory: one panel per dataset, one line per search method."""
    valid = [record for record in records if record["split"] == "valid"]
    shown = {name: titles[name] for name in sorted({r["dataset"] for r in valid})}
    figure, panels = panel_grid(shown, "network evaluations", "nRMSE")
    for dataset, panel in panels.items():
        for method, (colour, marker) in STYLES.items():
            of_method = [r for r in valid if (r["dataset"], r["method"]) == (dataset, method)]
            line = zip(*sorted((r["evaluations"], r["nRMSE"]) for r in of_method), strict=True)
            panel.plot(*line, color=colour, marker=marker, markersize=4, linewidth=1.2, label=method)
        panel.set_xscale("log", base=2)
    if panels:
        common_legend(figure, "validation split: mean over trajectories")
    return figure


def _decision_table(families: dict[str, Any]) -> str:
    names = ("family", "split", "search", "method", "members", "initial conditions")
    rows = []
    for family, decision in families.items():
        chosen = ["on" if decision["is_on"] else "off", decision.get("method", ""), decision.get("num_members", "")]
        for split, prefix in (("valid", ""), ("test", "test_")):
            if f"{prefix}gains" in decision:
                gains = [_value(decision[f"{prefix}gains"][rival]) for rival in RIVALS]
                rows.append([family, split, *chosen, decision[f"{prefix}num_initial_conditions"], *gains])
    return table((*names, *(f"over {rival}" for rival in RIVALS)), rows, num_names=4)


def _score_table(datasets: dict[str, Any]) -> str:
    rows = []
    for name, quality in datasets.items():
        parts = []
        for violation, found in quality["violations"].items():
            ratio = found["ratio_to_reference"]
            parts.append(f"{violation} {found['weight']:.2g} ({'no number' if ratio is None else number(ratio)})")
        sampled = f"{quality['sampler']}, {quality['corrector']}"
        rows.append([name, sampled, ", ".join(parts), _value(quality["rank_correlation"])])
    return table(("dataset", "sampler, corrector", "violations", "rank correlation"), rows, num_names=3)


def _error_table(records: list[dict[str, Any]]) -> str:
    columns = ("dataset", "split", "method", "members", "evaluations", "seconds", "nRMSE")
    rows = []
    for r in records:
        names = [r[key] for key in ("dataset", "split", "method", "num_members", "evaluations")]
        rows.append([*names, f"{r['seconds']:.2g}", f"{r['nRMSE']:.4g}{_interval_text(r, '.4g')}"])
    return table(columns, rows, num_names=3)


def _value(found: dict[str, float]) -> str:
    return f"{found['value']:.2g}{_interval_text(found, '.2g')}"


def _interval_text(found: dict[str, Any], digits: str) -> str:
    return f" [{found['low']:{digits}}, {found['high']:{digits}}]" if "low" in found else ""
