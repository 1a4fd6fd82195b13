"""Mirrored and turned samples are solutions of the same PDE, and their latents those of the turned fields."""

from types import SimpleNamespace

import pytest
import torch

from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch
from ups.models.codec import Codec, FieldGroup
from ups.models.sizes import Domain
from ups.solvers import sample_initial_states, solve
from ups.solvers.families import PROBLEMS
from ups.training import symmetry
from ups.training.distributed import Draw
from ups.training.symmetry import AxisTransform, Symmetries, axis_transforms

torch.set_num_threads(1)

COEFFICIENTS = {"beta": 0.7, "nu": 0.02, "rho": 2.0, "eta": 0.1, "zeta": 0.05}
ISOTROPIC = sorted(name for name, family in FAMILIES.items() if family.isotropic)
GROUPS = {
    "burgers_1d/fields": FieldGroup((12,), 3, 3, (False,), (0.4,), (2.0,)),
    "incompressible_ns_2d/fields": FieldGroup((6, 6), 2, 4, (False,) * 3, (0.3, -0.2, 1.0), (2.0, 0.5, 1.0)),
    "incompressible_ns_2d/coefficients": FieldGroup((6, 6), 2, 4, (False,) * 2, (0.1, 0.7), (0.2, 1.5)),
    "compressible_ns_3d/fields": FieldGroup(
        (4, 4, 4), 2, 8, (True, True, False, False, False), (0.1, 0.2, 0.3, 0.4, 0.5), (1.0, 2.0, 3.0, 4.0, 5.0)
    ),
}


def domains(grid: tuple[int, ...], family: str) -> SimpleNamespace:
    """A cache with one dataset on a grid whose axes are alike but for their points."""
    axes = {"grid": list(grid), "lengths": [1.0] * len(grid), "boundary": ["periodic"] * len(grid)}
    return SimpleNamespace(datasets={"one": {"dataset": {"family": family, **axes}}})


@pytest.mark.parametrize("name", ISOTROPIC)
def test_turned_states_have_turned_solutions(name: str):
    """Solving and turning commute, for every turn there is and every field.

    Compressible solvers take one axis after the other: swapped ones then differ by the error of the splitting.
    """
    family, problem = FAMILIES[name], PROBLEMS[name]
    parameters = {"mach": 0.5}
    u_0, given = sample_initial_states(name, range(1), (8,) * problem.num_axes, seed=0, parameters=parameters)
    given = {key: value for key, value in given.items() if key in family.coefficients}
    fields = torch.stack([given[key] for key in family.coefficients], 1) if given else None
    times = [0.0] if problem.steady else [0.0, 0.05, 0.1]

    def solution(turn: AxisTransform) -> torch.Tensor:
        turned = turn(fields, family.coefficients, family).unbind(1) if fields is not None else ()
        state = turn(u_0, family.fields, family) if u_0 is not None else None
        coefficients = COEFFICIENTS | dict(zip(family.coefficients, turned, strict=True))
        return solve(name, state, coefficients, times)[0]

    first, *others = axis_transforms(family, cubic=True)
    u = solution(first)
    splitting = 0.1 if name.startswith("compressible") else 1e-6
    for turn in others:
        expected = turn(u, family.fields, family)
        error = (solution(turn) - expected)[-1].flatten(1).norm(dim=1)
        scale = (expected[-1] - (0 if problem.steady else expected[0])).flatten(1).norm(dim=1)
        assert (error <= (splitting if turn.order != first.order else 1e-6) * scale).all()


def test_there_are_as_many_turns_as_a_cube_has():
    """2 in 1D, 8 in 2D, 48 in 3D; mirrors alone where axes or their treatment differ; none with a direction."""
    families = [FAMILIES[name] for name in ("burgers_1d", "darcy_2d", "compressible_ns_3d")]
    assert [len(set(axis_transforms(family, cubic=True))) for family in families] == [2, 8, 48]
    assert [len(set(axis_transforms(family, cubic=False))) for family in families] == [2, 4, 8]
    assert len(axis_transforms(FAMILIES["shallow_water_2d"], cubic=True)) == 4
    assert len(axis_transforms(FAMILIES["advection_1d"], cubic=True)) == 1
    assert len(Symmetries(domains((6, 8), "darcy_2d"), Codec(GROUPS)).transforms["darcy_2d"]) == 4


@pytest.mark.parametrize("axis", [{"lengths": [1.0, 2.0]}, {"boundary": ["periodic", "wall"]}, {"grid": [6, 8]}])
def test_axes_that_differ_are_not_swapped(axis: dict):
    """A domain with other lengths, boundaries or points along one axis is mirrored, but not turned."""
    cache = domains((6, 6), "darcy_2d")
    cache.datasets["one"]["dataset"] |= axis
    assert len(Symmetries(cache, Codec(GROUPS)).transforms["darcy_2d"]) == 4


def test_only_training_samples_are_turned(monkeypatch: pytest.MonkeyPatch):
    """Validation batches stay as they are, so that their losses can be compared; training batches are turned."""
    monkeypatch.setattr(symmetry, "load_model", lambda *_: Codec(GROUPS).requires_grad_(False))
    run = SimpleNamespace(data_root=None, inputs={"latent_cache": {"codec": {}}})
    z = torch.randn(2, 4, 3)
    batch = LatentBatch(Domain("burgers_1d", (4,), (True,)), z, z + 1, z[..., :0], torch.zeros(2, 3), before=z)

    def loss(model: None, batch: LatentBatch, draw: Draw) -> torch.Tensor:
        assert torch.equal(batch.z, batch.before)
        return batch.z

    seen = symmetry.augmented(loss, domains((12,), "burgers_1d"), run)
    draws = [Draw((0, step), 2, slice(0, 2), torch.device("cpu"), step) for step in range(8)]
    assert {torch.equal(seen(None, batch, draw), z) for draw in draws} == {True, False}
    assert all(torch.equal(seen(None, batch, Draw(draw.seed, 2, slice(0, 2), draw.device)), z) for draw in draws)


@pytest.mark.parametrize("group", GROUPS)
def test_latents_turn_as_fields_do(group: str):
    """Turned latents are the latents of turned fields, whatever the bases, means, scales and logarithms.

    That training is in bfloat16 makes samples no coarser.
    """
    torch.manual_seed(0)
    codec = Codec(GROUPS).requires_grad_(False)
    for skew in codec.parameters():
        skew.normal_()
    family = FAMILIES[group.partition("/")[0]]
    names = family.fields if group.endswith("/fields") else family.coefficients
    symmetries = Symmetries(domains(GROUPS[group].grid, family.name), codec)
    u = torch.rand(2, len(names), *GROUPS[group].grid) + 0.5
    z = codec.encode(u, group)
    for turn in symmetries.transforms[family.name]:
        expected = codec.encode(turn(u, names, family), group)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(symmetries.transformed(z, group, turn), expected, rtol=1e-4, atol=1e-5)
