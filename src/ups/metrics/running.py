"""Means over a stream of samples."""

from torch import Tensor


class SampleMeans:
    """Means over samples of named tensors (B, ...), summed in float64: how the samples are batched does not matter."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, samples: dict[str, Tensor]) -> None:
        """Add the samples of one batch."""
        for name, values in samples.items():
            total = values.double().sum(dim=0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self.num_samples += len(next(iter(samples.values())))

    def __getitem__(self, name: str) -> Tensor:
        if not self.num_samples:
            raise ValueError("expected at least one trajectory, got none: call update() before asking for metrics")
        return self._sums[name] / self.num_samples

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of one sample of `name`; None before the first."""
        return tuple(self._sums[name].shape) if name in self._sums else None
