"""A tiny surrogate of random weights for any family, made without files."""

import torch
from torch import Tensor

from tests.backbones import small
from ups.data.families import NUM_CONDITIONS, Dataset, Family
from ups.data.pdebench import FAMILIES
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.grid import patch_edge
from ups.models.operator import Operator, SteadyModel
from ups.models.sizes import Domain, Sizes
from ups.surrogate.export import PhysicalModel
from ups.surrogate.surrogate import Surrogate

GRIDS = {1: (12,), 2: (6, 4), 3: (4, 4, 2)}
PATCH = 2


def dataset_of(family: Family) -> Dataset:
    """A dataset of the family on a small grid, with all its parameters 0.1."""
    grid = GRIDS[len(family.axes)]
    times = (0.0,) if family.steady else (0.0, 0.1)
    boundary = (family.boundary,) * len(grid)
    parameters = dict.fromkeys(family.parameters, 0.1)
    return Dataset("tiny", family.name, ("tiny.hdf5",), (1,), times, grid, (1.0,) * len(grid), boundary, parameters)


def domain_of(dataset: Dataset) -> Domain:
    """The token grid of a dataset."""
    grid = tuple(n // PATCH for n in dataset.grid)
    return Domain(dataset.family, grid, tuple(boundary == "periodic" for boundary in dataset.boundary))


def _components(family: Family) -> int:
    """All of a patch for a flow whose divergence is removed, which takes whole patches; else two."""
    return PATCH ** len(family.axes) if family.divergence_free else 2


def _codec(family: Family, grid: tuple[int, ...]) -> Codec:
    groups = {}
    for kind, positive in (("fields", family.positive), ("coefficients", family.positive_coefficients)):
        if names := getattr(family, kind):
            log, count = tuple(name in positive for name in names), len(names)
            groups[group_name(family.name, kind)] = FieldGroup(
                grid, PATCH, _components(family), log, (0.1,) * count, (0.7,) * count
            )
    return Codec(groups)


def tiny_surrogate(name: str, *, history: bool = False) -> Surrogate:
    """Weights with a standard deviation of 0.3, seeded; two families, of which only the second has this name.

    With `history` steps of it start from two snapshots.
    """
    family = FAMILIES[name]
    dims, fields, coefficients = len(family.axes), len(family.fields), len(family.coefficients)
    components = _components(family)
    channels = (components * fields, components * coefficients)
    other = next(each for each in FAMILIES if each != name)
    sizes = Sizes(
        (other, name), (1, dims), (1, fields), (1, channels[0]), (0, channels[1]), NUM_CONDITIONS, [name] * history
    )
    codec, model = _codec(family, GRIDS[dims]), (SteadyModel if family.steady else Operator)(sizes, small(num_layers=1))
    generator = torch.Generator().manual_seed(0)
    for module in (codec, model):
        for weight in module.requires_grad_(False).eval().parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    for limit in ("max_mean", "max_fluctuation"):
        getattr(model.statistics, limit).fill_(1e3)
    if not family.steady:
        model.persistence.bases[1].copy_(torch.block_diag(*codec.bases(group_name(name, "fields"))[..., :components]))
        model.persistence.gains.uniform_(generator=generator)
        model.persistence.find_fitted()
        is_scalar = family.isotropic and not family.vectors and bool(patch_edge(components, dims))
        suits = "density" in family.fields, bool(family.divergence_free), is_scalar
        for constraint, is_on in zip(model.constraints, suits, strict=True):
            constraint.units[1, :, :fields] = torch.tensor([[0.7], [0.1]]) * is_on
            constraint.find_on()
        model.statistics.validation_error.fill_(0.5)
    steady, operator = (model, None) if family.steady else (None, model)
    return Surrogate(codec, operator, None, None, steady, {})


def tiny_model(name: str, *, history: bool = False) -> PhysicalModel:
    """The exportable model of a tiny surrogate."""
    dataset = dataset_of(FAMILIES[name])
    return PhysicalModel(tiny_surrogate(name, history=history), dataset, domain_of(dataset))


def random_inputs(model: PhysicalModel, batch_size: int) -> dict[str, Tensor]:
    """Inputs of a model in [0.5, 1.5), its dtype, the same for the same size."""
    generator = torch.Generator().manual_seed(batch_size)
    return {
        name: 0.5 + torch.rand(batch_size, *shape, generator=generator, dtype=model.features.dtype)
        for name, shape in model.inputs.items()
    }
