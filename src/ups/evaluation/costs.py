"""What a predicted frame costs: every method and the solver that made the data, in turns on the same trajectories."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ups.data.latent_cache import LatentCache
from ups.diffusion.samplers import independent
from ups.emulator import Emulator, Setting
from ups.evaluation import PLAIN_STAGES
from ups.evaluation.baselines import grid_emulator
from ups.evaluation.evaluate import Subject, batches, held_out
from ups.evaluation.markdown import geometric_mean
from ups.evaluation.predict import corrected_stepper, correctors, initial_state, plain_method, plain_stepper, targets
from ups.evaluation.score import Trained
from ups.files import WEIGHTS
from ups.models.weights import load
from ups.rollout import rollout
from ups.run import training_seconds
from ups.solvers import SIMULATED_FAMILIES, draw, solve

NUM_ROUNDS = 5
NUM_TRAJECTORIES = 4
ALL_AT_ONCE = 2**62
FRAME = "milliseconds_per_frame"
STAGES_OF = {
    "operator": ("codec", "operator"),
    "diffusion": ("codec", "operator", "steady", "diffusion"),
    "consistency": ("codec", "operator", "steady", "diffusion", "consistency"),
    "steady": ("codec", "steady"),
}

Predict = Callable[[], object]


def total_costs(
    trained: Trained,
    baselines: dict[str, dict[str, dict[str, Any]]],
    points: dict[str, Any],
    fields: LatentCache,
    device: str,
    raw: Path,
    *,
    compiled: bool,
) -> dict[str, Any]:
    """What training, keeping and using each method costs.

    Receipts of `baselines` are by kind and family. With `compiled` operator and steady model are, for the times.

    Returns:
        - "methods": {method: {"training_seconds", "parameters", "datasets", "milliseconds_per_frame", "over_fno",
          "speed_up_over_solver"}}; the last three are geometric means over the datasets that the method is for, so
          many of them. What a method trains on is counted: the corrector's operator and steady model, their codec;
        - "training_seconds": {"ours" or kind: seconds}, without the corrector's;
        - "milliseconds_per_frame": {dataset: {method or "solver": value}};
        - "compiled".
    """
    ours, where = trained.emulator(device), torch.device(device)
    if compiled:
        ours.compile()
    on_grid = {subject.dataset.name: subject for subject in held_out(fields, raw, "test")}
    frames: dict[str, dict[str, float]] = {}
    for subject in held_out(trained.cache(), raw, "test"):
        name, family = subject.dataset.name, subject.dataset.family
        references = {
            kind: grid_emulator(family, receipts[family], points, device, trained.data_root)
            for kind, receipts in baselines.items()
        }
        frames[name] = milliseconds_per_frame(ours, subject, references, on_grid[name], where)
    folders = {name: [trained.data_root / r["path"] for r in receipts.values()] for name, receipts in baselines.items()}
    known = {n: trained.data_root / r["path"] for n, r in trained.stages.items()}
    folders |= {method: [known[s] for s in stages if s in known] for method, stages in STAGES_OF.items()}
    methods = {
        method: {
            "training_seconds": _seconds(paths),
            "parameters": sum(_num_parameters(folder) for folder in paths),
            **frame_costs(method, [times for times in frames.values() if method in times]),
        }
        for method, paths in folders.items()
        if any(method in times for times in frames.values())
    }
    seconds = {"ours": _seconds([known[stage] for stage in PLAIN_STAGES if stage in known])}
    seconds |= {kind: _seconds(folders[kind]) for kind in baselines}
    return {"methods": methods, "training_seconds": seconds, FRAME: frames, "compiled": compiled}


def _seconds(folders: list[Path]) -> float:
    return sum(training_seconds(folder) for folder in folders)


def frame_costs(method: str, frames: list[dict[str, float]]) -> dict[str, float | None]:
    """Of a method, on the datasets that it is for; ratios are of times on the same dataset."""
    return {
        "datasets": len(frames),
        FRAME: geometric_mean([times[method] for times in frames]),
        "over_fno": geometric_mean([times[method] / times["fno"] for times in frames]),
        "speed_up_over_solver": geometric_mean(
            [times["solver"] / times[method] for times in frames if "solver" in times]
        ),
    }


def _num_parameters(folder: Path) -> int:
    return sum(value.numel() for value in load(folder / WEIGHTS)["weights"].values())


@torch.no_grad()
def milliseconds_per_frame(
    ours: Emulator, subject: Subject, baselines: dict[str, Emulator], on_grid: Subject, device: torch.device
) -> dict[str, float]:
    """Of every method on the first trajectories of a subject, decoded and per trajectory; `solver` where there is one.

    `on_grid` is the same subject for the baselines, which are in the operator's or the steady model's place. Diffusion
    and consistency: one member.
    """
    chosen = subject.trajectories[:NUM_TRAJECTORIES]
    contenders = _rollouts("", ours, replace(subject, trajectories=chosen), device)
    for name, emulator in baselines.items():
        contenders |= _rollouts(name, emulator, replace(on_grid, trajectories=chosen), device)
    if subject.dataset.family in SIMULATED_FAMILIES:
        contenders["solver"] = _solution(subject)
    num_frames = max(1, len(subject.dataset.times) - 1) * len(chosen)
    return {name: 1e3 * seconds / num_frames for name, seconds in in_turns(contenders, NUM_ROUNDS, device).items()}


def in_turns(contenders: dict[str, Predict], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each over rounds; one round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + rounds):
        for name, predict in contenders.items():
            started = time.perf_counter()
            predict()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(times[1:]) for name, times in seconds.items()}


def _rollouts(name: str, emulator: Emulator, subject: Subject, device: torch.device) -> dict[str, Predict]:
    """A rollout of each method of an emulator; a baseline's is called by its own `name`."""
    u_ref, setting = next(batches(emulator, subject, ALL_AT_ONCE, device))
    z_0, num_steps = initial_state(emulator, u_ref, setting.family), targets(u_ref, setting.family).shape[1]
    steppers = {name or plain_method(setting.family): plain_stepper(emulator)}
    for method in correctors(emulator):
        correction = emulator.corrections.get((method, setting.family))
        if correction is not None:
            generator = torch.Generator(device).manual_seed(0)
            steppers[method] = corrected_stepper(emulator, method, correction, 1, independent(generator))

    def rolling(step_of: Callable[[Setting], Callable[[Tensor], Tensor]]) -> Predict:
        return lambda: emulator.decode(rollout(step_of(setting), z_0, num_steps)[:, 1:], setting.family)

    return {method: rolling(stepper.step_of) for method, stepper in steppers.items()}


def _solution(subject: Subject) -> Predict:
    """As many trajectories from fresh initial states, in one go, as the data were made."""
    dataset, family = subject.dataset, subject.dataset.family
    own = {"mach": dataset.parameters.get("mach")} if family.startswith("compressible") else {}
    count = range(min(NUM_TRAJECTORIES, len(subject.trajectories)))
    u_0, drawn = draw(family, count, dataset.grid, 0, **own)
    times = dataset.times if len(dataset.times) > 1 else (0.0,)
    return lambda: solve(family, u_0, {**dataset.parameters, **drawn}, times)
