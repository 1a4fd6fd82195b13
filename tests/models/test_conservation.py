"""What predictions meet: mass, momentum and energy are kept, incompressible flow has no divergence, symmetry stays."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backbones import small
from ups.data.families import NUM_CONDITIONS
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.conservation import gradient_part
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.solvers.compressible import conserved_fields
from ups.training.inputs import fit_constraints

torch.set_num_threads(1)

FAMILY, GRID = "compressible_ns_2d", (8, 12)
DOMAIN, NAME = Domain(FAMILY, (4, 6), (True, True)), group_name(FAMILY, "fields")
MEAN, STD = (0.3, 1.1, 0.2, -0.1), (0.4, 0.6, 1.5, 0.7)
FLOW = "incompressible_ns_2d"
WALLS, FLOW_NAME = Domain(FLOW, (4, 6), (False, False)), group_name(FLOW, "fields")
Steps = list[tuple[Tensor, Tensor]]


def codec(components: int = 4) -> Codec:
    """Patches of 2 x 2 points in a random orthonormal basis; density and pressure are encoded by their logarithm."""
    group = FieldGroup(GRID, 2, components, (True, True, False, False), MEAN, STD)
    made = Codec({NAME: group}).requires_grad_(False).eval()
    made.skew[NAME].copy_(torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0)))
    return made


def operator() -> Operator:
    """An operator with random weights, which knows the codec's patches."""
    torch.manual_seed(1)
    model = Operator(Sizes((FAMILY,), (2,), (4,), (16,), (0,), NUM_CONDITIONS), small(modes=(3, 3, 3)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.persistence.bases[0] = torch.block_diag(*codec().bases(NAME))
    return model.requires_grad_(False).eval()


def states(seed: int) -> Tensor:
    """Latents (B, N, D) of random fields."""
    return torch.randn(5, 24, 16, generator=torch.Generator().manual_seed(seed))


def totals(z: Tensor) -> np.ndarray:
    """Means over the grid (B, 4) of the quantities that the solver conserves."""
    return conserved_fields(codec().decode(z, NAME)).double().mean((2, 3)).numpy()


def conserving() -> Steps:
    """Time steps that roll the fields around the periodic grid."""
    u = codec().decode(states(2), NAME)
    return [(states(2), codec().encode(u.roll((2, 4), (2, 3)), NAME))]


def losing(channel: int) -> Steps:
    """Time steps after which a field is a little larger everywhere: of density, pressure or a velocity."""
    ((z, z_next),) = conserving()
    u = codec().decode(z_next, NAME)
    u[:, channel] += 0.2
    return [(z, codec().encode(u, NAME))]


def fitted(steps: Steps, made: Codec | None = None) -> Operator:
    """An operator after `fit_constraints`."""
    model = operator()
    fit_constraints(model.constraints, made or codec(), DOMAIN, steps)
    return model


def is_on(model: Operator) -> list[bool]:
    """Which constraints are on: that of gas, that of flow between walls, that of mirror images."""
    return [on for constraint in model.constraints for on in constraint.is_on]


def step(model: Operator, z: Tensor, domain: Domain = DOMAIN) -> Tensor:
    """One step of the operator."""
    return model(z, z[..., :0], torch.zeros(len(z), NUM_CONDITIONS), domain)


def test_a_rollout_keeps_mass_momentum_and_energy():
    """As the solver defines them; the same network without this changes each of them."""
    model, z = fitted(conserving()), states(3)
    for _ in range(5):
        z = step(model, z)
    np.testing.assert_allclose(totals(z), totals(states(3)), rtol=2e-5, atol=2e-5)
    free = step(operator(), states(3))
    assert (np.abs(totals(free) - totals(states(3))).max(0) > 1e-2).all()


def test_training_is_free():
    """States in training have noise with momentum and energy of its own: nothing is moved, but in validation it is."""
    model = fitted(conserving()).train()
    assert torch.equal(step(model, states(3)), step(operator().train(), states(3)))
    with torch.no_grad():
        validated = step(model, states(3))
    assert torch.equal(validated, step(model.eval(), states(3)))


@pytest.mark.parametrize("periodic", [(False, False), (True, False)])
def test_gas_may_leave_an_open_domain(periodic: tuple[bool, ...]):
    """A model of a periodic domain that predicts on one with another boundary."""
    domain = Domain(FAMILY, DOMAIN.grid, periodic)
    assert torch.equal(step(fitted(conserving()), states(3), domain), step(operator(), states(3), domain))


def test_only_constants_are_added():
    """Each field, as it is encoded, moves by the same number everywhere."""
    model, z = fitted(conserving()), states(3)
    u, u_free = (codec().decode(step(each, z), NAME) for each in (model, operator()))
    moved = u - u_free
    moved[:, :2] = (u / u_free)[:, :2].log()
    assert moved.flatten(2).std(2).max() < 1e-5 < 1e-2 < moved.abs().amax((0, 2, 3)).min()


def test_a_state_with_these_integrals_stays():
    """What conserves them already is not moved."""
    model = fitted(conserving())
    for z, z_next in conserving():
        torch.testing.assert_close(
            model.constraints[0](z_next, z, model.persistence.bases_of(DOMAIN, 16), DOMAIN), z_next, rtol=0, atol=1e-5
        )


def test_the_gradient_is_exact():
    """Against finite differences, through both states."""
    model = fitted(conserving()).double()

    def moved(z_next: Tensor, z: Tensor) -> Tensor:
        return model.constraints[0](z_next, z, model.persistence.bases_of(DOMAIN, 16), DOMAIN)

    inputs = [states(seed)[:1].double().requires_grad_() for seed in (4, 5)]
    assert torch.autograd.gradcheck(moved, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("channel", range(4))
def test_data_that_lose_an_integral_are_not_held_to_it(channel: int):
    """With another boundary mass, momentum or energy may leave."""
    model = fitted(losing(channel))
    assert is_on(model) == [False, False, False]
    assert torch.equal(step(model, states(3)), step(operator(), states(3)))


def test_fields_that_the_latents_do_not_determine_are_left_alone():
    """Where the codec drops components nothing is kept."""
    assert is_on(fitted(conserving())) == [True, False, False]
    assert is_on(fitted(conserving(), codec(components=3))) == [False, False, False]


def test_loading_weights_tells_what_is_kept():
    """A model that was saved keeps the same integrals after loading."""
    model, loaded = fitted(conserving()), operator()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(step(loaded, states(3)), step(model, states(3)))


def centres(*grid: int) -> list[Tensor]:
    """Coordinates of the cell centres of the unit square or cube."""
    return list(torch.meshgrid(*((torch.arange(n) + 0.5) / n for n in grid), indexing="ij"))


def swirl(k: int, m: int) -> Tensor:
    """The velocity (2, 1, *GRID) of the stream function sin(pi k x) sin(pi m y), without divergence between walls."""
    x, y = (torch.pi * each for each in centres(*GRID))
    return torch.stack([m * (k * x).sin() * (m * y).cos(), -k * (k * x).cos() * (m * y).sin()])[:, None]


@pytest.mark.parametrize(("k", "m"), [(1, 1), (3, 2), (7, 11)])
def test_flow_without_divergence_has_no_gradient_part(k: int, m: int):
    """An exact solution of div v = 0 between walls."""
    assert gradient_part(swirl(k, m)).abs().max() < 1e-4


@pytest.mark.parametrize("wavenumbers", [(1, 0), (2, 3), (7, 11), (1, 2, 0), (2, 1, 3)])
def test_a_gradient_is_all_gradient_part(wavenumbers: tuple[int, ...]):
    """The gradient of a product of cosines, whose normal derivative is 0 at the walls, in 2D and 3D."""
    x = centres(*(GRID if len(wavenumbers) == 2 else (4, 6, 8)))
    cosines = [(torch.pi * k * each).cos() for k, each in zip(wavenumbers, x, strict=True)]
    sines = [k * (torch.pi * k * each).sin() for k, each in zip(wavenumbers, x, strict=True)]
    each = [[sines[a] if a == own else cosines[a] for a in range(len(x))] for own in range(len(x))]
    v = torch.stack([torch.stack(factors).prod(0) for factors in each])[:, None]
    torch.testing.assert_close(gradient_part(v), v, rtol=0, atol=1e-4)


def test_removing_it_twice_removes_it_once():
    """What is left of any flow has no gradient part."""
    v = torch.randn(2, 3, *GRID, generator=torch.Generator().manual_seed(6))
    part = gradient_part(v)
    assert part.norm() > 0.3 * v.norm()
    assert gradient_part(v - part).norm() < 1e-5 * v.norm()


def flow_codec() -> Codec:
    """As `codec`, for two velocities and particles, none of them encoded by its logarithm."""
    group = FieldGroup(GRID, 2, 4, (False,) * 3, (0.2, -0.3, 1.0), (1.5, 0.7, 2.0))
    made = Codec({FLOW_NAME: group}).requires_grad_(False).eval()
    made.skew[FLOW_NAME].copy_(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))
    return made


def flow(*, divergence: float) -> Steps:
    """Time steps between flows with some divergence."""
    u = [torch.cat([swirl(k, 2), torch.ones(1, 1, *GRID)]).transpose(0, 1) for k in (1, 3)]
    u[1][:, 0] += divergence * centres(*GRID)[0].mul(torch.pi).sin()
    return [tuple(flow_codec().encode(each, FLOW_NAME) for each in u)]  # type: ignore[list-item]


def flow_model(steps: Steps) -> Operator:
    """An operator of incompressible flow with random weights after `fit_constraints`."""
    torch.manual_seed(1)
    model = Operator(Sizes((FLOW,), (2,), (3,), (12,), (0,), NUM_CONDITIONS), small(modes=(3, 3, 3)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.persistence.bases[0] = torch.block_diag(*flow_codec().bases(FLOW_NAME))
    fit_constraints(model.constraints, flow_codec(), WALLS, steps)
    return model.requires_grad_(False).eval()


def test_predicted_flow_has_no_divergence():
    """In physical units; the particles are as without."""
    z = torch.randn(5, 24, 12, generator=torch.Generator().manual_seed(3))
    condition = torch.zeros(len(z), NUM_CONDITIONS)
    on, off = flow_model(flow(divergence=0.0)), flow_model(flow(divergence=1.0))
    assert (is_on(on), is_on(off)) == ([False, True, False], [False, False, False])
    u, u_off = (flow_codec().decode(each(z, z[..., :0], condition, WALLS), FLOW_NAME) for each in (on, off))
    parts = [gradient_part(each[:, :2].transpose(0, 1)).norm() / each[:, :2].norm() for each in (u, u_off)]
    assert parts[0] < 1e-5 < 0.1 < parts[1]
    torch.testing.assert_close(u[:, 2], u_off[:, 2], rtol=0, atol=1e-5)


def test_flow_without_walls_keeps_its_velocities():
    """A model of flow between walls that predicts in a periodic domain, where a uniform stream has no divergence."""
    z = torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(3))
    domain, condition = Domain(FLOW, (4, 6), (True, True)), torch.zeros(2, NUM_CONDITIONS)
    on, off = (flow_model(flow(divergence=each)) for each in (0.0, 1.0))
    assert torch.equal(on(z, z[..., :0], condition, domain), off(z, z[..., :0], condition, domain))


SCALARS = "diffusion_reaction_2d"
OPEN, SCALARS_NAME = Domain(SCALARS, (4, 6), (False, False)), group_name(SCALARS, "fields")


def scalar_codec() -> Codec:
    """As `codec`, for two scalar fields."""
    made = Codec({SCALARS_NAME: FieldGroup(GRID, 2, 4, (True, False), MEAN[:2], STD[:2])}).requires_grad_(False).eval()
    made.skew[SCALARS_NAME].copy_(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)))
    return made


def scalar_model(u: Tensor, u_next: Tensor) -> Operator:
    """An operator of two scalar fields (B, C, *GRID) with random weights, after `fit_constraints` to one time step."""
    torch.manual_seed(1)
    model = Operator(Sizes((SCALARS,), (2,), (2,), (8,), (0,), NUM_CONDITIONS), small(modes=(3, 3, 3)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.persistence.bases[0] = torch.block_diag(*scalar_codec().bases(SCALARS_NAME))
    steps = [tuple(scalar_codec().encode(each, SCALARS_NAME) for each in (u, u_next))]
    fit_constraints(model.constraints, scalar_codec(), OPEN, steps)  # type: ignore[arg-type]
    return model.requires_grad_(False).eval()


def scalars(seed: int, *even_axes: int) -> Tensor:
    """Random positive fields (B, C, *GRID) that are their own mirror images along some axes."""
    u = torch.rand(3, 2, *GRID, generator=torch.Generator().manual_seed(seed)) + 0.5
    for axis in even_axes:
        u = u + u.flip(axis)
    return u


def asymmetry(u: Tensor) -> list[float]:
    """RMS of the odd part along each axis over that of the fluctuation."""
    return [float((u - u.flip(axis)).norm() / 2 / (u - u.mean((2, 3), keepdim=True)).norm()) for axis in (2, 3)]


def predicted(model: Operator, u: Tensor) -> Tensor:
    """Fields after one step."""
    return scalar_codec().decode(step(model, scalar_codec().encode(u, SCALARS_NAME), OPEN), SCALARS_NAME)


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 3)])
def test_a_state_that_is_its_own_mirror_image_stays_so(axes: tuple[int, ...]):
    """Along the axes along which it is one, and along no other."""
    model = scalar_model(scalars(0), scalars(1))
    assert is_on(model) == [False, False, True]
    for axis, each in zip((2, 3), asymmetry(predicted(model, scalars(2, *axes))), strict=True):
        assert each < 1e-6 if axis in axes else each > 1e-2


def test_a_state_off_centre_is_predicted_as_before():
    """Each trajectory of a batch by itself; data whose steps leave the symmetry turn it off."""
    model, free = scalar_model(scalars(0), scalars(1)), scalar_model(scalars(0, 2), scalars(1))
    assert not any(is_on(free))
    mixed = torch.cat([scalars(2), scalars(3, 2, 3)])
    u, u_free = (predicted(each, mixed) for each in (model, free))
    assert torch.equal(u[:3], u_free[:3])
    assert (u[3:] - u_free[3:]).abs().amax() > 1e-2


def test_the_even_part_is_the_nearest_symmetric_state():
    """By orthogonality in the fields as encoded: what is taken away is odd."""
    model, free = scalar_model(scalars(0), scalars(1)), scalar_model(scalars(0, 2), scalars(1))
    u, u_free = (predicted(each, scalars(2, 2, 3)) for each in (model, free))
    u[:, :1], u_free[:, :1] = u[:, :1].log(), u_free[:, :1].log()
    even = (u_free + u_free.flip(2) + u_free.flip(3) + u_free.flip(2, 3)) / 4
    torch.testing.assert_close(u, even, rtol=1e-5, atol=1e-5)
