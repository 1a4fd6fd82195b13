"""Learn from few: a trained surrogate is adapted to some trajectories of new data, in one process and in memory.

Trials on some trajectories, scored by rollouts of the others, choose the start and its learning rate, or no training.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ups.config.studies import AdaptConfig, AdaptTraining
from ups.data.samples import LatentBatch
from ups.errors import DataFault, Diverged
from ups.files import WEIGHTS, digest_of
from ups.models.blocks import split_fields
from ups.models.operator import Operator
from ups.surrogate.surrogate import Surrogate
from ups.training.checkpoints import publish_tensors
from ups.training.distributed import Draw
from ups.training.examples import Examples, Trajectories, encode
from ups.training.optimizers import learning_rate, make_optimizer
from ups.training.stage import Loss, batch_size
from ups.training.stages.operator import step_loss, store_validation_error
from ups.training.stages.steady import steady_loss
from ups.training.starts import Model, Start, fno_scratch, rollout_error, scratch, starts, surrogate_of

METHODS = ("adapted", "scratch", "fno")
CHECKED_STEPS = 64  # time steps on which the validation error is measured that scales the noise of training
SOLVED_STEPS = 512  # time steps for which a head is solved, `CHECKED_STEPS` at once
RIDGE = 1e-5


class Trial(NamedTuple):
    """What was tried and its `trial_error`; at the learning rate 0 the start is not trained."""

    start: Start
    rate: float
    error: float


@dataclass(frozen=True)
class Adapted:
    """A model of a family and what was chosen; `trial_error` is the nRMSE of the best trial, of held-out trajectories.

    The learning rate 0 means that no trial was better than no training, so that the model is not trained.
    """

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

    It is the nRMSE of the best trial over that of the best one from random weights: below 1 trained weights help.
    `settings` are the constructor arguments of the network.
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
    start, error = adapted.start, adapted.trial_error
    random = [scratch(surrogate, trajectories, config)]
    of_random = error if start.donor is None else best_trial(random, trajectories, config).error
    return Gain(adapted.surrogate, start.settings, start.donor, adapted.learning_rate, error / of_random)


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
        candidates = [fno_scratch(surrogate, trajectories, config)]
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
    model = train_from(start, trajectories, config, rate)
    return Adapted(trajectories.family.name, start, model, rate, error)


def best_trial(candidates: list[Start], trajectories: Trajectories, config: AdaptConfig) -> Trial:
    """The trial with the lowest error.

    Every start is tried without training (the rate 0) and at the first of the rates; the best of those that were
    trained also at the rates beside its best one, until none is better.

    Raises:
        DataFault: fewer than two trajectories.
        Diverged: no trial is finite.
    """
    dataset, count = trajectories.dataset, len(trajectories.u)
    if count < 2:
        raise DataFault(f"{dataset.name}: adapting needs at least 2 trajectories, got {count}")

    def tried(start: Start, rate: float) -> Trial:
        return Trial(start, rate, trial_error(start, trajectories, config, rate))

    by_error, rates, first = attrgetter("error"), sorted(config.learning_rates), config.learning_rates[0]
    untrained, best = (min((tried(start, rate) for start in candidates), key=by_error) for rate in (0.0, first))
    known, place = {first}, rates.index(first)
    while beside := set(rates[max(0, place - 1) : place + 2]) - known:
        best = min((best, *(tried(best.start, rate) for rate in sorted(beside))), key=by_error)
        known, place = known | beside, rates.index(best.rate)
    best = min(untrained, best, key=by_error)
    if not math.isfinite(best.error):
        raise Diverged(f"{dataset.name}: no trial is finite; lower adapt.learning_rates")
    return best


def trial_error(start: Start, trajectories: Trajectories, config: AdaptConfig, rate: float) -> float:
    """The nRMSE of rollouts of the fraction `config.valid_fraction` of the trajectories, after training on the others.

    A trial has as many steps as the training: in shorter ones other starts and rates are ahead than at the end.
    Infinite where it diverges.
    """
    count = len(trajectories.u)
    held = min(max(1, round(config.valid_fraction * count)), count - 1)
    try:
        model = train_from(start, trajectories.of(slice(held, None)), config, rate)
    except Diverged:
        return math.inf
    error = rollout_error(start.codec, model, trajectories.of(slice(held)))
    return error if math.isfinite(error) else math.inf


def train_from(start: Start, trajectories: Trajectories, config: AdaptConfig, rate: float) -> nn.Module:
    """The model of a start, trained on trajectories, and on their images where `config.symmetries` says so.

    With a learning `rate` of 0 it is the model `before_training`.
    """
    section = config.training(rate or config.learning_rates[0])
    model, examples = before_training(start, trajectories, config, section)
    return fit(model, examples, section) if rate else model


def before_training(
    start: Start, trajectories: Trajectories, config: AdaptConfig, section: AdaptTraining
) -> tuple[nn.Module, Examples]:
    """A copy of the model of a start, with its head solved if the start says so, and the examples to train it on."""
    shown = trajectories.mirrored() if config.symmetries else trajectories
    model = copy.deepcopy(start.model).eval()
    history = model.statistics.history.has(trajectories.family.name)
    examples = replace(encode(start.codec, shown), history=history)
    if start.solves_head:
        solve_head(model, examples)
    _measure_error((model,), examples, section)
    return model, examples


@torch.no_grad()
def solve_head(model: Model, examples: Examples) -> None:
    """Change the head of a model of one family so that its outputs for the examples have the least mean square error.

    W <- W + (X^T X + r t I)^-1 X^T (Y - X W), with the head's weights and biases W, its inputs X (one row per token, a
    1 appended), the outputs Y that would lead to the next state, r = `RIDGE` and t the mean of the diagonal of X^T X:
    ridge regression, which leaves the weights as they are where the examples do not ask for others.
    """
    head, sums = model.mixer.head, []
    for batch in examples.spread(SOLVED_STEPS, CHECKED_STEPS):
        x, y = _of_head(model, batch)
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        channels, outputs = x.shape[1] - 1, y.shape[1]
        weights, bias = head.weights[0][:channels, :outputs], head.biases[0][:outputs]
        sums.append((x.mT @ x, x.mT @ (y - x @ torch.cat([weights, bias[None]]).double())))
    gram, moments = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    change = torch.linalg.solve(gram + ridge, moments).float()
    weights += change[:-1]
    bias += change[-1]


def _of_head(model: Model, batch: LatentBatch) -> tuple[Tensor, Tensor]:
    """Inputs (M, C) of the head for a batch and the outputs (M, K) that it should have, in float64."""
    mixer, inputs = model.mixer, []
    hook = mixer.head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model(batch.state, batch.coefficients, batch.condition, batch.domain)
    hook.remove()
    y = batch.z_next
    if isinstance(model, Operator):
        y = model.wanted_output(batch.z, batch.z_next, batch.domain)
    if mixer.num_fields is not None:
        y = split_fields(y, 1, mixer.num_fields[0], y.shape[-1] // mixer.num_fields[0])
    return inputs[0].double().flatten(0, 1), y.double().flatten(0, 1)


def fit(model: nn.Module, examples: Examples, config: AdaptTraining) -> nn.Module:
    """Train `model` in place; returns the moving average of its weights, as `Update` takes it.

    Raises:
        Diverged: a loss is not finite.
    """
    model.requires_grad_(True).train()
    average, optimizer = copy.deepcopy(model).requires_grad_(False), make_optimizer(model, config)
    loss, device = _loss(model, examples, config), examples.z.device
    size = batch_size(config.batch_tokens, examples.z.shape[2], config.batch_multiple)
    rng, never = np.random.default_rng(config.seed), torch.zeros((), device=device)
    for step in range(config.steps):
        if step % config.validate_every == 0:
            _measure_error((average, model), examples, config)
        batch = examples.draw(size, config.unroll.of(examples.domain.family).horizon, rng)
        draw = Draw((config.seed, 2, step), size, slice(0, size), device, step)
        value = loss(model, batch, draw).mean()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step(learning_rate(config, step), never)
        _average(average, model, min(config.ema_decay, (1 + step) / (10 + step)))
    _measure_error((average,), examples, config)
    return average.eval()


def _loss(model: nn.Module, examples: Examples, config: AdaptTraining) -> Loss:
    return steady_loss if examples.is_steady else step_loss(model.statistics, config)


@torch.no_grad()
def _measure_error(models: Sequence[nn.Module], examples: Examples, config: AdaptTraining) -> None:
    """Store the validation error of the first of the models in all of them."""
    (batch,) = examples.spread(CHECKED_STEPS, CHECKED_STEPS)
    family, size = examples.domain.family, len(batch.z)
    draw = Draw((config.seed, 3), size, slice(0, size), batch.z.device)
    error = _loss(models[0], examples, config)(models[0], batch, draw).mean().item()
    if not math.isfinite(error):
        raise Diverged(f"adapting to {family}: the loss is not finite; lower adapt.learning_rates")
    for model in models:
        store_validation_error(model, {family: error})


@torch.no_grad()
def _average(average: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
