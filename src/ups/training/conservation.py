"""How latents tell the integrals that the PDEs conserve."""

import torch
from torch import Tensor

from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.models.codec import Codec, group_name
from ups.training.inputs import datasets_of


def conserved_directions(cache: LatentCache, codec: Codec, like: Tensor) -> Tensor:
    """For `Operator.conserved`, of the shape of `like`: how latents, averaged over tokens, make up conserved integrals.

    The integral of a field is the sum over tokens of z @ (basis @ 1). Fields that the codec takes the logarithm of, and
    families with a dataset whose boundaries are not closed, have no such direction.
    """
    directions = torch.zeros_like(like)
    for name, family in FAMILIES.items():
        datasets = datasets_of(cache, name)
        is_closed = all(boundary == family.boundary for dataset in datasets for boundary in dataset["boundary"])
        if not datasets or not is_closed:
            continue
        group = codec.groups[group_name(name, "fields")]
        for field in family.conserved:
            place = family.fields.index(field)
            if not group.log[place]:
                direction = codec.bases(group)[place].sum(-1)
                channels = slice(place * group.components, (place + 1) * group.components)
                directions[list(FAMILIES).index(name), channels] = direction / direction.norm()
    return directions
