"""Predictions of all initial states in a file, written to a file: in batches, a number of time steps at once."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.data.arrays import stamp
from ups.data.families import Family, base_of
from ups.data.field_files import FieldFile, open_fields
from ups.data.field_output import Content
from ups.data.field_stores import REQUEST, Output, resumable
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.surrogate.arrays import check_finite, check_grid, check_positive, decimals
from ups.surrogate.bundle import models_of
from ups.surrogate.family_cards import find_family
from ups.surrogate.model import Model
from ups.surrogate.problem import Problem, read_ensemble, read_steps

log = logging.getLogger(__name__)

BATCH_TOKENS = 2**13  # that are advanced together: more are no faster, and a killed run loses one batch
PIECE_BYTES = 2**25  # of predictions that are kept before they are written


@dataclass(frozen=True)
class Request:
    """What to predict, as the arguments of `Model.predict`; the numbers `parameters` override those of the file.

    Predictions start from the snapshot with the index `start` of each trajectory, of which the last one has -1.
    """

    family: str
    start: int
    steps: int | None
    members: int | None
    seed: int
    dt: float | None
    parameters: dict[str, float]


@dataclass(frozen=True)
class Job:
    """Predictions of one file: `count` trajectories in batches of `size`, `steps_at_once` of which are written at once.

    `first` is the problem of the first batch, `total` the number of snapshots to predict.
    """

    model: Model
    source: Path
    target: Path
    request: Request
    count: int
    size: int
    steps_at_once: int
    first: Problem

    @classmethod
    def of(cls, model: Model, source: Path, target: Path, request: Request) -> "Job":
        """A job whose request and whose initial states are all checked.

        Raises:
            ConfigFault: the request does not suit the model, for instance members of a family without corrector, or a
                state is not finite.
            DataFault: the file is damaged, or has no initial states of the family.
        """
        read_ensemble(request.members, request.seed)
        if request.family not in map(base_of, model.families):
            find_family(request.family, model.cards, None)
        with _open(source, request) as file:
            count = file.first.count
            first = _pose(model, request, file, range(0, 1))
            read_steps(first, request.steps)
            if request.members is not None:
                model.corrector_of(first.card.name)
            if first.substeps > 1:
                log.info("%s: dt = %g is %d steps of the operator", first.card.name, first.dt, first.substeps)
            states = math.prod(first.card.domain.grid) * (request.members or 1)
            size = min(count, max(1, BATCH_TOKENS // states))
            for rows in _batches(count, size):
                model.warn_outside(_pose(model, request, file, rows))
        fields = len(first.card.family.fields)
        snapshot_bytes = 4 * fields * math.prod(first.dataset.grid) * size * (request.members or 1)
        steps_at_once = min(max(1, PIECE_BYTES // snapshot_bytes), (request.steps or 0) + 1)
        return cls(model, source, target, request, count, size, steps_at_once, first)

    @property
    def total(self) -> int:
        """Snapshots to predict, those of all members counted once."""
        return self.count * (self.request.steps or 1)

    def run(self, advance: Callable[[int], object]) -> None:
        """Predict and write; `advance(n)` follows n more snapshots. A killed job goes on with its next batch.

        Raises:
            ConfigFault: the target exists, or cannot hold the predictions.
            StorageFault: the disk is full or read-only.
            Locked: another process writes the target.
        """
        digest = self._digest()
        if self.target.exists() and self._is_complete(digest):
            log.info("%s is complete", self.target)
            return
        with (
            _open(self.source, self.request) as file,
            resumable(self.target, self._content(file), digest) as output,
            torch.inference_mode(),
        ):
            advance(output.done * (self.request.steps or 1))
            for rows in _batches(self.count, self.size):
                if rows.start >= output.done:
                    self._predict(file, rows, output, advance)
                    output.complete(rows.stop)

    def _predict(self, file: FieldFile, rows: range, output: Output, advance: Callable[[int], object]) -> None:
        """Predict one batch."""
        problem = _pose(self.model, self.request, file, rows)
        output.write_coefficients(rows.start, file.read_coefficients(rows))
        # Every batch has noise of its own, which does not depend on whether batches before were predicted just now.
        seed = int(np.random.SeedSequence([self.request.seed, rows.start]).generate_state(1)[0])
        snapshots = self.model.advance(problem, self.request.steps or 1, self.request.members, seed)
        shape = (len(rows), self.request.members or 1, self.steps_at_once, *problem.dataset.grid)
        u, filled = np.empty((len(problem.card.family.fields), *shape), np.float32), 0
        for number, snapshot in enumerate(snapshots):
            u[:, :, :, filled] = snapshot.permute(2, 1, 0, *range(3, snapshot.ndim)).cpu().numpy()
            filled += 1
            if filled == self.steps_at_once or number == (self.request.steps or 0):
                output.write((rows.start, 0, number + 1 - filled), u[:, :, :, :filled])
                filled = 0
            if number > 0 or problem.u_0 is None:  # the first snapshot is the initial state
                advance(len(rows))

    def _is_complete(self, digest: str) -> bool:
        try:
            with open_fields(self.target, FAMILIES[self.request.family]) as file:
                return file.attributes.get(REQUEST) == digest
        except DataFault:  # the target holds something else
            return False

    def _content(self, file: FieldFile) -> Content:
        first, request, family = self.first, self.request, self.first.card.family
        times = () if request.steps is None else tuple(first.dt * step for step in range(request.steps + 1))
        known = _arguments(file, request, range(self.count))
        default = {name: decimals(values)[0] for name, values in first.parameters.items()}
        parameters = {name: np.broadcast_to(known.get(name, default[name]), self.count) for name in family.parameters}
        attributes = {"family": first.card.name, "equation": family.equation, "source": self.source.name}
        chunk = (self.size, self.steps_at_once)
        grid, lengths = first.dataset.grid, first.dataset.lengths
        return Content(
            family,
            family.coefficients,
            self.count,
            request.members,
            times,
            grid,
            lengths,
            parameters,
            attributes,
            chunk,
        )

    def _digest(self) -> str:
        """SHA-256 of all that the predictions depend on: request, batches, initial states, models and corrections."""
        models = [self.model.card["settings"], self.model.card["corrections"]]
        asked = [asdict(self.request), str(self.source.resolve()), *stamp(self.source), self.size, *models]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
        for stage, model in models_of(self.model.surrogate).items():
            for name, tensor in model.state_dict().items():
                digest.update(f"{stage}/{name}".encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


@contextmanager
def _open(source: Path, request: Request) -> Iterator[FieldFile]:
    if source.suffix in (".h5", ".hdf5", ".nc"):
        inspect("fields", path=source, family=request.family, start=request.start)
    with open_fields(source, FAMILIES[request.family]) as file:
        if file.fields and file.first.members is not None and not FAMILIES[request.family].steady:
            raise ConfigFault(f"{source} has {file.first.members} members: keep one of them, or their mean")
        yield file


def _batches(count: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def _arguments(file: FieldFile, request: Request, rows: range) -> dict[str, Any]:
    """The parameters of some trajectories, of the request before those of the file."""
    return {name: values[rows.start : rows.stop] for name, values in file.parameters.items()} | request.parameters


def _start(file: FieldFile, request: Request) -> int:
    """The index of the initial states among the snapshots of the file, counted from its beginning."""
    count = file.first.times or 1
    if not -count <= request.start < count:
        raise ConfigFault(f"{file.path} has {count} snapshots per trajectory: start is {-count} to {count - 1}")
    return request.start % count


def _expect_step(file: FieldFile, time: int, problem: Problem) -> None:
    """Refuse two snapshots that are not one time step of training apart, where the file states its times."""
    if file.times is None or time >= len(file.times):
        return
    stated, dt = float(file.times[time] - file.times[time - 1]), problem.dt / problem.substeps
    if not math.isclose(stated, dt, rel_tol=1e-3):
        what = f"steps of {problem.card.name} start from two snapshots, {dt:g} apart, those of the file are {stated:g}"
        raise ConfigFault(f"{what}; choose start=0, or keep snapshots at the time step of training")


def _pose(model: Model, request: Request, file: FieldFile, rows: range) -> Problem:
    """The problem of some trajectories; a fault names the file."""
    family, coefficients, time = FAMILIES[request.family], file.read_coefficients(rows), _start(file, request)
    arguments = coefficients | _arguments(file, request, rows)
    u_0 = None if family.steady else file.states(rows, time)
    place = f"{file.path}, trajectories {rows.start} to {rows.stop - 1}" if len(rows) > 1 else str(file.path)
    try:
        _check_values(family, u_0, coefficients)
    except ConfigFault as fault:
        raise DataFault(f"{place}: {fault}") from None
    try:
        problem = model.pose(request.family, u_0, request.dt, arguments)
        if time == 0 or not model.has_history(problem.card.name):
            return problem
        _expect_step(file, time, problem)
        return problem.after(file.states(rows, time - 1))
    except ConfigFault as fault:
        raise ConfigFault(f"{place}: {fault}") from None


def _check_values(family: Family, u_0: np.ndarray | None, coefficients: dict[str, np.ndarray]) -> None:
    """Raise `ConfigFault` for fields (B, C, *grid) and coefficients (B, *grid) of a file that no model can take."""
    for name, values in coefficients.items():
        check_finite(torch.from_numpy(values), name)
    if u_0 is not None:
        u = torch.from_numpy(u_0)
        check_finite(u, "u_0")
        check_positive(u, family, "u_0")
        check_grid(tuple(u.shape[2:]), family)
