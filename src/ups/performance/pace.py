"""Pace: seconds per training step of several stages, measured alternately on this machine.

The pace turns a time budget into a number of steps: baselines get the training time of our models, independent
of other load on the machine during their training.
"""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ups.config import AblationConfig, BaselinesConfig, LaunchConfig
from ups.config.baselines import Candidate, Kind
from ups.config.training import TrainingSection
from ups.files import read_json, write_json
from ups.runs.machine import training_device
from ups.runs.run import REQUEST, RESULT, Run
from ups.runs.stage_cache import Receipt, cached_step, fingerprint
from ups.runs.torchrun import run_query
from ups.training.batches import Batches
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.stages import STAGES
from ups.training.update import Update
from ups.training.worker import main

PACE_WORKER = "ups.performance.pace"
SPEED_OPTIONS = {  # of `LaunchConfig`, on which the time per step depends
    "num_processes", "num_nodes", "threads_per_process", "device", "sharding", "exchange_precision", "compile",
    "activation_checkpointing", "deterministic",
}  # fmt: skip
# Steps are timed after these fractions of a training: with `unroll` a later step costs more than an earlier one.
TIMED_FRACTIONS = (0.125, 0.375, 0.625, 0.875)


def seconds_per_step(
    step: str,
    stages: dict[str, dict[str, Any]],
    config: AblationConfig | BaselinesConfig,
    launch: LaunchConfig,
    data_root: Path,
    raw: Path | None = None,
) -> Receipt:
    """Measure the pace of `stages`, {name: {"stage", "config", "inputs"}}, unless the measurement is up to date.

    A stage that was trained also has "num_steps", of which early stopping leaves fewer than configured, its
    "validations", losses by key, on which the share of each key depends with `max_difficulty`, and its "cpu_seconds",
    which differ after another training, so that the pace is measured again.

    Returns:
        The receipt of step `step`, with {"seconds_per_step": {name: seconds}}.
    """
    request = {"seconds": config.pace_seconds, "rounds": config.pace_rounds, "stages": stages}
    identity = fingerprint(PACE_WORKER, None, request | {"launch": launch.model_dump(include=SPEED_OPTIONS)})

    def measure(folder: Path) -> dict[str, Any]:
        first = next(iter(stages.values()))  # a worker process needs one stage to start with; `request` has all
        for each in stages.values():
            where = training_device(launch, each["stage"], each["config"]["precision"])
        run = Run(folder, first["stage"], identity, first["config"], first["inputs"], launch, where, data_root, raw)
        return {"seconds_per_step": run_query(PACE_WORKER, run, request)}

    where = data_root / "06_models" / "pace"
    return cached_step(step, where, identity, measure, root=data_root)


def pace_name(kind: Kind, family: str, candidate: Candidate) -> str:
    """For instance fno/burgers_1d for the configured sizes, fno/burgers_1d/modes+1 for more modes."""
    changed = (f"{name}{power:+d}" for name, power in candidate.items() if name != "learning_rate" and power)
    return "/".join((kind, family, *changed))


def clock_of(device: str) -> Callable[[], float]:
    """The clock of training steps, in seconds: on a CPU that of this process, which stands while other programs run."""
    return time.perf_counter if device == "cuda" else time.process_time


class PaceTimer:
    """Times training steps of a stage: for every key (family, or field group of the codec) one per timed fraction.

    The first step of each key is taken here and not timed, because it may compile.
    """

    def __init__(
        self,
        stage: Stage,
        config: TrainingSection,
        num_steps: int,
        run: Run,
        ranks: Ranks,
        validations: Sequence[dict[str, float]] = (),
    ) -> None:
        self.learning_rate, self.clock = config.learning_rate, clock_of(ranks.device.type)
        parts = (stage, config, run, ranks, Injection(run.folder, ranks.rank))
        self.update, self.batches = Update(*parts), Batches(*parts, validations)
        starts = [int(fraction * num_steps) for fraction in TIMED_FRACTIONS]
        self.steps = [step for start in starts for step in self.batches.first_of_each_key(start)]
        self.seconds(1)

    def seconds(self, repeats: int) -> list[float]:
        """Seconds of each timed step, the mean over `repeats` repetitions."""
        return [self._seconds_of(step, repeats) for step in self.steps]

    def expected(self, seconds: list[float]) -> float:
        """Expected seconds of a step of the training: the mean over timed fractions and, by probability, over keys."""
        weights = map(self._weight, self.steps)
        return sum(weight * each for weight, each in zip(weights, seconds, strict=True))

    def _weight(self, step: int) -> float:
        """Of a timed step: the probability of its key at that time, shared by the timed fractions."""
        sampler = self.batches.sampler
        key, _ = sampler.draw(step)
        return float(sampler.probabilities(step)[sampler.keys.index(key)]) / len(TIMED_FRACTIONS)

    def _seconds_of(self, step: int, repeats: int) -> float:
        started = self.clock()
        for _ in range(repeats):
            outcome = self.update(self.batches.read(step), self.learning_rate, stop=False, save=False)
        if outcome.loss is not None:
            outcome.loss.item()  # waits until a GPU has finished
        return (self.clock() - started) / repeats


def pace(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Write the result {name: seconds per step}, the median over rounds in which the stages alternate.

    The request is {"seconds": of each stage per round, "rounds", "stages": {name: {"stage", "config", "inputs"}}}.
    """
    request = read_json(run.folder / REQUEST)
    timers = {name: _timer(asked, run, ranks) for name, asked in request["stages"].items()}
    repeats = {
        name: ranks.broadcast(max(1, round(request["seconds"] / sum(timer.seconds(1)))))
        for name, timer in timers.items()
    }
    measured: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(request["rounds"]):
        for name, timer in timers.items():
            run.alive(ranks.rank).touch()
            measured[name].append(timer.expected(timer.seconds(repeats[name])))
    if ranks.rank == 0:
        write_json(run.folder / RESULT, {name: median(seconds) for name, seconds in measured.items()})
    ranks.barrier()


def _timer(asked: dict[str, Any], run: Run, ranks: Ranks) -> PaceTimer:
    run.alive(ranks.rank).touch()
    entry = STAGES[asked["stage"]]
    config = entry.config(**asked["config"])
    own_run = replace(run, stage=asked["stage"], config=asked["config"], inputs=asked["inputs"])
    num_steps = asked.get("num_steps", config.steps)
    stage = entry.build(config, own_run)
    return PaceTimer(stage, config, num_steps, own_run, ranks, asked.get("validations", ()))


if __name__ == "__main__":
    main(pace)
