"""Linear layers in float8 (extra `float8`), emulated on the CPU: which they are, how near, and what is saved."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from tests.backbones import SMALL, small
from tests.training.jobs import section
from tests.training.toys import CPU, Points, ranks, toy_batches, toy_run, toy_stage
from ups.files import WEIGHTS
from ups.models.backbone import TokenMixer
from ups.models.sizes import Domain, Sizes
from ups.training import parallel
from ups.training.distributed import Draw
from ups.training.injection import Injection
from ups.training.loop import train
from ups.training.update import Update, compile_blocks, convert_to_float8

Float8Linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
torch.set_num_threads(1)

MLPS = {f"mixer.trunks.0.blocks.{number}.mlp.{layer}" for number in (0, 1) for layer in ("first", "second")}

MLPS_WEIGHTS = {f"{name}.weight" for name in MLPS}

CHANNELS = {"hidden_channels": (16, 16, 16)}


class Mixer(nn.Module):
    """A token mixer whose tokens are the four numbers of a toy's sample, one each, on a grid of two by two."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        names = ("advection_1d",)
        sizes = Sizes(names, (2,), (1,), (1,), (0,), num_conditions=2)
        self.mixer = TokenMixer(small(**CHANNELS | options), sizes, num_states=1, num_conditions=2)
        nn.init.normal_(self.mixer.head.weights[0])  # zero at first, which would hide the blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = x.new_ones(len(x), 2)
        domain = Domain("advection_1d", (2, 2), (True, True))
        return self.mixer(x.unsqueeze(2), x[:, :2], condition, domain, 1).squeeze(2).clone()


def mixer(**options: Any) -> Mixer:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Mixer(**options)


def converted(model: nn.Module) -> set[str]:
    """Names of the layers in float8."""
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def update_of(folder: Path, precision: str, **launch: Any) -> Update:
    """The optimizer step of a token mixer."""
    stage, config = replace(toy_stage(), model=mixer()), section(precision=precision, model=SMALL | CHANNELS)
    return Update(stage, config, toy_run(folder, **launch), ranks(), Injection(folder, 0, ()))


def take(update: Update, folder: Path, *steps: int, **launch: Any) -> list[float]:
    """The losses of these steps."""
    batches = toy_batches(folder, **launch)
    return [float(update(batches.read(step), 0.003, stop=False, save=False).loss) for step in steps]


def test_layers_of_the_blocks_that_act_on_tokens_are_converted():
    """They are those of the MLPs and of attention; stems, heads, conditions and modulation stay, and all weights."""
    model, attention = mixer(), mixer(mixing="attention", levels=2, num_layers=3)
    weights = dict(model.named_parameters())
    for each in (model, attention):
        convert_to_float8(each, CPU)
    assert converted(model) == MLPS
    assert {name.rpartition(".")[2] for name in converted(attention)} == {"first", "second", "project", "merge"}
    assert len(converted(attention)) == 3 * 4
    assert all(weights.pop(name) is parameter for name, parameter in model.named_parameters()) and not weights


def test_a_product_is_that_of_rounded_operands():
    """Both operands are scaled so that their largest value is the largest of e4m3, rounded, and scaled back."""
    model = mixer()
    layer, x = model.mixer.trunks[0].blocks[0].mlp.first, torch.randn(3, 5, 16)
    convert_to_float8(model, CPU)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    expected = rounded(x) @ rounded(layer.weight).T + layer.bias
    torch.testing.assert_close(model.mixer.trunks[0].blocks[0].mlp.first(x), expected)
    assert not torch.allclose(layer(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_near_those_without(precision: torch.dtype):
    """The loss differs by less than 2 %, the gradient by less than 10 %, for any number of tokens; both do differ."""
    plain, model = mixer(), mixer()
    convert_to_float8(model, CPU)
    found = []
    for each in (plain, model):
        torch.manual_seed(1)
        x = torch.randn(7, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss = toy_stage().loss(each, Points("advection_1d", x), Draw((0, 2, 0), 7, slice(7), CPU, 0)).sum()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])))
    (loss, gradient), (loss_8, gradient_8) = found
    assert 0 < abs(loss_8 - loss) < 0.02 * abs(loss)
    assert gradient_8.isfinite().all() and 0 < (gradient_8 - gradient).norm() < 0.1 * gradient.norm()


def test_what_is_saved_does_not_know_float8(tmp_path: Path):
    """States have names, shapes and types of plain ones, load either way, and the average has plain layers."""
    plain, update = update_of(tmp_path, "bfloat16"), update_of(tmp_path, "float8")
    assert converted(update.model) == MLPS and converted(update.average) == set()
    take(update, tmp_path, 0, 1)
    take(plain, tmp_path, 0, 1)
    state = update.state()
    for part in ("model", "average"):
        kinds = [{n: (v.shape, v.dtype, type(v)) for n, v in each.state()[part].items()} for each in (update, plain)]
        assert kinds[0] == kinds[1]
    plain.restore(state)
    assert all(torch.equal(value, state["model"][name]) for name, value in plain.state()["model"].items())


@pytest.mark.parametrize("tokens", [None, 32])
def test_training_in_float8_resumes_bit_for_bit(tmp_path: Path, tokens: int | None):
    """Steps after a restore are those without one, in whole batches and in parts; the loss falls as without float8."""
    update, other = (update_of(tmp_path, "float8", micro_batch_tokens=tokens) for _ in range(2))
    first = take(update, tmp_path, *range(10), micro_batch_tokens=tokens)
    other.restore(copy.deepcopy(update.state()))
    steps = range(10, 25)
    rest = take(update, tmp_path, *steps, micro_batch_tokens=tokens)
    assert take(other, tmp_path, *steps, micro_batch_tokens=tokens) == rest
    plain = take(update_of(tmp_path, "bfloat16", micro_batch_tokens=tokens), tmp_path, *range(25))
    assert sum(rest[-5:]) < 0.9 * sum(first[:5])
    assert sum(rest) == pytest.approx(sum(plain[10:]), rel=0.1)


def test_shards_have_the_gradients_of_replicas(tmp_path: Path):
    """Sharded over the only rank of a group, the gradients are those without shards, bit for bit."""
    plain, sharded = mixer(), mixer()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for model in (plain, sharded):
            convert_to_float8(model, CPU)
        parallel._shard(sharded, ranks(), OffloadPolicy())
        for model in (plain, sharded):
            model(torch.linspace(-1, 1, 28).view(7, 4)).square().sum().backward()
        whole = {name: p.grad.full_tensor() for name, p in sharded.named_parameters() if p.grad is not None}
    finally:
        dist.destroy_process_group()
    assert whole.keys() == {name for name, p in plain.named_parameters() if p.grad is not None} > MLPS_WEIGHTS
    assert all(torch.equal(whole[name], p.grad) for name, p in plain.named_parameters() if name in whole)


def test_a_whole_training_leaves_plain_weights(tmp_path: Path):
    """What the loop saves at its end loads into a model that knows no float8."""
    config = section(precision="float8", model=SMALL | CHANNELS, steps=6, validate_every=3)
    run = toy_run(tmp_path, num_processes=1)
    train(replace(toy_stage(), model=mixer()), config, run, ranks())
    weights, model = torch.load(tmp_path / WEIGHTS, weights_only=True)["weights"], mixer()
    assert not any(torch.equal(weights[name], model.get_parameter(name)) for name in MLPS_WEIGHTS)
    model.load_state_dict(weights)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_blocks_in_float8_have_the_same_gradients():
    """Compiled and eager model agree within the rounding of float8."""
    gradients = []
    for compiles in (False, True):
        model = mixer()
        convert_to_float8(model, CPU)
        if compiles:
            compile_blocks(model)
        torch.manual_seed(1)
        model(torch.randn(7, 4)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()
