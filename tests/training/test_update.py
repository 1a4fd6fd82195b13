"""The optimizer step: what it moves, what a skipped one leaves alone, in how many parts it may be taken."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.jobs import section
from tests.training.toys import CPU, Points, ranks, toy_batches, toy_run, toy_stage, toy_update
from ups.errors import OutOfMemory
from ups.models.blocks import Blocks
from ups.training import parallel
from ups.training import update as update_module
from ups.training.distributed import Draw, Ranks
from ups.training.injection import Injection
from ups.training.update import CHECKED_STEPS, StepResult, Update

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
CPU_ALLOCATOR = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


def take(update: Update, folder: Path, *steps: int, **launch: int) -> list[StepResult]:
    """Take these steps."""
    batches = toy_batches(folder, **launch)
    return [update(batches.read(step), 0.01, stop=False, save=False) for step in steps]


def moved(update: Update) -> dict[str, Any]:
    """All that a step moves."""
    state = copy.deepcopy(update.state())
    del state["norms"]
    return state


def assert_equal(one: Any, other: Any) -> None:
    """Nested states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict | list):
        places = one.keys() if isinstance(one, dict) else range(len(one))
        assert len(one) == len(other)
        for place in places:
            assert_equal(one[place], other[place])
    else:
        assert one == other


def model_of(update: Update) -> torch.Tensor:
    """All weights in a row."""
    return torch.cat([parameter.detach().flatten() for parameter in update.model.parameters()])


@pytest.mark.parametrize("batch", [1, 3])
def test_operations_of_a_sample(batch: int, tmp_path: Path):
    """Counted are 2mn of both layers forward, for all weights backward and for the input of the second layer."""
    update, share = toy_update(tmp_path, section()), toy_batches(tmp_path).read(batch)
    before = moved(update)
    assert update.flops_per_sample(share) == 2 * (4 * 8 + 8 * 4) * 2 + 2 * 8 * 4
    assert_equal(before, moved(update))
    assert all(parameter.grad is None for parameter in update.model.parameters())


def test_a_step_moves_model_average_and_optimizer(tmp_path: Path):
    """A sound step changes all three and has a finite loss."""
    update = toy_update(tmp_path, section())
    before = moved(update)
    (result,) = take(update, tmp_path, 0)
    after = moved(update)
    assert result.loss.isfinite() and result.taken == 1
    for part in before:
        with pytest.raises(AssertionError):
            assert_equal(after[part], before[part])


def test_the_average_warms_up(tmp_path: Path):
    """After step k the average has moved to the weights by 1 - min(ema_decay, (1 + k) / (10 + k)) of the distance."""
    update = toy_update(tmp_path, section(ema_decay=0.15))
    for step, decay in enumerate([0.1, 0.15, 0.15]):
        before = [parameter.clone() for parameter in update.average.parameters()]
        take(update, tmp_path, step)
        for old, new, weight in zip(before, update.average.parameters(), update.model.parameters(), strict=True):
            torch.testing.assert_close(new, decay * old + (1 - decay) * weight)


def test_averages_warm_up_by_the_updates_of_their_parameter(tmp_path: Path):
    """Of a layer that only every second step moves, the average is as far as after half as many steps."""
    update = toy_update(tmp_path, section(ema_decay=0.9))

    def loss(model: nn.Sequential, batch: Points, draw: Draw) -> torch.Tensor:
        hidden = model[0](batch.x)
        return (hidden if draw.step % 2 else model[2](hidden)).square().mean(1)

    update.stage = replace(update.stage, loss=loss)
    for step, num_updates in enumerate([(0, 0), (1, None), (2, 1), (3, None), (4, 2)]):
        before = copy.deepcopy(update.average)
        take(update, tmp_path, step)
        for layer, n in zip((0, 2), num_updates, strict=True):
            decay = 1.0 if n is None else min(0.9, (1 + n) / (10 + n))
            for name, old in before[layer].named_parameters():
                new, weight = update.average[layer].get_parameter(name), update.model[layer].get_parameter(name)
                torch.testing.assert_close(new, decay * old + (1 - decay) * weight)
    assert update.state()["num_updates"] == [5, 5, 3, 3]


@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_gradient_not_fit_to_use_changes_no_bit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """NaN or a spike leaves model and optimizer state as they were, and counts."""
    monkeypatch.setattr(update_module, "SETTLED_STEPS", 3)
    update = toy_update(tmp_path, section(spike_factor=10.0), (kind, 5))
    take(update, tmp_path, *range(5))
    before = moved(update)
    (result,) = take(update, tmp_path, 5)
    after = moved(update)
    assert_equal([after["model"], after["optimizer"]], [before["model"], before["optimizer"]])
    assert (float(result.loss), float(result.taken)) == (0.0, 0.0)
    assert [float(value) for value in update.norms()[2:]] == [1.0, 5.0]


def test_the_first_of_several_skipped_steps_is_known(tmp_path: Path):
    """Of steps 1 and 3, whose gradients were unusable, there are two and the first is 1."""
    update = toy_update(tmp_path, section(), ("nan", 1), ("nan", 3))
    take(update, tmp_path, *range(5))
    assert [float(value) for value in update.norms()[2:]] == [2.0, 1.0]


def test_the_mean_norm_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settled after two steps, the mean of norms 1, 3, 6, 8 is 1, then 2, and then moves by half of the difference."""
    norms, means = iter([1.0, 3.0, 6.0, 8.0]), []
    monkeypatch.setattr(update_module, "SETTLED_STEPS", 2)
    monkeypatch.setattr(parallel, "clip_gradients", lambda *_: torch.tensor(next(norms)))
    update = toy_update(tmp_path, section(spike_factor=10.0))
    for step in range(4):
        take(update, tmp_path, step)
        means.append(float(update.mean_norm))
    assert means == [1.0, 2.0, 4.0, 6.0]


def test_the_norm_of_a_skipped_step_spoils_no_mean(tmp_path: Path):
    """The running mean of the gradient norm is that of the steps that were taken."""
    spoilt, sound = toy_update(tmp_path, section(), ("nan", 2)), toy_update(tmp_path, section())
    take(spoilt, tmp_path, 0, 1, 2)
    take(sound, tmp_path, 0, 1)
    assert_equal(spoilt.state()["norms"][:2], sound.state()["norms"][:2])


@pytest.mark.parametrize("error", [NO_MEMORY, CPU_ALLOCATOR])
@pytest.mark.parametrize("tokens", [None, 8])
def test_a_step_without_memory_changes_nothing(tmp_path: Path, error: RuntimeError, tokens: int | None):
    """A forward pass that finds no memory, in whole or in parts, gives the step up, and the next one is sound."""
    update, sound = (toy_update(tmp_path, section(), micro_batch_tokens=tokens) for _ in range(2))
    stage, calls = update.stage, []

    def loss(*arguments: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2 - (tokens is None):
            raise error
        return stage.loss(*arguments)

    update.stage = replace(stage, loss=loss)
    before = moved(update)
    (given_up,) = take(update, tmp_path, 0, micro_batch_tokens=tokens)
    assert_equal([given_up.loss, moved(update)], [None, before])
    take(update, tmp_path, 1, micro_batch_tokens=tokens)
    take(sound, tmp_path, 1, micro_batch_tokens=tokens)
    assert_equal(moved(update), moved(sound))


def test_no_memory_in_the_backward_pass_is_told(tmp_path: Path):
    """A backward pass cannot be given up: the fault has rank, tokens and remedy."""
    update, share = toy_update(tmp_path, section(), ("oom-backward", 0)), toy_batches(tmp_path).read(0)
    told = rf"{share.tokens} tokens of {share.key} .* rank 0 in the backward pass; set launch.micro_batch_tokens"
    with pytest.raises(OutOfMemory, match=told) as caught:
        take(update, tmp_path, 0)
    assert caught.value.tokens == share.tokens


def test_other_errors_are_not_taken_for_memory(tmp_path: Path):
    """An error of the model's is raised as it is."""
    update = toy_update(tmp_path, section(), ("oom-forward", 9))

    def loss(*_: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    update.stage = replace(update.stage, loss=loss)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        take(update, tmp_path, 0)


@pytest.mark.parametrize("tokens", [8, 24, 60])
def test_a_step_may_be_taken_in_parts(tmp_path: Path, tokens: int):
    """Gradients added up over micro-batches move the weights as those of the whole batch do, up to rounding."""
    whole, parts = toy_update(tmp_path, section()), toy_update(tmp_path, section(), micro_batch_tokens=tokens)
    expected = take(whole, tmp_path, *range(6))
    results = take(parts, tmp_path, *range(6), micro_batch_tokens=tokens)
    assert len(toy_batches(tmp_path, micro_batch_tokens=tokens).read(0).micro_batches) > 1
    torch.testing.assert_close([r.loss for r in results], [r.loss for r in expected])
    torch.testing.assert_close(model_of(parts), model_of(whole), rtol=1e-4, atol=1e-6)


def test_restored_state_goes_on_bit_for_bit(tmp_path: Path):
    """Steps after a restore are those that would have come without it."""
    update = toy_update(tmp_path, section())
    take(update, tmp_path, *range(4))
    state = copy.deepcopy(update.state())
    take(update, tmp_path, 4, 5)
    other = toy_update(tmp_path, section())
    take(other, tmp_path, 7)
    other.restore(state)
    take(other, tmp_path, 4, 5)
    assert_equal(other.state(), update.state())


class TwoExperts(nn.Module):
    """A linear map for each of two kinds of batches, and a scale for both."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        return self.scale * self.experts[kind](x)


@pytest.mark.parametrize("steps", [[0], [0, 0, 0]])
def test_an_unused_expert_rests(tmp_path: Path, steps: list[int]):
    """Weights, moments and average of an expert are after steps of others what they were, to the last bit."""
    update = toy_update(tmp_path, section())
    model, calls = TwoExperts(), iter([1, *steps, 1])

    def loss(_: nn.Module, batch: Any, draw: Any) -> torch.Tensor:
        return model(torch.ones(draw.size, 4), next(calls)).square().sum(1)

    stage = replace(update.stage, model=model, loss=loss)
    update = Update(stage, update.config, update.run, update.ranks, update.inject)
    take(update, tmp_path, 0)
    before = moved(update)
    take(update, tmp_path, *range(1, 1 + len(steps)))
    after = moved(update)
    for part in ("model", "average"):
        for name, value in after[part].items():
            assert torch.equal(value, before[part][name]) == name.startswith("experts.1"), (part, name)
    first, last = (state["optimizer"]["adamw"]["state"] for state in (before, after))
    assert_equal(last["experts.1.weight"], first["experts.1.weight"])
    assert "experts.0.weight" not in first and "experts.0.weight" in last


class Add(nn.Module):
    """A block that adds a linear map of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x + keep[:, None] * self.linear(x)


def test_skipped_blocks_follow_from_the_step(tmp_path: Path):
    """With drop path every step chooses anew, a repeated step chooses the same, and the average skips nothing."""
    stage = replace(toy_stage(), model=Blocks([Add(), Add()], drop_path=0.5))
    update = Update(stage, section(), toy_run(tmp_path), ranks(), Injection(tmp_path, 0))
    chosen = []
    for step in (0, 1, 0):
        take(update, tmp_path, step)
        chosen.append(update.model.keep)
    assert torch.equal(chosen[0], chosen[2])
    assert chosen[0].shape != chosen[1].shape or not torch.equal(chosen[0], chosen[1])
    assert update.average.keep is None


def test_skipped_blocks_have_random_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which blocks a sample skips does not follow from its noise: the two are drawn with different seeds."""
    seeds = []

    class Seeds(Draw):
        def __init__(self, seed: tuple[int, ...], *rest: Any) -> None:
            seeds.append(seed)
            super().__init__(seed, *rest)

    monkeypatch.setattr(update_module, "Draw", Seeds)
    stage = replace(toy_stage(), model=Blocks([Add(), Add()], drop_path=0.5))
    take(Update(stage, section(), toy_run(tmp_path), ranks(), Injection(tmp_path, 0)), tmp_path, 3)
    assert len(seeds) == 2 == len(set(seeds)) and {seed[-1] for seed in seeds} == {3}


class Two(Ranks):
    """The first of two ranks, which hears nothing of the other."""

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        return flags


def test_the_gradient_of_a_rank_is_that_of_the_mean_over_its_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half of the samples count in full, because ranks average their gradients: the average is that of all samples."""
    monkeypatch.setattr(parallel, "gradient_sync", lambda *_: nullcontext())
    update, share = toy_update(tmp_path, section()), toy_batches(tmp_path, 0, 2).read(0)
    update.ranks, update.checked = Two(0, 2, CPU), CHECKED_STEPS
    (micro,), model = share.micro_batches, copy.deepcopy(update.model)
    found: list[torch.Tensor] = []

    def kept(parameters: tuple[nn.Parameter, ...], max_norm: float) -> torch.Tensor:
        found.extend(p.grad.clone() for p in parameters)
        return torch.ones(())

    monkeypatch.setattr(parallel, "clip_gradients", kept)
    update(share, 0.01, stop=False, save=False)
    draw = Draw((0, 2, 0), share.size, micro.place, CPU, 0)
    update.stage.loss(model, micro.load(), draw).mean().backward()
    assert len(micro.load().x) == share.size / 2
    for gradient, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)
