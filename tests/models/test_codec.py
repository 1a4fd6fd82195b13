"""The codec: exact where all components are kept, the best linear one where they are not."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.files import WEIGHTS, digest_of
from ups.models import codec as codec_module
from ups.models.codec import (
    Codec,
    FieldGroup,
    choose_patch,
    codec_from,
    from_patches,
    larger_patches,
    normalized_patches,
    principal_errors,
)
from ups.models.weights import load_model, tensor_bytes

torch.set_num_threads(1)

GROUPS = {
    "1d/fields": FieldGroup((24,), 4, 4, (False,), (0.3,), (2.0,)),
    "2d/fields": FieldGroup((6, 4), 2, 4, (True, False), (-0.5, 1.0), (0.7, 3.0)),
    "2d/coefficients": FieldGroup((6, 4), 2, 4, (True,), (1.0,), (0.2,)),
    "3d/fields": FieldGroup((4, 2, 6), 2, 8, (True, False, False), (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)),
}
every_group = pytest.mark.parametrize("name", GROUPS)


def seeded(seed: int = 0) -> torch.Generator:
    """A generator in a known state."""
    return torch.Generator().manual_seed(seed)


def trained_codec(groups: dict[str, FieldGroup] = GROUPS) -> Codec:
    """A codec in double precision with bases far from where training starts."""
    codec = Codec(groups).double()
    with torch.no_grad():
        for number, skew in enumerate(codec.parameters()):
            skew.copy_(torch.randn(skew.shape, generator=seeded(number), dtype=torch.float64))
    return codec


def fields(name: str, batch: int = 3) -> Tensor:
    """Positive physical fields (B, C, *grid)."""
    shape = (batch, len(GROUPS[name].mean), *GROUPS[name].grid)
    return torch.rand(shape, generator=seeded(2), dtype=torch.float64) + 0.5


def plain(group: FieldGroup) -> FieldGroup:
    """The group without logarithms, means and scales."""
    count = len(group.mean)
    return replace(group, log=(False,) * count, mean=(0.0,) * count, std=(1.0,) * count)


@every_group
def test_round_trip_is_exact(name: str):
    """With all components kept, decoding undoes encoding, whatever the bases are."""
    codec, u = trained_codec(), fields(name)
    assert torch.allclose(codec.decode(codec.encode(u, name), name), u, rtol=1e-10)


@every_group
def test_latents_have_the_announced_shape(name: str):
    """Latents are (B, tokens, fields x components)."""
    group = GROUPS[name]
    assert trained_codec().encode(fields(name), name).shape == (3, group.num_tokens, group.num_channels)


@every_group
def test_encoding_is_isometric(name: str):
    """The distance of two latents is the distance of the normalized fields."""
    codec, u = trained_codec(), fields(name, batch=2)
    z, patches = codec.encode(u, name), normalized_patches(u, GROUPS[name])
    assert torch.allclose((z[0] - z[1]).norm(), (patches[:, 0] - patches[:, 1]).norm(), rtol=1e-10)


@every_group
def test_bases_are_orthonormal(name: str):
    """The kept components of every field are orthonormal for any weights."""
    group = replace(GROUPS[name], components=3)
    bases = trained_codec({name: group}).bases(name)
    assert bases.shape == (len(group.mean), 3, group.patch_points)
    assert torch.allclose(bases @ bases.mT, torch.eye(3, dtype=torch.float64).expand(len(group.mean), 3, 3), atol=1e-10)


def test_groups_have_their_own_bases():
    """Training the bases of one group leaves those of the others alone."""
    codec = trained_codec()
    before = {name: codec.bases(name).detach() for name in GROUPS}
    with torch.no_grad():
        codec.skew["2d/fields"].mul_(0.5)
    changed = {name for name in GROUPS if not torch.equal(codec.bases(name), before[name])}
    assert changed == {"2d/fields"}


def test_normalization_by_hand():
    """A positive field is (log u - mean) / std, another one (u - mean) / std."""
    u = torch.stack([torch.full((6, 4), 2.0), torch.full((6, 4), 4.0)])[None]
    patches = normalized_patches(u, GROUPS["2d/fields"])
    assert patches[:, 0, 0, 0].tolist() == pytest.approx([(0.693147 + 0.5) / 0.7, 1.0])


def test_decoded_positive_field_is_positive():
    """A field that is encoded by its logarithm is positive whatever a network predicts."""
    z = 5 * torch.randn(3, 6, 8, generator=seeded(), dtype=torch.float64)
    u = trained_codec().decode(z, "2d/fields")
    assert u[:, 0].min() > 0 > u[:, 1].min()


@every_group
def test_patches_round_trip(name: str):
    """Cutting fields into patches and joining them gives the same fields."""
    u, group = fields(name), plain(GROUPS[name])
    for field, patches in enumerate(normalized_patches(u, group)):
        assert torch.equal(from_patches(patches, group), u[:, field])


def test_patches_by_hand():
    """Tokens run over the patches row by row, and points over a patch row by row."""
    group = plain(replace(GROUPS["2d/coefficients"], grid=(4, 4)))
    u = torch.arange(16.0).view(1, 1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert normalized_patches(u, group)[0, 0].tolist() == expected


def test_tokens_are_local():
    """A change at one point changes the one token whose patch contains it."""
    codec, u = trained_codec(), fields("2d/fields", batch=1)
    z = codec.encode(u, "2d/fields")
    u[0, 1, 5, 1] += 1
    changed = (codec.encode(u, "2d/fields") - z).abs().amax((0, 2)).nonzero().flatten()
    assert changed.tolist() == [2 * 2 + 0]


@pytest.mark.parametrize(
    ("grid", "patch_size", "max_tokens", "patch"),
    [
        ((128,), 2, 256, 2),
        ((1024,), 2, 256, 4),
        ((1024,), 16, 256, 16),
        ((24,), 5, 256, 6),
        ((31,), 2, 256, 1),
        ((101,), 2, 64, 1),
        ((32, 32), 2, 1024, 2),
        ((128, 128), 2, 1024, 4),
        ((30, 20), 3, 1024, 5),
        ((31, 30), 2, 1024, 1),
        ((64, 64, 64), 2, 1024, 8),
        ((12,), 2, 1, 6),
    ],
)
def test_choose_patch(grid: tuple[int, ...], patch_size: int, max_tokens: int, patch: int):
    """The smallest divisor that is large enough, else the largest there is below the whole axis."""
    assert choose_patch(grid, patch_size, max_tokens) == patch


def test_another_grid_holds_for_fields_and_coefficients_of_one_family():
    """On a grid of twice the patches a family's fields and coefficients are encoded, other families as before."""
    codec, u = trained_codec(), fields("2d/coefficients")
    wide = codec.on_grid("2d", (12, 8))
    encoded = wide.encode(u.repeat(1, 1, 2, 2), "2d/coefficients").unflatten(1, (2, 3, 2, 2))
    torch.testing.assert_close(encoded[:, 0, :, 1].flatten(1, 2), codec.encode(u, "2d/coefficients"))
    assert wide.groups["2d/fields"].grid == (12, 8)
    assert wide.groups["1d/fields"] == codec.groups["1d/fields"]


def test_the_largest_basis_is_allowed(monkeypatch: pytest.MonkeyPatch):
    """A patch whose modes have as many entries as the limit has a basis; with one point more it has none."""
    monkeypatch.setattr(codec_module, "MAX_BASIS_ENTRIES", 8 * 9)
    group = FieldGroup((6, 6), 3, 2, (False,), (0.0,), (1.0,))
    assert Codec({"2d/fields": group}).bases("2d/fields").shape == (1, 2, 9)
    with pytest.raises(ConfigFault, match=r"10 grid points of 1d/fields .* 8 modes: raise codec\.model\.max_tokens"):
        Codec({"1d/fields": FieldGroup((20,), 10, 2, (False,), (0.0,), (1.0,))})


def test_few_components_turn_among_the_lowest_modes():
    """With components for a hundredth of a patch's points its parameter is small, and the bases are orthonormal."""
    name, group = "3d/fields", FieldGroup((16, 16, 16), 8, 5, (False,), (0.0,), (1.0,))
    codec = trained_codec({name: group})
    assert codec.skew[name].shape == (1, 20, 20)
    (basis,) = codec.bases(name)
    assert torch.allclose(basis @ basis.T, torch.eye(5, dtype=torch.float64), atol=1e-10)


def test_modes_of_a_cube_are_those_of_its_axes():
    """The lowest modes of a 3D patch are products of modes along the axes, in the order of the whole transform."""
    few, whole = (Codec({"3d/fields": FieldGroup((8,) * 3, 4, k, (False,), (0.0,), (1.0,))}) for k in (3, 64))
    assert torch.equal(few.bases("3d/fields")[0], whole.bases("3d/fields")[0, :3])
    one = torch.cos(torch.pi * (torch.arange(4) + 0.5) / 4)
    expected = one.expand(4, 4, 4) / one.expand(4, 4, 4).norm()
    assert torch.allclose(few.bases("3d/fields")[0, 1].view(4, 4, 4), expected, atol=1e-6)


def test_bases_of_a_loaded_codec_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    """In evaluation mode the system of each field is solved once, and again after the parameter has changed."""
    solved, solve = [], torch.linalg.solve
    monkeypatch.setattr(torch.linalg, "solve", lambda *system: solved.append(1) or solve(*system))
    codec, name = trained_codec().requires_grad_(False).eval(), "2d/fields"
    z = codec.encode(fields(name), name)
    assert torch.equal(codec.encode(fields(name), name), z) and len(solved) == 2
    codec.skew[name].mul_(0.5)
    assert not torch.equal(codec.encode(fields(name), name), z) and len(solved) == 4
    assert codec.float().bases(name).dtype == torch.float32


def test_bases_are_solved_once_per_training_step(monkeypatch: pytest.MonkeyPatch):
    """The forward pass solves one linear system per field for projection and reconstruction together."""
    solved, solve = [], torch.linalg.solve
    monkeypatch.setattr(torch.linalg, "solve", lambda *system: solved.append(1) or solve(*system))
    trained_codec()(fields("2d/fields"), "2d/fields", torch.tensor([1, 2, 3]))
    assert len(solved) == 2


def test_large_bases_are_solved_on_several_threads():
    """Bases of 256 modes of two fields are the same on two threads as on one."""
    group = FieldGroup((32, 32), 16, 64, (False,) * 2, (0.0,) * 2, (1.0,) * 2)
    codec = trained_codec({"2d/fields": group})
    alone = codec.bases("2d/fields")
    torch.set_num_threads(2)
    try:
        together = codec.bases("2d/fields")
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(together, alone, atol=1e-8)


@pytest.mark.parametrize("name", ["1d/fields", "2d/fields", "3d/fields"])
def test_forward_keeps_the_first_components(name: str):
    """Each sample is reconstructed from as many leading components of every field as it is told."""
    codec, group, u = trained_codec(), GROUPS[name], fields(name)
    patches, patches_pred = codec(u, name, torch.tensor([1, 2, group.components]))
    assert torch.equal(patches, normalized_patches(u, group))
    for sample, keep in enumerate((1, 2, group.components)):
        basis = codec.bases(name)[:, :keep]
        expected = torch.einsum("cni,cki,ckj->cnj", patches[:, sample], basis, basis)
        assert torch.allclose(patches_pred[:, sample], expected)


def test_untrained_basis_is_the_cosine_transform():
    """Before training the first component is the mean of a patch, and a constant field needs no other."""
    codec = Codec(GROUPS).double()
    z = codec.encode(torch.full((1, 1, 24), 2.3, dtype=torch.float64), "1d/fields")
    expected = torch.tensor([2.0, 0, 0, 0]).double().expand(1, 6, 4)  # (2.3 - 0.3) / 2.0 times sqrt(4 points)
    assert torch.allclose(z, expected)


def test_components_start_in_the_order_of_squared_frequencies():
    """On 3 x 3 points the fourth component has frequency 1 on both axes (1 + 1), before 2 on one of them (4)."""
    group = FieldGroup((6, 6), 3, 9, (False,), (0.0,), (1.0,))
    basis = Codec({"toy/fields": group}).bases("toy/fields")[0].view(9, 3, 3)
    one = torch.tensor([1.0, 0.0, -1.0])
    assert torch.allclose(basis[3], torch.outer(one, one) / 2, atol=1e-6)


def correlated_patches() -> Tensor:
    """Snapshots (B, 1, 32) whose patches of 8 points have random principal components of falling variance."""
    spectrum = 0.6 ** torch.arange(8.0)
    directions = torch.linalg.qr(torch.randn(8, 8, generator=seeded(3)))[0]
    return (torch.randn(64, 4, 8, generator=seeded(4)) * spectrum @ directions.T).flatten(1)[:, None]


def test_trained_codec_approaches_the_principal_components():
    """Nested dropout finds bases that lose within 10 % of what the best linear projection loses."""
    u = correlated_patches()
    group = FieldGroup((32,), 8, 3, (False,), (0.0,), (1.0,))
    codec = Codec({"toy/fields": group})

    def loss(keep: Tensor) -> Tensor:
        normalized, u_pred = codec(u, "toy/fields", keep)
        return (normalized - u_pred).square().mean()

    everything = torch.full((64,), 3)
    untrained = loss(everything).item()
    optimizer, generator = torch.optim.Adam(codec.parameters(), lr=0.02), seeded(5)
    for _ in range(400):
        optimizer.zero_grad()
        loss(torch.randint(1, 4, (64,), generator=generator)).backward()
        optimizer.step()
    best = torch.linalg.svdvals(u.view(-1, 8))[3:].square().sum().item() / u.numel()
    assert best <= loss(everything).item() * 1.0001
    assert loss(everything).item() < 1.1 * best
    assert untrained > 2 * best


def test_codec_is_rebuilt_from_its_file(tmp_path: Path):
    """Settings and weights on disk give the same codec, frozen."""
    codec = trained_codec().float()
    settings = {"groups": {name: asdict(group) for name, group in GROUPS.items()}}
    (tmp_path / "run").mkdir()
    content = tensor_bytes({"settings": settings, "weights": codec.state_dict()})
    (tmp_path / "run" / WEIGHTS).write_bytes(content)
    receipt = {"path": "run", "stage": "codec", "weights": digest_of(tmp_path / "run" / WEIGHTS)}
    rebuilt = load_model(codec_from, tmp_path, receipt)
    assert rebuilt.groups == GROUPS
    assert all(torch.equal(rebuilt.skew[name], codec.skew[name]) for name in GROUPS)
    assert not any(parameter.requires_grad for parameter in rebuilt.parameters())


def test_principal_errors_are_those_of_truncated_singular_value_decompositions():
    """The error with k components is that of the best approximation of the patches of rank k (Eckart and Young)."""
    x = torch.randn(2, 50, 6, generator=seeded(), dtype=torch.float64) * torch.arange(1, 7)
    errors = principal_errors(x.mT @ x / 50)
    for field, k in product(range(2), range(7)):
        left, values, right = torch.linalg.svd(x[field], full_matrices=False)
        approximation = left[:, :k] * values[:k] @ right[:k]
        expected = (approximation - x[field]).square().mean().sqrt()
        assert errors[field, k].item() == pytest.approx(expected.item(), abs=1e-7)


def test_larger_patches_divide_every_axis():
    """Candidates are the given edge and the larger divisors of all axes with few enough points, below an axis."""
    assert larger_patches((24, 36), 2, 64) == [2, 3, 4, 6]
    assert larger_patches((24,), 3, 64) == [3, 4, 6, 8, 12]
    assert larger_patches((64, 64), 16, 64) == [16]
