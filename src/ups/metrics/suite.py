"""All metrics of one method and horizon, over a stream of batches, each of them reduced a slab of times at a time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ups.metrics.bootstrap import bootstrap_interval
from ups.metrics.ensembles import EnsembleErrors, EnsembleSuite
from ups.metrics.errors import (
    L2RE,
    MAE,
    SampleMeans,
    conservation_drift,
    correlation,
    correlation_time,
    negative_part,
)
from ups.metrics.pdebench import CompatSuite, MetricSuite, SnapshotErrors, snapshot_errors
from ups.metrics.spectra import band_scores, energy_error, energy_floor, nyquist_energy, radial_spectrum

Reductions = dict[str, Tensor]
"""Name -> (B, T, ...): what remains of B trajectories at T times, reduced over space; SPECTRA have (B, 1, C, K)."""

Record = TypeVar("Record", SnapshotErrors, EnsembleErrors)

COMPAT = "pdebench_compat/"
SPECTRA = ("prediction_spectrum", "reference_spectrum", "prediction_nyquist", "reference_nyquist")  # summed over times
OF_PHYSICS = ("conservation_drift", "positivity")
OF_ROLLOUTS = ("correlation", *OF_PHYSICS)
MEDIANS = ("correlation_time",)  # its mean would depend on the length of rollouts that never lose correlation


@dataclass(frozen=True)
class Score:
    """A metric, with its 95 % confidence interval where it is a statistic over enough trajectories."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Truth:
    """Reference snapshots (B, T, C, *grid), with their spectrum computed once for all methods."""

    u: Tensor

    @cached_property
    def spectrum(self) -> Tensor:
        return radial_spectrum(self.u)


def joined(parts: Sequence[Reductions]) -> Reductions:
    """Join the reductions of different trajectories."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Timeline:
    """Reductions of whole trajectories of at most `num_times` steps, filled in a slab of times after the other.

    They are written in place: small tensors made between the snapshots that they outlive would scatter the free memory,
    which then grew with the length of the trajectories.
    """

    def __init__(self, num_times: int) -> None:
        self._num_times, self._stop = num_times, 0
        self._whole: Reductions = {}

    def append(self, part: Reductions) -> None:
        """Add the times that follow."""
        start, self._stop = self._stop, self._stop + next(iter(part.values())).shape[1]
        for name, values in part.items():
            if name not in self._whole:
                num_times = 1 if name in SPECTRA else self._num_times
                self._whole[name] = values.new_zeros(len(values), num_times, *values.shape[2:])
            if name in SPECTRA:
                self._whole[name].add_(values)
            else:
                self._whole[name][:, start : self._stop] = values

    @property
    def whole(self) -> Reductions:
        """The reductions of all times so far."""
        return {name: values[:, : self._stop] for name, values in self._whole.items()}


class ScoreSuite:
    """All metrics of one method and horizon (one step, or whole rollouts).

    - the metrics of `MetricSuite`, and those of `CompatSuite` under `pdebench_compat/`
    - `MAE`, `L2RE`, `VRMSE`: means over samples and channels (and times)
    - `band_error_<i>`, `band_energy_<i>`: see `band_scores`; `nyquist_energy`: the same as `band_energy`, of the
      shortest waves, see `nyquist_energy`
    - for rollouts `correlation_time`, the median over trajectories, in steps; where the equation conserves the channels
      `conserved`, `conservation_drift`, and where the channels `non_negative` cannot be negative, `positivity`, see
      `negative_part`: means over these channels, times and trajectories
    - for ensembles the scores of `EnsembleSuite`
    """

    def __init__(
        self, num_dims: int, batch_size: int, conserved: Sequence[int], seed: int, non_negative: Sequence[int] = ()
    ) -> None:
        self.metrics = MetricSuite()
        self.conserved, self.non_negative, self.seed = list(conserved), list(non_negative), seed
        self._compat = CompatSuite(num_dims, batch_size)
        self._spectra = SampleMeans()
        self._ensemble = EnsembleSuite()
        self._trajectories: dict[str, list[Tensor]] = defaultdict(list)
        self._curves: list[Tensor] = []

    def reduce(
        self, u_pred: Tensor, truth: Truth, u_0: Tensor | None = None, ensemble: EnsembleErrors | None = None
    ) -> Reductions:
        """Reduce predictions (B, T, C, *grid) of some trajectories at some times over space.

        Metrics over time need the initial state u_0 (B, C, *grid) of the rollouts; ensemble scores need `ensemble`, the
        reductions of the members whose mean is u_pred.
        """
        found = vars(snapshot_errors(u_pred, truth.u)) | {"MAE": MAE(u_pred, truth.u)}
        energies = radial_spectrum(u_pred), truth.spectrum, nyquist_energy(u_pred), nyquist_energy(truth.u)
        spectra = zip(SPECTRA, energies, strict=True)
        found |= {name: energy.double().sum(dim=1, keepdim=True) for name, energy in spectra}
        if u_0 is not None:
            found["correlation"] = correlation(u_pred, truth.u)
            if self.conserved:
                found["conservation_drift"] = conservation_drift(u_pred[:, :, self.conserved], u_0[:, self.conserved])
            if self.non_negative:
                found["positivity"] = negative_part(u_pred[:, :, self.non_negative], u_0[:, self.non_negative])
        return found if ensemble is None else found | vars(ensemble)

    def add(self, reductions: Reductions) -> None:
        """Add the reductions of whole trajectories."""
        errors = _record(SnapshotErrors, reductions)
        self.metrics.add(errors)
        self._compat.add(errors)
        self._curves.append(errors.nRMSE.mean(dim=-1))
        energies = {"error_spectrum": errors.radial} | {name: reductions[name] for name in SPECTRA}
        self._spectra.add({name: energy.double().sum(dim=1) for name, energy in energies.items()})
        scores = {name: reductions[name] for name in ("MAE", *OF_PHYSICS) if name in reductions}
        scores |= {"nRMSE": errors.nRMSE, "VRMSE": errors.VRMSE, "RMSE": errors.rms, "bRMSE": errors.boundary_rms}
        scores["L2RE"] = L2RE(errors.rms, errors.rms_ref)
        if "correlation" in reductions:
            scores["correlation_time"] = correlation_time(reductions["correlation"])
        if "crps" in reductions:
            self._ensemble.add(_record(EnsembleErrors, reductions))
            scores["CRPS"] = reductions["crps"]
        for name, values in scores.items():
            # One number per trajectory: its snapshots are not independent, so that intervals resample trajectories.
            self._trajectories[name].append(values.double().reshape(len(values), -1).mean(dim=1))

    def compute(self) -> dict[str, Score]:
        """Return the scores of all samples so far."""
        values, intervals = {}, {}
        for name in self._trajectories:
            each, is_median = self.of_trajectories(name), name in MEDIANS
            values[name] = float(each.quantile(0.5) if is_median else each.mean())
            intervals[name] = bootstrap_interval(each, statistic=np.median if is_median else np.mean, seed=self.seed)
        error, prediction, reference, *shortest = (self._spectra[name] for name in ("error_spectrum", *SPECTRA))
        values |= self.metrics.compute() | band_scores(error, prediction, reference)
        values["nyquist_energy"] = energy_error(*(energy[:, 0] for energy in shortest), energy_floor(reference))
        values |= {f"{COMPAT}{name}": value for name, value in self._compat.compute().items()}
        if "CRPS" in self._trajectories:
            values |= self._ensemble.compute()
        return {name: Score(value, intervals.get(name)) for name, value in values.items()}

    def of_trajectories(self, name: str) -> Tensor:
        """Return the metric `name` of every trajectory so far, (N,)."""
        return torch.cat(self._trajectories[name]).cpu()

    def curves(self) -> Tensor:
        """Return the nRMSE of every trajectory so far at each time, averaged over channels, (N, T)."""
        return torch.cat(self._curves).cpu()

    def spectra(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the energy of reference and prediction, (K,): summed over channels, mean over trajectories, times."""
        reference, prediction = (self._spectra[f"{name}_spectrum"].sum(0) for name in ("reference", "prediction"))
        num_times = self._curves[0].shape[1]
        return (reference / num_times).cpu().numpy(), (prediction / num_times).cpu().numpy()

    def ranks(self) -> Tensor | None:
        """Return the rank histogram of each channel, (C, M + 1); None without an ensemble."""
        return self._ensemble.ranks() if "CRPS" in self._trajectories else None


def _record(kind: type[Record], reductions: Reductions) -> Record:
    return kind(**{field.name: reductions[field.name] for field in fields(kind)})
