"""Steps of an operator conserve what the PDE conserves, exactly, whatever its weights and the codec's bases."""

from types import SimpleNamespace

import pytest
import torch

from tests.backbones import small
from ups.data.pdebench import FAMILIES
from ups.models.codec import Codec, FieldGroup
from ups.models.domain import Domain
from ups.models.operator import Operator
from ups.models.sizes import Sizes
from ups.training.conservation import conserved_directions

GROUPS = {
    "burgers_1d/fields": FieldGroup((12,), 3, 2, (False,), (0.4,), (2.0,), 0),
    "shallow_water_2d/fields": FieldGroup((4, 6), 2, 4, (False,), (1.0,), (0.5,), 1),
    "compressible_ns_1d/fields": FieldGroup((12,), 3, 3, (True, True, False), (0.0,) * 3, (1.0,) * 3, 2),
    "diffusion_reaction_1d/fields": FieldGroup((12,), 3, 3, (False,), (0.0,), (1.0,), 5),
}


def codec() -> Codec:
    """Bases turned anywhere; those of Burgers are not even complete."""
    made = Codec(GROUPS)
    with torch.no_grad():
        made.skew.copy_(torch.randn(made.skew.shape, generator=torch.Generator().manual_seed(0)))
    return made.requires_grad_(False)


def directions(boundary: str | None = None) -> torch.Tensor:
    """Of datasets with these boundaries, or each with its family's own."""
    datasets = {}
    for name in GROUPS:
        family = FAMILIES[name.partition("/")[0]]
        axes = [boundary or family.boundary] * len(family.axes)
        datasets[name] = {"dataset": {"family": family.name, "boundary": axes}}
    like = torch.zeros(len(FAMILIES), 9)
    return conserved_directions(SimpleNamespace(datasets=datasets), codec(), like)


@pytest.mark.parametrize("family", ["burgers_1d", "shallow_water_2d"])
def test_decoded_integrals_stay(family: str):
    """The mean of the decoded field before and after a step of an operator with random weights."""
    torch.manual_seed(0)
    group, index = GROUPS[f"{family}/fields"], list(FAMILIES).index(family)
    operator = Operator(Sizes(*((n,) * len(FAMILIES) for n in (3, 1, 9, 0)), 3), small(modes=(3, 3, 3)))
    for parameter in operator.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    operator.amplitude.bound.fill_(100.0), operator.amplitude.spread.fill_(100.0)
    channels = group.num_channels
    operator.amplitude.pool[index, :channels, :channels] = 1 / channels
    z = torch.randn(3, group.num_tokens, channels)
    domain = Domain(index, group.token_grid, (True,) * len(group.grid))
    inputs = z, z[..., :0], torch.randn(3, 3), domain

    def change_of_mean() -> torch.Tensor:
        u, u_next = (codec().decode(state, f"{family}/fields") for state in (z, operator(*inputs)))
        assert (u_next - u).abs().amax() > 0.01
        return (u_next - u).flatten(1).mean(1).abs().amax()

    assert change_of_mean() > 1e-3
    operator.conserved.copy_(directions())
    assert change_of_mean() < 1e-5


def test_what_is_not_conserved_has_no_direction():
    """Logarithms, reaction, and any family with open boundaries; the others one of unit length per field."""
    found = {name: directions()[list(FAMILIES).index(name.partition("/")[0])].norm().item() for name in GROUPS}
    assert found == pytest.approx(
        {
            "burgers_1d/fields": 1.0,
            "shallow_water_2d/fields": 1.0,
            "compressible_ns_1d/fields": 0.0,
            "diffusion_reaction_1d/fields": 0.0,
        }
    )
    assert not directions("dirichlet").any()
