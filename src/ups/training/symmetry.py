"""Symmetries and conservation laws of the PDEs that training uses.

Mirroring or swapping axes maps a solution of an isotropic PDE to another solution: one sample gives 2 in 1D,
8 in 2D, 48 in 3D. Data of a scheme that steps along one axis after the other have the mirror images alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch
from torch import Tensor, nn

from ups.data.families import Family
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch
from ups.models.baselines import NormalizedGridOperator
from ups.models.codec import Codec, codec_from, group_name
from ups.models.operator import Operator
from ups.models.weights import load_model
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import entries_of
from ups.training.stage import Loss


@dataclass(frozen=True)
class AxisTransform:
    """Permutation and mirroring of axes: new axis a is old axis `order[a]`, reversed where `mirrored[a]`."""

    order: tuple[int, ...]
    mirrored: tuple[bool, ...]

    def __call__(self, u: Tensor, names: Sequence[str], family: Family) -> Tensor:
        """Transform fields u (B, C, *grid) named `names`; components of vector fields are swapped and negated too."""
        sources, signs = list(range(len(names))), [1.0] * len(names)
        for vector in family.vectors:
            for axis, name in enumerate(vector):
                if name in names:
                    sources[names.index(name)] = names.index(vector[self.order[axis]])
                    signs[names.index(name)] = -1.0 if self.mirrored[axis] else 1.0
        u = u[:, sources].permute(0, 1, *(2 + axis for axis in self.order))
        u = u.flip([2 + axis for axis, is_mirrored in enumerate(self.mirrored) if is_mirrored])
        return u * u.new_tensor(signs).view(-1, *[1] * len(self.order))


def axis_transforms(family: Family, *, cubic: bool) -> list[AxisTransform]:
    """All transforms that map solutions of the family to solutions.

    Axes are swapped only if the domain is `cubic`, and the family has not `split_axes`.
    """
    num_axes = len(family.axes)
    if not family.isotropic:
        return [AxisTransform(tuple(range(num_axes)), (False,) * num_axes)]
    orders = permutations(range(num_axes)) if cubic and not family.split_axes else [tuple(range(num_axes))]
    return [AxisTransform(*choice) for choice in product(orders, product((False, True), repeat=num_axes))]


class Symmetries:
    """Axis transforms of latents z = encode(u): tokens are permuted, the channels of each token mapped affinely.

    The result is encode(transformed u), exactly if the codec keeps all components.
    """

    def __init__(self, cache: LatentCache, codec: Codec) -> None:
        self.codec = copy.deepcopy(codec).double()
        names = {entry["dataset"]["family"] for entry in cache.datasets.values()}
        self.transforms = {n: axis_transforms(FAMILIES[n], cubic=_is_cubic(cache, n)) for n in names}
        self._maps: dict[tuple[str, AxisTransform, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, batch: LatentBatch, draw: Draw) -> LatentBatch:
        """The batch after one random transform, the same for all samples on all ranks."""
        family = batch.domain.family
        transform = self.transforms[family][draw.one_of(len(self.transforms[family]))]
        fields, coefficients = group_name(family, "fields"), group_name(family, "coefficients")
        states = {
            name: state for name in ("z", "z_next", "before", "window") if (state := getattr(batch, name)) is not None
        }
        changed = {name: self.transformed(state, fields, transform) for name, state in states.items()}
        return replace(batch, **changed, coefficients=self.transformed(batch.coefficients, coefficients, transform))

    def transformed(self, z: Tensor, group: str, transform: AxisTransform) -> Tensor:
        """Transformed latents z (..., N, D) of a field group; latents without channels are returned as they are."""
        if z.shape[-1] == 0:
            return z
        if (group, transform, z.device) not in self._maps:
            self._maps[group, transform, z.device] = self._map(group, transform, z)
        tokens, matrix, offset = self._maps[group, transform, z.device]
        with torch.autocast(z.device.type, enabled=False):  # training data are not rounded to bfloat16
            return z[..., tokens, :] @ matrix + offset

    @torch.no_grad()
    def _map(self, group: str, transform: AxisTransform, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Source token of each token (N,), and the map of the latents of a patch, z @ matrix (D, D) + offset (D,)."""
        family = FAMILIES[group.partition("/")[0]]
        names = family.fields if group.endswith("/fields") else family.coefficients
        whole = self.codec.groups[group]
        tokens = torch.arange(whole.num_tokens).view(1, 1, *whole.token_grid)
        tokens = transform(tokens.double(), ("token",), family).long().flatten()
        patch = self.codec.on_grid(family.name, (whole.patch,) * len(whole.grid))
        z = torch.eye(whole.num_channels + 1, whole.num_channels, dtype=torch.float64).unsqueeze(1)
        image = patch.encode(transform(patch.decode(z, group), names, family), group).squeeze(1)
        offset, matrix = image[-1], image[:-1] - image[-1]
        return tokens.to(like.device), matrix.to(like), offset.to(like)


def _is_cubic(cache: LatentCache, family: str) -> bool:
    """Whether grid points, length and boundary are the same along all axes in each of the family's datasets."""
    datasets = [entry["dataset"] for entry in entries_of(cache, family)]
    return all(len(set(dataset[key])) == 1 for dataset in datasets for key in ("grid", "lengths", "boundary"))


def augmented(loss: Loss, cache: LatentCache, run: Run) -> Loss:
    """The loss with randomly transformed samples in training; validation samples are not transformed."""
    symmetries = Symmetries(cache, load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"]))

    def augmented_loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        return loss(model, batch if draw.step is None else symmetries(batch, draw), draw)

    return augmented_loss


def set_conserved(operator: Operator | NormalizedGridOperator, cache: LatentCache, codec: Codec) -> None:
    """Set `operator.conserved` to the directions, in the mean of latents over tokens, of conserved integrals.

    The integral of a field over space is proportional to the sum over tokens of z @ (basis @ 1), with the codec's basis
    of the field. Fields that are encoded by their logarithm have no such direction, nor have families with a dataset
    whose boundary differs from the one under which the PDE conserves (outflow instead of periodic).
    """
    for name, row in operator.statistics.rows.items():
        boundaries = [tuple(entry["dataset"]["boundary"]) for entry in entries_of(cache, name)]
        direction = conserved_direction(name, boundaries, codec)
        operator.conserved[row, : len(direction)] = direction


def conserved_direction(name: str, boundaries: Sequence[tuple[str, ...]], codec: Codec) -> Tensor:
    """The direction (D,) of the integrals that a family conserves, see `set_conserved`; 0 for other boundaries."""
    family, key = FAMILIES[name], group_name(name, "fields")
    bases, group = codec.bases(key), codec.groups[key]
    direction = torch.zeros(len(family.fields), group.components)
    for field in family.conserved:
        index = family.fields.index(field)
        if not group.log[index] and all(each == family.boundaries for each in boundaries):
            along = bases[index].sum(-1)
            direction[index] = along / along.norm()
    return direction.flatten()
