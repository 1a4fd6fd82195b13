"""Predictions of every method for a batch of trajectories: one step from each snapshot, and whole rollouts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import psutil
import torch
from torch import Tensor

from ups.config import LaunchConfig
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.diffusion import Normal
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.runs.machine import device as device_of
from ups.runs.processes import memory_bytes, release_memory
from ups.surrogate.arrays import find_device
from ups.surrogate.surrogate import Correction, NoisyStep, Setting, Surrogate, decoded, rollout_steps
from ups.surrogate.trained import OFF

HORIZONS = ("one_step", "rollout")
MAX_PIECE = 2**28  # bytes of fields at once: larger pieces are no faster
COPIES, COPIES_PER_MEMBER = 14, 2  # of a snapshot, that scoring holds at once
SHARE = 4  # part of the memory for these, and as much for the models
BYTES_PER_TOKEN = 24_000  # that a model holds of its input: 15,000 to 23,000 for 64 to 256 hidden channels

Encode = Callable[[Tensor, str], Tensor]  # snapshots (..., C, *grid) of a family to latents (..., N, D)


@dataclass(frozen=True)
class Compute:
    """Where models run, and the bytes that this process may use."""

    device: torch.device
    memory: int

    @classmethod
    def of(cls, launch: LaunchConfig) -> "Compute":
        """The device of a launch, and the memory of one of its processes."""
        device = torch.device(device_of(launch))
        return cls(device, memory_bytes(launch, device))

    @classmethod
    def on(cls, name: str | None) -> "Compute":
        """A device by its name, None: a GPU if there is one, and half of the memory that is free there."""
        device = find_device(name)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        return cls(device, free // 2)

    def limited(self, surrogate: Surrogate) -> Surrogate:
        """The surrogate with models that take as many tokens at once as the memory allows."""
        return replace(surrogate, max_tokens=self.memory // (SHARE * BYTES_PER_TOKEN))

    def num_snapshots(self, snapshot_bytes: int, num_members: int) -> int:
        """How many snapshots may be predicted, decoded and scored at once; 0 if no single one with all its members."""
        piece = min(MAX_PIECE, self.memory // SHARE)
        return piece // (snapshot_bytes * (COPIES + COPIES_PER_MEMBER * num_members))


@dataclass(frozen=True)
class Prediction:
    """Predicted snapshots u (B, T, C, *grid): for an ensemble their mean and reductions of the members.

    Half of the members have the noise of the others negated, so that the mean is that of antithetic pairs. Within each
    half they are independent: the scores of an ensemble are means over the two halves.
    """

    u: Tensor
    ensemble: EnsembleErrors | None = None


@dataclass(frozen=True)
class Slab:
    """Snapshots `target` (B, T, C, *grid) to predict, the T steps after the first `start` ones of their trajectories.

    Before them comes the snapshot `last` (B, 1, C, *grid); rollouts start from u_0 (B, C, *grid). A steady family has
    neither. `z_ref` (B, T + 1, N, D) are the latents of `last` and the targets, where a steady solution starts from 0;
    `z_before` (B, 1, N, D) those of the snapshot before `last`, or of `last` where a trajectory begins with it; None
    where steps start from one snapshot.
    """

    start: int
    target: Tensor
    u_0: Tensor | None
    last: Tensor | None
    z_ref: Tensor
    z_before: Tensor | None

    def state(self, step: int) -> Tensor:
        """What a model advances by the step after `step` of them: a snapshot, or it and the one before (`History`)."""
        if self.z_before is None:
            return self.z_ref[:, step]
        before = self.z_ref[:, step - 1] if step else self.z_before[:, 0]
        return torch.cat([self.z_ref[:, step], before], -1)


@dataclass(frozen=True)
class Batch:
    """B trajectories that are predicted together, of which `num_steps` snapshots are read at once.

    `rows` are the trajectories that are decoded and scored at once, `members_at_once` the members of an ensemble; with
    `history` steps start from two snapshots.
    """

    reader: TrajectoryReader
    indices: tuple[int, ...]
    setting: Setting
    device: torch.device
    num_steps: int
    rows: list[slice]
    members_at_once: int
    history: bool = False

    @property
    def num_times(self) -> int:
        """Snapshots of a trajectory."""
        return len(self.reader.dataset.times)

    def read(self, start: int, stop: int) -> Tensor:
        """Snapshots `start` to `stop` of all trajectories, (B, T, C, *grid)."""
        u = [self.reader.read(index, start, stop) for index in self.indices]
        return torch.from_numpy(np.stack(u)).to(self.device)

    def slabs(self, encode: Encode) -> Iterator[Slab]:
        """All that is to predict: every snapshot after the first, or a steady solution."""
        family, num_times, last = self.setting.family, self.num_times, self.read(0, 1)
        u_0, z_last = last[:, 0], encode(last, family)
        if FAMILIES[family].steady:
            yield Slab(0, last, None, None, torch.cat([torch.zeros_like(z_last), z_last], 1), None)
            return
        z_before = z_last if self.history else None
        for start in range(1, num_times, self.num_steps):
            if start > 1:
                release_memory()  # of the slab before
            target = self.read(start, min(start + self.num_steps, num_times))
            z_ref = torch.cat([z_last, encode(target, family)], 1)
            yield Slab(start - 1, target, u_0, last, z_ref, z_before)
            # Not views, which would keep the slab.
            last, z_last = target[:, -1:].clone(), z_ref[:, -1:].clone()
            z_before = z_ref[:, -2:-1].clone() if self.history else None


@dataclass(frozen=True)
class Predicted:
    """Predictions of one method for a slab: `members(rows)` are those of some trajectories.

    They are snapshots (M, B, T, C, *grid), of an ensemble one half of its members after the other. They hold for all
    `horizons`, and are of the slab's steps `times`.
    """

    method: str
    horizons: tuple[str, ...]
    times: slice
    members: Callable[[slice], Iterable[Tensor]]


@dataclass(frozen=True)
class Stepper:
    """Makes a method's step z -> z_next for a setting; `num_members` is the size of its ensemble."""

    step_of: Callable[[Setting], Callable[[Tensor], Tensor]]
    num_members: int

    def start(self, setting: Setting) -> NoisyStep:
        """The step of all M members of B trajectories, (M B, N, D); its noise is independent of earlier steps."""
        return self.step_of(setting.repeated(self.num_members))


class Forecast:
    """Single steps, rollout or both of one method along a batch of trajectories, a slab of time steps after the other.

    `steppers` by horizon have noise of their own, so that neither the lengths of the slabs nor the other horizon change
    a number. Only every `stride`-th single step is made.
    """

    def __init__(self, steppers: dict[str, Stepper], setting: Setting, stride: int = 1) -> None:
        self.num_members = max(stepper.num_members for stepper in steppers.values())
        self.stride = stride
        self._steps = {horizon: stepper.start(setting) for horizon, stepper in steppers.items()}
        self._rollout: Iterator[Tensor] = iter(())

    def advance(self, slab: Slab) -> Iterator[tuple[str, slice, Tensor]]:
        """For each horizon the predicted times of the next slab, and their latents (M, B, T, N, D)."""
        if step := self._steps.get("one_step"):
            times = slice(-slab.start % self.stride, None, self.stride)
            if before := range(slab.target.shape[1])[times]:
                yield "one_step", times, self._stacked([step(self._members_of(slab.state(each))) for each in before])
        if step := self._steps.get("rollout"):
            if slab.start == 0:
                self._rollout = rollout_steps(step, self._members_of(slab.state(0)))
            yield "rollout", slice(None), self._stacked(list(islice(self._rollout, slab.target.shape[1])))

    def _members_of(self, z: Tensor) -> Tensor:
        return z.repeat(self.num_members, 1, 1)

    def _stacked(self, states: list[Tensor]) -> Tensor:
        return torch.stack(states, 1).unflatten(0, (self.num_members, -1))


Forecasts = dict[str, Forecast]


def predict(surrogate: Surrogate, batch: Batch, forecasts: Forecasts, slab: Slab) -> Iterator[Predicted]:
    """Predictions of a slab by models, one method and horizon after the other."""
    for method, forecast in forecasts.items():
        for horizon, times, z in forecast.advance(slab):
            yield Predicted(method, (horizon,), times, partial(_members, surrogate, batch, z))


def _members(surrogate: Surrogate, batch: Batch, z: Tensor, rows: slice) -> Iterator[Tensor]:
    """From latents (M, B, T, N, D)."""
    for half in z[:, rows].chunk(2):
        yield decoded(surrogate, half, batch.setting.family, batch.members_at_once)


def prediction_of(members: Iterable[Tensor], target: Tensor) -> Prediction:
    """The prediction of a single member, or of an ensemble from its two halves (M / 2, B, T, C, *grid)."""
    means, errors = [], []
    for half in members:
        if len(half) == 1:
            return Prediction(half[0])
        means.append(half.mean(0))
        errors.append(ensemble_errors(half, target))
        del half  # before the other half is decoded
    return Prediction((means[0] + means[1]) / 2, EnsembleErrors.mean(errors))


def predict_trivially(surrogate: Surrogate, family: str, slab: Slab) -> Iterator[Predicted]:
    """What models are compared with: `codec` decodes the reference as it is stored in the latent cache.

    `rounding` errs by as much as the rounding of stored latents changes it; none where they are not rounded.
    `persistence` repeats the snapshot before, in rollouts the initial one; a steady family has none.
    """

    def stored_snapshots(rows: slice) -> list[Tensor]:
        return [surrogate.decode(surrogate.as_stored(slab.z_ref[rows, 1:], family), family)[None]]

    def changed_by_rounding(rows: slice) -> list[Tensor]:
        (stored,), exact = stored_snapshots(rows), surrogate.decode(slab.z_ref[rows, 1:], family)
        return [target[rows] + (stored - exact)]

    every, target, last, u_0 = slice(None), slab.target, slab.last, slab.u_0
    yield Predicted("codec", HORIZONS, every, stored_snapshots)
    if family in surrogate.latent_scales:
        yield Predicted("rounding", ("one_step",), every, changed_by_rounding)
    if last is not None and u_0 is not None:

        def snapshots_before(rows: slice) -> list[Tensor]:
            return [torch.cat([last[rows], target[rows, :-1]], 1)[None]]

        kept = u_0[:, None].expand_as(target)
        yield Predicted("persistence", ("one_step",), every, snapshots_before)
        yield Predicted("persistence", ("rollout",), every, lambda rows: [kept[rows][None]])


def plain_method(family: str) -> str:
    """The method that predicts a family without corrector."""
    return "steady" if FAMILIES[family].steady else "operator"


def trained_correctors(surrogate: Surrogate) -> list[str]:
    """The methods that sample residuals and whose model was trained."""
    models = {"diffusion": surrogate.denoiser, "consistency": surrogate.student}
    return [method for method, model in models.items() if model is not None]


def corrector_mode(surrogate: Surrogate, method: str, family: str) -> str | None:
    """`sample`, `refine` or `off` for a method that samples residuals; None for every other method."""
    if method not in trained_correctors(surrogate):
        return None
    correction = surrogate.corrections.get((method, family))
    return OFF if correction is None else correction.mode


def steppers(
    surrogate: Surrogate, family: str, num_members: int, normal_of: Callable[[str], Normal]
) -> dict[str, Stepper]:
    """The steps of a family's methods: without corrector, and with each corrector that is trained and not off.

    `normal_of` gives the noise of a method.
    """
    if surrogate.model(family) is None:
        return {}
    found = {plain_method(family): Stepper(surrogate.plain_step, 1)}
    for method in trained_correctors(surrogate):
        if correction := surrogate.corrections.get((method, family)):
            found[method] = corrected_stepper(surrogate, method, correction, num_members, normal_of(method))
    return found


def corrected_stepper(
    surrogate: Surrogate, method: str, correction: Correction, num_members: int, normal: Normal
) -> Stepper:
    """The plain step plus residuals sampled by the denoiser (`diffusion`) or by the student (`consistency`)."""
    make = surrogate.diffusion_step if method == "diffusion" else surrogate.consistency_step
    return Stepper(lambda setting: make(setting, correction, normal), num_members)
