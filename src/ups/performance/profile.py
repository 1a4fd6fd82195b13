"""Worker of `kedro run --pipeline profile`: time and memory of the parts of a training step, by torch.profiler."""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from ups.config import ProfileConfig
from ups.config.training import TrainingSection
from ups.files import read_json, write_json
from ups.runs.run import REQUEST, RESULT, Run
from ups.training.batches import Batches
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.update import Update
from ups.training.worker import main

TRACE = "trace.json"
# Names that the training gives to its parts with `record_function`; `OTHER` is the rest of a step.
STEP, PARTS, OTHER = "step", ("data", "forward", "exchange", "backward", "update"), "other"
# Names that torch.profiler gives to events.
COLLECTIVES, MEMORY = ("gloo:", "nccl:"), "[memory]"
NUM_OPERATORS = 15


@dataclass(frozen=True)
class Event:
    """One event of the profiler: start and end in seconds; `num_bytes` were allocated, or freed if negative."""

    name: str
    start: float
    end: float
    num_bytes: int
    device: str


def profile(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Write {"parts", "collectives", "operators", "steps", "world_size", "device"} of rank 0 as result; means per step.

    The other ranks take the same steps without the profiler.
    """
    settings = ProfileConfig(**read_json(run.folder / REQUEST))
    inject = Injection.read(run.folder, ranks.rank)
    update = Update(stage, config, run, ranks, inject)
    batches = Batches(stage, config, run, ranks, inject)

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            run.alive(ranks.rank).touch()
            with record_function(STEP):
                update(batches.next(), config.learning_rate, stop=False, save=False)
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize()

    with batches.from_step(0):
        take(settings.warmup_steps)
        recorded = record(lambda: take(settings.steps), ranks.device) if ranks.rank == 0 else take(settings.steps)
    if recorded is not None:
        recorded.export_chrome_trace(str(run.folder / TRACE))
        events = events_of(recorded)
        result = {
            "parts": parts_of(events, ranks.device.type),
            "collectives": collective_seconds(events) / settings.steps,
            "operators": operators_of(recorded, settings.steps),
        }
        size = {"steps": settings.steps, "world_size": ranks.world_size, "device": ranks.device.type}
        write_json(run.folder / RESULT, result | size)
    ranks.barrier()


def record(work: Callable[[], object], device: torch.device) -> torch_profile:
    """Run `work` under the profiler, allocations included."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch_profile(activities=activities, profile_memory=True) as recorded:
        work()
    return recorded


def events_of(recorded: torch_profile) -> list[Event]:
    """All recorded events by start time."""
    found = recorded.profiler.kineto_results.events()
    events = [
        Event(e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9, e.nbytes(), e.device_type().name.lower()) for e in found
    ]
    return sorted(events, key=lambda event: event.start)


def peak_bytes(events: list[Event], device: str) -> int:
    """Peak memory in use on a device, above what was in use at the start."""
    totals = np.cumsum([event.num_bytes for event in events if event.name == MEMORY and event.device == device])
    return int(max(0, *totals))


def parts_of(events: list[Event], device: str) -> list[dict[str, Any]]:
    """Seconds per step of each part, and its peak memory above what was in use at the start of its step.

    On a GPU the time of a part is that of its kernels.

    Returns:
        [{"part", "seconds", "peak_bytes"}], the last one for the rest of the step.
    """
    steps = [event for event in events if event.name == STEP and event.device == "cpu"]
    memory = [event for event in events if event.name == MEMORY and event.device == device]
    times, totals = np.array([e.start for e in memory]), np.cumsum([0] + [e.num_bytes for e in memory])
    # Spans on the CPU say when a part ran; where the device has spans of its own, these are its kernels.
    parts, rest = [], sum(step.end - step.start for step in steps) / len(steps)
    for part in PARTS:
        spans = [event for event in events if event.name == part]
        spans = [span for span in spans if span.device == device] or spans
        seconds = sum(span.end - span.start for span in spans) / len(steps)
        peaks = [_peak(span, steps, times, totals) for span in spans if span.device == "cpu"]
        parts.append({"part": part, "seconds": seconds, "peak_bytes": int(max(peaks, default=0))})
        rest -= seconds
    return [*parts, {"part": OTHER, "seconds": max(0.0, rest), "peak_bytes": 0}]


def collective_seconds(events: list[Event]) -> float:
    """Seconds of collective operations, waiting for other ranks included."""
    return sum(event.end - event.start for event in events if event.name.startswith(COLLECTIVES))


def _peak(span: Event, steps: list[Event], times: np.ndarray, totals: np.ndarray) -> int:
    """Peak bytes in use during `span` above those at the start of its step; `totals` is one longer than `times`."""
    begin = max((step.start for step in steps if step.start <= span.start), default=span.start)
    before, first, last = np.searchsorted(times, [begin, span.start, span.end])
    return int(totals[first : last + 1].max() - totals[before])


def operators_of(recorded: torch_profile, num_steps: int) -> list[dict[str, Any]]:
    """The operators with the largest time of their own: calls, seconds and allocated bytes per step."""
    found = [entry for entry in recorded.key_averages() if entry.key not in (STEP, MEMORY, *PARTS)]
    found = [entry for entry in found if not entry.is_user_annotation]
    seconds = {id(entry): (entry.self_device_time_total or entry.self_cpu_time_total) / 1e6 for entry in found}
    found.sort(key=lambda entry: seconds[id(entry)], reverse=True)
    return [
        {
            "operator": entry.key,
            "calls": entry.count / num_steps,
            "seconds": seconds[id(entry)] / num_steps,
            "bytes": max(entry.self_cpu_memory_usage, entry.self_device_memory_usage, 0) / num_steps,
        }
        for entry in found[:NUM_OPERATORS]
    ]


if __name__ == "__main__":
    main(profile)
