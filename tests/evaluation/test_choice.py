"""The choice of correctors is the same for every number of processes, also after an interruption."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.test_corrector import CONFIG
from tests.evaluation.test_external import stages
from tests.training.jobs import launched
from tests.untrained import receipt
from ups import pipelines
from ups.evaluation import choice, parts
from ups.evaluation.corrector import Validation
from ups.files import read_json, write_json
from ups.pipelines.evaluation import choose_on_valid_split
from ups.runs.run import REQUEST, RESULT, Run
from ups.surrogate.trained import Trained
from ups.training.distributed import Ranks

SHORT = {"min_trajectories": 1, "noise_correlations": [0.0], "refine": [], "max_miscalibration": 1.01}
FEW = CONFIG.model_copy(update=SHORT)


@pytest.fixture(scope="module")
def models(trained: Path) -> Trained:
    """All models, of eleven families."""
    return Trained(receipt(trained, "latent_cache"), stages(trained), trained)


def choose(folder: Path, models: Trained, num_processes: int) -> dict[str, Any]:
    """The choice by some processes."""
    launch = launched(num_processes=num_processes, memory_gigabytes=2.0 * num_processes)
    return choose_on_valid_split(folder, models, FEW, launch, models.data_root / "01_raw")


@pytest.fixture(scope="module")
def one(models: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The choice of one process."""
    found = choose(tmp_path_factory.mktemp("one"), models, 1)
    assert found["families"].keys() == found["report"].keys() and len(found["families"]) > 1
    assert all(report["candidates"] for report in found["report"].values())
    return found


def test_a_rank_chooses_for_what_no_other_has_taken(
    models: Trained, one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A family that another rank has taken is left to it; the others are chosen for as by one process."""
    taken, *others = one["families"]
    chosen: list[str] = []
    choose_one = choice.choose_for_family

    def noted(validation: Validation) -> tuple[dict[str, Any], dict[str, Any]]:
        chosen.append(validation.sets[0].dataset.family)
        return choose_one(validation)

    def query(module: str, run: Run, request: dict[str, Any], on_poll: Callable[[], None]) -> Any:
        run.write()
        write_json(run.folder / REQUEST, request)
        assert parts._take(choice.path_of(run.folder, taken))
        choice.choose_on_rank(Run.read(run.folder), Ranks(0, 1, torch.device("cpu")))
        assert sorted(chosen) == others
        write_json(choice.path_of(run.folder, taken), {"choice": "another's", "report": {}})
        on_poll()
        return read_json(run.folder / RESULT)

    monkeypatch.setattr(choice, "choose_for_family", noted)
    monkeypatch.setattr(pipelines, "run_query", query)
    found = choose(tmp_path, models, 2)
    assert found["families"] == one["families"] | {taken: "another's"}
    assert {name: found["report"][name] for name in others} == {name: one["report"][name] for name in others}


def test_what_is_chosen_is_not_tried_again(
    models: Trained, one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After an interruption in the second family the first one is taken as it is."""
    tried: list[str] = []
    choose_one = choice.choose_for_family

    def interrupted(validation: Validation) -> tuple[dict[str, Any], dict[str, Any]]:
        tried.append(validation.sets[0].dataset.family)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return choose_one(validation)

    monkeypatch.setattr(choice, "choose_for_family", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(tmp_path, models, 1)
    assert choose(tmp_path, models, 1) == one
    first, second, *_ = one["families"]
    assert tried == [first, second, *list(one["families"])[1:]]
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_several_processes_choose_what_one_chooses(models: Trained, one: dict[str, Any], tmp_path: Path):
    """Choices and reports are equal."""
    assert choose(tmp_path, models, 2) == one
