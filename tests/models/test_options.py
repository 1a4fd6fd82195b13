"""Options of the token mixer: every grid, every parameter in use, blocks skipped, conditions hidden."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.backbones import small
from tests.models.test_mixing import NAMES, normal, periodic, randomized, token_mixer
from ups.models.backbone import TokenMixer, make_stack
from ups.models.blocks import Blocks, UShape
from ups.models.denoiser import Denoiser, PredictedStep
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Domain, Sizes

torch.set_num_threads(1)

ATTENTION = {"mixing": "attention", "hidden_channels": (16, 16, 16)}
OPTIONS = {
    "attention": ATTENTION,
    "no_qk_norm": ATTENTION | {"qk_norm": False},
    "windows": ATTENTION | {"window": 4},
    "two_levels": {"levels": 2, "num_layers": 4},
    "three_levels": {"levels": 3, "num_layers": 5},
    "windows_in_levels": ATTENTION | {"window": 2, "levels": 2, "num_layers": 5},
    "separate_fields": {"separate_fields": True, "hidden_channels": (16, 16, 16)},
    "separate_attention": ATTENTION | {"separate_fields": True},
    "drop_path": {"drop_path": 0.5},
    "no_conditioning": {"conditioning": False},
}
GRIDS = [(12,), (13,), (6, 8), (7, 10), (4, 6, 5), (8, 8, 8), (2,)]
SIZES = Sizes(
    families=NAMES,
    num_axes=(1, 1, 1),
    num_fields=(1, 2, 1),
    latent_channels=(4,) * 3,
    coefficient_channels=(1,) * 3,
    num_conditions=7,
)


def mix(mixer: TokenMixer, tokens: Tensor, domain: Domain) -> Tensor:
    """The output for a fixed summary and condition."""
    num_samples = len(tokens)
    return mixer(tokens, normal(1, 8).expand(num_samples, -1), normal(1, 7).expand(num_samples, -1), domain, 4)


def unrested(mixer: TokenMixer, num_axes: int) -> list[tuple[str, nn.Parameter]]:
    """What family 1 uses of a mixer: its own stem, trunk and head, and the weights of as many axes."""
    axes = (f"mixing.weights.{axis}" for axis in range(num_axes, 3))
    unused = [*axes, *(f"local.weights.{axis}" for axis in range(num_axes, 3))]
    mine = [(name, p) for name, p in mixer.named_parameters() if re.match(r"trunks\.1|\w+\.\w+\.1$", name)]
    assert len(mine) > 6
    return [(name, p) for name, p in mine if not name.endswith(tuple(unused))]


@pytest.mark.parametrize(("name", "grid"), list(itertools.product(OPTIONS, GRIDS)))
def test_every_option_serves_every_grid(name: str, grid: tuple[int, ...]):
    """In 1D, 2D and 3D, on odd and even grids, there is a finite output per token and a gradient per parameter."""
    mixer = token_mixer(**OPTIONS[name])
    output = mix(mixer, normal(2, math.prod(grid), 5), Domain("burgers_1d", grid, (False, True, True)[: len(grid)]))
    output.square().sum().backward()
    assert output.shape == (2, math.prod(grid), 4) and output.isfinite().all()
    assert [name for name, parameter in unrested(mixer, len(grid)) if parameter.grad is None] == []


@pytest.mark.parametrize("name", ["attention", "windows", "two_levels", "windows_in_levels", "separate_attention"])
def test_a_new_part_is_felt(name: str):
    """The gradient of every parameter is somewhere not zero, so each of them matters."""
    mixer = token_mixer(**OPTIONS[name])
    mix(mixer, normal(2, 64, 5), periodic((8, 8), family=1)).square().sum().backward()
    assert [name for name, parameter in unrested(mixer, 2) if not parameter.grad.any()] == []


@pytest.mark.parametrize(
    ("name", "step"), [("attention", 1), ("two_levels", 2), ("three_levels", 4), ("windows", 4), ("separate_fields", 1)]
)
@pytest.mark.parametrize("grid", [(24,), (8, 16), (8, 8, 8)])
def test_options_commute_with_shifts(name: str, step: int, grid: tuple[int, ...]):
    """On a periodic domain the output moves with the input, by as many tokens as the coarsest grid or a window has."""
    mixer, tokens, axes = token_mixer(**OPTIONS[name]), normal(1, math.prod(grid), 5), tuple(range(1, len(grid) + 1))

    def shift(tokens: Tensor) -> Tensor:
        return tokens.unflatten(1, grid).roll((step,) * len(grid), axes).flatten(1, -2)

    expected = shift(mix(mixer, tokens, periodic(grid)))
    assert torch.allclose(mix(mixer, shift(tokens), periodic(grid)), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("levels", "num_layers", "expected"), [(1, 4, [4]), (2, 4, [1, 2, 1]), (2, 8, [2, 4, 2]), (3, 6, [1, 1, 2, 1, 1])]
)
def test_blocks_are_spread_over_levels(levels: int, num_layers: int, expected: list[int]):
    """Both sides of a level have equally many blocks; what does not divide is on the coarsest level."""
    stack = make_stack(small(levels=levels, num_layers=num_layers), 3)
    assert [len(blocks) for blocks in _sides(stack)] == expected


@pytest.mark.parametrize("levels", [1, 2])
def test_every_other_block_shifts_its_windows(levels: int):
    """Along a row or a U-shape of four blocks windows are at their place, shifted, at their place, shifted."""
    stack = make_stack(small(**ATTENTION, window=4, levels=levels, num_layers=4), 1)
    assert [block.mixing.shifted for blocks in _sides(stack) for block in blocks] == [False, True] * 2


def _sides(stack: Blocks | UShape) -> list[Blocks]:
    return [stack] if isinstance(stack, Blocks) else [stack.before, *_sides(stack.inner), stack.after]


def test_u_shape_by_hand():
    """Without blocks and with maps that change nothing it adds the mean of pairs, on axes that can be halved."""
    shape = UShape(Blocks([]), Blocks([]), Blocks([]), channels=1)
    for linear in (shape.down, shape.up):
        nn.init.ones_(linear.weight)
        nn.init.zeros_(linear.bias)
    x = torch.tensor([[1.0, 3.0, 8.0, 0.0], [0.0, 2.0, 0.0, 0.0], [5.0, 5.0, 1.0, 2.0]])
    expected = x + torch.tensor([[2.0, 2.0, 4.0, 4.0], [1.0, 1.0, 0.0, 0.0], [5.0, 5.0, 1.5, 1.5]])
    assert torch.equal(shape(x[None, ..., None], torch.empty(0), periodic((3, 4)))[0, ..., 0], expected)


def test_an_axis_of_two_tokens_is_not_halved():
    """On 2 x 4 tokens the coarse grid is 2 x 2: means of pairs along the second axis alone."""
    shape = UShape(Blocks([]), Blocks([]), Blocks([]), channels=1)
    for linear in (shape.down, shape.up):
        nn.init.ones_(linear.weight)
        nn.init.zeros_(linear.bias)
    x = torch.tensor([[1.0, 3.0, 8.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    expected = x + torch.tensor([[2.0, 2.0, 4.0, 4.0], [1.0, 1.0, 0.0, 0.0]])
    assert torch.equal(shape(x[None, ..., None], torch.empty(0), periodic((2, 4)))[0, ..., 0], expected)


@pytest.mark.parametrize("name", ["separate_fields", "separate_attention"])
def test_a_skipped_block_is_skipped_for_all_fields_of_a_sample(name: str):
    """With keep 0 for the first sample all of its fields stay as they are, and none of the second's."""
    mixer = token_mixer(**OPTIONS[name])
    blocks, domain = mixer.trunks[0].blocks, replace(periodic((8,)), num_fields=2)
    x, condition = normal(4, 8, 16), normal(4, 16)
    blocks.keep = torch.tensor([[0.0], [1.0]]).expand(2, len(blocks))
    stayed = (blocks(x, condition, domain) == x).flatten(1).all(1)
    assert stayed.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ["drop_path", "attention", "two_levels"])
def test_a_skipped_block_adds_nothing(name: str):
    """Blocks with keep 0 return what they got, with keep 1 what they give without; each sample for itself."""
    mixer = token_mixer(**OPTIONS[name])
    blocks = next(module for module in mixer.modules() if isinstance(module, Blocks))
    channels = mixer.trunks[0].channels
    x, condition, domain = normal(2, 8, channels), normal(2, channels), periodic((8,))
    whole = blocks(x, condition, domain)
    blocks.keep = torch.tensor([[0.0], [1.0]]).expand(2, len(blocks))
    mixed = blocks(x, condition, domain)
    assert torch.equal(mixed[0], x[0])
    assert torch.equal(mixed[1], whole[1])


def test_skipping_survives_recomputation():
    """Blocks computed again in the backward pass skip what they skipped before."""
    mixer, tokens = token_mixer(drop_path=0.5), normal(4, 12, 5)
    mixer.trunks[0].blocks.keep = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    gradients, calls = [], []
    for block in mixer.trunks[0].blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(recompute))
    for recompute in (False, True):
        mixer.trunks[0].blocks.recompute = recompute
        mixer.zero_grad()
        mix(mixer, tokens, periodic((12,))).square().sum().backward()
        gradients.append(
            [parameter.grad.clone() for parameter in mixer.trunks[0].blocks.parameters() if parameter.grad is not None]
        )
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls.count(True) == 2 * calls.count(False) > 0


@pytest.mark.parametrize("conditioning", [True, False])
def test_conditions_can_be_hidden(conditioning: bool):
    """Without conditioning no model depends on the PDE's conditions; the denoiser still hears the noise level."""
    backbone, domain = small(conditioning=conditioning), periodic((12,))
    operator, steady, denoiser = (randomized(kind(SIZES, backbone)) for kind in (Operator, SteadyModel, Denoiser))
    z, coefficients, sigma = normal(2, 12, 4), normal(2, 12, 1), torch.ones(2)
    context = PredictedStep(z, normal(2, 12, 9), normal(2, 8), torch.ones(2, 1, 4))
    calls = [
        lambda condition: operator(z, coefficients, condition, domain),
        lambda condition: steady(z, coefficients, condition, domain),
        lambda condition: denoiser(z, sigma, context, condition, domain),
    ]
    for call in calls:
        assert torch.equal(call(normal(2, 7)), call(normal(2, 7, seed=1))) != conditioning
    condition = normal(2, 7)
    louder = denoiser(z, 2 * sigma, context, condition, domain)
    skip = [1 / (1 + level**2) for level in (1, 4)]
    assert not torch.allclose(louder - skip[1] * z, calls[2](condition) - skip[0] * z, atol=1e-3)
