"""Worker of `kedro run --pipeline profile`: some steps of a stage under torch.profiler, summed up part by part."""

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from ups.config import ProfileConfig, TrainingSection
from ups.files import read_json, write_json
from ups.jobs import ANSWER, QUESTION
from ups.run import Run
from ups.training.batches import Batches
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.train import main
from ups.training.update import Update

TRACE = "trace.json"
STEP, PARTS = "step", ("data", "forward", "exchange", "backward", "update")
OTHER = "other"
COLLECTIVES = ("gloo:", "nccl:")
MEMORY = "[memory]"
TOP = 15


@dataclass(frozen=True)
class Event:
    """One entry of the profiler: start and end in seconds; `num_bytes` are allocated, or freed where negative."""

    name: str
    start: float
    end: float
    num_bytes: int
    device: str


def profile(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Answer {"parts", "collectives", "operators", "steps", "world_size", "device"} of what rank 0 records."""
    asked = ProfileConfig(**read_json(run.folder / QUESTION))
    inject = Injection.read(run.folder, ranks.rank)
    update = Update(stage, config, run, ranks, inject)
    batches = Batches(stage, config, run, ranks, inject)

    def step() -> None:
        run.alive(ranks.rank).touch()
        with record_function(STEP):
            update(batches.next(), config.learning_rate, stop=False, save=False)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()

    with batches.from_step(0):
        for _ in range(asked.warmup_steps):
            step()
        recorded = record(lambda: [step() for _ in range(asked.steps)], ranks.device) if ranks.rank == 0 else None
        if recorded is None:
            for _ in range(asked.steps):
                step()
    if recorded is not None:
        recorded.export_chrome_trace(str(run.folder / TRACE))
        events = events_of(recorded)
        answer = {
            "parts": parts_of(events, ranks.device.type),
            "collectives": collective_seconds(events) / asked.steps,
            "operators": operators_of(recorded, asked.steps),
        }
        size = {"steps": asked.steps, "world_size": ranks.world_size, "device": ranks.device.type}
        write_json(run.folder / ANSWER, answer | size)
    ranks.barrier()


def record(work: Callable[[], object], device: torch.device) -> torch_profile:
    """Do `work` under the profiler, with its allocations."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch_profile(activities=activities, profile_memory=True) as recorded:
        work()
    return recorded


def events_of(recorded: torch_profile) -> list[Event]:
    """All that was recorded, in order of time."""
    found = recorded.profiler.kineto_results.events()
    events = [
        Event(e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9, e.nbytes(), e.device_type().name.lower()) for e in found
    ]
    return sorted(events, key=lambda event: event.start)


def peak_bytes(events: list[Event], device: str) -> int:
    """The most memory in use on a device, above what was in use at the start."""
    totals = np.cumsum([event.num_bytes for event in events if event.name == MEMORY and event.device == device])
    return int(max(totals, default=0))


def parts_of(events: list[Event], device: str) -> list[dict[str, Any]]:
    """Per step the seconds in each part, and the peak of its memory above what was in use when the step began.

    On a GPU a part takes as long as its kernels. What belongs to no part is `other`.
    """
    steps = [event for event in events if event.name == STEP and event.device == "cpu"]
    memory = [event for event in events if event.name == MEMORY and event.device == device]
    times, totals = np.array([e.start for e in memory]), np.cumsum([0] + [e.num_bytes for e in memory])
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
    """Seconds during which ranks exchange, or wait to."""
    return sum(event.end - event.start for event in events if event.name.startswith(COLLECTIVES))


def _peak(span: Event, steps: list[Event], times: np.ndarray, totals: np.ndarray) -> int:
    """The most bytes in use during `span` above those at the start of its step; `totals` is one longer than `times`."""
    begin = max((step.start for step in steps if step.start <= span.start), default=span.start)
    before, first, last = np.searchsorted(times, [begin, span.start, span.end])
    return int(totals[first : last + 1].max() - totals[before])


def operators_of(recorded: torch_profile, num_steps: int) -> list[dict[str, Any]]:
    """The operators that take most time by themselves: calls, seconds and bytes allocated per step."""
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
        for entry in found[:TOP]
    ]


if __name__ == "__main__":
    main(profile)
