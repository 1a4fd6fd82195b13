"""A leaderboard: errors of runs, of registered versions and of other models on the same test trajectories, ranked."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from ups.errors import DataFault
from ups.evaluation.entries import Entry
from ups.evaluation.predictions import HORIZONS
from ups.evaluation.tables import LABELS, console_table, geometric_mean, number, ratio, table

ROUND_OFF = 1e-9  # relative: a registered version has the mean of its run, summed in another order
OTHER = {  # what two results of `scored_trajectories` differ in
    "files": "raw files",
    "subsample": "parts of the files",
    "grid": "grid",
    "times": "times",
    "test": "test trajectories",
}


@dataclass(frozen=True)
class Row:
    """An entry with its rank; `differs` says what other trajectories it was scored on, then there is no rank."""

    entry: Entry
    differs: str | None
    rank: int | None


@dataclass(frozen=True)
class Mean:
    """Geometric means over datasets of a model's rollout error / that of the reference.

    `common` is over the datasets of all models and gives the rank, `own` over the `num_datasets` that the model has in
    common with the reference.
    """

    model: str
    rank: int | None
    common: float | None
    own: float | None
    num_datasets: int


@dataclass(frozen=True)
class Leaderboard:
    """Means relative to `reference`, the first model that never diverged, and rows by dataset, the best first.

    `common` are the datasets on which all models are compared.
    """

    reference: str
    common: list[str]
    means: list[Mean]
    rows: dict[str, list[Row]]


def ranked(entries: Sequence[Entry]) -> Leaderboard:
    """Rank models by rollout errors where they were scored on the trajectories of the first entry of the dataset.

    Raises:
        DataFault: two models have the same name.
    """
    by_dataset: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        if entry.model in by_dataset[entry.dataset]:
            what = f"two models are called {entry.model} on {entry.dataset}"
            raise DataFault(f"{what}: score one of them again with another name, `ups score ... --method NAME`")
        by_dataset[entry.dataset][entry.model] = entry
    rows = {dataset: _rows(list(of_dataset.values())) for dataset, of_dataset in sorted(by_dataset.items())}
    errors = _comparable_errors(rows, dict.fromkeys(entry.model for entry in entries))
    reference = next((model for model, found in errors.items() if None not in found.values()), entries[0].model)
    return Leaderboard(reference, *_means(reference, errors), rows)


def _rows(entries: list[Entry]) -> list[Row]:
    differing = [_difference(entry, entries[0]) for entry in entries]
    errors = [e.errors["rollout"].value if d is None else None for e, d in zip(entries, differing, strict=True)]
    rows = map(Row, entries, differing, _ranks(errors))
    return sorted(rows, key=lambda row: (row.differs is not None, row.rank or len(entries) + 1))


def _difference(entry: Entry, reference: Entry) -> str | None:
    """In words what trajectories of an entry differ in from those of another; None where they are the same."""
    if entry.digest == reference.digest:
        return None
    if entry.trajectories is None or reference.trajectories is None:
        return "other test trajectories, or other points or times of them"
    names = [name for name in OTHER if entry.trajectories.get(name) != reference.trajectories.get(name)]
    return f"other {', '.join(OTHER[name] for name in names)}"


def _ranks(errors: Sequence[float | None]) -> list[int | None]:
    """1 for the smallest, equal ranks for errors that differ by round-off; None where there is no finite error."""
    known = [error for error in errors if error is not None]
    return [None if e is None else 1 + sum(other < e * (1 - ROUND_OFF) for other in known) for e in errors]


def _comparable_errors(rows: dict[str, list[Row]], models: Iterable[str]) -> dict[str, dict[str, float | None]]:
    """Rollout errors by model, in this order, and dataset, where a model is compared."""
    errors: dict[str, dict[str, float | None]] = {model: {} for model in models}
    for row in (row for of_dataset in rows.values() for row in of_dataset if row.differs is None):
        errors[row.entry.model][row.entry.dataset] = row.entry.errors["rollout"].value
    return {model: found for model, found in errors.items() if found}


def _means(reference: str, errors: dict[str, dict[str, float | None]]) -> tuple[list[str], list[Mean]]:
    """The datasets of all models that share one with the reference, and their means, the best first."""
    first = errors[reference]
    shared = {model: [dataset for dataset in found if dataset in first] for model, found in errors.items()}
    shared = {model: datasets for model, datasets in shared.items() if datasets}
    common = [dataset for dataset in first if all(dataset in datasets for datasets in shared.values())]

    def mean(model: str, datasets: list[str]) -> float | None:
        return geometric_mean([ratio(errors[model][dataset], first[dataset]) for dataset in datasets])

    of_common = [mean(model, common) for model in shared]
    means = [
        Mean(model, rank, value, mean(model, datasets), len(datasets))
        for (model, datasets), rank, value in zip(shared.items(), _ranks(of_common), of_common, strict=True)
    ]
    return common, sorted(means, key=lambda each: each.rank or len(means) + 1)


NOTE = (
    "nRMSE with its 95 % bootstrap interval over test trajectories, lower is better. Ranks are by rollouts, *: best. "
    "On a dataset models are ranked that were scored on the trajectories, points and times of the first model there."
)
MEAN_COLUMNS = ("rank", "model", "on common datasets", "on its datasets", "number of these")
COLUMNS = ("rank", "model", *LABELS.values(), "trajectories")
CONSOLE_COLUMNS = ("rank", "model", *LABELS.values(), "interval")


def _mean_note(board: Leaderboard) -> str:
    compared = {mean.model for mean in board.means}
    apart = sorted({row.entry.model for rows in board.rows.values() for row in rows} - compared)
    return (
        f"Rollout error / that of {board.reference}, geometric mean over datasets: exp(mean(log(ratio))). "
        f"`{MEAN_COLUMNS[2]}`: over the {len(board.common)} of {len(board.rows)} on which all these models are "
        f"compared, for the rank; `{MEAN_COLUMNS[3]}`: over all on which the model is compared."
    ) + (f" Compared on none, and not listed: {', '.join(apart)}." if apart else "")


def leaderboard_text(board: Leaderboard) -> str:
    """Markdown: means, then every dataset, then what cannot be compared."""
    lines = ["# Leaderboard", "", NOTE, "", "## Overall", "", _mean_note(board), ""]
    lines += [table(MEAN_COLUMNS, _mean_cells(board), num_names=2), ""]
    for dataset, rows in board.rows.items():
        lines += [f"## {dataset}", "", table(COLUMNS, map(_cells, filter(_is_comparable, rows)), num_names=2), ""]
    if others := _others(board):
        cells = [[row.entry.dataset, *_cells(row)[1:], row.differs] for row in others]
        lines += ["## Not comparable", "", table(["dataset", *COLUMNS[1:], "scored on"], cells, num_names=2), ""]
    return "\n".join(lines)


def leaderboard_tables(board: Leaderboard) -> Group:
    """The same for the console, narrower: with the intervals of rollouts alone."""
    parts: list[RenderableType] = [Text(f"{NOTE} {_mean_note(board)}\n", "dim")]
    parts.append(console_table("Overall", MEAN_COLUMNS, _mean_cells(board), num_names=2))
    for dataset, rows in board.rows.items():
        cells = map(_console_cells, filter(_is_comparable, rows))
        parts += ["", console_table(dataset, CONSOLE_COLUMNS, cells, num_names=2)]
    for row in _others(board):
        what = f"not comparable on {row.entry.dataset}: {row.entry.model}, scored on {row.differs}"
        parts += ["", Text(what, "yellow")]
    return Group(*parts)


def _is_comparable(row: Row) -> bool:
    return row.differs is None


def _others(board: Leaderboard) -> list[Row]:
    return [row for rows in board.rows.values() for row in rows if not _is_comparable(row)]


def _mean_cells(board: Leaderboard) -> Iterator[list[str]]:
    for mean in board.means:
        common = number(mean.common) if board.common else ""
        yield [_rank(mean.rank), mean.model, common, number(mean.own), str(mean.num_datasets)]


def _cells(row: Row) -> list[str]:
    errors = [_error(row, horizon) + _interval(row, horizon, " ({} to {})") for horizon in HORIZONS]
    return [_rank(row.rank), row.entry.model, *errors, str(row.entry.errors["rollout"].num_trajectories)]


def _console_cells(row: Row) -> list[str]:
    errors = [_error(row, horizon) for horizon in HORIZONS]
    return [_rank(row.rank), row.entry.model, *errors, _interval(row, "rollout", "{} to {}")]


def _rank(rank: int | None) -> str:
    return "" if rank is None else f"{rank}{'*' * (rank == 1)}"


def _error(row: Row, horizon: str) -> str:
    return number(row.entry.errors[horizon].value) if horizon in row.entry.errors else ""


def _interval(row: Row, horizon: str, form: str) -> str:
    """The ends of the interval in a form; nothing where there is no interval."""
    record = row.entry.errors.get(horizon)
    if record is None or record.low is None or record.high is None:
        return ""
    return form.format(number(record.low), number(record.high))


def leaderboard_csv(board: Leaderboard) -> str:
    """CSV: a line per dataset and model with all digits; what is not finite or not there is empty."""
    ends = [f"{horizon}{end}" for horizon in HORIZONS for end in ("", "_low", "_high")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["dataset", "model", "rank", *ends, "num_trajectories", "scored_on"])
    for dataset, rows in board.rows.items():
        for row in rows:
            errors = [row.entry.errors.get(horizon) for horizon in HORIZONS]
            numbers = [None if e is None else getattr(e, name) for e in errors for name in ("value", "low", "high")]
            count = row.entry.errors["rollout"].num_trajectories
            writer.writerow([dataset, row.entry.model, row.rank, *numbers, count, row.differs])
    return text.getvalue()
