"""What a model returns: predictions and ensembles of them, descriptions of families with scores, cards of bundles."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.files import markdown_row
from ups.surrogate.arrays import Array, as_given, labelled
from ups.surrogate.family_cards import FamilyCard
from ups.surrogate.problem import Problem
from ups.surrogate.trained import OFF

NO_ENSEMBLES = "no corrector was trained, or none passed on validation data"
COMPARED = ("codec", "rounding", "persistence")  # methods without a trained model of the dynamics


@dataclass(frozen=True)
class Description:
    """One family of a trained model.

    `fields` and `coefficients` have meanings by name, `parameters` the trained values, `boundary` one entry per axis;
    `lengths` and `time_steps` are in the units of the PDE; `trajectories` counts those of the splits. `scores` are
    mean errors in physical units on the test split by (method, metric, horizon); `history` says whether steps start
    from two snapshots, `ensembles` whether `members` can be predicted, `adapted` from which family's network a model
    learned, and what that gained.
    """

    name: str
    equation: str
    fields: dict[str, str]
    coefficients: dict[str, str]
    grid: tuple[int, ...]
    lengths: tuple[float, ...]
    boundary: tuple[str, ...]
    time_steps: tuple[float, ...]
    parameters: dict[str, tuple[float, ...]]
    trajectories: dict[str, int]
    history: bool
    ensembles: bool
    adapted: str | None
    scores: dict[tuple[str, str, str], float | None]

    def rows(self) -> list[tuple[str, str]]:
        """Names and values as text, as they are displayed."""
        axes = [f"{n} points on length {length:g}" for n, length in zip(self.grid, self.lengths, strict=True)]
        rows = [("equation", self.equation), ("fields", _named(self.fields))]
        rows += [("coefficients", _named(self.coefficients))] * bool(self.coefficients)
        rows += [("grid", " x ".join(axes)), ("boundary", ", ".join(self.boundary))]
        rows += [("time step", _listed(self.time_steps))] * bool(self.time_steps)
        rows += [(name, f"trained at {_listed(values)}") for name, values in self.parameters.items()]
        rows += [("trajectories", ", ".join(f"{count} {split}" for split, count in self.trajectories.items()))]
        rows += [("initial state", "u_0, and u_before a time step earlier; without it at rest")] * self.history
        rows += [("ensembles", "yes" if self.ensembles else f"no: {NO_ENSEMBLES}")]
        rows += [("adapted", self.adapted)] * (self.adapted is not None)
        return rows + [(f"nRMSE, {horizon}, {method}", f"{value:.4g}") for method, horizon, value in self._errors()]

    def _errors(self) -> list[tuple[str, str, float]]:
        """The nRMSE of every method and horizon, those of the models first."""
        errors = [
            (method, horizon.replace("_", " "), value)
            for (method, metric, horizon), value in self.scores.items()
            if metric == "nRMSE" and value is not None
        ]
        return sorted(errors, key=lambda error: (error[0] in COMPARED, error[0], error[1]))

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.name, *(f"  {name:{width}}  {value}" for name, value in rows)])

    def _repr_markdown_(self) -> str:
        return markdown(self)


def markdown(description: Description) -> str:
    """A heading and a table."""
    rows = map(markdown_row, description.rows())
    return "\n".join([f"## {description.name}", "", "| | |", "| --- | --- |", *rows, ""])


def families_with_history(card: dict[str, Any]) -> Collection[str]:
    """The families whose steps start from two snapshots, from the card of a model; see `ups.models.history`."""
    return card["settings"].get("operator", {"sizes": {}})["sizes"].get("history", ())


def describe(known: FamilyCard, card: dict[str, Any], ensembles: bool) -> Description:
    """The description of a family that is in the card of a model."""
    family, first, entry = known.family, known.datasets[0], card["families"][known.name]
    splits = [dataset["split"] for dataset in entry["datasets"]]
    return Description(
        name=known.name,
        equation=family.equation,
        fields={name: family.meanings.get(name, "") for name in family.fields},
        coefficients={name: family.meanings.get(name, "") for name in family.coefficients},
        grid=first.grid,
        lengths=first.lengths,
        boundary=first.boundary,
        time_steps=tuple(known.time_steps),
        parameters={name: tuple(known.values(name)) for name in family.parameters},
        trajectories={name: sum(len(split[name]) for split in splits) for name in splits[0]},
        history=known.name in families_with_history(card),
        ensembles=ensembles,
        adapted=_gain(entry["adapted"]) if "adapted" in entry else None,
        scores=_scores(entry["scores"]),
    )


def card_text(card: dict[str, Any], families: Mapping[str, FamilyCard]) -> str:
    """The README of a bundle: what the models are, how to use them, and a description of every family."""
    ensembles = {family for _, family, _ in card["corrections"]}
    lines = [
        "# Surrogates of PDEs",
        "",
        f"Trained with Universal Physics Stack {card['ups']}. Fields are in the units of the PDE; errors are on test",
        "trajectories that training did not see, averaged over trajectories, fields and times. Grids are regular, time",
        "steps uniform; outside the trained parameters, grids and amplitudes errors are larger than stated.",
        "",
        "```python",
        "import ups",
        "",
        'model = ups.load("this folder")',
        f'model.describe("{next(iter(families))}")',
        "```",
        "",
        "A version in MLflow answers the same questions as JSON: a list of requests, each with the arguments of",
        "`Model.predict`, arrays as nested lists, parameters and coefficients by name; it returns one `u` for each, or",
        "`mean` and `std` where `members` are asked for.",
        "",
        "```bash",
        "export MLFLOW_TRACKING_URI=sqlite:///data/mlflow.db  # the store of the data root",
        "mlflow models serve --model-uri models:/ups@champion --env-manager local",
        "curl localhost:5000/invocations -H 'Content-Type: application/json' -d \\",
        """  '{"inputs": [{"family": "...", "u_0": [[...]], "steps": 20, "parameters": {"...": 0.1}}]}'""",
        "```",
        "",
    ]
    described = [describe(each, card, name in ensembles) for name, each in families.items()]
    return "\n".join([*lines, *map(markdown, described)])


def _gain(adapted: dict[str, Any]) -> str:
    if adapted["donor"] is None:
        return "from random weights, which were better in trials than trained ones"
    ratio = f"error {adapted['over_scratch']:.2f} times that of random weights, in trials of equal length"
    return f"from the network of {adapted['donor']}: {ratio}"


def _scores(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], float | None]:
    """Means over the datasets of a family, without methods that are off; None where a score is not finite."""
    grouped: dict[tuple[str, str, str], list[float | None]] = {}
    for record in (each for each in records if each.get("mode") != OFF):
        grouped.setdefault((record["method"], record["metric"], record["horizon"]), []).append(record["value"])
    return {key: None if None in values else sum(values) / len(values) for key, values in grouped.items()}  # type: ignore[arg-type]


def _named(meanings: dict[str, str]) -> str:
    return ", ".join(f"{name} ({meaning})" if meaning else name for name, meaning in meanings.items())


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class Ensemble:
    """Members of an ensemble (M, ...), each of the shape that `Model.predict` returns without members.

    Mean, deviation and quantiles are NaN where a member is.
    """

    members: Array

    @property
    def mean(self) -> Array:
        """Mean over the members."""
        return self.members.mean(**self._axis())

    @property
    def std(self) -> Array:
        """Standard deviation over the members, with M in the denominator."""
        own = {"correction": 0} if self._is_torch() else {}
        return self.members.std(**self._axis(), **own)

    def quantile(self, q: float) -> Array:
        """The value below which a share q in [0, 1] of the members lies, interpolated linearly."""
        if not isinstance(q, Real) or not 0 <= q <= 1:
            raise ConfigFault(f"a quantile is a share in [0, 1], not {q!r}")
        if self._is_torch():  # torch.quantile takes at most 16 million values
            lower, share = divmod(q * (len(self.members) - 1), 1.0)
            ordered = self.members.sort(0).values  # NaN last
            found = torch.lerp(ordered[int(lower)], ordered[math.ceil(lower + share)], share)
            return torch.where(ordered[-1].isnan(), ordered[-1], found)
        if isinstance(self.members, np.ndarray):
            return np.quantile(self.members, q, axis=0)
        return self.members.quantile(q, **self._axis())

    def _is_torch(self) -> bool:
        return isinstance(self.members, Tensor)

    def _axis(self) -> dict[str, Any]:
        """The axis of members, as an argument; xarray would leave out NaN."""
        is_labelled = not isinstance(self.members, Tensor | np.ndarray)
        return {"dim": "member", "skipna": False} if is_labelled else {"axis": 0}


def result_of(u: Tensor, problem: Problem, steps: int | None, labels: bool) -> Array:
    """A prediction (B, [T,] C, *grid) as the caller's kind, without T if `steps` is None."""
    if labels or problem.form.kind == "xarray":
        times = None if steps is None else [problem.dt * step for step in range(steps + 1)]
        return labelled(u, times, problem.parameters, problem.dataset, problem.form)
    return as_given(u if problem.form.channels else u.squeeze(-len(problem.card.family.axes) - 1), problem.form)


def snapshot_of(u: Tensor, problem: Problem, step: int) -> Array:
    """The snapshot (B, C, *grid) after a number of steps as the caller's kind, in xarray with its time."""
    if problem.form.kind != "xarray":
        return result_of(u, problem, None, False)
    times = [problem.dt * step]
    return labelled(u[:, None], times, problem.parameters, problem.dataset, problem.form).isel(time=0)


def stacked(results: list[Array]) -> Array:
    """Members of one kind as an array (M, ...), in xarray with the dimension `member`."""
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    if isinstance(results[0], np.ndarray):
        return np.stack(results)
    import xarray

    return xarray.concat(results, "member")
