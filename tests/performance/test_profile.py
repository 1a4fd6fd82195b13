import json
import re
from pathlib import Path
from typing import Any

import pytest

from ups.config import Parameters
from ups.evaluation.styles import png
from ups.performance.profile import MEMORY, PARTS, STEP, Event, collective_seconds, parts_of, peak_bytes
from ups.performance.report import profile_figure, profile_text
from ups.pipelines.performance import profile_operator

Profile = tuple[dict[str, Any], str, dict[str, bytes]]


def _events() -> list[Event]:
    """Two steps of 10 s: 1 s data, 4 s forward that allocates 100, 3 s backward that frees it after 50 more."""
    events = []
    for begin in (0.0, 10.0):
        spans = (STEP, 0, 10), ("data", 0, 1), ("forward", 1, 5), ("backward", 6, 9)
        events += [Event(name, begin + start, begin + end, 0, "cpu") for name, start, end in spans]
        allocated = (2, 100), (6.5, 50), (8, -150)
        events += [Event(MEMORY, begin + time, begin + time, count, "cpu") for time, count in allocated]
    return sorted(events, key=lambda event: event.start)


def test_parts_add_up_to_a_step():
    """Time per step of each part; what is in none of them is `other`."""
    parts = {entry["part"]: entry["seconds"] for entry in parts_of(_events(), "cpu")}
    assert parts == {"data": 1, "forward": 4, "exchange": 0, "backward": 3, "update": 0, "other": 2}


def test_parts_have_the_peak_of_their_memory():
    """A peak is above what was in use when the step began."""
    peaks = {entry["part"]: entry["peak_bytes"] for entry in parts_of(_events(), "cpu")}
    assert (peaks["data"], peaks["forward"], peaks["backward"]) == (0, 100, 150)
    assert peak_bytes(_events(), "cpu") == 150


def test_collectives_are_counted_apart():
    """All-reduce and all-gather count on any device, and no other event does."""
    events = [Event("gloo:all_reduce", 6, 8, 0, "cpu"), Event("nccl:all_gather", 1, 1.5, 0, "cuda"), *_events()]
    assert collective_seconds(events) == 2.5


@pytest.fixture(scope="module")
def profiled(latents: tuple[Path, dict[str, Any]], parameters: Parameters) -> Profile:
    """What the node returns for two ranks."""
    root, receipts = latents
    launch = parameters.launch.model_copy(update={"num_processes": 2})
    return profile_operator(receipts["latent_cache"], parameters.operator, parameters.profile, launch, root)


@pytest.mark.slow
def test_the_trace_has_every_part(profiled: Profile):
    """The trace is one of Chrome's and names each part once per step at least."""
    names = [event.get("name") for event in profiled[0]["traceEvents"]]
    assert all(names.count(part) >= 2 for part in (STEP, *PARTS))
    assert json.dumps(profiled[0], allow_nan=False)


@pytest.mark.slow
def test_the_profile_is_reported(profiled: Profile):
    """The table has all parts and some operators, and the figure is a page."""
    _, text, figure = profiled
    assert all(f"| {part} " in text for part in PARTS)
    assert "`aten::" in text and "rank 0 of 2 on cpu" in text and "Collectives take" in text
    assert png(figure).startswith(b"\x89PNG")


def test_a_profile_without_memory_is_drawn():
    """Parts that allocate nothing, or take no time, do not break table or figure."""
    found = {"parts": parts_of([Event(STEP, 0, 1, 0, "cpu")], "cpu"), "operators": []}
    found |= {"steps": 1, "world_size": 1, "device": "cpu"}
    assert "| other | 1000.00 | 100.0% | |" in re.sub(" +", " ", profile_text(found, "operator"))
    assert png(profile_figure(found, "operator")).startswith(b"\x89PNG")
