"""The Fourier neural operator of `neuraloperator` (Li et al. 2020, arXiv:2010.08895), an optional dependency."""

import warnings
from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ups.errors import ConfigFault


class _Complex(nn.Module):
    """A complex parameter kept as its real and imaginary part: what fused optimizers and averages can take."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.real.clone(), value.imag.clone()


def make_fno(
    in_channels: int,
    out_channels: int,
    *,
    hidden_channels: int,
    num_layers: int,
    modes: Sequence[int],
    padding: float,
    grid: Sequence[int],
    periodic: Sequence[bool],
) -> nn.Module:
    """An FNO on fields (B, C, *grid), with the library's grid embedding; axes that do not wrap are padded.

    `modes` are frequencies per axis in 1D, 2D and 3D, of either sign: the library counts both. `padding` is a share
    of the axis, half of it at each end.

    Raises:
        ConfigFault: the library is not installed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            from neuralop.models import FNO
    except ImportError as error:
        raise ConfigFault(f"the FNO baseline needs the extra: pip install -e '.[baselines]' ({error})") from error
    network = FNO(
        n_modes=tuple(min(2 * modes[len(grid) - 1], n) for n in grid),
        in_channels=in_channels,
        out_channels=out_channels,
        hidden_channels=hidden_channels,
        n_layers=num_layers,
        domain_padding=None if all(periodic) else [0.0 if wraps else padding / 2 for wraps in periodic],
    )
    # The library's own state also holds constructor arguments, functions among them.
    network.state_dict = MethodType(nn.Module.state_dict, network)
    for convolution in network.fno_blocks.convs:
        weight = convolution.weight.to_tensor()
        del convolution.weight
        convolution.weight = nn.Parameter(weight)
        parametrize.register_parametrization(convolution, "weight", _Complex())
    return network
