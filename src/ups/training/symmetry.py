"""Symmetries of the PDEs: mirrored or swapped axes make one solution into another, one sample into 2, 8 or 48."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch
from torch import Tensor, nn

from ups.data.latent_cache import LatentCache
from ups.data.loader import LatentBatch
from ups.data.pdebench import FAMILIES, Family
from ups.models.codec import Codec, codec_from, group_name
from ups.models.weights import load_model
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import datasets_of
from ups.training.stage import Loss


@dataclass(frozen=True)
class Turn:
    """New axis a is old axis `order[a]`, run through backwards where `mirrored[a]`."""

    order: tuple[int, ...]
    mirrored: tuple[bool, ...]

    def __call__(self, u: Tensor, names: Sequence[str], family: Family) -> Tensor:
        """Turn fields u (B, C, *grid) named `names`; components of a vector turn with the axes."""
        places, signs = list(range(len(names))), [1.0] * len(names)
        for vector in family.vectors:
            for axis, name in enumerate(vector):
                if name in names:
                    places[names.index(name)] = names.index(vector[self.order[axis]])
                    signs[names.index(name)] = -1.0 if self.mirrored[axis] else 1.0
        u = u[:, places].permute(0, 1, *(2 + axis for axis in self.order))
        u = u.flip([2 + axis for axis, backwards in enumerate(self.mirrored) if backwards])
        return u * u.new_tensor(signs).view(-1, *[1] * len(self.order))


def turns(family: Family, *, cubic: bool) -> list[Turn]:
    """All turns that make solutions of the family into solutions; axes are swapped where the domain is `cubic`."""
    num_axes = len(family.axes)
    if not family.isotropic:
        return [Turn(tuple(range(num_axes)), (False,) * num_axes)]
    orders = permutations(range(num_axes)) if cubic else [tuple(range(num_axes))]
    return [Turn(*choice) for choice in product(orders, product((False, True), repeat=num_axes))]


class Symmetries:
    """Turns latents of batches: each turn moves tokens and maps the channels of every token alike.

    With z = encode(u), what it gives is encode(turned u), exactly where the codec keeps all components.
    """

    def __init__(self, cache: LatentCache, codec: Codec) -> None:
        self.codec = copy.deepcopy(codec).double()
        self.turns = {name: turns(family, cubic=_is_cubic(cache, name)) for name, family in FAMILIES.items()}
        self._maps: dict[tuple[str, Turn, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, batch: LatentBatch, draw: Draw) -> LatentBatch:
        """The batch with one turn of all its samples, the same on all ranks."""
        family = list(FAMILIES)[batch.domain.family]
        turn = self.turns[family][draw.one_of(len(self.turns[family]))]
        states, given = group_name(family, "fields"), group_name(family, "coefficients")
        return replace(
            batch,
            z=self.turned(batch.z, states, turn),
            z_next=self.turned(batch.z_next, states, turn),
            window=None if batch.window is None else self.turned(batch.window, states, turn),
            coefficients=self.turned(batch.coefficients, given, turn),
        )

    def turned(self, z: Tensor, group: str, turn: Turn) -> Tensor:
        """Latents z (..., N, D) of a field group, turned; those without channels stay."""
        if z.shape[-1] == 0:
            return z
        if (group, turn, z.device) not in self._maps:
            self._maps[group, turn, z.device] = self._map(group, turn, z)
        tokens, matrix, offset = self._maps[group, turn, z.device]
        with torch.autocast(z.device.type, enabled=False):  # samples keep their precision
            return z[..., tokens, :] @ matrix + offset

    @torch.no_grad()
    def _map(self, group: str, turn: Turn, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens come from (N,), and what the turn does to a patch's latents: z @ matrix (D, D) + offset (D,)."""
        family = FAMILIES[group.partition("/")[0]]
        names = family.fields if group.endswith("/fields") else family.coefficients
        whole = self.codec.groups[group]
        tokens = torch.arange(whole.num_tokens).view(1, 1, *whole.token_grid)
        tokens = turn(tokens.double(), ("token",), family).long().flatten()
        patch = self.codec.on_grid(family.name, (whole.patch,) * len(whole.grid))
        z = torch.eye(whole.num_channels + 1, whole.num_channels, dtype=torch.float64).unsqueeze(1)
        image = patch.encode(turn(patch.decode(z, group), names, family), group).squeeze(1)
        offset, matrix = image[-1], image[:-1] - image[-1]
        return tokens.to(like.device), matrix.to(like), offset.to(like)


def _is_cubic(cache: LatentCache, family: str) -> bool:
    """Whether all axes have as many points, the same length and the same boundary in each of the family's datasets."""
    datasets = datasets_of(cache, family)
    return all(len(set(dataset[key])) == 1 for dataset in datasets for key in ("grid", "lengths", "boundary"))


def augmented(loss: Loss, cache: LatentCache, run: Run) -> Loss:
    """The loss of a run that learns on `cache`, in training on turned samples."""
    symmetries = Symmetries(cache, load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"]))

    def augmented_loss(model: nn.Module, batch: LatentBatch, draw: Draw) -> Tensor:
        return loss(model, batch if draw.step is None else symmetries(batch, draw), draw)

    return augmented_loss
