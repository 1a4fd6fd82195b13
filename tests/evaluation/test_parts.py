"""Scores are the same for every number of processes, also after one of them was killed."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from tests.evaluation.test_external import CORRECTOR, config, stages
from tests.training.jobs import launched
from tests.untrained import receipt
from ups import pipelines
from ups.errors import DataFault, LostWorker
from ups.evaluation import parts
from ups.evaluation.examples import ROLES
from ups.evaluation.parts import make_parts, score_sets
from ups.evaluation.predictions import Compute
from ups.evaluation.scores import TrajectorySet, held_out
from ups.files import read_json, write_json
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator, SteadyModel
from ups.pipelines.evaluation import score_test_split
from ups.runs.run import REQUEST, RESULT, Run
from ups.surrogate.trained import Trained
from ups.training.distributed import Ranks

CONFIG = config(None).model_copy(update={"keep_predictions": ["operator", "diffusion"]})
CPU = torch.device("cpu")
ON = [(method, horizon) for method in ("diffusion", "consistency") for horizon in ("one_step", "rollout")]


@pytest.fixture(scope="module")
def models(trained: Path) -> Trained:
    """All models, with both correctors on for every family."""
    return Trained(receipt(trained, "latent_cache"), stages(trained) | {"corrector": CORRECTOR}, trained)


def sets_of(models: Trained) -> list[TrajectorySet]:
    """The test splits."""
    return held_out(models.cache(), models.data_root / "01_raw")


def score(folder: Path, models: Trained, num_processes: int) -> list[dict[str, Any]]:
    """Records of the test split by some processes."""
    launch = launched(num_processes=num_processes, memory_gigabytes=2.0 * num_processes)
    return score_test_split(folder, models, CONFIG, launch, models.data_root / "01_raw")["records"]


def contents(folder: Path) -> dict[str, bytes]:
    """Arrays for figures and kept rollouts."""
    files = [*folder.glob("*.npz"), *(path for path in folder.glob("*.zarr/**/*") if path.is_file())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def one(models: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Records and files of one process."""
    folder = tmp_path_factory.mktemp("one")
    records, files = score(folder, models, 1), contents(folder)
    assert {Path(name).suffix for name in files} >= {".npz", ".json"} and len(records) > 1000
    return records, files


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process works as rank 0, and no other rank takes a part."""

    def query(module: str, run: Run, request: dict[str, Any], on_poll: Callable[[], None]) -> Any:
        run.write()
        write_json(run.folder / REQUEST, request)
        parts.score_on_rank(Run.read(run.folder), Ranks(0, run.launch.num_processes, CPU))
        on_poll()
        return read_json(run.folder / RESULT)

    monkeypatch.setattr(pipelines, "run_query", query)


def test_parts_have_every_score_once(models: Trained):
    """Where all sets are large, correctors and horizons are apart; together they are the whole, in its order."""
    surrogate, sets = models.surrogate("cpu"), sets_of(models)
    whole, split = (make_parts(surrogate, sets, CONFIG, num_processes=n) for n in (1, 1000))
    assert [list(part.corrected) for part in whole] == [ON] * len(sets)
    assert [list(part.corrected) for part in split] == [[], *([key] for key in ON)] * len(sets)
    assert [part.plain for part in split] == [True, False, False, False, False] * len(sets)
    assert sum(part.cost for part in split) == sum(part.cost for part in whole)
    assert len({part.name for part in whole + split}) == len(whole + split)


def test_only_large_sets_are_split(models: Trained):
    """A set is split if it costs more than an equal share of a process."""
    surrogate, sets = models.surrogate("cpu"), sets_of(models)
    whole = make_parts(surrogate, sets, CONFIG, num_processes=1)
    share = sum(part.cost for part in whole) / 3
    large = {part.scored.dataset.name for part in whole if part.cost > share}
    found = Counter(part.scored.dataset.name for part in make_parts(surrogate, sets, CONFIG, num_processes=3))
    assert {name for name, count in found.items() if count > 1} == large and 0 < len(large) < len(sets)


@pytest.mark.parametrize("num_processes", [3, 1000])
def test_parts_change_no_bit(models: Trained, tmp_path: Path, one: tuple, alone: None, num_processes: int):
    """However many sets are split, records, arrays for figures and kept rollouts are those of one process."""
    assert score(tmp_path / "parts", models, num_processes) == one[0]
    assert contents(tmp_path / "parts") == one[1]


def test_a_network_evaluation_is_a_sign_of_life(
    models: Trained, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
):
    """A rank touches its heartbeat file at least once for each evaluation of a network."""
    found: Counter[str] = Counter()
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda path, **how: (found.update([path.name]), touch(path, **how))[1])
    count = lambda module, *_: found.update(["networks"] * isinstance(module, Operator | SteadyModel | Denoiser))  # noqa: E731
    handle = register_module_forward_hook(count)
    score(tmp_path / "parts", models, 2)
    handle.remove()
    assert found["alive.rank0"] >= found["networks"] > 100


def test_what_is_scored_is_not_scored_again(
    models: Trained, tmp_path: Path, one: tuple, monkeypatch: pytest.MonkeyPatch
):
    """After an interruption in the second set the first one is taken as it is."""
    scored, score_part = [], parts.score_part

    def interrupted(folder: Path, surrogate: Any, part: Any, **how: Any) -> Any:
        scored.append(part.name)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score_part(folder, surrogate, part, **how)

    monkeypatch.setattr(parts, "score_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path / "parts", models, 1)
    assert score(tmp_path / "parts", models, 1) == one[0]
    assert contents(tmp_path / "parts") == one[1]
    assert scored[0] not in scored[1:] and len(scored) == len(sets_of(models)) + 1
    assert not list((tmp_path / "parts").rglob(".*.tmp"))


def test_examples_are_predicted_for_figures_alone(models: Trained, tmp_path: Path, one: tuple):
    """Without them the records are the same, and of the arrays those of trajectories are missing, no others."""
    records = score_sets(tmp_path, models.surrogate("cpu"), sets_of(models), CONFIG, Compute(CPU, 2**30))
    assert records == one[0]
    for name in (each.dataset.name for each in sets_of(models)):
        few, whole = dict(np.load(tmp_path / f"{name}.npz")), dict(np.load(io.BytesIO(one[1][f"{name}.npz"])))
        assert set(few) == {key for key in whole if key.partition("/")[0] not in ROLES} < set(whole)
        assert all(np.array_equal(values, whole[key], equal_nan=True) for key, values in few.items() if key != "title")


def test_a_damaged_part_is_one_line(models: Trained, tmp_path: Path):
    """A part that is no archive is refused by name."""
    first, *_ = make_parts(models.surrogate("cpu"), sets_of(models), CONFIG, num_processes=1)
    path = tmp_path / "parts" / f"{first.name}.npz"
    path.parent.mkdir()
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(DataFault, match=rf"^{path} is damaged \(.*\); delete it and run again$"):
        score_sets(tmp_path, models.surrogate("cpu"), sets_of(models), CONFIG, Compute(CPU, 2**30))


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3])
def test_several_processes_score_what_one_scores(models: Trained, tmp_path: Path, one: tuple, num_processes: int):
    """Records are equal, and files byte for byte."""
    assert score(tmp_path / "several", models, num_processes) == one[0]
    assert contents(tmp_path / "several") == one[1]


@pytest.mark.slow
def test_a_killed_process_is_one_line_and_the_next_command_goes_on(
    models: Trained, tmp_path: Path, one: tuple, monkeypatch: pytest.MonkeyPatch
):
    """After a rank was killed the whole parts stay, and the same command scores the others."""
    folder = tmp_path / "several"
    (tmp_path / "killer.py").write_text(
        "import os, signal\nfrom ups.evaluation import parts\nfrom ups.training.process import run_rank\n"
        "write = parts._write_part\n"
        "def killed(*part):\n    write(*part)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "parts._write_part = killed\nrun_rank(parts.score_on_rank)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(parts.__file__).parents[2]}")
    monkeypatch.setattr(parts, "MODULE", "killer")
    with pytest.raises(LostWorker, match="killed") as lost:
        score(folder, models, 2)
    assert lost.value.exit_code == 9
    before = {path: path.stat().st_mtime_ns for path in (folder / "parts").glob("*.npz")}
    monkeypatch.undo()
    after: dict[Path, int] = {}
    joined = parts.joined
    seen = lambda *given: (after.update({path: path.stat().st_mtime_ns for path in before}), joined(*given))[1]  # noqa: E731
    monkeypatch.setattr(parts, "joined", seen)
    assert score(folder, models, 2) == one[0]
    assert contents(folder) == one[1]
    assert 1 <= len(before) <= 2 and after == before
