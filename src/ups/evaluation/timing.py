"""Wall-clock times of functions that are called alternately, so that other load on the machine slows all alike."""

import time
from collections.abc import Callable
from statistics import median

import torch


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, after all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds per call of each contender over `rounds`, after one round as warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + rounds):
        for name, run in contenders.items():
            started = now(device)
            run()
            seconds[name].append(now(device) - started)
    return {name: median(times[1:]) for name, times in seconds.items()}
