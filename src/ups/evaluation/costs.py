"""Costs of every method: seconds of training, parameters, and milliseconds per predicted snapshot.

Times are measured alternately on the same trajectories, together with the numerical solver that simulates the data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.data.families import base_of
from ups.data.latent_cache import LatentCache
from ups.diffusion import independent
from ups.evaluation.external import baseline_surrogate
from ups.evaluation.predictions import Compute, Stepper, steppers
from ups.evaluation.scores import TrajectorySet, batches, held_out
from ups.evaluation.tables import STRONG, geometric_mean
from ups.files import WEIGHTS, place_of
from ups.models.weights import load
from ups.runs.machine import in_turns
from ups.runs.run import training_cpu_seconds, training_seconds
from ups.solvers import SIMULATED_FAMILIES, sample_initial_states, solve
from ups.surrogate.surrogate import Surrogate, rollout
from ups.surrogate.trained import PLAIN_STAGES, Trained
from ups.training.stages import stages_behind

NUM_ROUNDS = 5
NUM_TRAJECTORIES = 4
ALL_AT_ONCE = 2**62  # tokens: all trajectories in one batch
PER_SNAPSHOT = "milliseconds_per_snapshot"
OURS = ("operator", "diffusion", "consistency", "steady")

Run = Callable[[], object]


def total_costs(
    trained: Trained,
    baselines: dict[str, dict[str, dict[str, Any]]],
    identity_codec: dict[str, Any],
    fields: LatentCache,
    device: str,
    raw: Path,
    *,
    compiled: bool,
) -> dict[str, Any]:
    """Costs of each method in training, size and prediction.

    `baselines` are receipts by kind and family, trained on the latents `fields` of `identity_codec`, the codec with one
    token per grid point. With `compiled` the operator and the steady model are compiled before times are measured.

    Returns:
        - "methods": {method: {"training_seconds", "parameters", "datasets", "milliseconds_per_snapshot", "over_fno",
          "speed_up_over_solver"}}; the last three are geometric means over the "datasets" that the method predicts.
          Training and parameters include the stages that a method builds on: the codec, for correctors the operator
          and the steady model;
        - "training": {"ours" or kind: {"wall", "cpu"}}, in seconds, without the correctors;
        - "milliseconds_per_snapshot": {dataset: {method or "solver": value}};
        - "compiled".
    """
    ours, where = trained.surrogate(device), torch.device(device)
    if compiled:
        ours.compile()
    on_grid = {each.dataset.name: each for each in held_out(fields, raw, "test")}
    times_by_dataset: dict[str, dict[str, float]] = {}
    for trajectory_set in held_out(trained.cache(), raw, "test"):
        name, family = trajectory_set.dataset.name, trajectory_set.dataset.family
        of_family = {
            kind: baseline_surrogate(family, receipts[family], identity_codec, device, trained.data_root)
            for kind, receipts in baselines.items()
            if family in receipts
        }
        times_by_dataset[name] = milliseconds_per_snapshot(ours, trajectory_set, of_family, on_grid[name], where)
    folder_of = partial(place_of, trained.data_root)
    folders = {name: list(map(folder_of, receipts.values())) for name, receipts in baselines.items()}
    known = {name: folder_of(receipt) for name, receipt in trained.stages.items()}
    folders |= {method: [known[s] for s in known if s in stages_behind(method)] for method in OURS}
    methods = {
        method: {
            "training_seconds": sum(map(training_seconds, paths)),
            "parameters": sum(v.numel() for folder in paths for v in load(folder / WEIGHTS)["weights"].values()),
            **snapshot_costs(method, [times for times in times_by_dataset.values() if method in times]),
        }
        for method, paths in folders.items()
        if any(method in times for times in times_by_dataset.values())
    }
    paths_of = {"ours": [known[stage] for stage in PLAIN_STAGES if stage in known]} | {k: folders[k] for k in baselines}
    clocks = {"wall": training_seconds, "cpu": training_cpu_seconds}
    training = {name: {k: sum(map(f, paths)) for k, f in clocks.items()} for name, paths in paths_of.items()}
    return {"methods": methods, "training": training, PER_SNAPSHOT: times_by_dataset, "compiled": compiled}


def ratio_of_times(training: dict[str, dict[str, float]], shares: dict[str, float]) -> float:
    """The largest ratio between CPU seconds of our models and of FNO and U-Net, each divided by its time share."""
    seconds = [training["ours"]["cpu"], *(training[kind]["cpu"] / shares[kind] for kind in STRONG)]
    return max(seconds) / min(seconds)


def snapshot_costs(method: str, times_of_datasets: list[dict[str, float]]) -> dict[str, float | None]:
    """Geometric means over the datasets that a method predicts; ratios are of times on the same dataset."""
    speed_ups = [times["solver"] / times[method] for times in times_of_datasets if "solver" in times]
    return {
        "datasets": len(times_of_datasets),
        PER_SNAPSHOT: geometric_mean([times[method] for times in times_of_datasets]),
        "over_fno": geometric_mean([times[method] / times["fno"] for times in times_of_datasets]),
        "speed_up_over_solver": geometric_mean(speed_ups),
    }


@torch.no_grad()
def milliseconds_per_snapshot(
    ours: Surrogate,
    trajectory_set: TrajectorySet,
    baselines: dict[str, Surrogate],
    on_grid: TrajectorySet,
    device: torch.device,
) -> dict[str, float]:
    """Times per method, and of the `solver` if there is one, on the first trajectories of a set, decoding included.

    `on_grid` is the same set with one token per grid point, for the baselines. Correctors predict one member.
    """
    indices = trajectory_set.indices[:NUM_TRAJECTORIES]
    contenders = _rollouts("", ours, replace(trajectory_set, indices=indices), device)
    for name, surrogate in baselines.items():
        contenders |= _rollouts(name, surrogate, replace(on_grid, indices=indices), device)
    if base_of(trajectory_set.dataset.family) in SIMULATED_FAMILIES:
        contenders["solver"] = _solution(trajectory_set)
    num_snapshots = max(1, len(trajectory_set.dataset.times) - 1) * len(indices)
    return {name: 1e3 * seconds / num_snapshots for name, seconds in in_turns(contenders, NUM_ROUNDS, device).items()}


def _rollouts(name: str, surrogate: Surrogate, trajectory_set: TrajectorySet, device: torch.device) -> dict[str, Run]:
    """A rollout of each method of a surrogate; that of a baseline gets its own `name`."""
    batch = next(batches(surrogate, trajectory_set, ALL_AT_ONCE, Compute(device, memory=0), num_members=1))
    setting, num_steps = batch.setting, max(1, len(trajectory_set.dataset.times) - 1)
    z_0 = next(batch.slabs(surrogate.encode)).z_ref[:, 0]

    def run(stepper: Stepper) -> Tensor:
        return surrogate.decode(rollout(stepper.start(setting), z_0, num_steps), setting.family)

    normal = independent(torch.Generator(device).manual_seed(0))
    found = steppers(surrogate, setting.family, 1, lambda _: normal)
    return {name or method: partial(run, each) for method, each in found.items()}


def _solution(trajectory_set: TrajectorySet) -> Run:
    """The numerical solution of as many trajectories in one batch, from initial states of its own."""
    dataset, family = trajectory_set.dataset, base_of(trajectory_set.dataset.family)
    count = range(min(NUM_TRAJECTORIES, len(trajectory_set.indices)))
    u_0, sampled = sample_initial_states(family, count, dataset.grid, 0, dataset.parameters)
    times = dataset.times if len(dataset.times) > 1 else (0.0,)
    return lambda: solve(family, u_0, {**dataset.parameters, **sampled}, times)
