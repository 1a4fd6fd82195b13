"""Scores of adapted networks on held-out trajectories, and learning curves over the number of trajectories."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset, condition_features
from ups.data.pdebench import FAMILIES
from ups.evaluation.figures import colour_of, common_legend, panel_grid
from ups.evaluation.parts import score_sets
from ups.evaluation.predictions import Compute, plain_method
from ups.evaluation.scores import TrajectorySet
from ups.evaluation.tables import geometric_mean, number, ratio, table
from ups.models.baselines import grid_model
from ups.models.codec import codec_from, group_name
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Domain
from ups.models.weights import from_settings, load_model
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import Trained
from ups.training.adaptation import METHODS
from ups.training.starts import is_known, surrogate_of

NOTE = (
    "nRMSE of rollouts (of solutions in steady families) on {test} held-out trajectories, physical units. before: the "
    "trained model as it is; adapted: after {steps} steps on the given number of trajectories, from the network of the "
    "family `from`, halfway from random weights if that is of another equation, or from random weights where none was "
    "better in trials; scratch, fno: equally many steps from random weights. All choose among the same learning rates, "
    "and none of them is trained where no training was better. Last column: adapted / scratch, below 1 is better."
)


def score_networks(
    folder: Path,
    trained: Trained,
    data: dict[str, Any],
    adapted: dict[str, Any],
    config: EvaluationConfig,
    launch: LaunchConfig,
) -> dict[str, Any]:
    """Records of every network on the test trajectories of its dataset; `learned_from` is its number of trajectories.

    The trained model as it was has the method `before` and learned from 0, as has `persistence`.
    """
    compute, records = Compute.of(launch), []
    for name, entry in adapted["datasets"].items():
        dataset, test = Dataset.from_json(entry["dataset"]), data["splits"][name]["test"]
        plain = plain_method(dataset.family)
        for label, count, surrogate in _networks(trained, dataset, entry["networks"], compute):
            scored = _set_of(surrogate, Path(data["folder"]), dataset, test)
            found = score_sets(folder / f"{name}.{label}_{count}", surrogate, [scored], config, compute)
            methods = {plain: label} | ({"persistence": "persistence"} if label == "scratch" else {})
            records += [
                record
                | {"method": methods[record["method"]], "learned_from": count if record["method"] == plain else 0}
                for record in found
                if record["method"] in methods
            ]
    return {"records": records}


def _networks(
    trained: Trained, dataset: Dataset, networks: dict[str, dict[str, Any]], compute: Compute
) -> Iterator[tuple[str, int, Surrogate]]:
    """Method, number of trajectories and surrogate of the trained model, if it knows the dataset, and of all others."""
    before = trained.surrogate(compute.device)
    if is_known(before, dataset):
        model = before.model(dataset.family)
        assert model is not None
        yield "before", 0, surrogate_of(before.codec, model, dataset.family)
    for count, methods in networks.items():
        for method, receipt in methods.items():
            yield method, int(count), load_adapted(receipt, dataset.family, trained.data_root, compute)


def load_adapted(receipt: dict[str, Any], family: str, data_root: Path, compute: Compute) -> Surrogate:
    """The surrogate of one family that a training on a few trajectories has left."""
    stages = receipt["stages"]
    own = from_settings(SteadyModel if FAMILIES[family].steady else Operator)
    codec = load_model(codec_from, data_root, stages["codec"])
    model = load_model(grid_model if receipt["method"] == "fno" else own, data_root, stages[plain_method(family)])
    return surrogate_of(codec.to(compute.device), model.to(compute.device), family)


def _set_of(surrogate: Surrogate, folder: Path, dataset: Dataset, indices: list[int]) -> TrajectorySet:
    """Trajectories of a dataset on the tokens of a surrogate's codec."""
    patch = surrogate.codec.groups[group_name(dataset.family, "fields")].patch
    periodic = tuple(boundary == "periodic" for boundary in dataset.boundary)
    domain = Domain(dataset.family, tuple(n // patch for n in dataset.grid), periodic)
    return TrajectorySet(folder, dataset, tuple(indices), condition_features(dataset), domain)


Curves = dict[str, dict[str, dict[int, float | None]]]
"""Rollout errors by dataset, method and number of trajectories."""


def curves_of(records: list[dict[str, Any]]) -> Curves:
    """The nRMSE of rollouts in the records."""
    curves: Curves = {}
    for record in records:
        if (record["metric"], record["horizon"]) == ("nRMSE", "rollout"):
            methods = curves.setdefault(record["dataset"], {})
            methods.setdefault(record["method"], {})[record["learned_from"]] = record["value"]
    return curves


def adapt_text(records: list[dict[str, Any]], adapted: dict[str, Any]) -> str:
    """The table of all errors, and the geometric mean over datasets of adapted / scratch."""
    curves, rows, ratios = curves_of(records), [], {}
    trained = [method for method in METHODS if any(method in methods for methods in curves.values())]
    for name, methods in curves.items():
        for count, error in methods["adapted"].items():
            network = adapted["datasets"][name]["networks"][str(count)]["adapted"]
            gain = ratio(error, methods["scratch"][count])
            ratios.setdefault(count, []).append(gain)
            fixed = [number(methods[key][0]) if key in methods else "" for key in ("persistence", "before")]
            errors = [number(methods[method][count]) for method in trained]
            rows.append([name, network["donor"] or "random weights", str(count), *fixed, *errors, number(gain)])
    columns = ["dataset", "from", "trajectories", "persistence", "before", *trained, "adapted / scratch"]
    means = [[str(count), number(geometric_mean(found)), str(len(found))] for count, found in sorted(ratios.items())]
    summary = table(["trajectories", "adapted / scratch, geometric mean", "datasets"], means)
    tests = sorted({record["num_trajectories"] for record in records})
    note = NOTE.format(test=" or ".join(map(str, tests)), steps=adapted["steps"])
    return f"# Learning from few\n\n{note}\n\n{table(columns, rows, 2)}\n\n{summary}\n"


def draw_curves(records: list[dict[str, Any]]) -> Figure:
    """Error over the number of trajectories: one panel per dataset, one line per method."""
    curves = curves_of(records)
    figure, panels = panel_grid({name: name for name in curves}, "trajectories", "nRMSE of rollouts")
    for name, panel in panels.items():
        for method, errors in curves[name].items():
            if method in METHODS:
                panel.plot(list(errors), list(errors.values()), color=colour_of(method), marker="o", label=method)
            elif errors[0] is not None:
                panel.axhline(errors[0], color=colour_of(method), linestyle="--", label=method)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
    common_legend(figure)
    return figure
