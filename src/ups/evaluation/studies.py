"""Reports of studies: variants of the operator, compressed latents, and one comparison over several seeds."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import fmean, mean, stdev
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ups.config import EvaluationConfig, LaunchConfig
from ups.config.studies import BASE
from ups.data.estimate import raw_bytes
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.evaluation.comparison import FURTHER, HORIZON_TITLES, Errors, best, further_baselines
from ups.evaluation.parts import score_sets
from ups.evaluation.predictions import HORIZONS, Compute, plain_method
from ups.evaluation.scores import held_out
from ups.evaluation.styles import GRID, NORMAL, colour_of, new_figure, tidy, wrapped
from ups.evaluation.tables import STRONG, WITHOUT_SAMPLING, geometric_mean, number, ratio, table
from ups.models.codec import Codec, group_name
from ups.surrogate.trained import Trained

ABLATION_NOTE = (
    "Validation split, physical units. First table: geometric mean over families of the nRMSE divided by that of the "
    "variant base with the same seed, below 1 is better; milliseconds per training step (on a CPU those "
    "of its process), mean over a run, all variants measured alternately. Second table: nRMSE of one step / of the "
    "rollout."
)

COMPRESSION_NOTE = (
    "Ratio: bytes of the fields as float32 / bytes of the latents on disk. Errors: nRMSE on the validation split, of "
    "the codec (with the rounding of the latents), of that rounding alone, and of the operator or steady model trained "
    "on them, one step and rollout; in brackets relative to that of the first variant. Decoding: megabytes of fields "
    "per second from latents on disk that the system has in memory. First table: geometric means of ratios and "
    "relative errors over families; with one seed an error of a single family may differ by tens of percent between "
    "trainings that are equally good."
)
DECODED_TRAJECTORIES, DECODED_ROUNDS = 4, 5


def score_variant(
    folder: Path, trained: Trained, config: EvaluationConfig, launch: LaunchConfig, raw: Path
) -> dict[str, Any]:
    """{"row": {"one_step", "rollout": {family: nRMSE}, "parameters"}} of one operator on the validation split."""
    transient = [s for s in held_out(trained.cache(), raw, "valid") if not FAMILIES[s.dataset.family].steady]
    compute = Compute.of(launch)
    surrogate = trained.surrogate(compute.device)
    assert surrogate.operator is not None
    records = score_sets(folder, surrogate, transient, config, compute)
    row: dict[str, Any] = {horizon: _by_family(records, horizon, "operator") for horizon in HORIZONS}
    row["parameters"] = sum(parameter.numel() for parameter in surrogate.operator.parameters())
    return {"row": row}


def _by_family(records: list[dict[str, Any]], horizon: str, method: str) -> dict[str, float | None]:
    """Mean nRMSE over the datasets of each family; None where one is not finite."""
    values = defaultdict(list)
    for record in records:
        if (record["method"], record["metric"], record["horizon"]) == (method, "nRMSE", horizon):
            values[record["family"]].append(record["value"])
    return {family: None if None in found else fmean(found) for family, found in values.items()}


def score_compression(
    folder: Path, trained: Trained, config: EvaluationConfig, launch: LaunchConfig, raw: Path
) -> dict[str, Any]:
    """The rows, one per family, of the latents and models of one variant.

    {"rows": [{"family", "latents" (tolerance), "ratio", "decoded_megabytes_per_second", "codec_error", "one_step",
    "rollout"}]}, with "rounding" where latents are rounded.
    """
    compute, cache = Compute.of(launch), trained.cache()
    surrogate = trained.surrogate(compute.device)
    records = score_sets(folder, surrogate, held_out(cache, raw, "valid"), config, compute)
    rows, rounding = [], _by_family(records, "one_step", "rounding")
    for family in cache.families:
        own = cache.only(family)
        datasets = [Dataset.from_json(entry["dataset"]) for entry in own.datasets.values()]
        row = {"family": family, "latents": trained.latent_cache["key"]["options"]["tolerance"][family]}
        row["ratio"] = sum(map(raw_bytes, datasets)) / own.num_bytes
        row["decoded_megabytes_per_second"] = _decoding_speed(cache, surrogate.codec, datasets[0])
        row["codec_error"] = _by_family(records, "one_step", "codec")[family]
        row |= {"rounding": rounding[family]} if family in rounding else {}
        rows.append(row | {h: _by_family(records, h, plain_method(family))[family] for h in HORIZONS})
    return {"rows": rows}


def _decoding_speed(cache: LatentCache, codec: Codec, dataset: Dataset) -> float:
    """Megabytes of fields per second read and decoded from the cache on the codec's device, the best of some rounds."""
    group, count = group_name(dataset.family, "fields"), min(dataset.num_trajectories, DECODED_TRAJECTORIES)
    best_seconds, num_bytes = inf, 0
    device = next(codec.parameters()).device
    for _ in range(DECODED_ROUNDS):
        started = perf_counter()
        with torch.no_grad():
            z = (torch.from_numpy(cache.read(dataset.name, "fields", index)) for index in range(count))
            num_bytes = sum(codec.decode(each.to(device), group).cpu().nbytes for each in z)
        best_seconds = min(best_seconds, perf_counter() - started)
    return num_bytes / best_seconds / 1e6


def compression_text(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per variant, then one per family and variant."""
    first = {row["family"]: row for row in rows if row["name"] == rows[0]["name"]}
    columns = ["family", "variant", "codec.model. tolerance", "latents. tolerance", "ratio", "codec", "rounding"]
    cells = (_compression_cells(row, first[row["family"]]) for row in sorted(rows, key=lambda row: row["family"]))
    columns += ["one step", "rollout", "MB / s"]
    variants = {row["name"]: [other for other in rows if other["name"] == row["name"]] for row in rows}
    means = ([name, *map(number, _compression_means(own, first))] for name, own in variants.items())
    tables = table(["variant", "ratio", "one step", "rollout"], means), table(columns, cells, num_names=2)
    return "\n\n".join(["# Compression of latents", COMPRESSION_NOTE, *tables]) + "\n"


def _compression_means(rows: list[dict[str, Any]], first: dict[str, dict[str, Any]]) -> list[float | None]:
    """Geometric means over the families of a variant: ratio, then the error of each horizon relative to the first."""
    relative = [[ratio(row[h], first[row["family"]][h]) for row in rows] for h in HORIZONS]
    return [geometric_mean(values) for values in ([row["ratio"] for row in rows], *relative)]


def _compression_cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    tolerances = ["" if row[name] is None else f"{row[name]:g}" for name in ("codec", "latents")]
    errors = [f"{number(row[h])} ({number(ratio(row[h], base[h]))})" for h in HORIZONS]
    speed = number(row["decoded_megabytes_per_second"])
    floor = [number(row["codec_error"]), number(row["rounding"]) if "rounding" in row else ""]
    return [row["family"], row["name"], *tolerances, number(row["ratio"]), *floor, *errors, speed]


def compare(rows: list[dict[str, Any]], seconds_per_step: dict[str, float]) -> list[dict[str, Any]]:
    """Add to each row "relative" and "milliseconds_per_step".

    "relative" is {horizon: geometric mean over families of the ratio of nRMSE to that of the variant `base` with the
    same seed}, None if one is not finite.
    """
    bases = {row["seed"]: row for row in rows if row["variant"] == BASE}
    compared = []
    for row in rows:
        pairs = {horizon: (row[horizon], bases[row["seed"]][horizon]) for horizon in HORIZONS}
        relative = {h: geometric_mean([ratio(own[f], base[f]) for f in base]) for h, (own, base) in pairs.items()}
        compared.append(row | {"relative": relative, "milliseconds_per_step": 1000 * seconds_per_step[row["variant"]]})
    return compared


def ablation_text(rows: list[dict[str, Any]]) -> str:
    """Markdown: one row per variant and seed, over all families, then family by family."""
    columns = ["variant", "changed", "seed", "one step", "rollout", "parameters", "ms per step"]
    summary = table(columns, map(_summary, rows), num_names=2)
    errors = table(["variant", "seed", *rows[0]["one_step"]], map(_errors, rows))
    return "\n\n".join(["# Ablation of the operator", ABLATION_NOTE, summary, errors]) + "\n"


def _summary(row: dict[str, Any]) -> list[str]:
    relative = [number(row["relative"][horizon]) for horizon in HORIZONS]
    cost = [f"{row['parameters']:,}", number(row["milliseconds_per_step"])]
    return [row["variant"], ", ".join(_changes(row["overrides"])), row["seed"], *relative, *cost]


def _errors(row: dict[str, Any]) -> list[str]:
    cells = [" / ".join(number(row[horizon][family]) for horizon in HORIZONS) for family in row["one_step"]]
    return [row["variant"], row["seed"], *cells]


def _changes(overrides: dict[str, Any], place: str = "") -> list[str]:
    """`model.levels=2` for {"model": {"levels": 2}}."""
    changes = []
    for name, value in overrides.items():
        inside = isinstance(value, dict)
        changes += _changes(value, f"{place}{name}.") if inside else [f"{place}{name}={json.dumps(value)}"]
    return changes


SEEDS_NOTE = (
    "nRMSE on the test split, mean ± standard deviation over seeds; then ours over the better of FNO and U-Net for "
    "each data root, and the geometric mean. `ours` is the operator, or the steady model."
)
FURTHER_NOTE = "Below, ours is compared with the best of all networks: FNO, U-Net and those whose errors are shown."


def seeds_text(runs: dict[str, Errors]) -> str:
    """Markdown: a table per horizon; `runs` maps data roots to their errors.

    Raises:
        DataFault: the runs have different datasets, or two of them the same errors.
    """
    datasets = [sorted({dataset for dataset, _, _ in errors}) for errors in runs.values()]
    for name, found in zip(runs, datasets, strict=True):
        if found != datasets[0]:
            raise DataFault(f"{name} has the datasets {', '.join(found)}, not {', '.join(datasets[0])}: same --env?")
    ours = {name: {k: v for k, v in errors.items() if k[1] in WITHOUT_SAMPLING} for name, errors in runs.items()}
    for one, other in combinations(runs, 2):
        if ours[one] == ours[other]:
            raise DataFault(f"{one} and {other} have the same errors: run one of them anew with --params seed=N")
    lines = [f"# Comparison over {len(runs)} seeds", "", SEEDS_NOTE, ""]
    own = {method: (method,) for method in STRONG} | {"ours": WITHOUT_SAMPLING}
    lines += _seed_tables(runs, "", STRONG, own)
    if further := [method for method in FURTHER if all(method in further_baselines(each) for each in runs.values())]:
        shown = {method: (method,) for method in further}
        lines += [FURTHER_NOTE, "", *_seed_tables(runs, ", all networks", (*STRONG, *further), shown)]
    return "\n".join(lines)


def _seed_tables(
    runs: dict[str, Errors], suffix: str, rivals: Sequence[str], shown: dict[str, Sequence[str]]
) -> list[str]:
    """Lines of a table per horizon."""
    columns, lines = ["dataset", *shown, *runs, "geometric mean"], []
    for horizon, title in HORIZON_TITLES.items():
        rows = _seed_rows(list(runs.values()), horizon, rivals, shown)
        lines += [f"## {title}{suffix}", "", table(columns, rows), ""]
    return lines


def _seed_rows(
    runs: list[Errors], horizon: str, rivals: Sequence[str], shown: dict[str, Sequence[str]]
) -> Iterator[list[str]]:
    """Cells of each dataset: the mean errors of the methods in `shown`, ratios of ours to the best of `rivals`."""
    found = seed_ratios(runs, horizon, rivals)
    ratios_of = {name: [*ratios, geometric_mean(ratios)] for name, ratios in found.items()}
    for dataset, ratios in ratios_of.items():
        values = [_values(errors, dataset, horizon) for errors in runs]
        errors_of_all = [[best(each, names) for each in values if each.keys() & names] for names in shown.values()]
        means = [_mean_and_std(errors) if len(errors) == len(runs) else "" for errors in errors_of_all]
        yield [dataset, *means, *map(number, ratios)]
    means = [geometric_mean(column) for column in zip(*ratios_of.values(), strict=True)]
    yield ["geometric mean", *[""] * len(shown), *map(number, means)]


def _values(errors: Errors, dataset: str, horizon: str) -> dict[str, float | None]:
    methods = (*STRONG, *FURTHER, *WITHOUT_SAMPLING)
    return {method: errors[key] for method in methods if (key := (dataset, method, horizon)) in errors}


def seed_ratios(runs: list[Errors], horizon: str, rivals: Sequence[str] = STRONG) -> dict[str, list[float | None]]:
    """For each dataset and run, our error over that of the best of `rivals`."""
    return {
        dataset: [
            ratio(best(values, WITHOUT_SAMPLING), best(values, rivals))
            for values in (_values(errors, dataset, horizon) for errors in runs)
        ]
        for dataset in sorted({dataset for dataset, _, _ in runs[0]})
    }


def draw_seeds(ratios: dict[str, list[float | None]]) -> Figure:
    """One line per name: the ratios of errors of all seeds as dots, and their geometric mean as a bar.

    A ratio that is not finite has no dot, and the mean of that line no bar.
    """
    figure = new_figure(7.0, 1.1 + 0.26 * len(ratios))
    panel = figure.add_subplot()
    panel.axvline(1.0, color="black", linewidth=1.0)
    for place, found in enumerate(ratios.values()):
        known = [value for value in found if value is not None]
        style = {"color": colour_of("operator"), "marker": "o", "markersize": 5, "alpha": 0.6, "linestyle": "none"}
        panel.plot(known, [place] * len(known), gid=f"ratios {place}", **style)
        if (centre := geometric_mean(found)) is not None:
            panel.plot([centre], [place], color="black", marker="|", markersize=12, linestyle="none")
    panel.set(xscale="log", ylim=(len(ratios) - 0.4, -0.6), yticks=range(len(ratios)))
    panel.set_yticklabels([wrapped(name, 34) for name in ratios])
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.grid(axis="both", color=GRID, linewidth=0.6)
    panel.set_xlabel(
        "rollout error of ours / of the better of FNO and U-Net; left of 1: ours is better", fontsize=NORMAL
    )
    tidy(panel)
    return figure


def _mean_and_std(values: list[float | None]) -> str:
    if None in values:
        return number(None)
    one_digit = float(f"{stdev(values):.1g}")
    return f"{number(mean(values))} ± {number(one_digit)}"
