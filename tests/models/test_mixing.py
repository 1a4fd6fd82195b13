"""Mixing along axes: against the fast Fourier transform, under shifts, on other grids, in every dimension."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backbones import small
from ups.models.backbone import Block, FamilyLinear, FourierMixing, LocalMixing, LocalMLP, TokenMixer, neighbours
from ups.models.sizes import Domain, Sizes

torch.set_num_threads(1)

GRIDS = [(12,), (6, 8), (4, 6, 5)]

NAMES = ("advection_1d", "burgers_1d", "diffusion_reaction_1d")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Unit normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomized(module: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """The module with random weights everywhere, also where training starts from zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module


def periodic(grid: tuple[int, ...], family: int = 0) -> Domain:
    """A domain that wraps on every axis."""
    return Domain(NAMES[family], grid, (True,) * len(grid))


def token_mixer(**choices: Any) -> TokenMixer:
    """A small mixer of three families, on grids of up to three axes, with random weights."""
    sizes = Sizes(
        families=NAMES,
        num_axes=(3, 3, 3),
        num_fields=(2, 2, 2),
        latent_channels=(4,) * 3,
        coefficient_channels=(1,) * 3,
        num_conditions=7,
    )
    return randomized(TokenMixer(small(**choices), sizes, num_states=1, num_conditions=7))


@pytest.mark.parametrize("modes", [1, 3, 16])
@pytest.mark.parametrize("grid", GRIDS)
def test_fourier_mixing_is_a_spectral_convolution(grid: tuple[int, ...], modes: int):
    """On periodic axes it multiplies the modes of the FFT by complex matrices, whatever the cells' phases."""
    mixing, x = FourierMixing(3, modes, len(grid)), normal(2, *grid, 3)
    expected = torch.zeros_like(x)
    for axis, n in enumerate(grid):
        num_modes = min(modes, n // 2)
        weight = torch.complex(mixing.weights[axis][:num_modes, 0], mixing.weights[axis][:num_modes, 1])
        x_hat = torch.fft.rfft(x, dim=axis + 1).movedim(axis + 1, -2)[..., :num_modes, :]
        y_hat = torch.einsum("...mi,mio->...mo", x_hat, weight.conj()).movedim(-2, axis + 1)
        expected += torch.fft.irfft(y_hat, n=n, dim=axis + 1)
    assert torch.allclose(mixing(x, periodic(grid)), expected, atol=1e-5)


def test_half_turns_on_bounded_axes():
    """On an axis with ends, mode k is a cosine of k half-turns: mode 1 alone returns cos(pi x) as it came."""
    mixing = FourierMixing(1, 2, 1)
    with torch.no_grad():
        mixing.weights[0].zero_()
        mixing.weights[0][1, 0] = 1.0
    x = (torch.arange(64) + 0.5) / 64
    analysed = mixing((torch.pi * x).cos()[None, :, None], Domain("advection_1d", (64,), (False,)))
    assert torch.allclose(analysed[0, :, 0], (torch.pi * x).cos(), atol=1e-5)


@pytest.mark.parametrize(("wraps", "tolerance"), [(True, 1e-5), (False, 5e-3)])
def test_fourier_mixing_knows_no_resolution(wraps: bool, tolerance: float):
    """A smooth function is mixed alike on a grid and on one three times as fine."""
    mixing = FourierMixing(1, 4, 1)

    def mixed(num_points: int) -> Tensor:
        x = (torch.arange(num_points) + 0.5) / num_points
        u = (2 * math.pi * x).sin() + 0.5 * (4 * math.pi * x + 1).cos()
        return mixing(u[None, :, None], Domain("advection_1d", (num_points,), (wraps,)))[0, :, 0]

    assert torch.allclose(mixed(60), mixed(180)[1::3], atol=tolerance)


def test_neighbours_by_hand():
    """The neighbour of a bounded end is the end itself."""
    x = torch.tensor([1.0, 2.0, 4.0])[None, :, None]
    assert [side.flatten().tolist() for side in neighbours(x, 1, True)] == [[4, 1, 2], [2, 4, 1]]
    assert [side.flatten().tolist() for side in neighbours(x, 1, False)] == [[1, 1, 2], [2, 4, 4]]


@pytest.mark.parametrize(("wraps", "mode"), [(True, "circular"), (False, "replicate")])
def test_local_mixing_is_a_depthwise_convolution(wraps: bool, mode: str):
    """It equals torch's convolution with one group per channel."""
    mixing, x = LocalMixing(3), normal(2, 12, 3)
    padded = nn.functional.pad(x.mT, [1, 1], mode=mode)
    expected = nn.functional.conv1d(padded, mixing.weights.mT.unsqueeze(1), groups=3).mT
    torch.testing.assert_close(mixing(x, Domain("advection_1d", (12,), (wraps,))), expected, rtol=1e-5, atol=1e-5)


def test_the_shortest_waves_have_a_linear_map():
    """Two modes of mixing leave out the wave + - + -: in 1D a block whose MLP is off scales it, at any amplitude."""
    block = Block(small(modes=(2, 2, 2), norm=False), 1, shifted=False)
    nn.init.zeros_(block.mlp.second.weight)
    nn.init.zeros_(block.mlp.second.bias)
    wave, condition = torch.tensor([1.0, -1.0]).repeat(6)[None, :, None].expand(1, 12, 8), torch.zeros(1, 8)
    before, own, after = block.local.weights
    for amplitude in (1.0, 100.0):
        expected = amplitude * wave * (1 + own - before - after)
        torch.testing.assert_close(block(amplitude * wave, condition, periodic((12,))), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_first_layer_of_the_mlp_is_a_convolution(grid: tuple[int, ...]):
    """It equals torch's convolution with a kernel that is zero outside of the axes through its centre."""
    mlp, x = randomized(LocalMLP(3, len(grid))), normal(2, *grid, 3)
    kernel, centre = torch.zeros(6, 3, *[3] * len(grid)), [1] * len(grid)
    parts = mlp.first.weight.detach().split(3, dim=1)
    kernel[:, :, *centre] = parts[0]
    for axis, sides in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
        for place, weight in zip((0, 2), sides, strict=True):
            kernel[:, :, *(place if a == axis else 1 for a in range(len(grid)))] = weight
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[len(grid) - 1]
    padded = nn.functional.pad(x.movedim(-1, 1), [1, 1] * len(grid), mode="circular")
    h = convolve(padded, kernel, mlp.first.bias).movedim(1, -1)
    torch.testing.assert_close(mlp(x, periodic(grid)), mlp.second(nn.functional.gelu(h)), rtol=1e-5, atol=1e-5)


def test_an_mlp_of_more_axes_ignores_the_missing_ones():
    """On a grid of one axis one for three axes has no use for the weights of the others."""
    mlp, x, domain = randomized(LocalMLP(3, 3)), normal(2, 12, 3), Domain("advection_1d", (12,), (True,))
    line = LocalMLP(3, 1)
    line.load_state_dict({**mlp.state_dict(), "first.weight": mlp.first.weight[:, :9]})
    torch.testing.assert_close(line(x, domain), mlp(x, domain))


def test_each_axis_has_its_own_boundary():
    """A shift along the periodic axis commutes with mixing; one along the bounded axis does not."""
    domain, x = Domain("advection_1d", (6, 8), (False, True)), normal(2, 6, 8, 3)
    for mixing in (FourierMixing(3, 3, 2), randomized(LocalMLP(3, 2))):
        mixed = mixing(x, domain)
        assert torch.allclose(mixing(x.roll(3, 2), domain), mixed.roll(3, 2), atol=1e-5)
        assert not torch.allclose(mixing(x.roll(3, 1), domain), mixed.roll(3, 1), atol=1e-2)


@pytest.mark.parametrize("grid", GRIDS)
def test_token_mixer_commutes_with_shifts(grid: tuple[int, ...]):
    """On a periodic domain the output moves with the input."""
    mixer, tokens = token_mixer(), normal(2, math.prod(grid), 5)
    summary, condition = normal(2, 6, seed=1), normal(2, 7, seed=2)
    shifts, axes = tuple(range(1, len(grid) + 1)), tuple(range(1, len(grid) + 1))

    def shift(tokens: Tensor) -> Tensor:
        return tokens.unflatten(1, grid).roll(shifts, axes).flatten(1, -2)

    moved = mixer(shift(tokens), summary, condition, periodic(grid), 4)
    assert torch.allclose(moved, shift(mixer(tokens, summary, condition, periodic(grid), 4)), atol=1e-4)


def test_samples_do_not_mix():
    """Each sample of a batch is treated as if it were alone."""
    mixer, tokens, summary, condition = token_mixer(), normal(3, 12, 5), normal(3, 8), normal(3, 7)
    together = mixer(tokens, summary, condition, periodic((12,)), 4)
    alone = mixer(tokens[1:2], summary[1:2], condition[1:2], periodic((12,)), 4)
    assert torch.allclose(together[1:2], alone, atol=1e-5)


@pytest.mark.parametrize("ignored", ["summary", "condition", "family", "boundary"])
def test_token_mixer_listens(ignored: str):
    """Summary, condition, family and boundary each change the output."""
    mixer, tokens = token_mixer(), normal(2, 12, 5)
    given = {"summary": normal(2, 8), "condition": normal(2, 7), "domain": periodic((12,))}
    other = {
        "summary": {"summary": normal(2, 6, seed=1)},
        "condition": {"condition": normal(2, 7, seed=1)},
        "family": {"domain": periodic((12,), family=1)},
        "boundary": {"domain": Domain("advection_1d", (12,), (False,))},
    }[ignored]
    difference = mixer(tokens, **given, out_channels=4) - mixer(tokens, **given | other, out_channels=4)
    assert difference.abs().max() > 1e-3


def test_family_linear_by_hand():
    """Each family has its matrix and bias; a family with fewer channels uses the first rows and columns."""
    linear, x = randomized(FamilyLinear(5, 4, [1.0] * 3)), normal(2, 7, 3)
    expected = torch.einsum("bni,io->bno", x, linear.weights[2][:3, :2]) + linear.biases[2][:2]
    assert torch.allclose(linear(x, 2, 2), expected, atol=1e-6)


def test_family_linear_starts_from_zero():
    """A head of std zero says nothing before training."""
    assert FamilyLinear(5, 4, [0.0] * 3)(normal(2, 5), 1, 4).count_nonzero() == 0


@pytest.mark.parametrize(("separate_trunks", "family"), list(itertools.product([True, False], range(3))))
def test_what_a_batch_does_not_use_rests(separate_trunks: bool, family: int):
    """Stem, summary, head and, with separate trunks, trunk of other families have no gradient; all others have one."""
    mixer, domain = token_mixer(separate_trunks=separate_trunks), periodic((4, 6, 5), family)
    mixer(normal(1, 120, 3), normal(1, 3), normal(1, 7), domain, 2).square().sum().backward()
    used = {name for name, parameter in mixer.named_parameters() if parameter.grad is not None}
    place = {"trunks": 1} if separate_trunks else {}
    place |= dict.fromkeys(("stem", "summary", "head"), 2)
    expected = {
        name
        for name, _ in mixer.named_parameters()
        if (parts := name.split("."))[0] not in place or parts[place[parts[0]]] == str(family)
    }
    assert used == expected


@pytest.mark.parametrize("separate_trunks", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_separate_trunks_are_of_one_family(grid: tuple[int, ...], separate_trunks: bool):
    """A trunk that changes changes its family alone, or all families if they share it."""
    mixer, inputs = (
        token_mixer(separate_trunks=separate_trunks),
        (normal(2, math.prod(grid), 5), normal(2, 8), normal(2, 7)),
    )
    before = [mixer(*inputs, periodic(grid, family), 4) for family in range(3)]
    randomized(mixer.trunks[-1], seed=1)
    changed = [not torch.equal(mixer(*inputs, periodic(grid, family), 4), before[family]) for family in range(3)]
    assert changed == [not separate_trunks, not separate_trunks, True]


def test_channels_are_those_of_the_number_of_axes():
    """A trunk is as wide as its number of axes says; stem and head serve the widest."""
    sizes = Sizes(
        families=NAMES,
        num_axes=(1, 2, 3),
        num_fields=(1, 1, 1),
        latent_channels=(4,) * 3,
        coefficient_channels=(1,) * 3,
        num_conditions=7,
    )
    backbone = small(hidden_channels=(4, 8, 12))
    mixer = randomized(TokenMixer(backbone, sizes, num_states=1, num_conditions=7))
    for family, grid in enumerate(GRIDS):
        inputs = normal(2, math.prod(grid), 5), normal(2, 8), normal(2, 7)
        assert mixer(*inputs, periodic(grid, family), 4).shape == (2, math.prod(grid), 4)
        assert mixer.trunks[family].blocks[0].mlp.second.out_features == (4, 8, 12)[family]


@pytest.mark.parametrize("separate_fields", [False, True])
@pytest.mark.parametrize("num_states", [0, 2, 3])
def test_what_a_family_begins_with_does_not_depend_on_the_others(num_states: int, separate_fields: bool):
    """Tokens of unit variance enter the blocks with unit variance, however few numbers they hold beside others'."""
    num_fields, latents, coefficients = (1, 2, 5), (1, 8, 40), (1, 0, 2)
    sizes = Sizes(NAMES, (1, 1, 1), num_fields, latents, coefficients, num_conditions=7)
    backbone = small(hidden_channels=(512, 512, 512), separate_fields=separate_fields)
    torch.manual_seed(0)
    mixer = TokenMixer(backbone, sizes, num_states, num_conditions=7)
    for family, (fields, own, shared) in enumerate(zip(num_fields, latents, coefficients, strict=True)):
        size = num_states * own // (fields if separate_fields else 1) + shared
        if size:
            assert mixer.stem(normal(64, size), family, 512).std().item() == pytest.approx(1.0, rel=0.15)


def test_families_without_data_have_no_trunk():
    """Only families that have a grid cost weights."""
    sizes = Sizes(
        families=NAMES,
        num_axes=(1, 0, 2),
        num_fields=(1, 1, 1),
        latent_channels=(4,) * 3,
        coefficient_channels=(1,) * 3,
        num_conditions=7,
    )
    mixer = TokenMixer(small(), sizes, num_states=1, num_conditions=7)
    assert [len(list(trunk.parameters())) > 0 for trunk in mixer.trunks] == [True, False, True]


def test_one_trunk_serves_families_of_one_to_three_axes():
    """A trunk that all families share has weights for as many axes as the family with the most."""
    sizes = Sizes(NAMES, (1, 2, 3), (1,) * 3, (4,) * 3, (1,) * 3, num_conditions=7)
    mixer = randomized(TokenMixer(small(separate_trunks=False), sizes, num_states=1, num_conditions=7))
    for family, grid in enumerate(GRIDS):
        inputs = normal(2, math.prod(grid), 5), normal(2, 8), normal(2, 7)
        assert mixer(*inputs, periodic(grid, family), 4).shape == (2, math.prod(grid), 4)
