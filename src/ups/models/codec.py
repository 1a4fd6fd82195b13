"""The codec between physical fields (B, C, *grid) and latents (B, N, D): normalization, patches, orthonormal bases.

A token is one patch of the grid. Its latent channels are the coefficients of the patch in a trained orthonormal basis,
one basis per field, given by a skew-symmetric matrix (Cayley transform). Training reconstructs each sample from a
random number of leading components (nested dropout, Rippel et al. 2014, arXiv:1402.0915), so that the optimal basis is
the field's principal components. With all components kept the codec is exact up to rounding and isometric: the distance
of two latents is that of the normalized fields.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ups.errors import ConfigFault

# With this many modes per component principal components of PDEBench's fields lose at most 4 % more than with all.
MODES_PER_COMPONENT = 4
MAX_BASIS_ENTRIES = 4096**2  # of the cosine modes of a patch; that many modes are a linear system of 4096 unknowns


@dataclass(frozen=True)
class FieldGroup:
    """Fields encoded together: the state fields or the coefficient fields of one family, with their normalization.

    `patch` is the edge of a patch in grid points, `components` the number of basis components kept per field. Mean and
    standard deviation of each field are those of log(u) where `log` is true, else of u.
    """

    grid: tuple[int, ...]
    patch: int
    components: int
    log: tuple[bool, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def token_grid(self) -> tuple[int, ...]:
        """Patches per axis."""
        return tuple(n // self.patch for n in self.grid)

    @property
    def num_tokens(self) -> int:
        """Tokens N of a snapshot."""
        return math.prod(self.token_grid)

    @property
    def num_channels(self) -> int:
        """Latent channels D = fields x components."""
        return len(self.mean) * self.components

    @property
    def patch_points(self) -> int:
        """Grid points P of a patch."""
        return self.patch ** len(self.grid)

    @property
    def num_modes(self) -> int:
        """Lowest cosine modes m of a patch among which a basis turns: all P of them where most are kept."""
        return min(self.patch_points, MODES_PER_COMPONENT * self.components)


def choose_patch(grid: tuple[int, ...], patch_size: int, max_tokens: int) -> int:
    """The smallest patch edge that divides every axis, is at least `patch_size` and gives at most `max_tokens` tokens.

    If there is none (prime numbers of points), the largest that divides every axis and is below the shortest axis.
    """
    divisors = [p for p in range(1, min(grid) + 1) if all(n % p == 0 for n in grid) and p < min(grid)]
    fitting = [p for p in divisors if p >= patch_size and math.prod(n // p for n in grid) <= max_tokens]
    return min(fitting) if fitting else max(divisors)


def larger_patches(grid: tuple[int, ...], patch: int, max_points: int) -> list[int]:
    """`patch`, and the larger edges below the shortest axis that divide every axis and have at most `max_points`."""
    edges = range(patch + 1, min(grid))
    return [patch] + [p for p in edges if all(n % p == 0 for n in grid) and p ** len(grid) <= max_points]


def principal_errors(moments: Tensor) -> Tensor:
    """Least RMS errors (fields, P + 1) of patches reconstructed from k = 0, ..., P components.

    `moments` (fields, P, P) are the second moments E[x x^T] of normalized patches x. The principal components have the
    least error; its square is the sum of the P - k smallest eigenvalues over P.
    """
    smallest_first = torch.linalg.eigvalsh(moments).clamp(min=0.0).cumsum(-1)
    lost = nn.functional.pad(smallest_first, (1, 0)).flip(-1)
    return (lost / moments.shape[-1]).sqrt()


class Codec(nn.Module):
    """Encoder and decoder of every field group, by `group_name`; the decoder is the transpose of the encoder.

    The parameters are `skew`, one (fields, m, m) per group: a matrix S per field, see `bases`. In evaluation mode, in
    which a trained codec is loaded, the bases are kept until the parameters change.

    Raises:
        ConfigFault: the cosine modes of a patch have more than `MAX_BASIS_ENTRIES` entries.
    """

    def __init__(self, groups: dict[str, FieldGroup]) -> None:
        super().__init__()
        self.groups = groups
        for name, group in groups.items():
            if group.num_modes * group.patch_points > MAX_BASIS_ENTRIES:
                raise ConfigFault(
                    f"a patch of {group.patch_points} grid points of {name} is too large for a basis of "
                    f"{group.num_modes} modes: raise codec.model.max_tokens or lower codec.model.components"
                )
        sizes = {name: (len(group.mean), group.num_modes, group.num_modes) for name, group in groups.items()}
        self.skew = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
        self._kept: dict[str, tuple[tuple[object, ...], Tensor]] = {}

    def on_grid(self, family: str, grid: tuple[int, ...]) -> "Codec":
        """A codec that shares this one's bases and takes snapshots of `family` on `grid`, a multiple of its patch."""
        names = (group_name(family, "fields"), group_name(family, "coefficients"))
        on_grid = {name: replace(self.groups[name], grid=grid) for name in names if name in self.groups}
        codec = copy.copy(self)
        codec.groups = self.groups | on_grid
        return codec

    def bases(self, name: str) -> Tensor:
        """Orthonormal bases of a group (fields, components, patch points): the first rows of Q C.

        Q = (I - A)(I + A)^-1 with A = S - S^T is the Cayley transform, orthogonal for every S, so that training needs
        no constraint; C are the lowest cosine modes (m, P), where training starts with S = 0.
        """
        skew, group = self.skew[name], self.groups[name]
        if self.training or (skew.requires_grad and torch.is_grad_enabled()):
            return _bases(skew, group)
        state = (skew._version, skew.data_ptr(), skew.dtype, skew.device)
        if name not in self._kept or self._kept[name][0] != state:
            with torch.inference_mode(False):  # tensors made in inference mode could not be used with gradients later
                self._kept[name] = state, _bases(skew.detach(), group)
        return self._kept[name][1]

    def encode(self, u: Tensor, name: str) -> Tensor:
        """Physical fields (B, C, *grid) to latents (B, N, D)."""
        return encode_fields(u, self.groups[name], self.bases(name))

    def decode(self, z: Tensor, name: str) -> Tensor:
        """Latents (B, N, D) to physical fields (B, C, *grid)."""
        return decode_fields(z, self.groups[name], self.bases(name))

    def forward(self, u: Tensor, name: str, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized patches (C, B, N, P), and their reconstruction from the first `keep` (B,) components of each."""
        group, bases = self.groups[name], self.bases(name)
        patches = normalized_patches(u, group)
        kept = torch.arange(group.components, device=u.device) < keep[:, None]  # (B, components)
        components = torch.einsum("cbni,cki->cbnk", patches, bases) * kept[:, None, :]
        return patches, torch.einsum("cbnk,cki->cbni", components, bases)


def _bases(skew: Tensor, group: FieldGroup) -> Tensor:
    skew = skew - skew.mT
    identity = torch.eye(group.num_modes, device=skew.device, dtype=skew.dtype)
    # One by one: MKL's batched solver fails on more than one thread for systems of 256 unknowns or more.
    systems = zip(identity + skew, identity - skew, strict=True)
    rotation = torch.stack([torch.linalg.solve(left, right) for left, right in systems])
    cosines = _cosine_modes(group.patch, len(group.grid), group.num_modes)
    return rotation[:, : group.components] @ cosines.to(skew)


def _cosine_modes(patch: int, num_dims: int, num_modes: int) -> Tensor:
    """The first rows of the orthonormal cosine transform of a patch (m, P), sorted by squared frequency."""
    k, i = torch.meshgrid(*[torch.arange(patch, dtype=torch.float64)] * 2, indexing="ij")
    basis = torch.cos(torch.pi * k * (i + 0.5) / patch)
    basis = basis / basis.norm(dim=1, keepdim=True)
    frequency = torch.zeros(1, dtype=torch.long)
    for _ in range(num_dims):
        frequency = (frequency[:, None] + torch.arange(patch) ** 2).flatten()
    lowest = frequency.argsort(stable=True)[:num_modes]
    modes = torch.ones(num_modes, 1, dtype=torch.float64)
    for axis in reversed(range(num_dims)):  # torch.unravel_index imports SymPy: a second for the first prediction
        modes = (modes[:, :, None] * basis[lowest // patch**axis % patch][:, None, :]).flatten(1)
    return modes


def encode_fields(u: Tensor, group: FieldGroup, bases: Tensor) -> Tensor:
    """Physical fields (B, C, *grid) to latents (B, N, D), given the bases of the group."""
    pairs = enumerate(zip(bases, group.std, strict=True))
    # With a contiguous factor the product rounds the same for any number of small patches; decoding has one anyway.
    fields = [_patches(u[:, field], group, field).mm((basis.mT / std).contiguous()) for field, (basis, std) in pairs]
    z = fields[0] if len(fields) == 1 else torch.cat(fields, -1)
    return z.unflatten(0, (-1, group.num_tokens))


def decode_fields(z: Tensor, group: FieldGroup, bases: Tensor) -> Tensor:
    """Latents (B, N, D) to physical fields (B, C, *grid), given the bases of the group."""
    components, fields = z.unflatten(2, (len(group.mean), group.components)), []
    for field, basis in enumerate(bases):
        patches = components[:, :, field].flatten(0, 1).mm(basis * group.std[field])
        u = from_patches(patches.unflatten(0, (-1, group.num_tokens)), group).add_(group.mean[field])
        fields.append(u.exp_() if group.log[field] else u)
    return torch.stack(fields, 1)


def normalized_patches(u: Tensor, group: FieldGroup) -> Tensor:
    """Fields (B, C, *grid) to patches (C, B, N, P) of (g(u) - mean) / std, with g = log for positive fields."""
    fields = [_patches(u[:, field], group, field).div_(std) for field, std in enumerate(group.std)]
    return torch.stack(fields).unflatten(1, (-1, group.num_tokens))


def _patches(u: Tensor, group: FieldGroup, field: int) -> Tensor:
    """Patches (B N, P) of g(u) - mean of one field u (B, *grid)."""
    d = len(group.grid)
    for axis, n in reversed(list(enumerate(group.grid))):
        u = u.unflatten(axis + 1, (n // group.patch, group.patch))
    u = u.permute(0, *(1 + 2 * axis for axis in range(d)), *(2 + 2 * axis for axis in range(d)))
    # A copy in the order of patches, then changed in place, is faster than a result that is copied into this order.
    patches = u.clone(memory_format=torch.contiguous_format).view(-1, group.patch_points)
    return (patches.log_() if group.log[field] else patches).sub_(group.mean[field])


def from_patches(patches: Tensor, group: FieldGroup) -> Tensor:
    """Patches (B, N, P) of one field to the field (B, *grid)."""
    d = len(group.grid)
    u = patches.unflatten(2, (group.patch,) * d).unflatten(1, group.token_grid)
    u = u.permute(0, *(axis for a in range(1, d + 1) for axis in (a, a + d)))
    return u.reshape(-1, *group.grid)


def group_name(family: str, kind: str) -> str:
    """The key of a family's `fields` or `coefficients` among the codec's groups."""
    return f"{family}/{kind}"


def codec_from(groups: dict[str, dict[str, Any]]) -> Codec:
    """The codec of the constructor arguments saved with its weights, one dict per field group."""
    return Codec({name: FieldGroup(**group) for name, group in groups.items()})
