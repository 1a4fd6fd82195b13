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


@dataclass(frozen=True)
class FieldGroup:
    """Fields encoded together: the state fields or the coefficient fields of one family, with their normalization.

    `patch` is the edge of a patch in grid points, `components` the number of basis components kept per field. Mean and
    standard deviation of each field are those of log(u) where `log` is true, else of u. The fields' bases lie one after
    the other along the first axis of `Codec.skew`, from `first` on.
    """

    grid: tuple[int, ...]
    patch: int
    components: int
    log: tuple[bool, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    first: int

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
        """Grid points of a patch."""
        return self.patch ** len(self.grid)


def choose_patch(grid: tuple[int, ...], patch_size: int, max_tokens: int) -> int:
    """The smallest patch edge that divides every axis, is at least `patch_size` and gives at most `max_tokens` tokens.

    If there is none (prime numbers of points), the largest that divides every axis and is below the shortest axis.
    """
    divisors = [p for p in range(1, min(grid) + 1) if all(n % p == 0 for n in grid) and p < min(grid)]
    fitting = [p for p in divisors if p >= patch_size and math.prod(n // p for n in grid) <= max_tokens]
    return min(fitting) if fitting else max(divisors)


MAX_PATCH_POINTS = 4096  # a basis has the square of it as entries, and is the solution of a linear system of this size


class Codec(nn.Module):
    """Encoder and decoder of every field group, by `group_name`; the decoder is the transpose of the encoder.

    The only parameter is `skew` (bases, P, P), P the grid points of the largest patch: one matrix S per basis, of which
    a group with smaller patches uses the leading block. See `bases`.

    Raises:
        ConfigFault: a patch has more than `MAX_PATCH_POINTS` grid points.
    """

    def __init__(self, groups: dict[str, FieldGroup]) -> None:
        super().__init__()
        self.groups = groups
        points = max(group.patch_points for group in groups.values())
        if points > MAX_PATCH_POINTS:
            raise ConfigFault(
                f"a patch of {points} grid points is too large for a dense basis: raise codec.model.max_tokens"
            )
        num_bases = sum(len(group.mean) for group in groups.values())
        self.skew = nn.Parameter(torch.zeros(num_bases, points, points))

    def on_grid(self, family: str, grid: tuple[int, ...]) -> "Codec":
        """A codec that shares this one's bases and takes snapshots of `family` on `grid`, a multiple of its patch."""
        names = (group_name(family, "fields"), group_name(family, "coefficients"))
        on_grid = {name: replace(self.groups[name], grid=grid) for name in names if name in self.groups}
        codec = copy.copy(self)
        codec.groups = self.groups | on_grid
        return codec

    def bases(self, group: FieldGroup) -> Tensor:
        """Orthonormal bases (fields, components, patch points): the first rows of Q C.

        Q = (I - A)(I + A)^-1 with A = S - S^T is the Cayley transform, orthogonal for every S, so that training needs
        no constraint; C is the cosine basis, where training starts with S = 0.
        """
        fields = slice(group.first, group.first + len(group.mean))
        skew = self.skew[fields, : group.patch_points, : group.patch_points]
        skew = skew - skew.mT
        identity = torch.eye(group.patch_points, device=skew.device, dtype=skew.dtype)
        rotation = torch.linalg.solve(identity + skew, identity - skew)
        return (rotation @ _cosine_basis(group.patch, len(group.grid)).to(skew))[:, : group.components]

    def encode(self, u: Tensor, name: str) -> Tensor:
        """Physical fields (B, C, *grid) to latents (B, N, D)."""
        group = self.groups[name]
        return self.project(normalize(u, group), group)

    def decode(self, z: Tensor, name: str) -> Tensor:
        """Latents (B, N, D) to physical fields (B, C, *grid)."""
        group = self.groups[name]
        return denormalize(self.reconstruct(z, group), group)

    def project(self, u: Tensor, group: FieldGroup) -> Tensor:
        """Normalized fields (B, C, *grid) to latents (B, N, D)."""
        components = torch.einsum("bnci,cki->bnck", to_patches(u, group), self.bases(group))
        return components.flatten(2)

    def reconstruct(self, z: Tensor, group: FieldGroup) -> Tensor:
        """Latents (B, N, D) to normalized fields (B, C, *grid)."""
        components = z.unflatten(2, (len(group.mean), group.components))
        return from_patches(torch.einsum("bnck,cki->bnci", components, self.bases(group)), group)

    def forward(self, u: Tensor, name: str, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized fields (B, C, *grid), and their reconstruction from the first `keep` (B,) components per patch."""
        group = self.groups[name]
        u = normalize(u, group)
        kept = torch.arange(group.components, device=u.device) < keep[:, None]  # (B, components)
        z = self.project(u, group) * kept.repeat(1, len(group.mean))[:, None, :]
        return u, self.reconstruct(z, group)


def _cosine_basis(patch: int, num_dims: int) -> Tensor:
    """Rows of the orthonormal cosine transform of a patch (P, P), sorted by squared frequency, lowest first."""
    k, i = torch.meshgrid(*[torch.arange(patch, dtype=torch.float64)] * 2, indexing="ij")
    basis = torch.cos(torch.pi * k * (i + 0.5) / patch)
    basis = basis / basis.norm(dim=1, keepdim=True)
    full, frequency = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    for _ in range(num_dims):
        full = torch.kron(full, basis)
        frequency = (frequency[:, None] + torch.arange(patch) ** 2).flatten()
    return full[frequency.argsort(stable=True)]


def normalize(u: Tensor, group: FieldGroup) -> Tensor:
    """Physical to normalized fields: (g(u) - mean) / std with g = log for positive fields."""
    fields = zip(u.unbind(1), group.log, group.mean, group.std, strict=True)
    return torch.stack([((u.log() if log else u) - mean) / std for u, log, mean, std in fields], 1)


def denormalize(u: Tensor, group: FieldGroup) -> Tensor:
    """Normalized to physical fields, the inverse of `normalize`."""
    fields = zip(u.unbind(1), group.log, group.mean, group.std, strict=True)
    return torch.stack([(u * std + mean).exp() if log else u * std + mean for u, log, mean, std in fields], 1)


def to_patches(u: Tensor, group: FieldGroup) -> Tensor:
    """Fields (B, C, *grid) to patches (B, N, C, patch points)."""
    d = len(group.grid)
    for axis, n in reversed(list(enumerate(group.grid))):
        u = u.unflatten(axis + 2, (n // group.patch, group.patch))
    tokens, points = [2 + 2 * axis for axis in range(d)], [3 + 2 * axis for axis in range(d)]
    return u.permute(0, *tokens, 1, *points).flatten(1, d).flatten(3)


def from_patches(patches: Tensor, group: FieldGroup) -> Tensor:
    """Patches (B, N, C, patch points) to fields (B, C, *grid), the inverse of `to_patches`."""
    d = len(group.grid)
    u = patches.unflatten(3, (group.patch,) * d).unflatten(1, group.token_grid)
    axes = [axis for a in range(1, d + 1) for axis in (a, a + d + 1)]
    u = u.permute(0, d + 1, *axes)
    return u.reshape(u.shape[0], u.shape[1], *group.grid)


def group_name(family: str, kind: str) -> str:
    """The key of a family's `fields` or `coefficients` among the codec's groups."""
    return f"{family}/{kind}"


def codec_from(groups: dict[str, dict[str, Any]]) -> Codec:
    """The codec of the constructor arguments saved with its weights, one dict per field group."""
    return Codec({name: FieldGroup(**group) for name, group in groups.items()})
