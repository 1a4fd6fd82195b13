"""Sizes and options of the networks, as plain values; imported by the configuration, so this module needs no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ups.errors import DataFault


@dataclass(frozen=True)
class Domain:
    """The token grid of a family: points per axis, and whether each axis is periodic.

    With separate tokens per field a grid point has `num_fields` tokens, one after the other in the batch; otherwise 1.
    """

    family: str
    grid: tuple[int, ...]
    periodic: tuple[bool, ...]
    num_fields: int = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes given by the data: the families of the latent cache by name, and the sizes of each.

    `latent_channels` D of the state, `coefficient_channels` D_c of the coefficients; sizes are 0 for a family on which
    the model is not trained. `num_conditions` is K. Steps of the families in `history` start from two snapshots.
    """

    families: Sequence[str]
    num_axes: Sequence[int]
    num_fields: Sequence[int]
    latent_channels: Sequence[int]
    coefficient_channels: Sequence[int]
    num_conditions: int
    history: Sequence[str] = ()

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row of each family on which the model is trained, in tables and lists with one entry per family."""
        return {name: row for row, name in enumerate(self.families) if self.num_axes[row]}


def row_of(rows: dict[str, int], family: str) -> int:
    """Row of a family by name.

    Raises:
        DataFault: the model was not trained on this family.
    """
    if family not in rows:
        raise DataFault(f"the model was not trained on {family!r}, only on {', '.join(rows)}: train it on that family")
    return rows[family]


def common_inputs(sizes: Sizes, source: Sizes, row: int) -> Iterator[tuple[slice, slice]]:
    """Places of the inputs of a stem that both have, in a network of one family and in `row` of `source`.

    The state as it is, at unit amplitude, with a history in both its last change, and for one equation in both the
    coefficients.
    """
    family = source.families[row]
    own, other = sizes.latent_channels[0], source.latent_channels[row]
    own_parts, other_parts = 2 + len(sizes.history), 2 + (family in source.history)
    for part in range(min(own_parts, other_parts)):
        yield tuple(slice(part * size, part * size + min(own, other)) for size in (own, other))
    if family == sizes.families[0]:
        kept = min(sizes.coefficient_channels[0], source.coefficient_channels[row])
        starts = own_parts * own, other_parts * other
        yield tuple(slice(start, start + kept) for start in starts)


def limits(**bounds: float) -> Any:
    """A dataclass field with bounds (`ge`, `le`, `lt`, `multiple_of`) that the configuration checks."""
    return field(metadata=bounds)


@dataclass(frozen=True)
class Backbone:
    """Options of the network between stem and head that operator, denoiser and steady model have in common.

    `hidden_channels` on 1D, 2D and 3D grids. `num_layers` counts all blocks; with `levels` > 1 they form a U-shape
    whose grids are halved per level. `norm`: RMSNorm before token mixing and MLP. With `separate_trunks` there is one
    trunk of blocks per family, selected by the family's name; otherwise all families share one. With `separate_fields`
    every field has tokens of its own, which attend to the tokens of other fields at the same point.

    Tokens are mixed by `modes` Fourier modes along each axis (of 1D, 2D, 3D grids), or by attention in heads of
    `head_channels`: over all tokens, or over windows of `window` tokens per axis that are shifted by half a window in
    every other block; `qk_norm` normalizes queries and keys. `drop_path` is the probability with which training skips a
    block for a sample. Without `conditioning` the model gets zeros instead of the condition features (PDE parameters,
    boundaries, resolution, time step).

    Raises:
        ValueError: options exclude each other.
    """

    hidden_channels: tuple[int, int, int] = limits(ge=1)
    num_layers: int = limits(ge=1)
    levels: int = limits(ge=1, le=3)
    norm: bool
    separate_trunks: bool
    separate_fields: bool
    mixing: Literal["fourier", "attention"]
    modes: tuple[int, int, int] = limits(ge=1)
    head_channels: int = limits(ge=16, le=64, multiple_of=2)
    window: int | None = limits(ge=2)
    qk_norm: bool
    drop_path: float = limits(ge=0.0, lt=1.0)
    conditioning: bool

    def __post_init__(self) -> None:
        if self.num_layers < 2 * self.levels - 1:
            raise ValueError(f"levels={self.levels} needs num_layers of at least {2 * self.levels - 1}")
        attends = self.mixing == "attention" or self.separate_fields
        if attends and any(channels % self.head_channels for channels in self.hidden_channels):
            raise ValueError("attention needs hidden_channels that are a multiple of head_channels")
        if self.mixing == "fourier" and self.window is not None:
            raise ValueError("window needs mixing: attention")

    def channels(self, num_axes: int) -> int:
        """Hidden channels on grids of `num_axes` axes."""
        return self.hidden_channels[num_axes - 1]
