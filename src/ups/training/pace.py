"""Worker that asks how long the steps of several stages take, in turns, so that a busy machine slows all alike."""

from ups.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import time
from dataclasses import replace
from statistics import median
from typing import Any

from ups.config import TrainingSection
from ups.files import read_json, write_json
from ups.jobs import ANSWER, QUESTION
from ups.run import Run
from ups.training.batches import Batches
from ups.training.distributed import Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.train import STAGES, main
from ups.training.update import Update

SHARES = (0.125, 0.375, 0.625, 0.875)


class Contender:
    """A stage that takes training steps of every key in turn; the first of each, which may compile, is over.

    Of every key steps are taken after several shares of the training: those that unroll cost more than those before.
    """

    def __init__(self, stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
        self.learning_rate = config.learning_rate
        inject = Injection(run.folder, ranks.rank)
        self.update, self.batches = (
            Update(stage, config, run, ranks, inject),
            Batches(stage, config, run, ranks, inject),
        )
        starts = [int(share * config.steps) for share in SHARES]
        self.steps = [step for start in starts for step in self.batches.first_of_each_key(start)]
        self.seconds(1)

    def seconds(self, repeats: int) -> list[float]:
        """How long each of the steps takes, the mean over `repeats` of it."""
        return [self._seconds_of(step, repeats) for step in self.steps]

    def expected(self, seconds: list[float]) -> float:
        """The mean over training, in which some keys are drawn more often than others."""
        sampler = self.batches.sampler
        drawn = dict(zip(sampler.keys, sampler.probabilities, strict=True))
        weights = [float(drawn[sampler.draw(step)[0]]) / len(SHARES) for step in self.steps]
        return sum(weight * each for weight, each in zip(weights, seconds, strict=True))

    def _seconds_of(self, step: int, repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            outcome = self.update(self.batches.read(step), self.learning_rate, stop=False, save=False)
        if outcome.loss is not None:
            outcome.loss.item()  # a GPU has now finished
        return (time.perf_counter() - started) / repeats


def pace(stage: Stage, config: TrainingSection, run: Run, ranks: Ranks) -> None:
    """Answer {name: seconds per step}, the median over rounds, for the stages that `question.json` describes.

    Steps of several keys differ by far, those of one as the training unrolls: every key is timed at several shares of
    the training, and weighted by how often it is drawn.

    {"seconds": of steps per round, "rounds": of turns, "stages": {name: {"stage", "config", "inputs"}}}.
    """
    question = read_json(run.folder / QUESTION)
    contenders = {name: _contender(asked, run, ranks) for name, asked in question["stages"].items()}
    repeats = {
        name: ranks.from_first(max(1, round(question["seconds"] / sum(contender.seconds(1)))))
        for name, contender in contenders.items()
    }
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(question["rounds"]):
        for name, contender in contenders.items():
            run.alive(ranks.rank).touch()
            measured[name].append(contender.expected(contender.seconds(repeats[name])))
    if ranks.rank == 0:
        write_json(run.folder / ANSWER, {name: median(seconds) for name, seconds in measured.items()})
    ranks.barrier()


def _contender(asked: dict[str, Any], run: Run, ranks: Ranks) -> Contender:
    run.alive(ranks.rank).touch()
    config_class, build = STAGES[asked["stage"]]
    config = config_class(**asked["config"])
    its_run = replace(run, stage=asked["stage"], config=asked["config"], inputs=asked["inputs"])
    return Contender(build(config, its_run), config, its_run, ranks)


if __name__ == "__main__":
    main(pace)
