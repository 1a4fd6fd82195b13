"""Mass, momentum and energy of compressible flow, which a step of a network keeps."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backbones import small
from ups.data.families import NUM_CONDITIONS
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.solvers.compressible import conserved_fields
from ups.training.inputs import fit_gas_integrals

torch.set_num_threads(1)

FAMILY, GRID = "compressible_ns_2d", (8, 12)
DOMAIN, NAME = Domain(FAMILY, (4, 6), (True, True)), group_name(FAMILY, "fields")
MEAN, STD = (0.3, 1.1, 0.2, -0.1), (0.4, 0.6, 1.5, 0.7)
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
    """An operator after `fit_gas_integrals`."""
    model = operator()
    fit_gas_integrals(model.gas, made or codec(), DOMAIN, steps)
    return model


def step(model: Operator, z: Tensor) -> Tensor:
    """One step of the operator."""
    return model(z, z[..., :0], torch.zeros(len(z), NUM_CONDITIONS), DOMAIN)


def test_a_rollout_keeps_mass_momentum_and_energy():
    """As the solver defines them; the same network without this changes each of them."""
    model, z = fitted(conserving()), states(3)
    for _ in range(5):
        z = step(model, z)
    np.testing.assert_allclose(totals(z), totals(states(3)), rtol=2e-5, atol=2e-5)
    free = step(operator(), states(3))
    assert (np.abs(totals(free) - totals(states(3))).max(0) > 1e-2).all()


def test_training_is_free():
    """In training, whose states have noise with momentum and energy of its own, nothing is moved."""
    model = fitted(conserving())
    assert torch.equal(step(model.train(), states(3)), step(operator(), states(3)))


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
        torch.testing.assert_close(model.gas(z_next, z, model.bases(DOMAIN), DOMAIN), z_next, rtol=0, atol=1e-5)


def test_the_gradient_is_exact():
    """Against finite differences, through both states."""
    model = fitted(conserving()).double()

    def moved(z_next: Tensor, z: Tensor) -> Tensor:
        return model.gas(z_next, z, model.bases(DOMAIN), DOMAIN)

    inputs = [states(seed)[:1].double().requires_grad_() for seed in (4, 5)]
    assert torch.autograd.gradcheck(moved, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("channel", range(4))
def test_data_that_lose_an_integral_are_not_held_to_it(channel: int):
    """With another boundary mass, momentum or energy may leave."""
    model = fitted(losing(channel))
    assert not model.gas.is_kept[0]
    assert torch.equal(step(model, states(3)), step(operator(), states(3)))


def test_fields_that_the_latents_do_not_determine_are_left_alone():
    """Where the codec drops components nothing is kept."""
    assert fitted(conserving()).gas.is_kept == [True]
    assert fitted(conserving(), codec(components=3)).gas.is_kept == [False]


def test_loading_weights_tells_what_is_kept():
    """A model that was saved keeps the same integrals after loading."""
    model, loaded = fitted(conserving()), operator()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(step(loaded, states(3)), step(model, states(3)))
