"""A profile for people: a table and a figure of what a training step is made of."""

from typing import Any

from ups.benchmark.drawing import COLOUR, GREY, NORMAL, draw_bars, figure_of
from ups.evaluation.figures import png

MEBIBYTE = 2**20


def profile_text(found: dict[str, Any], stage: str) -> str:
    """Markdown: time and memory of each part of a step, then the operators that take most time."""
    total = step_seconds(found)
    lines = [f"# A training step of {stage}", "", _circumstances(found), ""]
    lines += ["| part | ms | share | peak MiB |", "|---|---:|---:|---:|"]
    for part in found["parts"]:
        peak = f"{part['peak_bytes'] / MEBIBYTE:.1f}" if part["peak_bytes"] else ""
        lines.append(f"| {part['part']} | {1e3 * part['seconds']:.2f} | {part['seconds'] / total:.1%} | {peak} |")
    lines.append(f"| step | {1e3 * total:.2f} | | |")
    lines += ["", "Peaks are above what is in use when a step begins."]
    if found["world_size"] > 1:
        told = (
            f"Collectives take {1e3 * found['collectives']:.2f} ms per step, those of gradients while backward goes on."
        )
        lines.append(told)
    lines.append("")
    lines += ["| operator | calls | ms | share | MiB |", "|---|---:|---:|---:|---:|"]
    for entry in found["operators"]:
        times = f"{entry['calls']:.0f} | {1e3 * entry['seconds']:.2f} | {entry['seconds'] / total:.1%}"
        lines.append(f"| `{entry['operator']}` | {times} | {entry['bytes'] / MEBIBYTE:.1f} |")
    return "\n".join(lines) + "\n"


def profile_figure(found: dict[str, Any], stage: str) -> bytes:
    """The same as bars: parts by time and by memory, operators by time."""
    total, parts, operators = step_seconds(found), found["parts"], found["operators"]
    figure = figure_of(11, 7)
    time, memory, below = figure.subplot_mosaic([["time", "memory"], ["below", "below"]], height_ratios=[2, 4]).values()
    names, seconds = [part["part"] for part in parts], [part["seconds"] for part in parts]
    words = [f"{1e3 * value:.1f} ms, {value / total:.1%}" for value in seconds]
    draw_bars(time, names, [1e3 * value for value in seconds], words, [COLOUR] * len(parts))
    peaks = [part["peak_bytes"] / MEBIBYTE for part in parts]
    draw_bars(memory, names, peaks, [f"{peak:.1f}" for peak in peaks], [COLOUR] * len(parts))
    names = [f"{entry['operator']} x {entry['calls']:.0f}" for entry in operators]
    seconds = [entry["seconds"] for entry in operators]
    words = [f"{1e3 * value:.1f} ms, {value / total:.1%}" for value in seconds]
    draw_bars(below, names, [1e3 * value for value in seconds], words, [GREY] * len(operators))
    time.set_title("milliseconds per step", fontsize=NORMAL)
    memory.set_title("peak memory above the start of the step, MiB", fontsize=NORMAL)
    below.set_title("operators by their own time, milliseconds per step", fontsize=NORMAL)
    figure.suptitle(f"A training step of {stage}: {1e3 * total:.1f} ms, {_circumstances(found)}", fontsize=NORMAL + 1)
    return png(figure)


def step_seconds(found: dict[str, Any]) -> float:
    """Seconds of one step."""
    return sum(part["seconds"] for part in found["parts"])


def _circumstances(found: dict[str, Any]) -> str:
    return f"mean of {found['steps']} steps, rank 0 of {found['world_size']} on {found['device']}, under the profiler"
