"""What a model on tokens is made from: sizes that the data dictates, sizes that a section of `conf` chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Sizes:
    """What the data dictates: `num_conditions`, and the rest per family, 0 where a model has nothing to do with it.

    Axes of its grid, fields, channels of its latents and of the latents of its coefficients.
    """

    num_axes: Sequence[int]
    num_fields: Sequence[int]
    latent_channels: Sequence[int]
    coefficient_channels: Sequence[int]
    num_conditions: int

    @property
    def num_families(self) -> int:
        """Families that have a number, with data or without."""
        return len(self.num_axes)


@dataclass(frozen=True)
class Backbone:
    """What the section `model` of a stage chooses for its token mixer; described in `ups.config`."""

    hidden_channels: Sequence[int]
    num_layers: int
    levels: int
    norm: bool
    experts: bool
    separate_fields: bool
    mixing: Literal["fourier", "attention"]
    modes: Sequence[int]
    head_channels: int
    window: int | None
    qk_norm: bool
    drop_path: float
    conditioning: bool

    def channels(self, num_axes: int) -> int:
        """Hidden channels on grids of so many axes."""
        return self.hidden_channels[num_axes - 1]


def from_settings(model: Callable[[Sizes, Backbone], Model]) -> Callable[..., Model]:
    """`model` as a function of `sizes` and `backbone` as plain values, as they are saved with its weights."""

    def make(sizes: dict[str, Any], backbone: dict[str, Any]) -> Model:
        return model(Sizes(**sizes), Backbone(**backbone))

    return make
