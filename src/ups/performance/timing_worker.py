"""Worker of `kedro run --pipeline benchmark`: times two setups of a stage alternately in one process group.

A setup is a stage with its own configuration, launch and data path; it is trained some steps at a time.
"""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import gc
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ups.config.training import TrainingSection
from ups.data.samples import LatentSamples
from ups.files import read_json, write_json
from ups.models.codec import codec_from
from ups.models.weights import load_model
from ups.performance.profile import events_of, peak_bytes, record
from ups.runs.processes import now
from ups.runs.run import CHECKPOINTS, REQUEST, RESULT, Run, append_metrics
from ups.training.batches import Batches, Share
from ups.training.checkpoints import Checkpoints
from ups.training.distributed import Ranks
from ups.training.history import TrainingHistory
from ups.training.injection import Injection
from ups.training.inputs import encoder
from ups.training.stage import Stage
from ups.training.stages import STAGES
from ups.training.update import StepResult, Update
from ups.training.worker import main

SIDES = ("value", "baseline")
NUM_WARMUP_STEPS = 3


@dataclass(frozen=True)
class Setup:
    """How a timed training differs from the stage as it is configured and launched.

    - `families`: it trains on these only; `threads`: intra-op threads of torch
    - `config`, `launch`: overrides of the stage's section and of the section `launch`
    - `rank_0_only`: rank 0 takes the whole batch, the other ranks wait
    - `exchange`: false: ranks train on their shares of a batch and never communicate
    - `foreach_adamw`: AdamW as operations on lists of tensors instead of the fused kernel
    - `prefetch`: batches are read ahead by a thread
    - `encode_on_the_fly`: batches are read from raw files and encoded, instead of read from the latent cache
    - `train`: false only loads the batches
    - `save_and_log`: each round also writes the checkpoint and the metrics of one checkpoint interval
    - `measure_memory`: the peak memory of a step is measured after the last round
    """

    families: list[str]
    threads: int
    config: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    rank_0_only: bool = False
    exchange: bool = True
    foreach_adamw: bool = False
    prefetch: bool = True
    encode_on_the_fly: bool = False
    train: bool = True
    save_and_log: bool = False
    measure_memory: bool = False


class TimedTraining:
    """A model with its optimizer and batches; under every setup the batches are the same and in the same order."""

    def __init__(self, setup: Setup, run: Run, ranks: Ranks) -> None:
        alone = Ranks(0, 1, ranks.device)
        self.setup, self.run, self.ranks = setup, run, alone if setup.rank_0_only else ranks
        entry = STAGES[run.stage]
        self.config: TrainingSection = entry.config(**run.config | setup.config)
        torch.manual_seed(self.config.seed)
        stage = entry.build(self.config, run)
        assert isinstance(stage.train, LatentSamples)
        samples = stage.train.only(*setup.families)
        tokens = {family: stage.num_tokens[family] for family in samples.families}
        train = encoded_on_the_fly(samples, run) if setup.encode_on_the_fly else samples
        own = replace(run, launch=run.launch.model_copy(update=setup.launch))
        stage, inject = replace(stage, train=train, num_tokens=tokens), Injection(run.folder, 0)
        self.update = Update(stage, self.config, own, self.ranks if setup.exchange else alone, inject)
        self.batches = Batches(stage, self.config, own, self.ranks, inject)
        if setup.foreach_adamw:
            self.update.optimizer = ForeachAdamW(self.update.optimizer.parts.values())
        num_logs = run.launch.checkpoint_steps // self.config.log_every
        self.interval = CheckpointInterval(self, num_logs) if setup.save_and_log else None
        self.step = 0

    def warm_up(self) -> float:
        """Take steps until every family had one, because its first step may compile; then the seconds of one step."""
        torch.set_num_threads(self.setup.threads)
        unseen = set(self.setup.families)
        while unseen or self.step < NUM_WARMUP_STEPS:
            unseen -= {self._take_step().key}
        started = time.perf_counter()
        for _ in range(NUM_WARMUP_STEPS):
            self._take_step()
        return (now(self.ranks.device) - started) / NUM_WARMUP_STEPS

    def round(self, num_steps: int) -> dict[str, float]:
        """Take `num_steps` steps.

        Returns:
            {"seconds", "waited": seconds of waiting for data, "samples": of all ranks, "steps"}.
        """
        torch.set_num_threads(self.setup.threads)
        waited = samples = 0.0
        started = time.perf_counter()
        if self.interval:
            self.interval.begin()
        for done in range(num_steps):
            before = time.perf_counter()
            share = self._next_share()
            waited += time.perf_counter() - before
            outcome = self._train_on(share)
            samples += share.size
            if self.interval and outcome:
                self.interval.after_step(share, outcome, done, num_steps)
        if self.interval:
            self.interval.checkpoints.wait()  # until the checkpoint is on disk
        seconds = now(self.ranks.device) - started
        return {"seconds": seconds, "waited": waited, "samples": samples, "steps": num_steps}

    def peak_bytes(self) -> int:
        """Peak memory of a step above what is in use before it: weights, averages and optimizer states."""
        recorded = record(self._take_step, self.ranks.device)
        return peak_bytes(events_of(recorded), self.ranks.device.type)

    def _take_step(self) -> Share:
        share = self._next_share()
        self._train_on(share)
        return share

    def _next_share(self) -> Share:
        self.step += 1
        return self.batches.next() if self.setup.prefetch else self.batches.read(self.step - 1)

    def _train_on(self, share: Share) -> StepResult | None:
        if not self.setup.train:
            return None
        return self.update(share, self.config.learning_rate, stop=False, save=False)


class ForeachAdamW:
    """The AdamW of the training, but with `foreach=True`, which cannot skip a step."""

    def __init__(self, fused: Iterable[torch.optim.Optimizer]) -> None:
        options = ("params", "lr", "betas", "eps", "weight_decay")
        groups = [{name: group[name] for name in options} for one in fused for group in one.param_groups]
        self.optimizer = torch.optim.AdamW(groups, foreach=True)
        self.zero_grad = self.optimizer.zero_grad

    def step(self, learning_rate: float, skip: torch.Tensor) -> None:
        """One step; `skip` is ignored."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


class CheckpointInterval:
    """What a training run writes between two checkpoints: one checkpoint, and `num_logs` lines of metrics."""

    def __init__(self, training: TimedTraining, num_logs: int) -> None:
        run = training.run
        self.training, self.num_logs = training, num_logs
        self.progress = TrainingHistory(run.stage, training.ranks.device)
        self.checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.launch.keep_checkpoints)

    def begin(self) -> None:
        """Start to write a checkpoint."""
        state = {"update": self.training.update.state(), "progress": self.progress.state(self.training.ranks)}
        self.checkpoints.save(self.training.step, state)

    def after_step(self, share: Share, outcome: StepResult, done: int, num_steps: int) -> None:
        """Count a step, and write the lines of metrics that are due: they are evenly distributed over a round."""
        self.progress.add(outcome, share)
        for _ in range(done * self.num_logs // num_steps, (done + 1) * self.num_logs // num_steps):
            training = self.training
            metrics = self.progress.metrics(training.update, training.config, training.ranks)
            append_metrics(training.run.folder, share.step, metrics)


def encoded_on_the_fly(samples: LatentSamples, run: Run) -> LatentSamples:
    """The same samples, but read from raw files, normalized and encoded when a batch is loaded."""
    codec = load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"])
    return samples.reading(samples.cache.encoded_by(encoder(codec, torch.device("cpu"))))


def time_comparisons(_: Stage, __: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Write the result {comparison: {"value" or "baseline": {"rounds", "peak_bytes", "eager_because"}}} of rank 0.

    The request is {"comparisons": {name: {"value", "baseline": arguments of `Setup`}}, "rounds", "seconds_per_round"}.
    The stage that `main` has built is not used: every setup builds its own.
    """
    request = read_json(run.folder / REQUEST)
    result = {}
    for name, comparison in request["comparisons"].items():
        result[name] = _time_both([Setup(**comparison[side]) for side in SIDES], request, run, ranks)
    if ranks.rank == 0:
        write_json(run.folder / RESULT, result)
    ranks.barrier()


def _time_both(setups: list[Setup], request: dict[str, Any], run: Run, ranks: Ranks) -> dict[str, Any]:
    """Rounds of both setups with the same number of steps; their order alternates between rounds."""
    trainings = [None if setup.rank_0_only and ranks.rank else TimedTraining(setup, run, ranks) for setup in setups]
    rounds: list[list[dict[str, float]]] = [[], []]
    with ExitStack() as prefetching:
        for training in filter(None, trainings):
            prefetching.enter_context(training.batches.from_step(0))
        num_steps = 1
        for training in trainings:
            run.alive(ranks.rank).touch()
            seconds = training.warm_up() if training else 0.0
            # The number for the baseline, which comes last, is used for both.
            num_steps = ranks.broadcast(max(1, round(request["seconds_per_round"] / max(seconds, 1e-6))))
        # A collection of garbage during one of the rounds would count against its setup.
        gc.collect()
        gc.freeze()
        for number in range(request["rounds"]):
            for position in (0, 1) if number % 2 == 0 else (1, 0):
                run.alive(ranks.rank).touch()
                ranks.barrier()
                training = trainings[position]
                if training is not None:
                    rounds[position].append(training.round(num_steps))
        peaks = [each.peak_bytes() if each and each.setup.measure_memory else None for each in trainings]
    gc.unfreeze()
    if any(training and training.update.eager_because is None for training in trainings):
        torch.compiler.reset()  # graphs of this comparison must not count towards the recompile limit of the next
    reasons = [training.update.eager_because if training else None for training in trainings]
    measured = zip(SIDES, rounds, peaks, reasons, strict=True)
    return {side: {"rounds": taken, "peak_bytes": peak, "eager_because": why} for side, taken, peak, why in measured}


if __name__ == "__main__":
    main(time_comparisons)
