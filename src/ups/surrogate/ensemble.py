"""Ensembles of predictions, with mean, standard deviation and quantiles over their members."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.errors import ConfigFault
from ups.surrogate.arrays import Array


@dataclass(frozen=True)
class Ensemble:
    """Members of an ensemble (M, ...), each of the shape that `Model.predict` returns without members."""

    members: Array

    @property
    def mean(self) -> Array:
        """Mean over the members."""
        return self.members.mean(self._axis())

    @property
    def std(self) -> Array:
        """Standard deviation over the members, with M in the denominator."""
        return self.members.std(self._axis(), correction=0) if self._is_torch() else self.members.std(self._axis())

    def quantile(self, q: float) -> Array:
        """The value below which a share q in [0, 1] of the members lies, interpolated linearly."""
        if not 0 <= q <= 1:
            raise ConfigFault(f"a quantile is a share in [0, 1], not {q}")
        if self._is_torch():  # torch.quantile takes at most 16 million values
            lower, share = divmod(q * (len(self.members) - 1), 1.0)
            ordered = self.members.sort(0).values
            return torch.lerp(ordered[int(lower)], ordered[math.ceil(lower + share)], share)
        if isinstance(self.members, np.ndarray):
            return np.quantile(self.members, q, axis=0)
        return self.members.quantile(q, "member")

    def _is_torch(self) -> bool:
        return isinstance(self.members, Tensor)

    def _axis(self) -> Any:
        return 0 if self._is_torch() or isinstance(self.members, np.ndarray) else "member"


def stacked(results: list[Array]) -> Array:
    """Members of one kind as an array (M, ...), in xarray with the dimension `member`."""
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    if isinstance(results[0], np.ndarray):
        return np.stack(results)
    import xarray

    return xarray.concat(results, "member")
