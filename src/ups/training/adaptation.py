"""Learn from few: a trained surrogate is adapted to some trajectories of new data, in one process and in memory.

Short trials on a part of the trajectories, scored by rollouts of the others, choose where the training starts and its
learning rate; the training then uses all of them.
"""

import copy
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ups.config.studies import AdaptConfig, AdaptTraining
from ups.errors import DataFault, Diverged
from ups.files import WEIGHTS, digest_of
from ups.surrogate.surrogate import Surrogate
from ups.training.checkpoints import publish_tensors
from ups.training.distributed import Draw
from ups.training.examples import Examples, Trajectories, encode
from ups.training.optimizers import learning_rate, make_optimizer
from ups.training.stage import Loss, batch_size
from ups.training.stages.operator import step_loss, store_validation_error
from ups.training.stages.steady import steady_loss
from ups.training.starts import Start, fno_scratch, rollout_error, scratch, starts, surrogate_of

METHODS = ("adapted", "scratch", "fno")
CHECKED_STEPS = 64  # time steps on which the validation error is measured that scales the noise of training


@dataclass(frozen=True)
class Adapted:
    """A trained model of a family and what was chosen; `trial_error` is the nRMSE of the best trial."""

    family: str
    start: Start
    model: nn.Module
    learning_rate: float
    trial_error: float

    @property
    def surrogate(self) -> Surrogate:
        """The model as a surrogate of its family."""
        return surrogate_of(self.start.codec, self.model, self.family)


@dataclass(frozen=True)
class Gain:
    """A surrogate of one family adapted to new data; `over_scratch` compares rollouts it was not trained on.

    It is the nRMSE of the best trial from the trained weights over that of the best trial from random ones, both of
    equal length: below 1 the trained weights help. `settings` are the constructor arguments of the network.
    """

    surrogate: Surrogate
    settings: dict[str, Any]
    donor: str | None
    learning_rate: float
    over_scratch: float


def adapt(surrogate: Surrogate, trajectories: Trajectories, config: AdaptConfig) -> Gain:
    """Adapt a surrogate to trajectories, and say what its weights gain over random ones.

    Raises:
        ConfigFault: there is no donor, or no trained model.
        DataFault: fewer than two trajectories.
        Diverged: no learning rate gives finite errors.
    """
    adapted = train_best(starts(surrogate, trajectories, config), trajectories, config)
    _, _, error = best_trial([scratch(surrogate, trajectories, config)], trajectories, config)
    start = adapted.start
    return Gain(adapted.surrogate, start.settings, start.donor, adapted.learning_rate, adapted.trial_error / error)


def train_and_save(
    folder: Path, method: str, surrogate: Surrogate, trajectories: Trajectories, config: AdaptConfig, data_root: Path
) -> dict[str, Any]:
    """Train `adapted`, `scratch` or `fno`; codec and network are written into `folder`, their receipts returned.

    Raises as `adapt`.
    """
    if method == "adapted":
        candidates = starts(surrogate, trajectories, config)
    elif method == "scratch":
        candidates = [scratch(surrogate, trajectories, config)]
    else:
        assert config.fno is not None
        candidates = [fno_scratch(trajectories, config.fno.model_dump(), config)]
    trained = train_best(candidates, trajectories, config)
    codec, start = trained.start.codec, trained.start
    groups = {"groups": {name: asdict(group) for name, group in codec.groups.items()}}
    stage = "steady" if trajectories.family.steady else "operator"
    receipts = {}
    for name, settings, model in (("codec", groups, codec), (stage, start.settings, trained.model)):
        (folder / name).mkdir(exist_ok=True)
        path = folder / name / WEIGHTS
        publish_tensors(path, {"settings": settings, "weights": model.state_dict()})
        receipts[name] = {"stage": name, "path": str(path.parent.relative_to(data_root)), "weights": digest_of(path)}
    chosen = {"donor": start.donor, "learning_rate": trained.learning_rate, "trial_error": trained.trial_error}
    return {"method": method, "stages": receipts} | chosen


def train_best(candidates: list[Start], trajectories: Trajectories, config: AdaptConfig) -> Adapted:
    """Train from the start and with the learning rate of the best trial, on all trajectories; raises as `adapt`."""
    start, rate, error = best_trial(candidates, trajectories, config)
    model = train_from(start, trajectories, config, config.training(config.steps, rate))
    return Adapted(trajectories.family.name, start, model, rate, error)


def best_trial(candidates: list[Start], trajectories: Trajectories, config: AdaptConfig) -> tuple[Start, float, float]:
    """Start and learning rate with the lowest rollout error after a trial, and that error.

    A donor is chosen with the first learning rate. Trials see a part of the trajectories, their error is of the others.
    """
    count = len(trajectories.u)
    if count < 2:
        raise DataFault(f"{trajectories.dataset.name}: adapting needs at least 2 trajectories, got {count}")
    kept = count - max(1, round(config.valid_fraction * count))
    part, valid = trajectories.of(slice(kept)), trajectories.of(slice(kept, count))

    def error(start: Start, rate: float) -> float:
        section = config.training(config.trial_steps, rate)
        try:
            found = rollout_error(start.codec, train_from(start, part, config, section), valid)
        except Diverged:
            return math.inf
        return found if math.isfinite(found) else math.inf

    first, *others = config.learning_rates
    errors = {(index, first): error(start, first) for index, start in enumerate(candidates)}
    chosen, _ = min(errors, key=errors.__getitem__)
    errors |= {(chosen, rate): error(candidates[chosen], rate) for rate in others}
    index, rate = min(errors, key=errors.__getitem__)
    if not math.isfinite(errors[index, rate]):
        raise Diverged(f"{trajectories.dataset.name}: no trial is finite; lower adapt.learning_rates")
    return candidates[index], rate, errors[index, rate]


def train_from(start: Start, trajectories: Trajectories, config: AdaptConfig, section: AdaptTraining) -> nn.Module:
    """The model of a start, trained on trajectories, and on their images where `config.symmetries` says so."""
    shown = trajectories.mirrored() if config.symmetries else trajectories
    return fit(copy.deepcopy(start.model), encode(start.codec, shown), section)


def fit(model: nn.Module, examples: Examples, config: AdaptTraining) -> nn.Module:
    """Train `model` in place; returns the moving average of its weights.

    Raises:
        Diverged: a loss is not finite.
    """
    model.requires_grad_(True).train()
    average, optimizer = copy.deepcopy(model).requires_grad_(False), make_optimizer(model, config)
    family, device = examples.domain.family, examples.z.device
    loss = steady_loss if examples.is_steady else step_loss(model.statistics, config)
    size = batch_size(config.batch_tokens, examples.z.shape[2], config.batch_multiple)
    rng, never = np.random.default_rng(config.seed), torch.zeros((), device=device)
    for step in range(config.steps):
        if step % config.validate_every == 0:
            error = _validation_error(average, loss, examples, config.seed)
            for each in (model, average):
                store_validation_error(each, {family: error})
        batch = examples.draw(size, config.unroll.horizon, rng)
        draw = Draw((config.seed, 2, step), size, slice(0, size), device, step)
        value = loss(model, batch, draw).mean()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step(learning_rate(config, step), never)
        _average(average, model, config.ema_decay)
    return average.eval()


def _validation_error(model: nn.Module, loss: Loss, examples: Examples, seed: int) -> float:
    batch = examples.spread(CHECKED_STEPS)
    size = len(batch.z)
    with torch.no_grad():
        error = loss(model, batch, Draw((seed, 3), size, slice(0, size), batch.z.device)).mean().item()
    if not math.isfinite(error):
        raise Diverged(f"adapting to {examples.domain.family}: the loss is not finite; lower adapt.learning_rates")
    return error


@torch.no_grad()
def _average(average: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
