"""Steps of an operator conserve what the PDE conserves, exactly, whatever its weights and the codec's bases."""

from types import SimpleNamespace

import pytest
import torch

from tests.backbones import small
from ups.data.pdebench import FAMILIES
from ups.models.codec import Codec, FieldGroup
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.training.symmetry import set_conserved

GROUPS = {
    "burgers_1d/fields": FieldGroup((12,), 3, 2, (False,), (0.4,), (2.0,)),
    "shallow_water_2d/fields": FieldGroup((4, 6), 2, 4, (False,), (1.0,), (0.5,)),
    "compressible_ns_1d/fields": FieldGroup((12,), 3, 3, (True, True, False), (0.0,) * 3, (1.0,) * 3),
    "diffusion_reaction_1d/fields": FieldGroup((12,), 3, 3, (False,), (0.0,), (1.0,)),
}


def codec() -> Codec:
    """Bases turned anywhere; those of Burgers are not even complete."""
    made = Codec(GROUPS)
    with torch.no_grad():
        for number, skew in enumerate(made.parameters()):
            skew.copy_(torch.randn(skew.shape, generator=torch.Generator().manual_seed(number)))
    return made.requires_grad_(False)


def directions(boundary: str | None = None, also: str | None = None) -> torch.Tensor:
    """Of datasets with these boundaries, or each with its family's own; with `also` of a second dataset each."""
    datasets = {}
    for name in GROUPS:
        family = FAMILIES[name.partition("/")[0]]
        axes = [boundary or family.boundary] * len(family.axes)
        datasets[name] = {"dataset": {"family": family.name, "boundary": axes}}
        if also is not None:
            datasets[f"{name} 2"] = {"dataset": {"family": family.name, "boundary": [also, *axes[1:]]}}
    families = {name.partition("/")[0]: row for row, name in enumerate(GROUPS)}
    operator = SimpleNamespace(statistics=SimpleNamespace(rows=families), conserved=torch.zeros(len(GROUPS), 9))
    set_conserved(operator, SimpleNamespace(datasets=datasets), codec())
    return operator.conserved


@pytest.mark.parametrize("family", ["burgers_1d", "shallow_water_2d"])
def test_decoded_integrals_stay(family: str):
    """The mean of the decoded field before and after a step of an operator with random weights."""
    torch.manual_seed(0)
    group, index = GROUPS[f"{family}/fields"], 0
    operator = Operator(Sizes((family,), (3,), (1,), (9,), (0,), 3), small(modes=(3, 3, 3)))
    for parameter in operator.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    operator.statistics.max_mean.fill_(100.0), operator.statistics.max_fluctuation.fill_(100.0)
    channels = group.num_channels
    operator.statistics.field_average[index, :channels, :channels] = 1 / channels
    z = torch.randn(3, group.num_tokens, channels)
    domain = Domain(family, group.token_grid, (True,) * len(group.grid))
    inputs = z, z[..., :0], torch.randn(3, 3), domain

    def change_of_mean() -> torch.Tensor:
        u, u_next = (codec().decode(state, f"{family}/fields") for state in (z, operator(*inputs)))
        assert (u_next - u).abs().amax() > 0.01
        return (u_next - u).flatten(1).mean(1).abs().amax()

    assert change_of_mean() > 1e-3
    operator.conserved.copy_(directions()[[list(GROUPS).index(f"{family}/fields")]])
    assert change_of_mean() < 1e-5


class Steps(torch.nn.Module):
    """Takes the place of the token mixer: every token takes the same step."""

    def visible(self, condition: torch.Tensor) -> torch.Tensor:
        return condition

    def forward(self, tokens: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.tensor([1.0, 3.0, 5.0]).expand(*tokens.shape[:2], -1)


def test_each_field_loses_its_own_integral_alone():
    """Of steps by 1, 3 and 5 the first two fields, which are conserved, do not move, and the third moves by 5."""
    operator = Operator(Sizes(("compressible_ns_1d",), (1,), (3,), (3,), (0,), 3), small())
    operator.mixer = Steps()
    operator.conserved.copy_(torch.tensor([[1.0, 1.0, 0.0]]))
    operator.statistics.max_mean.fill_(100.0), operator.statistics.max_fluctuation.fill_(100.0)
    z = torch.tensor([1.0, -1.0]).repeat(6)[None, :, None].repeat(1, 1, 3)  # of amplitude 1 in every field
    z_next = operator(z, z[..., :0], torch.zeros(1, 3), Domain("compressible_ns_1d", (12,), (True,)))
    torch.testing.assert_close(z_next - z, torch.tensor([0.0, 0.0, 5.0]).expand(1, 12, 3))


def test_what_is_not_conserved_has_no_direction():
    """Logarithms, reaction, and any family with open boundaries; the others one of unit length per field."""
    found = {name: directions()[list(GROUPS).index(name)].norm().item() for name in GROUPS}
    assert found == pytest.approx(
        {
            "burgers_1d/fields": 1.0,
            "shallow_water_2d/fields": 1.0,
            "compressible_ns_1d/fields": 0.0,
            "diffusion_reaction_1d/fields": 0.0,
        }
    )
    assert not directions("dirichlet").any()


def test_one_open_dataset_ends_conservation():
    """A family with a periodic and an open dataset has no direction: its operator serves both."""
    assert not directions(also="dirichlet").any()
    assert torch.equal(directions(also="periodic")[0], directions()[0])
