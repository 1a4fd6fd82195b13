"""The benchmark for people: a table and a figure."""

from typing import Any

from ups.benchmark.drawing import BAD, GOOD, GREY, NORMAL, SMALL, draw_bars, figure_of, png
from ups.benchmark.records import Record

LESS_IS_BETTER = ("first_step_over_import_torch", "resume_seconds", "activation_checkpointing_memory_over_plain")


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
    """Ratios as bars on a log axis, green where the first is better; numbers without a baseline below."""
    ratios = [entry for entry in found["records"] if entry["ratio"] is not None]
    others = [entry for entry in found["records"] if entry["ratio"] is None]
    figure = figure_of(11, 1.6 + 0.28 * len(ratios) + 0.16 * len(others))
    panel = figure.subplots()
    names = [entry["name"] for entry in ratios]
    words = [
        f"{entry['ratio']:.2f}   ({_number(entry['value'])} against {_number(entry['baseline'])} {entry['unit']})"
        for entry in ratios
    ]
    draw_bars(panel, names, [entry["ratio"] for entry in ratios], words, [_colour(entry) for entry in ratios])
    panel.set_xscale("log")
    panel.axvline(1.0, color="black", linewidth=0.8)
    low, high = min(entry["ratio"] for entry in ratios), max(entry["ratio"] for entry in ratios)
    panel.set_xlim(min(0.5, 0.8 * low), max(4.0, high) ** 2)  # room for the words
    panel.set_xlabel("ratio of value to baseline", fontsize=SMALL)
    machine = found["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    panel.set_title(f"{machine['cpu']}, {machine['cores']} cores{gpu}, torch {machine['torch']}", fontsize=NORMAL)
    text = "\n".join(f"{entry['name']} = {_number(entry['value'])} {entry['unit']}" for entry in others)
    figure.supxlabel(text, fontsize=SMALL, x=0.02, ha="left")
    return png(figure)


def _colour(entry: Record) -> str:
    if abs(entry["ratio"] - 1) < 0.02:
        return GREY
    return GOOD if (entry["ratio"] > 1) != (entry["name"] in LESS_IS_BETTER) else BAD


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
