"""Learning from few."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.jobs import RECIPE, adapt_section
from ups.config.studies import AdaptConfig
from ups.errors import DataFault, Diverged
from ups.files import WEIGHTS
from ups.models.codec import codec_from
from ups.models.operator import Operator
from ups.models.weights import from_settings, load_model
from ups.surrogate.surrogate import Surrogate
from ups.training import adaptation
from ups.training.adaptation import (
    adapt,
    before_training,
    best_trial,
    solve_head,
    train_and_save,
    train_best,
    train_from,
    trial_error,
)
from ups.training.examples import Trajectories, encode
from ups.training.starts import Start, rollout_error, scratch, starts

Few = dict[str, Trajectories]


@pytest.mark.parametrize("family", ["advection_1d", "darcy_2d"])
def test_it_learns(surrogate: Surrogate, trajectories: Few, family: str):
    """Some steps from random weights lower the error on the trajectories, of time steps and of steady solutions."""
    few, config = trajectories[family], adapt_section(steps=60)
    start = scratch(surrogate, few, config)
    trained = train_from(start, few, config, rate=0.01)
    assert rollout_error(start.codec, trained, few) < 0.8 * rollout_error(start.codec, start.model, few)


def test_a_rate_that_destroys_the_weights_is_a_fault(surrogate: Surrogate, trajectories: Few):
    """Weights that are no longer finite are not returned, even if the last check was before."""
    few, config = trajectories["advection_1d"], adapt_section(recipe=RECIPE | {"validate_every": 100}, steps=20)
    with pytest.raises(Diverged, match="lower adapt.learning_rates"):
        train_from(scratch(surrogate, few, config), few, config, rate=1e30)


def test_the_average_of_short_trainings_forgets_the_start(
    surrogate: Surrogate, trajectories: Few, monkeypatch: pytest.MonkeyPatch
):
    """It moves by (1 + n) / (10 + n) of the distance after n updates: with 0.99, 37 % of 100 steps were the start."""
    few, decays = trajectories["advection_1d"], []
    config = adapt_section(recipe=RECIPE | {"ema_decay": 0.25}, steps=5)
    monkeypatch.setattr(adaptation, "_average", lambda average, model, decay: decays.append(decay))
    train_from(scratch(surrogate, few, config), few, config, rate=0.001)
    assert decays == pytest.approx([1 / 10, 2 / 11, 3 / 12, 0.25, 0.25])


def test_the_start_is_left_alone(surrogate: Surrogate, trajectories: Few):
    """Neither the surrogate nor the start change, so that trials do not disturb each other."""
    few, config = trajectories["advection_1d"], adapt_section()
    assert surrogate.operator is not None
    before = {name: value.clone() for name, value in surrogate.operator.state_dict().items()}
    *_, start, _ = starts(surrogate, few, config)
    assert start.solves_head
    weights = {name: value.clone() for name, value in start.model.state_dict().items()}
    train_best([start], few, config)
    assert all(torch.equal(before[name], value) for name, value in surrogate.operator.state_dict().items())
    assert all(torch.equal(weights[name], value) for name, value in start.model.state_dict().items())


def test_the_same_seed_gives_the_same_weights(surrogate: Surrogate, trajectories: Few):
    """Training is a function of its inputs, whatever the state of torch's random numbers."""
    few, config, found = trajectories["advection_1d"], adapt_section(), []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(train_best([scratch(surrogate, few, config)], few, config).model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_trials_choose(surrogate: Surrogate, trajectories: Few):
    """A learning rate that destroys the network loses against one that does not."""
    few = trajectories["advection_1d"]
    config = adapt_section(learning_rates=[1e6, 0.003], steps=60)
    start = scratch(surrogate, few, config)
    _, rate, error = best_trial([start], few, config)
    assert rate == 0.003 and error < trial_error(start, few, config, 0.0)


def test_a_network_that_training_makes_worse_stays_as_it_is(surrogate: Surrogate, trajectories: Few):
    """Where every learning rate is harmful, the result is the best start before training."""
    few, config = trajectories["advection_1d"], adapt_section(learning_rates=[1e6])
    candidates = starts(surrogate, few, config)
    trained = train_best(candidates, few, config)
    expected, _ = before_training(trained.start, few, config, config.training(0.1))
    assert trained.learning_rate == 0.0
    assert trained.trial_error == min(trial_error(start, few, config, 0.0) for start in candidates)
    for name, value in expected.state_dict().items():
        assert torch.equal(trained.model.state_dict()[name], value)


@pytest.mark.parametrize(("fraction", "count", "held"), [(0.4, 6, 2), (0.25, 3, 1), (0.1, 3, 1), (0.9, 3, 2)])
def test_a_trial_is_a_training_on_a_part(
    surrogate: Surrogate, trajectories: Few, fraction: float, count: int, held: int
):
    """Its error is that of the trajectories that it held out, the first ones: at least one, and not all."""
    few, config = trajectories["advection_1d"].of(slice(count)), adapt_section(valid_fraction=fraction)
    start = scratch(surrogate, few, config)
    model = train_from(start, few.of(slice(held, None)), config, rate=0.003)
    expected = rollout_error(start.codec, model, few.of(slice(held)))
    assert trial_error(start, few, config, 0.003) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "separate_fields"), [("advection_1d", False), ("compressible_ns_1d", True), ("darcy_2d", False)]
)
def test_a_head_that_made_the_examples_is_found(
    surrogate: Surrogate, trajectories: Few, family: str, separate_fields: bool
):
    """From another head least squares lead back to the one that predicts all examples exactly."""
    start = scratch(surrogate, trajectories[family], adapt_section())
    model = _with_separate_fields(start) if separate_fields else start.model
    model.statistics.limits, head = False, model.mixer.head.requires_grad_(False)
    if isinstance(model, Operator):
        assert separate_fields or (model.persistence.gains[:, 0] < 0.99).any()
        model.conserved.zero_()
    nn.init.normal_(head.weights[0], generator=torch.Generator().manual_seed(0))
    examples = encode(start.codec, trajectories[family])
    (batch,) = examples.spread(64, 64)
    inputs = (batch.z, batch.coefficients, batch.condition, batch.domain)
    channels = batch.z.shape[-1]
    exact = model(*inputs)[..., :channels].detach()
    made = torch.stack([batch.z, exact], 1)[:, examples.is_steady :]
    head.weights[0].mul_(-0.5)
    head.biases[0].add_(0.3)
    errors = [(model(*inputs)[..., :channels] - exact).square().mean()]
    solve_head(model, replace(examples, z=made, coefficients=batch.coefficients))
    errors.append((model(*inputs)[..., :channels] - exact).square().mean())
    assert errors[1] < 1e-6 * errors[0]


def _with_separate_fields(start: Start) -> Operator:
    """An operator with random weights and the statistics of a start, in whose trunk a token holds one field."""
    backbone = start.settings["backbone"] | {"separate_fields": True, "head_channels": 4}
    model = from_settings(Operator)(start.settings["sizes"], backbone)
    model.statistics.load_state_dict(start.model.statistics.state_dict())
    return model


def test_the_best_untrained_start_is_found(surrogate: Surrogate, trajectories: Few):
    """The four states of a trained network and random weights differ before training; their order does not matter."""
    few, config = trajectories["compressible_ns_1d"], adapt_section(learning_rates=[1e6])
    candidates = starts(surrogate, few, config)
    errors = [trial_error(start, few, config, 0.0) for start in candidates]
    assert len(set(errors)) == 5
    for order in (candidates, candidates[::-1]):
        start, rate, _ = best_trial(order, few, config)
        assert start is candidates[errors.index(min(errors))] and rate == 0.0


@pytest.mark.parametrize("of_untrained", [1.0, 0.01])
@pytest.mark.parametrize("best", range(5))
def test_starts_and_rates_are_compared_in_trials(
    monkeypatch: pytest.MonkeyPatch, surrogate: Surrogate, trajectories: Few, best: int, of_untrained: float
):
    """Every start untrained and at the first learning rate; the best one at rates beside, until none is better.

    The best untrained start wins if training makes none as good.
    """
    few, tried = trajectories["advection_1d"], []
    config = adapt_section(learning_rates=[0.01, 0.003, 0.001, 0.02, 0.0003])
    candidates = starts(surrogate, few, config)
    places = {id(start): place for place, start in enumerate(candidates)}
    assert [start.donor for start in candidates] == ["advection_1d"] * 4 + [None]

    def error(start: Start, _: Trajectories, __: AdaptConfig, rate: float) -> float:
        tried.append((places[id(start)], rate))
        at_rate = {0.0: of_untrained, 0.02: 0.9, 0.01: 0.7, 0.003: 0.5, 0.001: 0.6, 0.0003: 0.1}[rate]
        is_best = places[id(start)] == (best if rate else 4 - best)
        return at_rate * (1 if is_best else 2)

    monkeypatch.setattr(adaptation, "trial_error", error)
    start, rate, found = best_trial(candidates, few, config)
    chosen, at, lowest = (4 - best, 0.0, 0.01) if of_untrained < 0.1 else (best, 0.003, 0.5)
    assert (places[id(start)], rate, found) == (chosen, at, lowest)
    assert tried[:10] == [(place, rate) for rate in (0.0, 0.01) for place in range(5)]
    assert tried[10:] == [(best, 0.003), (best, 0.02), (best, 0.001)]  # a better one further off is not found


def test_one_trajectory_is_refused(surrogate: Surrogate, trajectories: Few):
    """Trials need another one to compare with."""
    few = trajectories["advection_1d"].of(slice(1))
    with pytest.raises(DataFault, match="at least 2 trajectories, got 1"):
        adapt(surrogate, few, adapt_section())


def test_data_that_are_not_finite_are_told(surrogate: Surrogate, trajectories: Few):
    """A loss that is not finite in every trial is a fault with a remedy."""
    few = trajectories["advection_1d"]
    broken = replace(few, u=few.u * float("nan"))
    for candidates in (starts(surrogate, few, adapt_section()), [scratch(surrogate, few, adapt_section())]):
        with pytest.raises(Diverged, match="no trial is finite"):
            best_trial(candidates, broken, adapt_section())


@pytest.mark.parametrize("donor", [None, "other", "compressible_ns_1d"])
def test_a_surrogate_and_its_gain_are_returned(surrogate: Surrogate, trajectories: Few, donor: str | None):
    """The result predicts the family; its gain is a ratio of the errors of two trials."""
    few, config = trajectories["advection_1d"], adapt_section(donor=donor)
    gain = adapt(surrogate, few, config)
    adapted, random = starts(surrogate, few, config), [scratch(surrogate, few, config)]
    expected = best_trial(adapted, few, config).error / best_trial(random, few, config).error
    assert gain.over_scratch == pytest.approx(expected)
    assert gain.surrogate.operator is not None and list(gain.surrogate.operator.rows) == ["advection_1d"]


def test_what_is_saved_is_what_was_trained(surrogate: Surrogate, trajectories: Few, tmp_path: Path):
    """Receipts name codec and network below the data root, and loading them gives the same predictions."""
    few, config = trajectories["advection_1d"], adapt_section()
    (tmp_path / "a").mkdir()
    saved = train_and_save(tmp_path / "a", "adapted", surrogate, few, config, tmp_path)
    codec = load_model(codec_from, tmp_path, saved["stages"]["codec"])
    operator = load_model(from_settings(Operator), tmp_path, saved["stages"]["operator"])
    trained = train_best(starts(surrogate, few, config), few, config)
    assert rollout_error(codec, operator, few) == rollout_error(trained.start.codec, trained.model, few)
    assert (tmp_path / saved["stages"]["operator"]["path"] / WEIGHTS).is_file()
    assert saved["donor"] == "advection_1d" and saved["learning_rate"] == trained.learning_rate
