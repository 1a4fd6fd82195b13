"""The benchmark for people: a table and a figure."""

from typing import Any

from matplotlib.axes import Axes

from ups.benchmark.drawing import BAD, GOOD, GREY, NORMAL, SMALL, figure_of, tidy
from ups.benchmark.records import Record
from ups.evaluation.figures import png

LESS_IS_BETTER = ("activation_checkpointing_memory_over_plain",)
NO_RIVALS = ("first_step_over_import_torch", "resume_seconds")


def benchmark_text(found: dict[str, Any]) -> str:
    """Markdown: the machine, then one line per record."""
    lines = ["# Benchmark", "", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {'' if value is None else value} |" for name, value in found["machine"].items()]
    lines += ["", "| record | value | baseline | ratio | unit |", "|---|---:|---:|---:|---|"]
    for entry in found["records"]:
        numbers = " | ".join(_number(entry[key]) for key in ("value", "baseline", "ratio"))
        lines.append(f"| {entry['name']} | {numbers} | {entry['unit']} |")
    lines += [
        "",
        "Contenders take turns within one job; numbers are medians over rounds, a ratio is value over baseline.",
    ]
    return "\n".join(lines) + "\n"


def benchmark_figure(found: dict[str, Any]) -> bytes:
    """Ratios as bars from 1 on a log axis, green where the first is better; numbers without a baseline below."""
    ratios = [entry for entry in found["records"] if entry["ratio"] is not None]
    others = [entry for entry in found["records"] if entry["ratio"] is None]
    figure = figure_of(11, 1.6 + 0.28 * len(ratios) + 0.16 * len(others))
    panel = figure.subplots()
    _draw_ratios(panel, ratios)
    machine = found["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    panel.set_title(f"{machine['cpu']}, {machine['cores']} cores{gpu}, torch {machine['torch']}", fontsize=NORMAL)
    text = "\n".join(f"{entry['name']} = {_number(entry['value'])} {entry['unit']}" for entry in others)
    figure.supxlabel(text, fontsize=SMALL, x=0.02, ha="left")
    return png(figure)


def _draw_ratios(panel: Axes, records: list[Record]) -> None:
    ratios = [entry["ratio"] for entry in records]
    panel.barh(range(len(ratios)), [r - 1 for r in ratios], left=1, color=[_colour(r) for r in records], height=0.7)
    for row, entry in enumerate(records):
        against = f"{_number(entry['value'])} against {_number(entry['baseline'])} {entry['unit']}"
        place = 1.05 * max(1.0, entry["ratio"])
        panel.text(place, row, f"{entry['ratio']:.2f}   ({against})", fontsize=SMALL, va="center")
    low, high = min(0.5, 0.8 * min(ratios)), max(2.0, *ratios)
    panel.set(xscale="log", xlim=(low, high * (high / low)), xlabel="ratio of value to baseline")  # room for the words
    panel.axvline(1.0, color="black", linewidth=0.8)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.set_yticks(range(len(records)), [entry["name"] for entry in records])
    tidy(panel)


def _colour(entry: Record) -> str:
    if entry["name"] in NO_RIVALS or abs(entry["ratio"] - 1) < 0.02:
        return GREY
    return GOOD if (entry["ratio"] > 1) != (entry["name"] in LESS_IS_BETTER) else BAD


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
