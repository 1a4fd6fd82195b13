"""Tables and figures of the benchmark and of the profile."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from ups.evaluation.styles import NORMAL, SMALL, new_figure
from ups.evaluation.tables import number, table
from ups.performance.benchmark import Record

BLUE, GREEN, RED, GREY = "#1f77b4", "#2ca02c", "#d62728", "#8c8c8c"
LOWER_IS_BETTER = ("activation_checkpointing_memory_over_plain", "batch_of_100000_over_100_trajectories")
# The baseline is a scale, not a competing setup.
NEUTRAL = (
    "first_step_over_import_torch",
    "resume_seconds",
    *(f"encoding_over_{other}" for other in ("cat", "h5py", "writing")),
)
BENCHMARK_NOTE = (
    "Both setups of a comparison alternate in one job. Numbers are medians over rounds; ratio = value / baseline."
)
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
MEBIBYTE = 2**20


def benchmark_text(benchmark: dict[str, Any]) -> str:
    """Markdown: the machine, then one line per record."""
    machine = [[name, "" if value is None else str(value)] for name, value in benchmark["machine"].items()]
    numbers = ["value", "baseline", "ratio"]
    rows = [
        [entry["name"], *("" if entry[key] is None else number(entry[key]) for key in numbers), entry["unit"]]
        for entry in benchmark["records"]
    ]
    columns, sides = ["record", *numbers, "unit"], ["left", "right", "right", "right", "left"]
    records = tabulate(rows, columns, tablefmt="pipe", colalign=sides, disable_numparse=True)
    return "\n\n".join(["# Benchmark", table(["machine", ""], machine, num_names=2), records, f"{BENCHMARK_NOTE}\n"])


def benchmark_figure(benchmark: dict[str, Any]) -> Figure:
    """Ratios as bars from 1 on a log axis, green where `value` is better; numbers without a baseline below."""
    ratios = [entry for entry in benchmark["records"] if entry["ratio"] is not None]
    others = [entry for entry in benchmark["records"] if entry["ratio"] is None]
    figure = new_figure(11, 1.6 + 0.28 * len(ratios) + 0.16 * len(others))
    panel = figure.subplots()
    _draw_ratios(panel, ratios)
    machine = benchmark["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    panel.set_title(f"{machine['cpu']}, {machine['cores']} cores{gpu}, torch {machine['torch']}", fontsize=NORMAL)
    text = "\n".join(f"{entry['name']} = {number(entry['value'])} {entry['unit']}" for entry in others)
    figure.supxlabel(text, fontsize=SMALL, x=0.02, ha="left")
    return figure


def _draw_ratios(panel: Axes, records: list[Record]) -> None:
    ratios = [entry["ratio"] for entry in records]
    panel.barh(range(len(ratios)), [r - 1 for r in ratios], left=1, color=[_colour(r) for r in records], height=0.7)
    for row, entry in enumerate(records):
        both = f"{number(entry['value'])} against {number(entry['baseline'])} {entry['unit']}"
        label = f"{entry['ratio']:.2f}   ({both})"
        panel.text(1.05 * max(1.0, entry["ratio"]), row, label, fontsize=SMALL, va="center")
    low, high = min(0.5, 0.8 * min(ratios)), max(2.0, *ratios)
    # The axis is twice as long as the bars need, in decades: their labels stand to the right of them.
    panel.set(xscale="log", xlim=(low, high * (high / low)), xlabel="ratio of value to baseline")
    panel.axvline(1.0, color="black", linewidth=0.8)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.set_yticks(range(len(records)), [entry["name"] for entry in records])
    _tidy(panel)


def _colour(entry: Record) -> str:
    if entry["name"] in NEUTRAL or abs(entry["ratio"] - 1) < 0.02:
        return GREY
    return GREEN if (entry["ratio"] > 1) != (entry["name"] in LOWER_IS_BETTER) else RED


def profile_text(profile: dict[str, Any], stage: str) -> str:
    """Markdown: time and peak memory of each part of a step, then the operators with the largest time of their own."""
    total = _step_seconds(profile)
    parts = [
        [part["part"], *_times(part, total), f"{part['peak_bytes'] / MEBIBYTE:.1f}" if part["peak_bytes"] else ""]
        for part in profile["parts"]
    ]
    operators = [
        [f"`{entry['operator']}`", f"{entry['calls']:.0f}", *_times(entry, total), f"{entry['bytes'] / MEBIBYTE:.1f}"]
        for entry in profile["operators"]
    ]
    notes = ["Peaks are above the memory in use at the start of a step."]
    if profile["world_size"] > 1:
        seconds = f"Collectives take {1e3 * profile['collectives']:.2f} ms per step"
        notes.append(f"{seconds}; replicas exchange gradients after the backward pass, shards during it.")
    columns, step = ["part", "ms", "share", "peak MiB"], ["step", f"{1e3 * total:.2f}", "", ""]
    tables = table(columns, [*parts, step]), table(["operator", "calls", "ms", "share", "MiB"], operators)
    heading = f"# A training step of {stage}"
    return "\n\n".join([heading, _conditions(profile), tables[0], " ".join(notes), tables[1] + "\n"])


def _times(entry: dict[str, Any], total: float) -> list[str]:
    """Milliseconds per step, and their share of a step of `total` seconds."""
    return [f"{1e3 * entry['seconds']:.2f}", f"{entry['seconds'] / total:.1%}"]


def profile_figure(profile: dict[str, Any], stage: str) -> Figure:
    """The same as bars: parts by time and by memory, operators by time."""
    total, parts, operators = _step_seconds(profile), profile["parts"], profile["operators"]
    figure = new_figure(11, 7)
    time, memory, below = figure.subplot_mosaic([["time", "memory"], ["below", "below"]], height_ratios=[2, 4]).values()
    names = [part["part"] for part in parts]
    _draw_times(time, names, [part["seconds"] for part in parts], total, BLUE)
    peaks = [part["peak_bytes"] / MEBIBYTE for part in parts]
    _draw_bars(memory, names, peaks, [f"{peak:.1f}" for peak in peaks], BLUE)
    names = [f"{entry['operator']} x {entry['calls']:.0f}" for entry in operators]
    _draw_times(below, names, [entry["seconds"] for entry in operators], total, GREY)
    time.set_title("milliseconds per step", fontsize=NORMAL)
    memory.set_title("peak memory above the start of the step, MiB", fontsize=NORMAL)
    below.set_title("operators by their own time, milliseconds per step", fontsize=NORMAL)
    figure.suptitle(f"A training step of {stage}: {1e3 * total:.1f} ms, {_conditions(profile)}", fontsize=NORMAL + 1)
    return figure


def _draw_times(panel: Axes, names: list[str], seconds: list[float], total: float, colour: str) -> None:
    labels = [f"{1e3 * value:.1f} ms, {value / total:.1%}" for value in seconds]
    _draw_bars(panel, names, [1e3 * value for value in seconds], labels, colour)


def _draw_bars(panel: Axes, names: list[str], values: list[float], labels: list[str], colour: str) -> None:
    rows = range(len(names))
    panel.bar_label(panel.barh(rows, values, color=colour, height=0.7), labels, padding=3, fontsize=SMALL)
    panel.set_yticks(rows, names)
    panel.margins(x=0.25)  # room for the labels
    _tidy(panel)


def _tidy(panel: Axes) -> None:
    panel.invert_yaxis()  # the first row on top
    panel.tick_params(labelsize=SMALL)
    panel.xaxis.label.set_fontsize(SMALL)
    panel.spines[["top", "right"]].set_visible(False)


def _step_seconds(profile: dict[str, Any]) -> float:
    return sum(part["seconds"] for part in profile["parts"])


def _conditions(profile: dict[str, Any]) -> str:
    processes = f"rank 0 of {profile['world_size']} on {profile['device']}"
    return f"mean of {profile['steps']} steps, {processes}, under the profiler"
