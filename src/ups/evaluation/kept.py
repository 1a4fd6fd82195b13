"""Rollouts of the evaluation kept as zarr, from which `ups score` recomputes their records without the models."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from ups.config import EvaluationConfig
from ups.data.axes import has_step
from ups.data.families import Dataset, base_of
from ups.data.field_files import FieldFile
from ups.data.field_output import Content
from ups.data.field_stores import Output, resumable
from ups.data.hdf5 import file_fault
from ups.data.pdebench import FAMILIES
from ups.data.sources import is_added
from ups.errors import DataFault
from ups.evaluation.predictions import Batch, Predicted, Slab, corrector_mode
from ups.surrogate.surrogate import Surrogate

ORIGIN = "origin"  # attribute with what the records depend on besides the fields


@dataclass(frozen=True)
class Origin:
    """What the records of kept rollouts depend on besides the fields.

    `indices` are the trajectories of the dataset, `md5` those of its files by name. Records depend on the order of
    sums: `batch_size` trajectories are scored together, `rows` of them and `num_steps` times at once. `seed` is that of
    confidence intervals.
    """

    dataset: dict[str, Any]
    md5: dict[str, str]
    method: str
    mode: str | None
    indices: list[int]
    batch_size: int
    rows: int
    num_steps: int
    seed: int

    @classmethod
    def of(cls, path: Path, attributes: Any) -> "Origin | None":
        """The origin of a file of predictions; None if the evaluation has not written it."""
        if ORIGIN not in attributes:
            return None
        try:
            return cls(**json.loads(attributes[ORIGIN]))
        except (TypeError, ValueError) as error:
            raise DataFault(f"{path}: the attribute {ORIGIN!r} is damaged ({error}); evaluate again") from error


class Keeper:
    """Writes the rollouts of the methods in `evaluation.keep_predictions` along one dataset; a context manager.

    They are `folder/<dataset>.<method>.zarr`, with all members of ensembles, in physical units.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        indices: tuple[int, ...],
        md5: dict[str, str],
        surrogate: Surrogate,
        config: EvaluationConfig,
    ) -> None:
        self._folder, self._dataset, self._indices, self._md5 = folder, dataset, indices, md5
        self._surrogate, self._config = surrogate, config
        self._outputs: dict[str, Output] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def kept(self, predicted: Predicted, batch: Batch, slab: Slab) -> Predicted:
        """The same predictions; rollouts of a method that is kept are written when their members are read."""
        if predicted.method not in self._config.keep_predictions or "rollout" not in predicted.horizons:
            return predicted
        return replace(predicted, members=partial(self._members, predicted, batch, slab))

    def _members(self, predicted: Predicted, batch: Batch, slab: Slab, rows: slice) -> Iterator[Tensor]:
        first, member = self._indices.index(batch.indices[0]) + (rows.start or 0), 0
        for part in predicted.members(rows):
            if predicted.method not in self._outputs:
                self._open(predicted.method, batch, 2 * len(part) if len(part) > 1 else None)
            output = self._outputs[predicted.method]
            if slab.u_0 is not None and slab.start == 0:
                initial = slab.u_0[rows].expand(len(part), *slab.u_0[rows].shape)[:, :, None]
                output.write((first, member, 0), _channels_first(initial))
            output.write((first, member, slab.start + (slab.u_0 is not None)), _channels_first(part))
            member += len(part)
            yield part
            del part  # before the other half is decoded

    def _open(self, method: str, batch: Batch, members: int | None) -> None:
        dataset, rows = self._dataset, batch.rows[0]
        family, count = FAMILIES[dataset.family], len(self._indices)
        size, at_once, num_steps = len(batch.indices), rows.stop - rows.start, batch.num_steps
        mode = corrector_mode(self._surrogate, method, dataset.family)
        md5 = {name: self._md5[name] for name in dataset.files if not is_added(name)}
        chosen = (list(self._indices), size, at_once, num_steps, self._config.seed)
        origin = Origin(asdict(dataset), md5, method, mode, *chosen)
        content = Content(
            family,
            (),
            count,
            members,
            () if family.steady else dataset.times,
            dataset.grid,
            dataset.lengths,
            {name: np.full(count, value) for name, value in dataset.parameters.items()},
            {"family": dataset.family, "equation": family.equation, ORIGIN: json.dumps(asdict(origin))},
            (at_once, num_steps),
        )
        path = self._folder / f"{dataset.name}.{method}.zarr"
        if path.exists():  # of an evaluation that was interrupted
            shutil.rmtree(path)
        self._outputs[method] = self._stack.enter_context(resumable(path, content, "evaluation"))


def _channels_first(u: Tensor) -> np.ndarray:
    """Snapshots (M, B, T, C, *grid) as (C, B, M, T, *grid) in memory."""
    return u.permute(3, 1, 0, 2, *range(4, u.ndim)).cpu().numpy()


def expect_like(file: FieldFile, dataset: Dataset, count: int, truth: str) -> None:
    """Refuse predictions of another shape than the truth, or of what they say is another equation or other times."""
    found, num_times = file.first, len(dataset.times)
    if (found.count, found.times or 1, found.grid) != (count, num_times, dataset.grid):
        shape = f"{found.count} trajectories of {found.times or 1} snapshots on {found.grid}"
        expected = f"{count} of {num_times} on {dataset.grid} as in {truth}"
        raise file_fault(file.path, f"has {shape}, expected {expected}", "predict all of them at every time")
    if found.members is not None and (found.members < 4 or found.members % 2):
        raise file_fault(file.path, f"has {found.members} members", "score an even number of at least 4, or their mean")
    stated, family = file.attributes.get("family"), base_of(dataset.family)
    if isinstance(stated, str) and base_of(stated) in FAMILIES and base_of(stated) != family:
        raise file_fault(file.path, f"has predictions of {stated}, not of {family}", "name the file of its truth")
    if file.times is None or num_times < 2:
        return
    times, step = file.times[:num_times], (dataset.times[-1] - dataset.times[0]) / (num_times - 1)
    if len(times) != num_times or not has_step(times, step):
        what = f"has snapshots {times[1] - times[0]:g} apart at first, those of {dataset.name} are {step:g} apart"
        raise file_fault(file.path, what, "predict at the times of the truth, or leave its times out")
