"""Damped persistence: wavenumbers of the grid that a step keeps, and lets through of the predicted change."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.backbones import small
from ups.data.families import NUM_CONDITIONS
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.grid import axis_modes
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.training.inputs import fit_persistence

torch.set_num_threads(1)

FAMILY, GRID = "incompressible_ns_2d", (8, 12)  # three fields
DOMAIN = Domain(FAMILY, (4, 6), (True, False))
NAME = group_name(FAMILY, "fields")


def codec() -> Codec:
    """Patches of 2 x 2 points in a random orthonormal basis of all four components."""
    made = Codec({NAME: FieldGroup(GRID, 2, 4, (False,) * 3, (0.0,) * 3, (1.0,) * 3)}).requires_grad_(False).eval()
    made.skew[NAME].copy_(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))
    return made


def operator() -> Operator:
    """An operator before training, whose limits do not bind and whose filter knows the codec's patches."""
    model = Operator(Sizes((FAMILY,), (2,), (3,), (12,), (0,), NUM_CONDITIONS), small(modes=(3, 3, 3)))
    model.statistics.max_mean.fill_(1e3), model.statistics.max_fluctuation.fill_(1e3)
    model.persistence.bases[0] = torch.block_diag(*codec().bases(NAME))
    model.persistence.find_fitted()
    return model.requires_grad_(False)


def fields(batch_size: int) -> Tensor:
    """White noise on the grid, (B, 3, *GRID)."""
    return torch.randn(batch_size, 3, *GRID, generator=torch.Generator().manual_seed(batch_size))


def heat(u: Tensor, nu: float) -> Tensor:
    """The solution of the heat equation after a unit of time, by FFT: axis 0 wraps, axis 1 has no flux."""
    even = torch.cat([u, u.flip(-1)], -1)
    k, half = torch.fft.fftfreq(GRID[0], 1 / GRID[0]), torch.fft.rfftfreq(2 * GRID[1], 1 / GRID[1])
    decay = torch.exp(-nu * (k[:, None].square() + half.square()))
    return torch.fft.irfft2(torch.fft.rfft2(even) * decay, s=even.shape[-2:])[..., : GRID[1]]


@pytest.mark.parametrize(("num_points", "periodic"), list(product((1, 2, 7, 12), (True, False))))
def test_modes_are_orthonormal_and_sorted(num_points: int, periodic: bool):
    """Mode 0 is the mean and wavenumbers do not fall; the last one is half a wave per point, or nearly."""
    modes, k = axis_modes(num_points, periodic, torch.device("cpu"))
    torch.testing.assert_close(modes @ modes.mT, torch.eye(num_points), atol=1e-6, rtol=0)
    assert k[0] == 0
    assert k.tolist() == sorted(k)
    assert k[-1] == (num_points // 2 if periodic else (num_points - 1) / 2)


def test_persistence_without_noise_changes_nothing():
    """Then the filtered change is the predicted one, as it is where no bases are known."""
    model, z = operator(), codec().encode(fields(4), NAME)
    change = z.flip(0)
    torch.testing.assert_close(model.persistence(z, change, torch.tensor(0.0), DOMAIN), change, atol=1e-5, rtol=0)
    model.persistence.bases.zero_(), model.persistence.gains.zero_(), model.persistence.find_fitted()
    assert torch.equal(model.persistence(z, change, torch.tensor(9.0), DOMAIN), change)


def test_what_is_kept_and_let_through_by_hand():
    """Gains 0.3 and 0.5 of one wave of one field act on it alone; the grid may be finer than in training."""
    wave = torch.cos(2 * torch.pi * (torch.arange(16) + 0.5) * 3 / 16)[:, None].expand(16, 12)
    u = torch.stack([wave, wave, 0 * wave])[None]
    model, large = operator(), codec().on_grid(FAMILY, (16, 12))
    filters, noise = model.persistence, torch.tensor(0.1)
    filters.gains[0, 1] = 1e9
    filters.gains[0, 0, 1, 16], filters.gains[0, 1, 1, 16] = 0.3, 0.1**2 / (16 * 12)  # 8 log2(1 + 3) = 16
    found = filters(large.encode(u, NAME), large.encode(2 * u, NAME), noise, Domain(FAMILY, (8, 6), (True, False)))
    expected = torch.stack([2 * wave, (0.3 - 1 + 0.5 * 2) * wave, 0 * wave])
    torch.testing.assert_close(large.decode(found, NAME)[0], expected, atol=1e-5, rtol=0)


def test_an_untrained_operator_solves_the_heat_equation():
    """Fitted to its solutions, what a step keeps is exp(-nu k^2), for nearly equal k the same; on new states too."""
    model, encode = operator(), codec().encode
    u = fields(64)
    fit_persistence(model, codec(), DOMAIN, [(encode(u, NAME), encode(heat(u, 0.05), NAME))])
    z = encode(fields(3), NAME)
    z_next = model(z, z[..., :0], torch.zeros(3, NUM_CONDITIONS), DOMAIN)
    expected = heat(fields(3), 0.05)
    assert (codec().decode(z_next, NAME) - expected).norm() < 0.05 * (fields(3) - expected).norm()


def test_white_noise_of_the_network_is_filtered():
    """A filter for noise of 0.1 passes changes at small wavenumbers, and next to none where persistence is exact."""
    model, encode, u = operator(), codec().encode, fields(64)
    fit_persistence(model, codec(), DOMAIN, [(encode(u, NAME), encode(u - 2 * heat(u, 0.05), NAME))])
    passed = model.persistence.gains[0, 1] / (model.persistence.gains[0, 1] + 0.1**2 / 96)
    assert passed[:, 8].min() > 0.9
    assert passed[:, -1].max() < 0.1


def test_bfloat16_leaves_the_filter_alone():
    """Under autocast the filtered change is the same bit for bit."""
    model, z, noise = operator(), codec().encode(fields(4), NAME), torch.tensor(0.5)
    model.persistence.gains.uniform_(generator=torch.Generator().manual_seed(1))
    expected = model.persistence(z, z.flip(0), noise, DOMAIN)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.persistence(z, z.flip(0), noise, DOMAIN), expected)


def test_a_wave_is_kept_no_less_than_shorter_ones():
    """States that oscillate fast in long waves alone fit gains of P that do not rise with the wavenumber."""
    model, encode, u = operator(), codec().encode, fields(64)
    long_waves = heat(u, 0.2)
    fit_persistence(model, codec(), DOMAIN, [(encode(u, NAME), encode(heat(u, 0.01) - 2 * long_waves, NAME))])
    kept = model.persistence.gains[0, 0]
    assert kept[:, 0].tolist() == [1.0] * 3
    assert (kept.diff() <= 0).all()
    assert kept[:, 12].min() > 0.1


@pytest.mark.parametrize("grid", [(9,), (6, 10), (6, 4, 10)], ids=str)
@pytest.mark.parametrize("periodic", [True, False])
def test_what_a_step_keeps_beside_a_larger_family(grid: tuple[int, ...], periodic: bool):
    """Fitted to u -> u / 2, an untrained operator halves all but the mean; another family has more axes and fields."""
    names = {1: "burgers_1d", 2: "shallow_water_2d", 3: "compressible_ns_3d"}
    name, patch = names[len(grid)], 3 if grid == (9,) else 2
    num_fields, components = (5 if len(grid) == 3 else 1), patch ** len(grid)
    key = group_name(name, "fields")
    group = FieldGroup(grid, patch, components, (False,) * num_fields, (0.0,) * num_fields, (1.0,) * num_fields)
    lossless = Codec({key: group}).requires_grad_(False).eval()
    sizes = Sizes((FAMILY, name), (2, len(grid)), (3, num_fields), (50, group.num_channels), (0, 0), NUM_CONDITIONS)
    model = Operator(sizes, small(modes=(2, 2, 2))).requires_grad_(False)
    model.statistics.max_mean.fill_(1e3), model.statistics.max_fluctuation.fill_(1e3)
    domain = Domain(name, group.token_grid, (periodic,) * len(grid))
    z = lossless.encode(torch.randn(64, num_fields, *grid, generator=torch.Generator().manual_seed(0)), key)
    fit_persistence(model, lossless, domain, [(z, z / 2)])
    u, u_next = (lossless.decode(x, key) for x in (z, model(z, z[..., :0], torch.zeros(64, NUM_CONDITIONS), domain)))
    mean = u.mean(tuple(range(2, u.ndim)), keepdim=True)
    torch.testing.assert_close(u_next, mean + (u - mean) / 2, atol=1e-4, rtol=0)


def test_a_finer_grid_filters_the_same_waves():
    """Fitted on solutions of the heat equation on two grids, R and P of the long waves agree."""
    found = []
    for factor in (1, 2):
        grid = tuple(factor * n for n in GRID)
        made, model = codec().on_grid(FAMILY, grid), operator()
        domain = Domain(FAMILY, tuple(n // 2 for n in grid), DOMAIN.periodic)
        wave = torch.cos(2 * torch.pi * 2 * (torch.arange(grid[0]) + 0.5) / grid[0])[:, None].expand(grid)
        sizes = torch.linspace(1, 2, 8).view(8, 1, 1, 1).expand(8, 3, 1, 1)
        u, u_next = sizes * wave, (sizes.flip(0) + sizes / 2) * wave
        fit_persistence(model, made, domain, [(made.encode(u, NAME), made.encode(u_next, NAME))])
        found.append(model.persistence.gains[0, :, :, 13])  # 8 log2(1 + 2) = 12.7
    torch.testing.assert_close(found[0], found[1], rtol=0.03, atol=0.01)
    assert found[0][1].min() > 1e-3
