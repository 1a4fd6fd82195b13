"""Scoring in parts, by one process or shared by the ranks of `torchrun ... -m ups.evaluation.parts RUN_DIR`.

A part is written when it is whole, so that an interrupted scoring loses the unfinished part of each process.
"""

from ups.runs.processes import die_with_parent, memory_bytes

if __name__ == "__main__":
    die_with_parent()

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from ups.config import EvaluationConfig
from ups.errors import DataFault
from ups.evaluation.examples import Arrays
from ups.evaluation.predictions import Compute
from ups.evaluation.scores import Part, TrajectorySet, held_out, score_part
from ups.evaluation.selected import SearchChoice
from ups.files import open_plain, publish, read_json, remove_leftovers, storage_faults, write_json
from ups.runs.progress import ProgressBar
from ups.runs.run import REQUEST, RESULT, Run
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import OFF, Trained
from ups.training.distributed import Ranks
from ups.training.process import run_rank

MODULE = "ups.evaluation.parts"
PARTS = "parts"  # folder of the parts, until all are there
TAKEN = ".taken"  # ending of an empty file beside a part that a rank scores
RECORDS = "records"  # array of a part: its records as JSON

Records = list[dict[str, Any]]


def held_out_sets(
    trained: Trained, raw: Path, num_trajectories: int | None, choices: dict[str, dict[str, Any]]
) -> list[TrajectorySet]:
    """The first `num_trajectories` of the test split of each dataset, None: all of them.

    `choices` are the values of a `SearchChoice` for the datasets that have one.
    """
    found = {name: SearchChoice.from_json(values) for name, values in choices.items()}
    sets = held_out(trained.cache(), raw, "test")
    return [
        replace(each, indices=each.indices[:num_trajectories], choice=found.get(each.dataset.name)) for each in sets
    ]


def num_tokens(sets: Iterable[TrajectorySet]) -> int:
    """Tokens of all trajectories."""
    return sum(each.num_tokens * len(each.indices) for each in sets)


def score_sets(
    folder: Path,
    surrogate: Surrogate,
    sets: list[TrajectorySet],
    config: EvaluationConfig,
    compute: Compute,
    *,
    examples: bool = False,
) -> Records:
    """Score every method on every set in this process; write `folder/<dataset>.npz` for the figures.

    `examples`: the file has, beside curves, the worst, median and best trajectory, which are predicted once more. Sets
    that an interrupted call with the same arguments has finished are not scored again.

    Returns:
        Records {"family", "dataset", "method", "metric", "horizon", "value", "num_trajectories"}. "low" and "high" are
        the 95 % confidence interval of metrics that are statistics over enough trajectories. The nRMSE has
        "trajectories", the error of each in order. A number that is not finite is None. Methods with a corrector have
        its "mode": with "off" they have the scores of the operator or the steady model. Predicted states that limits
        of `StateStatistics` have changed are the share `limited_steps`, their values the share `limited_values`; where
        the operator's rollouts have any, `nRMSE_without_limits` is the error of its rollouts without limits.
    """
    parts = make_parts(surrogate, sets, config, num_processes=1)
    total = sum(len(each.indices) for each in sets)
    prepare(folder)
    with ProgressBar("evaluate", total, "trajectories", sum(part.cost for part in parts)) as bar:
        for part in parts:
            size = len(part.scored.indices)

            def advance(count: int, cost: float = part.cost / size) -> None:
                bar.advance(count, count * cost)

            if path_of(folder, part).is_file():
                advance(size)
            else:
                how = {"config": config, "compute": compute, "examples": examples, "advance": advance}
                _write_part(folder, part, *score_part(folder, surrogate, part, **how))
    return joined(folder, parts)


def make_parts(
    surrogate: Surrogate, sets: list[TrajectorySet], config: EvaluationConfig, num_processes: int
) -> list[Part]:
    """A part for each set; a set that costs more than an equal share of the processes is split."""
    whole = [Part.whole(surrogate, each, config) for each in sets]
    share = sum(part.cost for part in whole) / num_processes
    return list(chain.from_iterable(part.split() if part.cost > share else [part] for part in whole))


def score_on_rank(run: Run, ranks: Ranks) -> None:
    """Score parts that are neither there nor taken by another rank, the most expensive first, until all are there."""
    trained, surrogate, compute = models_of(run, ranks)
    config, alive = EvaluationConfig(**run.config), run.alive(ranks.rank)
    assert run.raw is not None
    request = read_json(run.folder / REQUEST)
    sets, examples = held_out_sets(trained, run.raw, **request["sets"]), request["examples"]
    parts = make_parts(surrogate, sets, config, ranks.world_size)

    def score(part: Part) -> None:
        how = {"config": config, "compute": compute, "examples": examples, "advance": lambda _: alive.touch()}
        _write_part(run.folder, part, *score_part(run.folder, surrogate, part, **how))

    dearest_first = sorted(parts, key=lambda part: part.cost, reverse=True)
    share_out(run, ranks, {path_of(run.folder, part): partial(score, part) for part in dearest_first})


def share_out(run: Run, ranks: Ranks, work: dict[Path, Callable[[], None]]) -> None:
    """Do the work whose file is neither there nor taken by another rank, in this order, until all files are there."""
    for path, write in work.items():
        if not path.is_file() and _take(path):
            write()
    ranks.wait_for_all(run.alive(ranks.rank).touch)
    if ranks.rank == 0:
        write_json(run.folder / RESULT, {"parts": len(work)})


def models_of(run: Run, ranks: Ranks) -> tuple[Trained, Surrogate, Compute]:
    """The trained stages of a job, and their models on this rank, each evaluation of which is a sign of life."""
    stages = {name: receipt for name, receipt in run.inputs.items() if name != "latent_cache"}
    trained = Trained(run.inputs["latent_cache"], stages, run.data_root)
    compute = Compute(ranks.device, memory_bytes(run.launch, ranks.device))
    surrogate, alive = trained.surrogate(compute.device), run.alive(ranks.rank)
    for model in (surrogate.operator, surrogate.steady, surrogate.denoiser, surrogate.student):
        if model is not None:
            model.register_forward_hook(lambda *_: alive.touch())
    return trained, surrogate, compute


def prepare(folder: Path) -> None:
    """Make the folder of parts, without what killed processes have left unfinished."""
    with storage_faults(folder / PARTS):
        (folder / PARTS).mkdir(parents=True, exist_ok=True)
    for path in (folder / PARTS).glob(f"*{TAKEN}"):
        path.unlink()
    for place in (folder, folder / PARTS):
        remove_leftovers(place)


def path_of(folder: Path, part: Part) -> Path:
    """The file that is there when a part is scored."""
    return folder / PARTS / f"{part.name}.npz"


def _take(path: Path) -> bool:
    """Whether this process is the first to take the part that will be the file `path`."""
    taken = path.with_suffix(TAKEN)
    with storage_faults(taken):
        try:
            taken.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _write_part(folder: Path, part: Part, records: Records, arrays: Arrays) -> None:
    _write(path_of(folder, part), arrays | {RECORDS: np.array(json.dumps(records, allow_nan=False))})


def _write(path: Path, arrays: Arrays) -> None:
    with publish(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **dict(sorted(arrays.items())))


def _read(path: Path) -> Arrays:
    try:
        with open_plain(path) as file, np.load(file) as content:
            return dict(content)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataFault(f"{path} is damaged ({error}); delete it and run again") from error


def joined(folder: Path, parts: list[Part]) -> Records:
    """The records of all parts, in their order; `folder/<dataset>.npz` gets the arrays of each set, the parts go."""
    records: Records = []
    for name, of_set in groupby(parts, key=lambda part: part.scored.dataset.name):
        contents = [_read(path_of(folder, part)) for part in of_set]
        found = chain.from_iterable(json.loads(str(content.pop(RECORDS))) for content in contents)
        records += sorted(found, key=lambda record: record.get("mode") == OFF)  # copies of other records come last
        _write(folder / f"{name}.npz", {key: values for content in contents for key, values in content.items()})
    shutil.rmtree(folder / PARTS)
    return records


if __name__ == "__main__":
    run_rank(score_on_rank)
