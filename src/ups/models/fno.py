"""The Fourier neural operator (Li et al. 2020, arXiv:2010.08895) of the library neuraloperator."""

import warnings
from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ups.errors import ConfigFault


class _Modes(nn.Module):
    """Complex weights (in, out, *modes) as real ones (M, 2, in, out), which fused optimizers take."""

    def __init__(self, modes: Sequence[int]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, parts: Tensor) -> Tensor:
        return torch.complex(*parts.unbind(1)).permute(1, 2, 0).unflatten(2, self.modes)

    def right_inverse(self, value: Tensor) -> tuple[Tensor]:  # a tuple may be of another type
        return (torch.view_as_real(value.flatten(2)).permute(2, 3, 0, 1).contiguous(),)


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
    """The FNO of the library neuraloperator on fields (B, C, *grid), with its grid embedding.

    `modes` are the largest frequencies per axis on 1D, 2D and 3D grids; the library counts positive and negative ones,
    hence twice as many. Non-periodic axes are padded by the fraction `padding` of their length, half of it at each end.

    Raises:
        ConfigFault: neuraloperator is not installed.
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
    # The library's own `state_dict` adds the constructor arguments, functions among them, which cannot be saved.
    network.state_dict = MethodType(nn.Module.state_dict, network)
    for convolution in network.fno_blocks.convs:
        weight = convolution.weight.to_tensor()
        del convolution.weight
        convolution.weight = nn.Parameter(weight)
        parametrize.register_parametrization(convolution, "weight", _Modes(weight.shape[2:]))
    return network
