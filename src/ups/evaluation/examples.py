"""Arrays for figures and animations: the trajectories of the test split with the largest, median and smallest error."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ups.data.card_text import title_of
from ups.data.families import Dataset
from ups.evaluation.predictions import Batch, Predicted, Slab, prediction_of
from ups.metrics.errors import nRMSE
from ups.metrics.suite import ScoreSuite
from ups.surrogate.surrogate import Surrogate

MAX_POINTS = {1: 256, 2: 96, 3: 96}  # points per axis that are kept, by the dimension of the grid
MAX_TIMES = {1: 64, 2: 12, 3: 12}  # snapshots that are kept
ROLES = ("worst", "median", "best")
BAND = (0.1, 0.9)  # quantiles over trajectories

Arrays = dict[str, np.ndarray]


def chosen(errors: Tensor) -> dict[str, int]:
    """Positions of the trajectories with the largest, median and smallest of the errors (N,); NaN is the largest.

    Of a single trajectory there is only the `median`.
    """
    order = errors.nan_to_num(torch.inf, torch.inf).argsort().tolist()
    found = {"worst": order[-1], "median": order[(len(order) - 1) // 2], "best": order[0]}
    return {"median": order[0]} if len(order) == 1 else found


class Example:
    """One trajectory: truth and prediction at some times and points, and the nRMSE of the prediction.

    Of a volume there is the middle plane of z.
    """

    def __init__(self, dataset: Dataset) -> None:
        num_dims = len(dataset.grid)
        self._max_points = MAX_POINTS[num_dims]
        count = min(MAX_TIMES[num_dims], len(dataset.times))
        self.shown = np.unique(np.linspace(0, len(dataset.times) - 1, count).astype(int))
        self._snapshots: dict[str, list[np.ndarray]] = defaultdict(list)
        self._errors: list[np.ndarray] = []

    def predict(self, surrogate: Surrogate, batch: Batch, predictor: Callable[[Slab], Iterable[Predicted]]) -> None:
        """Keep the only trajectory of a batch, and its rollout by the only such method of `predictor`."""
        for slab in batch.slabs(surrogate.encode):
            self.add("truth", slab, slab.target[0])
            for predicted in predictor(slab):
                if "rollout" in predicted.horizons:
                    u = prediction_of(predicted.members(slice(None)), slab.target[:, predicted.times]).u
                    self.add("prediction", slab, u[0])
                    self._errors.append(nRMSE(u, slab.target)[0].cpu().numpy())

    def add(self, name: str, slab: Slab, u: Tensor) -> None:
        """Add snapshots u (T, C, *grid) of truth or prediction, those of a slab; rollouts start from the truth."""
        start = slab.start
        if slab.u_0 is not None:
            start += 1
            if slab.start == 0:
                self._snapshots[name].append(self._thinned(slab.u_0[0]))
        self._snapshots[name] += [self._thinned(u[i - start]) for i in self.shown if start <= i < start + len(u)]

    def arrays(self) -> Arrays:
        """Arrays `truth` and `prediction` (F, C, *grid), and `nRMSE` (steps, C)."""
        snapshots = {name: self.snapshots(name) for name in ("truth", "prediction")}
        return snapshots | {"nRMSE": np.concatenate(self._errors)}

    def snapshots(self, name: str) -> np.ndarray:
        """The kept snapshots (F, C, *grid) of truth or prediction."""
        return np.stack(self._snapshots[name])

    def _thinned(self, u: Tensor) -> np.ndarray:
        """A snapshot (C, *grid) at no more points per axis than are kept; of a volume the middle plane of z."""
        if u.ndim == 4:
            u = u.narrow(3, u.shape[3] // 2, 1)
        for axis in range(1, u.ndim):
            u = u[(slice(None),) * axis + (slice(None, None, -(-u.shape[axis] // self._max_points)),)]
        return u.cpu().numpy().copy()


def description(dataset: Dataset) -> Arrays:
    """The `title` of a dataset, all its `times` and those `shown` in examples."""
    times = np.array(dataset.times)
    return {"title": np.array(title_of(dataset)), "times": times, "shown": times[Example(dataset).shown]}


def statistics(suites: dict[tuple[str, str], ScoreSuite]) -> Arrays:
    """Of the rollouts of each method: errors over time, energy over wavenumber, and for ensembles rank histograms.

    `curve/<method>` (T,) is the mean nRMSE of all trajectories, `band/<method>` (2, T) the quantiles `BAND`;
    `spectrum/<method>` (K,) and `spectrum/truth` the mean over trajectories and times; `ranks/<method>` (C, M + 1).
    """
    arrays: Arrays = {}
    for method, suite in ((method, suite) for (method, horizon), suite in suites.items() if horizon == "rollout"):
        errors = suite.curves()
        low, high = BAND
        band = [errors.quantile(q, dim=0, interpolation="nearest") for q in (low, high)]
        arrays |= {f"curve/{method}": suite.metrics.curve().cpu().numpy(), f"band/{method}": torch.stack(band).numpy()}
        arrays["spectrum/truth"], arrays[f"spectrum/{method}"] = suite.spectra()
        if (ranks := suite.ranks()) is not None:
            arrays[f"ranks/{method}"] = ranks.cpu().numpy()
    return arrays
