"""Sizes and choices of the networks."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from ups.config.sections import NonNegative, PerDimension, Section


class CodecModel(Section):
    """Patches: at least `patch_size` per axis, and larger until a snapshot has at most `max_tokens` tokens.

    Both are given for 1D, 2D and 3D grids. `components` is the largest number of latent channels kept per field.
    """

    patch_size: PerDimension
    max_tokens: PerDimension
    components: PositiveInt


class Backbone(Section):
    """The token mixer that operator, denoiser and steady model share.

    `hidden_channels` on 1D, 2D and 3D grids: a token of a 3D patch holds more than a point. `num_layers` blocks in all;
    with `levels` > 1 they form a U on grids that are halved per level. `norm` divides tokens by their RMS before mixing
    and MLP. With `experts` every family has blocks of its own, otherwise all families share them. With
    `separate_fields` every field has tokens of its own, which attend to those of other fields at the same point.

    Tokens mix by `modes` Fourier modes along each axis of 1D, 2D and 3D grids, or by attention in heads of
    `head_channels`: over all tokens, or over `window` tokens per axis, windows shifted by half in every other block;
    `qk_norm` normalizes queries and keys. `drop_path`: probability with which training skips a block for a sample.
    Without `conditioning` parameters, boundaries, resolution and time step are hidden.
    """

    hidden_channels: PerDimension
    num_layers: PositiveInt
    levels: Annotated[int, Field(ge=1, le=3)]
    norm: bool
    experts: bool
    separate_fields: bool
    mixing: Literal["fourier", "attention"]
    modes: PerDimension
    head_channels: Annotated[int, Field(ge=16, le=64, multiple_of=2)]
    window: Annotated[int, Field(ge=2)] | None
    qk_norm: bool
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)]
    conditioning: bool

    @model_validator(mode="after")
    def _check_choices(self) -> "Backbone":
        if self.num_layers < 2 * self.levels - 1:
            raise ValueError(f"levels={self.levels} needs num_layers of at least {2 * self.levels - 1}")
        attends = self.mixing == "attention" or self.separate_fields
        if attends and any(channels % self.head_channels for channels in self.hidden_channels):
            raise ValueError("attention needs hidden_channels that are a multiple of head_channels")
        if self.mixing == "fourier" and self.window is not None:
            raise ValueError("window needs mixing: attention")
        return self


class FNOModel(Section):
    """Sizes of the Fourier neural operator, `modes` frequencies of either sign per axis in 1D, 2D and 3D.

    Axes that do not wrap are padded by the share `padding`, half of it at each end.
    """

    hidden_channels: PositiveInt
    num_layers: PositiveInt
    modes: PerDimension
    padding: NonNegative


class UNetModel(Section):
    """Channels of the U-Net on the finest of its grids."""

    hidden_channels: PositiveInt


class LinearModel(Section):
    """Points per axis of the linear stencil."""

    kernel_size: PositiveInt
