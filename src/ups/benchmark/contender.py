"""One contender: a stage trained in its own way, some steps at a time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ups.benchmark.fields import FieldSteps
from ups.config import TrainingSection
from ups.data.loader import Batch, Samples
from ups.data.samples import LatentSamples
from ups.models.codec import codec_from
from ups.models.weights import load_model
from ups.run import CHECKPOINTS, Run, append_metrics
from ups.training.batches import Batches, Share
from ups.training.checkpoints import Checkpoints
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.profile import events_of, peak_bytes, record
from ups.training.progress import Progress
from ups.training.train import STAGES
from ups.training.update import Outcome, Update

WARM_UP = 3


@dataclass(frozen=True)
class Variant:
    """How a contender differs from the stage as it is configured and launched.

    It sees `families` only and computes with so many `threads`. `alone`: rank 0 takes the whole batch. `foreach`: AdamW
    as a list of tensor operations, not fused. `trains` not: batches are delivered and thrown away. `saves`: in each
    round it does what a training run does between two checkpoints. `is_weighed`: its memory is measured as well.
    """

    families: tuple[str, ...]
    threads: int
    config: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    foreach: bool = False
    prefetch: bool = True
    on_the_fly: bool = False
    trains: bool = True
    saves: bool = False
    is_weighed: bool = False


class Chosen:
    """Samples of some keys only."""

    def __init__(self, samples: Samples, keys: tuple[str, ...]) -> None:
        self.samples, self.keys = samples, keys

    @property
    def num_samples(self) -> dict[str, int]:
        return {key: count for key, count in self.samples.num_samples.items() if key in self.keys}

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Some of them at random."""
        return self.samples.draw(key, size, rng)

    def dataset(self, key: str, sample: int) -> str:
        """The dataset that a sample is from."""
        return self.samples.dataset(key, sample)

    def load(self, key: str, samples: np.ndarray) -> Batch:
        """These samples."""
        return self.samples.load(key, samples)


class Contender:
    """A model of its own with its optimizer and batches; all contenders see the same batches in the same order."""

    def __init__(self, variant: Variant, run: Run, ranks: Ranks) -> None:
        self.variant, self.run, self.ranks = variant, run, Ranks(0, 1, ranks.device) if variant.alone else ranks
        config_class, build = STAGES[run.stage]
        self.config: TrainingSection = config_class(**run.config | variant.config)
        torch.manual_seed(self.config.seed)
        stage = build(self.config, run)
        tokens = {key: count for key, count in stage.num_tokens.items() if key in variant.families}
        train = Chosen(_on_the_fly(stage.train, run) if variant.on_the_fly else stage.train, variant.families)
        launch = run.launch.model_copy(update=variant.launch)
        own = replace(run, launch=launch)
        parts = (replace(stage, train=train, num_tokens=tokens), self.config, own, self.ranks, Injection(run.folder, 0))
        self.update, self.batches = Update(*parts), Batches(*parts)
        if variant.foreach:
            self.update.optimizer = Foreach(self.update.optimizer.parts.values())
        self.saving = Saving(self, run.launch.checkpoint_steps // self.config.log_every) if variant.saves else None
        self.step = 0

    def warm_up(self) -> float:
        """Take steps until every family was seen; the seconds of one step from then on."""
        torch.set_num_threads(self.variant.threads)
        unseen = set(self.variant.families)
        while unseen or self.step < WARM_UP:
            unseen -= {self._take().key}
        started = time.perf_counter()
        for _ in range(WARM_UP):
            self._take()
        self._synchronize()
        return (time.perf_counter() - started) / WARM_UP

    def round(self, num_steps: int) -> dict[str, float]:
        """Seconds, seconds spent waiting for data, and samples of all ranks, of so many more steps."""
        torch.set_num_threads(self.variant.threads)
        waited = samples = 0.0
        started = time.perf_counter()
        if self.saving:
            self.saving.begin()
        for done in range(num_steps):
            before = time.perf_counter()
            share = self._next()
            waited += time.perf_counter() - before
            outcome = self._train(share)
            samples += share.size
            if self.saving and outcome:
                self.saving.after(share, outcome, done, num_steps)
        if self.saving:
            self.saving.end()
        self._synchronize()
        return {"seconds": time.perf_counter() - started, "waited": waited, "samples": samples, "steps": num_steps}

    def peak_bytes(self) -> int:
        """The most memory that a step takes on top of weights, gradients and states."""
        recorded = record(self._take, self.ranks.device)
        return peak_bytes(events_of(recorded), self.ranks.device.type)

    def _take(self) -> Share:
        share = self._next()
        self._train(share)
        return share

    def _next(self) -> Share:
        self.step += 1
        return self.batches.next() if self.variant.prefetch else self.batches.read(self.step - 1)

    def _train(self, share: Share) -> Outcome | None:
        if not self.variant.trains:
            return None
        return self.update(share, self.config.learning_rate, stop=False, save=False)

    def _synchronize(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()


class Foreach:
    """The same AdamW, but as operations on lists of tensors; it cannot skip a step."""

    def __init__(self, fused: Iterable[torch.optim.Optimizer]) -> None:
        options = ("params", "lr", "betas", "eps", "weight_decay")
        groups = [[{name: group[name] for name in options} for group in one.param_groups] for one in fused]
        self.members = [torch.optim.AdamW(group, foreach=True) for group in groups]

    def step(self, learning_rate: float, skip: torch.Tensor) -> None:
        """One step of every member."""
        for member in self.members:
            for group in member.param_groups:
                group["lr"] = learning_rate
            member.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for member in self.members:
            member.zero_grad(set_to_none=True)


class Saving:
    """What a training run does between two checkpoints: one save, and `num_logs` times metrics on a line."""

    def __init__(self, contender: Contender, num_logs: int) -> None:
        run, device = contender.run, contender.ranks.device
        self.contender, self.num_logs = contender, num_logs
        self.progress = Progress(run.stage, device)
        self.checkpoints = Checkpoints(run.folder / CHECKPOINTS, run.launch.keep_checkpoints)

    def begin(self) -> None:
        """Start to write a checkpoint."""
        state = {"update": self.contender.update.state(), "progress": self.progress.state(self.contender.ranks)}
        self.checkpoints.save(self.contender.step, state)

    def after(self, share: Share, outcome: Outcome, done: int, num_steps: int) -> None:
        """Count a step, and log as often as is spread evenly over the steps of a round."""
        self.progress.add(outcome, share)
        if (done + 1) * self.num_logs // num_steps > done * self.num_logs // num_steps:
            contender = self.contender
            metrics = self.progress.metrics(contender.update, contender.config, contender.ranks)
            append_metrics(contender.run.folder, share.step, metrics)

    def end(self) -> None:
        """Wait until the checkpoint is on disk."""
        self.checkpoints.wait()


def _on_the_fly(steps: LatentSamples, run: Run) -> FieldSteps:
    assert run.raw is not None
    codec = load_model(codec_from, run.data_root, run.inputs["codec"])
    return FieldSteps(steps, codec, run.raw, run.inputs["datasets"]["datasets"])
