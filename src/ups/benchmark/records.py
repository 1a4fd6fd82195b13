"""What was measured, as records {"name", "value", "unit", "baseline", "ratio"} of medians over rounds."""

from collections.abc import Callable
from statistics import median
from typing import Any

Record = dict[str, Any]
Sides = dict[str, dict[str, Any]]  # value and baseline, as the worker answers


def record(name: str, value: float, unit: str, baseline: float | None = None) -> Record:
    """A number, held against a baseline where there is one."""
    ratio = None if baseline is None else value / baseline
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


def throughput(name: str, sides: Sides, remark: str = "") -> Record:
    """Samples per second of both sides; their ratio says how many times faster the first is."""
    value, baseline = (median_of(sides[side], samples_per_second) for side in ("value", "baseline"))
    reason = sides["value"]["eager_because"] if name == "compile_over_eager" else None
    remarks = ["samples/s", remark, f"not compiled: {reason}" if reason else ""]
    return record(name, value, ", ".join(filter(None, remarks)), baseline)


def memory(name: str, sides: Sides) -> Record:
    """Peak memory of a step of both sides."""
    return record(name, sides["value"]["peak_bytes"], "bytes", sides["baseline"]["peak_bytes"])


def loop_records(name: str, sides: Sides, checkpoint_steps: int) -> list[Record]:
    """Speed and waiting of plain steps, and what the checkpoint and log of an interval add to its steps.

    Pairs of rounds next to one another are subtracted, so that the machine's slow changes cancel.
    """
    plain = sides["baseline"]
    step_seconds = median_of(plain, lambda r: r["seconds"] / r["steps"])
    rounds = zip(sides["value"]["rounds"], plain["rounds"], strict=True)
    extra = median(kept["seconds"] - bare["seconds"] for kept, bare in rounds)
    return [
        record("samples_per_second", median_of(plain, samples_per_second), "samples/s"),
        record("step_seconds", step_seconds, "s"),
        record("data_wait_fraction", median_of(plain, lambda r: r["waited"] / r["seconds"]), "of step time"),
        record(name, extra / (checkpoint_steps * step_seconds), "of step time"),
    ]


def median_of(side: dict[str, Any], quantity: Callable[[dict[str, float]], float]) -> float:
    """Median over rounds."""
    return median(map(quantity, side["rounds"]))


def samples_per_second(one: dict[str, float]) -> float:
    """Samples of all ranks per second of a round."""
    return one["samples"] / one["seconds"]
