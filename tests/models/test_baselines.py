"""Reference models on the grid: symmetric where the PDE is, identical at first, rebuilt from their settings."""

import pytest
import torch

from ups.models.baselines import (
    Convolution,
    GridOperator,
    GridSteadyModel,
    LinearStencil,
    NormalizedGridOperator,
    UNet,
    grid_model,
)
from ups.models.sizes import Domain, Sizes

SIZES = {
    "fno": {"hidden_channels": 8, "num_layers": 2, "modes": (4, 2, 2), "padding": 0.25},
    "unet": {"hidden_channels": 8},
    "transformer": {"hidden_channels": 8, "num_layers": 1, "head_channels": 4, "patch_size": (2, 2, 2)},
    "linear": {"kernel_size": 3},
}
GRIDS = {1: (16,), 2: (8, 8), 3: (8, 8, 8)}


def settings(
    kind: str, num_dims: int = 1, *, steady: bool = False, periodic: bool = True, normalized: bool = False
) -> dict:
    """Two fields in and out on a small grid."""
    grid = GRIDS[num_dims]
    return {
        "kind": kind,
        "normalized": normalized,
        "steady": steady,
        "family": "burgers_1d",
        "in_channels": 2,
        "out_channels": 2,
        "grid": grid,
        "periodic": (periodic,) * num_dims,
        "condition_channels": [],
        "model": SIZES[kind],
    }


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("kind", sorted(SIZES))
@pytest.mark.parametrize(("periodic", "normalized"), [(True, True), (True, False), (False, False)])
def test_all_parameters_learn_on_every_grid(kind: str, num_dims: int, periodic: bool, normalized: bool):
    """A step keeps the shape of the state, is finite, and its error reaches every parameter."""
    model = grid_model(**settings(kind, num_dims, periodic=periodic, normalized=normalized))
    model.statistics.max_mean.fill_(100.0), model.statistics.max_fluctuation.fill_(100.0)
    domain = Domain("burgers_1d", GRIDS[num_dims], (periodic,) * num_dims)
    z = torch.randn(3, torch.tensor(domain.grid).prod(), 2)
    z_next = model(z, z[..., :0], torch.zeros(3, 1), domain)
    assert z_next.shape == z.shape and z_next.isfinite().all()
    (z_next - torch.randn_like(z)).square().mean().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("kind", sorted(SIZES))
def test_a_model_is_told_what_varies_and_nothing_else(kind: str, steady: bool):
    """Of two conditions the second is told: the prediction depends on it, and not on the first."""
    torch.manual_seed(0)
    model = grid_model(**settings(kind, steady=steady) | {"condition_channels": [1]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    domain, z = Domain("burgers_1d", (16,), (True,)), torch.randn(1, 16, 2)
    coefficients = torch.randn(1, 16, 2) if steady else z[..., :0]
    first, second, third = (
        model(z, coefficients, torch.tensor([told]), domain) for told in ([1.0, 2.0], [5.0, 2.0], [1.0, 3.0])
    )
    assert torch.equal(first, second)
    assert not torch.allclose(first, third)


@pytest.mark.parametrize("periodic", [True, False])
def test_the_fno_sees_as_many_frequencies_as_it_says(periodic: bool):
    """4 modes: 4 cycles at least, on an axis padded by a quarter; a fifth is beyond a periodic axis."""
    model = grid_model(**settings("fno", periodic=periodic))
    convolution = model.network.fno_blocks.convs[0]
    assert convolution.weight.shape[-1] == 4 + 1
    padding = model.network.domain_padding
    assert padding is None if periodic else padding.domain_padding == [0.125]


@pytest.mark.parametrize(("num_dims", "shape"), [(1, (5,)), (2, (4, 3)), (3, (4, 4, 3))])
def test_the_fno_has_the_frequencies_of_its_number_of_axes(num_dims: int, shape: tuple[int, ...]):
    """Twice 4, 2 and 2 modes on 1D, 2D and 3D grids, of which real transforms keep half along the last axis."""
    weight = grid_model(**settings("fno", num_dims)).network.fno_blocks.convs[0].weight
    assert tuple(weight.shape[-num_dims:]) == shape


@pytest.mark.parametrize("kind", ["unet", "linear"])
def test_periodic_models_commute_with_shifts(kind: str):
    """Shifting the state by what divides all grids of the model shifts the prediction."""
    model = grid_model(**settings(kind)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    domain = Domain("burgers_1d", (16,), (True,))
    z = torch.randn(2, 16, 2, dtype=torch.float64)
    condition = torch.zeros(2, 1)
    shifted = model(z.roll(4, 1), z[..., :0], condition, domain)
    torch.testing.assert_close(shifted, model(z, z[..., :0], condition, domain).roll(4, 1))


def test_a_linear_stencil_is_linear_and_nothing_at_first():
    """F(a u + b v) = a F(u) + b F(v) up to the bias; before training the state stays."""
    stencil = LinearStencil(1, 1, kernel_size=5, periodic=(True, False)).double()
    assert not stencil.convolution.weight.any()
    torch.nn.init.normal_(stencil.convolution.weight)
    torch.nn.init.zeros_(stencil.convolution.bias)
    u, v = torch.randn(2, 3, 1, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(stencil(2 * u - 3 * v), 2 * stencil(u) - 3 * stencil(v))


def test_edges_are_repeated_or_wrapped():
    """The mean of three neighbours at the edge: the last point, or the edge itself once more."""
    u = torch.tensor([[[1.0, 2.0, 4.0, 8.0]]])
    for periodic, first in ((True, 8.0 + 1 + 2), (False, 1.0 + 1 + 2)):
        mean = Convolution(1, 1, 3, (periodic,))
        torch.nn.init.ones_(mean.convolution.weight), torch.nn.init.zeros_(mean.convolution.bias)
        assert mean(u)[0, 0, 0].item() == first


def test_each_axis_of_a_convolution_has_its_own_padding():
    """Along the first axis neighbours wrap, along the second the edge is repeated: sums of 3 x 3 by hand."""
    total = Convolution(1, 1, 3, (True, False))
    torch.nn.init.ones_(total.convolution.weight), torch.nn.init.zeros_(total.convolution.bias)
    u = torch.tensor([[1.0, 0.0, 0.0], [10.0, 0.0, 0.0], [100.0, 0.0, 0.0], [1000.0, 0.0, 0.0]])
    assert total(u[None, None])[0, 0, 0].tolist() == [2 * (1000 + 1 + 10), 1000 + 1 + 10, 0.0]


@pytest.mark.parametrize("periodic", [True, False])
def test_a_u_net_tells_the_ends_of_bounded_axes_apart(periodic: bool):
    """The change of a constant state differs between the two ends, as with diffusion from one of them."""
    change = UNet(1, 1, hidden_channels=8, grid=(16,), periodic=[periodic])(torch.ones(1, 1, 16))
    assert torch.allclose(change[..., 0], change[..., -1], atol=1e-4) == periodic


def test_a_normalized_step_keeps_integrals_and_grows_with_the_state():
    """The mean of the state stays, and a state with twice the fluctuation changes by twice as much."""
    model = NormalizedGridOperator(torch.nn.Conv1d(4, 1, 3, padding=1, padding_mode="circular"), WAVES, []).double()
    model.statistics.max_mean.fill_(100.0), model.statistics.max_fluctuation.fill_(100.0)
    with torch.no_grad():  # the network sees the state of zero mean and unit amplitude alone
        model.network.weight[:, [0, 2, 3]] = 0.0
    model.conserved.fill_(1.0)
    z = torch.randn(1, 8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = z - z.mean()
    once, twice = (model(u, u[..., :0], torch.zeros(1, 1), Domain("burgers_1d", (8,), (True,))) - u for u in (z, 2 * z))
    assert once.abs().max() > 0.1 and once.mean().abs() < 1e-12
    torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize(("grid", "num_levels"), [((64,), 3), ((12, 12), 2), ((7,), 1), ((16, 8), 2)])
def test_a_u_net_descends_while_it_can(grid: tuple[int, ...], num_levels: int):
    """Grids are halved at most twice, evenly, and keep four points."""
    model = UNet(1, 1, hidden_channels=4, grid=grid, periodic=[True] * len(grid))
    assert len(model.down) == num_levels - 1
    assert model(torch.randn(1, 1, *grid)).shape == (1, 1, *grid)


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_weights_are_plain_and_rebuild_the_model(kind: str, tmp_path):
    """A model is its settings and tensors alone; steady ones map coefficients to solutions."""
    content = settings(kind, 2, steady=True)
    model = grid_model(**content)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = grid_model(**content)
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    z, coefficients, domain = torch.zeros(2, 64, 2), torch.randn(2, 64, 2), Domain("burgers_1d", (8, 8), (True, True))
    assert all(value.is_floating_point() for value in model.state_dict().values())
    inputs = z, coefficients, torch.zeros(2, 1), domain
    assert torch.equal(model(*inputs), again(*inputs))


WAVE = torch.tensor([1.0, -1.0] * 4)[None, :, None]
WAVES = Sizes(("burgers_1d",), (1,), (1,), (1,), (0,), 1)


def identity(kind: type[GridOperator | GridSteadyModel], **statistics: float) -> torch.Tensor:
    """What a model makes of the state, or coefficients, 5 + wave if its network returns its input."""
    model = kind(torch.nn.Identity(), WAVES, [])
    for name, value in ({"max_mean": 100.0, "max_fluctuation": 100.0} | statistics).items():
        getattr(model.statistics, name).fill_(value)
    coefficients = 5 + WAVE if kind is GridSteadyModel else WAVE[..., :0]
    return model(5 + WAVE, coefficients, torch.zeros(1, 1), Domain("burgers_1d", (8,), (True,)))


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        ({}, 10 + 2 * WAVE),
        ({"step_rms": 0.5}, 7.5 + 1.5 * WAVE),
        ({"max_mean": 2.0}, 5 + 2 * WAVE),
        ({"max_mean": 2.0, "step_rms": -0.5}, 4 + 0.5 * WAVE),
        ({"max_growth": 1.5}, 10 + 1.5 * WAVE),
    ],
)
def test_a_baseline_has_the_units_and_limits_of_the_operator(statistics: dict[str, float], expected: torch.Tensor):
    """A step is z + step_rms F(clamped z); its mean stays within limit or state, its growth within a factor."""
    torch.testing.assert_close(identity(GridOperator, **statistics), expected)


def test_a_steady_baseline_has_the_limits_of_the_steady_model():
    """The mean 5 of the solution is clamped to 2, its fluctuation 1 to 0.5."""
    torch.testing.assert_close(identity(GridSteadyModel, max_mean=2.0, max_fluctuation=0.5), 2 + 0.5 * WAVE)
