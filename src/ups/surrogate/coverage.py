"""What training covered, family by family, and how far a state, its parameters and its time step lie outside of it.

A field is described by `FEATURES` of its normalized values, which are logarithms but for the mean. Training gives for
each the smallest and the largest value, and for all together their mean and precision matrix. Besides there are the
ranges of the parameters and the time step, the grid, and the error that the model usually has. All are plain numbers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.metrics.spectra import NUM_BANDS, radial_spectrum

FEATURES = ("mean", "amplitude", "peak", "gradient", "band 1", "band 2", "band 3", "band 4")
WORDS = {
    "amplitude": "amplitude of {name}",
    "peak": "largest deviation of {name} from its mean, over its amplitude,",
    "gradient": "steepest gradient of {name}, over its amplitude,",
}
SMALLEST = 0.01  # amplitude, in standard deviations of the field, below which a fluctuation counts as none
RIDGE = 0.05  # added to the standard deviation of each feature: features that never vary in training are not exact
COMMON = 0.99  # quantile of the Mahalanobis distances in training
LARGEST = 100.0  # logarithm of a factor, above which it counts as this
# Chosen on shifts by other factors than those in `conf`, see `ups.evaluation.shifts`:
RARITY_WEIGHT = 0.03  # of the Mahalanobis distance beside the relative distance
WARNING = 5.0  # relative distance over the usual error from which on a state is warned of


def band_starts(grid: tuple[int, ...]) -> tuple[int, ...]:
    """The lowest wavenumber (waves per domain) of each of four bands, equally wide in its logarithm."""
    return tuple(round(((min(grid) + 1) // 2) ** (number / NUM_BANDS)) for number in range(NUM_BANDS))


def describe(x: Tensor, bands: tuple[int, ...]) -> Tensor:
    """`FEATURES` (B, 8) of a field of normalized values (B, *grid).

    With the RMS a of the fluctuation: mean; log a; log of the largest fluctuation / a; log of the largest difference of
    neighbours times the points of the axis / a; log of the RMS in each band of wavenumbers / a, where the last band
    includes all that is finer.
    """
    axes = tuple(range(1, x.ndim))
    mean = x.mean(axes)
    fluctuation = x - mean.reshape(-1, *[1] * len(axes))
    square = fluctuation.square().mean(axes)
    a = (square + SMALLEST**2).sqrt()
    differences = [x.diff(dim=axis).abs().amax(axes) * x.shape[axis] for axis in axes]
    sizes = [fluctuation.abs().amax(axes), torch.stack(differences).amax(0)]
    ratios = [(size / a).clamp_min(SMALLEST) for size in sizes]
    energy = radial_spectrum(fluctuation[:, None, None])[:, 0, 0]
    lower = [energy[:, start:stop].sum(-1) for start, stop in zip(bands[:-1], bands[1:], strict=True)]
    last = (square - torch.stack(lower).sum(0)).clamp_min(0.0)
    ratios += [part.sqrt() / a + SMALLEST for part in (*lower, last)]
    return torch.stack([mean, a.log(), *(ratio.log() for ratio in ratios)], -1)


@dataclass(frozen=True)
class FieldCoverage:
    """Normalization of a field (of log(u) where `log` is true), and its `FEATURES` in the training split.

    `low` and `high` are their extremes, `center` and `precision` their mean and inverse covariance, `common` the
    Mahalanobis distance that 99 % of the training states stay below, at least 1.
    """

    log: bool
    mean: float
    std: float
    low: list[float]
    high: list[float]
    center: list[float]
    precision: list[list[float]]
    common: float

    @classmethod
    def fit(cls, features: Tensor, *, log: bool, mean: float, std: float) -> "FieldCoverage":
        """From the features (S, 8) of S training states."""
        values = features.double()
        covariance = torch.cov(values.T, correction=0) + RIDGE**2 * torch.eye(len(FEATURES), dtype=values.dtype)
        center, precision = values.mean(0), torch.linalg.inv(covariance)
        distances = _mahalanobis(values - center, precision)
        limits = {"low": values.amin(0).tolist(), "high": values.amax(0).tolist()}
        common = max(1.0, float(distances.quantile(COMMON)))  # a single state has no distance from its mean
        return cls(log, mean, std, **limits, center=center.tolist(), precision=precision.tolist(), common=common)

    def describe(self, u: Tensor, bands: tuple[int, ...]) -> Tensor:
        """`FEATURES` (B, 8) of physical values (B, *grid), in float64 on the CPU."""
        return describe(normalized(u, log=self.log, mean=self.mean, std=self.std), bands).double().cpu()

    def beyond(self, features: Tensor) -> Tensor:
        """How far features (B, 8) lie above their range (> 0) or below it (< 0); 0 inside."""
        low, high = torch.tensor(self.low).double(), torch.tensor(self.high).double()
        features = features.nan_to_num(nan=math.inf)  # of values whose squares exceed float32
        return (features - high).clamp_min(0.0) + (features - low).clamp_max(0.0)

    def rarity(self, features: Tensor) -> Tensor:
        """Mahalanobis distance of features (B, 8) over that of the rarest hundredth of training, (B,)."""
        return _mahalanobis(features - torch.tensor(self.center), torch.tensor(self.precision).double()) / self.common

    def reason(self, name: str, feature: int, beyond: float, bands: tuple[int, ...]) -> str:
        """In words that a feature of the field `name` lies outside by `beyond`."""
        if FEATURES[feature] == "mean":
            ends = [self.low[0], self.high[0], (self.high if beyond > 0 else self.low)[0] + beyond]
            low, high, value = (self._physical(end) for end in ends)
            return f"{'geometric ' * self.log}mean of {name} is {value:.3g}, {_outside(low, high)}"
        band = feature - FEATURES.index("band 1")
        last = f"{bands[band + 1] - 1}" if 0 <= band < len(bands) - 1 else "the finest"
        what = WORDS.get(FEATURES[feature], f"share of {{name}} at wavenumbers {bands[band]} to {last}")
        extreme = "largest" if beyond > 0 else "smallest"
        return f"{what.format(name=name)} is {math.exp(min(beyond, LARGEST)):.3g} times the {extreme} in training"

    def _physical(self, value: float) -> float:
        return math.exp(self.mean + self.std * value) if self.log else self.mean + self.std * value


@dataclass(frozen=True)
class Outside:
    """How B states lie to what training covered.

    The distance of a state is that of its worst parameter, time step or feature from the range of training, relative to
    the end of that range, over the usual error of the family: a model that is exact inside has more to lose outside.
    `score` (B,) is the distance with a little of the rarity of the features, and orders states by the error to expect.
    `warned` (B,) says which states are more than `WARNING` away. `reasons` are sorted by distance: features by which a
    state is warned of, and all parameters, time steps and grids outside, however near.
    """

    score: Tensor
    warned: Tensor
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """What the training split of one family covers.

    `parameters` and `dt` (None: steady) have a smallest and a largest value, `bands` are the lowest wavenumbers of the
    bands of the spectrum; `error` is the median nRMSE of the rollouts, or steady solutions, of validation trajectories.
    """

    parameters: dict[str, tuple[float, float]]
    dt: tuple[float, float] | None
    grid: tuple[int, ...]
    bands: tuple[int, ...]
    fields: dict[str, FieldCoverage]
    coefficients: dict[str, FieldCoverage]
    error: float

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Coverage":
        """The coverage that `dataclasses.asdict` and JSON wrote."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        values["parameters"] = {name: tuple(ends) for name, ends in content["parameters"].items()}
        for kind in ("fields", "coefficients"):
            values[kind] = {name: FieldCoverage(**field) for name, field in content[kind].items()}
        return cls(**values)

    def check(
        self,
        u_0: Tensor | None,
        coefficients: Tensor | None,
        parameters: Mapping[str, float | Tensor],
        *,
        grid: tuple[int, ...],
        dt: float | None,
    ) -> Outside:
        """States u_0 (B, C, *grid) and coefficients (B, C', *grid) in physical units; None where a family has none.

        Parameters are numbers, or (B,). A steady family has no states and no `dt`. Predicted states may be checked as
        well as initial ones.
        """
        batch = len(u_0 if u_0 is not None else coefficients)
        distance, found = self._settings(parameters, grid, dt, batch)
        rarity = torch.zeros_like(distance)
        for name, field, features in self._described(u_0, coefficients):
            beyond = field.beyond(features)
            distance = torch.maximum(distance, _relative(beyond).amax(1))
            rarity = torch.maximum(rarity, field.rarity(features).nan_to_num(nan=math.inf))
            found += self._reasons(name, field, beyond)
        reasons = tuple(reason for _, reason in sorted(found, key=lambda each: -each[0]))
        score = (distance + RARITY_WEIGHT * rarity) / self.error
        return Outside(score, distance > WARNING * self.error, reasons)

    def _described(
        self, u_0: Tensor | None, coefficients: Tensor | None
    ) -> Iterator[tuple[str, FieldCoverage, Tensor]]:
        """Name, coverage and features (B, 8) of every field and coefficient."""
        for values, covered in ((u_0, self.fields), (coefficients, self.coefficients)):
            for channel, (name, field) in enumerate(covered.items() if values is not None else ()):
                yield name, field, field.describe(values[:, channel], self.bands)

    def _reasons(self, name: str, field: FieldCoverage, beyond: Tensor) -> Iterator[tuple[float, str]]:
        """Relative distance and reason for each feature by which a state is warned of, from the state farthest out."""
        is_far = _relative(beyond) > WARNING * self.error
        for feature in is_far.any(0).nonzero().flatten().tolist():
            row = int(_relative(beyond)[:, feature].argmax())
            count = f", in {int(is_far[:, feature].sum())} of {len(beyond)} states" if len(beyond) > 1 else ""
            reason = field.reason(name, feature, float(beyond[row, feature]), self.bands)
            yield float(_relative(beyond)[row, feature]), reason + count

    def _settings(
        self, parameters: Mapping[str, float | Tensor], grid: tuple[int, ...], dt: float | None, batch: int
    ) -> tuple[Tensor, list[tuple[float, str]]]:
        """Largest relative distance (B,) of parameters and time step; distance and reason for each, 0 for the grid.

        A parameter that is a factor in the equation changes it by its own relative change.
        """
        named = [(name, parameters[name], *ends) for name, ends in self.parameters.items()]
        if dt is not None and self.dt is not None:
            named.append(("dt", dt, *self.dt))
        distance, found = torch.zeros(batch, dtype=torch.float64), []
        for name, given, low, high in named:
            value = torch.as_tensor(given, dtype=torch.float64).expand(batch)
            bound = value.clamp(low, high)
            scale = torch.where(bound == 0, max(abs(low), abs(high)) or 1.0, bound.abs())
            own = torch.where(torch.isclose(value, bound, rtol=1e-4, atol=0.0), 0.0, (value - bound).abs() / scale)
            distance, worst, count = torch.maximum(distance, own), int(own.argmax()), int((own > 0).sum())
            if count:
                some = f", in {count} of {batch} states" if count < batch else ""
                found.append((float(own[worst]), f"{name} = {value[worst]:.4g} is {_outside(low, high)}{some}"))
        if tuple(grid) != self.grid:
            given, trained = (" x ".join(map(str, points)) for points in (grid, self.grid))
            found.append((0.0, f"the grid of {given} points is not the trained one of {trained}"))
        return distance, found


def normalized(u: Tensor, *, log: bool, mean: float, std: float) -> Tensor:
    """(g(u) - mean) / std with g = log for positive fields, in float32 at least."""
    u = u.float() if u.dtype in (torch.float16, torch.bfloat16) else u
    return ((u.clamp_min(torch.finfo(u.dtype).tiny).log() if log else u) - mean) / std


def _relative(beyond: Tensor) -> Tensor:
    """|factor - 1| of features that lie outside by the logarithm of a factor."""
    return beyond.clamp_max(LARGEST).expm1().abs()


def _mahalanobis(deviations: Tensor, precision: Tensor) -> Tensor:
    """Distance (S,) of deviations (S, F) from the mean; about 1 for normal features, whatever their number F."""
    return ((deviations @ precision) * deviations).mean(1).sqrt()


def _outside(low: float, high: float) -> str:
    return f"outside the trained range {low:.4g} to {high:.4g}" if low < high else f"not the trained {low:.4g}"
