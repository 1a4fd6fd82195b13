"""The choice of the corrector, by one process or shared by the ranks of a job that `ups.runs.torchrun` starts.

What was chosen for a family is written at once, so that an interruption loses the unfinished family of each process.
"""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from ups.config import CorrectorConfig
from ups.evaluation.corrector import Validation, choose_for_family
from ups.evaluation.parts import PARTS, models_of, prepare, share_out
from ups.evaluation.predictions import Compute
from ups.evaluation.scores import TrajectorySet, held_out
from ups.files import read_json, write_json
from ups.runs.progress import ProgressBar
from ups.runs.run import Run
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import Trained
from ups.training.distributed import Ranks
from ups.training.process import run_rank

MODULE = "ups.evaluation.choice"

ValidationSets = dict[str, list[TrajectorySet]]
"""Family -> the validation split of each of its datasets."""


def validation_sets(trained: Trained, raw: Path) -> ValidationSets:
    """The validation split of each dataset, by family."""
    sets: dict[str, list[TrajectorySet]] = defaultdict(list)
    for each in held_out(trained.cache(), raw, "valid"):
        sets[each.dataset.family].append(each)
    return dict(sorted(sets.items()))


def path_of(folder: Path, family: str) -> Path:
    """The file that is there when a family's corrector is chosen."""
    return folder / PARTS / f"{family}.json"


def choose(
    folder: Path, surrogate: Surrogate, sets: ValidationSets, config: CorrectorConfig, compute: Compute
) -> dict[str, Any]:
    """Choose a correction, or none, for every family and method, in this process.

    Families that an interrupted call with the same arguments has finished are not tried again.

    Returns:
        {"families": {family: {"diffusion", "consistency"}}, "report": {family: scores of all candidates}}.
    """
    surrogate = compute.limited(surrogate)
    prepare(folder)
    with ProgressBar("choose_corrector", len(sets), "families") as bar:
        for family, of_family in sets.items():
            if not path_of(folder, family).is_file():
                _choose_one(folder, family, Validation(surrogate, of_family, config, compute))
            bar.advance(1)
    return joined(folder, list(sets))


def choose_on_rank(run: Run, ranks: Ranks) -> None:
    """Choose for families that no other rank has taken, those with most validation data first, until all are done."""
    trained, surrogate, compute = models_of(run, ranks)
    surrogate, config = compute.limited(surrogate), CorrectorConfig(**run.config)
    assert run.raw is not None
    sets = validation_sets(trained, run.raw)

    def choose_for(family: str) -> None:
        _choose_one(run.folder, family, Validation(surrogate, sets[family], config, compute))

    largest_first = sorted(sets, key=lambda name: sum(each.num_tokens for each in sets[name]), reverse=True)
    share_out(run, ranks, {path_of(run.folder, family): partial(choose_for, family) for family in largest_first})


def _choose_one(folder: Path, family: str, validation: Validation) -> None:
    choice, report = choose_for_family(validation)
    write_json(path_of(folder, family), {"choice": choice, "report": report})


def joined(folder: Path, families: list[str]) -> dict[str, Any]:
    """What `choose` returns, from the files of all families, which are deleted."""
    found = {family: read_json(path_of(folder, family)) for family in families}
    shutil.rmtree(folder / PARTS)
    return {
        "families": {family: one["choice"] for family, one in found.items()},
        "report": {family: one["report"] for family, one in found.items()},
    }


if __name__ == "__main__":
    run_rank(choose_on_rank)
