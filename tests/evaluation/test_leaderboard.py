"""The leaderboard: ranks and means by hand, and nothing is ranked that was scored on something else."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import write_file
from tests.evaluation.conftest import unpadded
from tests.evaluation.test_kept import COMPUTE
from ups.config import LeaderboardConfig, RegistrationConfig
from ups.data.trajectories import TrajectoryReader, inspect_file
from ups.errors import DataFault
from ups.evaluation.entries import Described, entries_in, entries_of_version, entry_of_scores, trajectories_digest
from ups.evaluation.external import score_predictions
from ups.evaluation.leaderboard import Leaderboard, leaderboard_csv, leaderboard_text, ranked
from ups.files import digest_of, read_json
from ups.pipelines.studies import rank_models
from ups.runs import registry

TEST = [1, 4, 6]
TRAJECTORIES = {"grid": [8], "times": [0.0, 1.0], "subsample": {}, "counts": [9], "files": ["md5"], "test": TEST}
REGISTRATION = RegistrationConfig(name="ups", alias="champion", max_family_ratio=1.02)


def record(dataset: str, method: str, horizon: str, value: float | None) -> dict[str, Any]:
    """An nRMSE with an interval from half of it to twice of it."""
    ends = {} if value is None else {"low": value / 2, "high": 2 * value}
    where = {"dataset": dataset, "family": "burgers_1d", "method": method, "metric": "nRMSE", "horizon": horizon}
    return where | {"value": value, "num_trajectories": len(TEST), "trajectories": [value] * len(TEST)} | ends


def run(root: Path, errors: dict[str, float | None], **changed: Any) -> Path:
    """A data root whose operator has these rollout errors, and half of them for one step."""
    chosen = TRAJECTORIES | changed
    steps = {name: None if error is None else error / 2 for name, error in errors.items()}
    records = [record(name, "operator", "one_step", error) for name, error in steps.items()]
    records += [record(name, "operator", "rollout", error) for name, error in errors.items()]
    described = {name: chosen[name] for name in ("grid", "times", "subsample", "counts")}
    content = {
        "datasets": {name: described | {"files": [f"{name}.hdf5"]} for name in errors},
        "sources": {f"{name}.hdf5": {"md5": chosen["files"][0], "bytes": 1} for name in errors},
        "splits": {name: {"test": chosen["test"]} for name in errors},
    }
    for place, written in (("08_reporting/metrics.json", records), ("04_feature/datasets.json", content)):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(json.dumps(written))
    return identified(root)


def identified(root: Path) -> Path:
    """A data root whose scores are of the test trajectories that `datasets.json` says."""
    described, path = Described.below(root), root / "08_reporting/metrics.json"
    digests = {name: trajectories_digest(described.test_trajectories(name)) for name in described.datasets}
    path.write_text(json.dumps([record | {"digest": digests[record["dataset"]]} for record in read_json(path)]))
    return root


def foreign(path: Path, dataset: str, error: float, method: str = "their_model") -> Path:
    """A file of `ups score`."""
    scores = {"method": method, "dataset": dataset, "family": "burgers_1d", "trajectories": TRAJECTORIES}
    path.write_text(json.dumps(scores | {"records": [record(dataset, method, "rollout", error)]}))
    return path


def board_of(roots: list[Path], *scores: Path) -> Leaderboard:
    """The leaderboard of data roots by the names of their folders, and of other models."""
    entries = [entry for root in roots for entry in entries_in(root.name, root)]
    return ranked([*entries, *(entry_of_scores(path, entries) for path in scores)])


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three runs on two datasets."""
    errors = {"a": (0.1, 0.4), "b": (0.2, 0.1), "c": (0.1, None)}
    return [run(tmp_path / name, {"flow": flow, "gas": gas}) for name, (flow, gas) in errors.items()]


def test_three_runs_and_one_other_model(roots: list[Path], tmp_path: Path):
    """Equal errors have equal ranks, a diverged run none; the better half of an interval is as in metrics.json."""
    text = unpadded(leaderboard_text(board_of(roots, foreign(tmp_path / "scores.json", "flow", 0.05))))
    flow = text[text.index("## flow") : text.index("## gas")]
    assert [line for line in flow if "0." in line] == [
        "| 1* | their_model | | 0.05 (0.025 to 0.1) | 3 |",
        "| 2 | a | 0.05 (0.025 to 0.1) | 0.1 (0.05 to 0.2) | 3 |",
        "| 2 | c | 0.05 (0.025 to 0.1) | 0.1 (0.05 to 0.2) | 3 |",
        "| 4 | b | 0.1 (0.05 to 0.2) | 0.2 (0.1 to 0.4) | 3 |",
    ]
    assert "| | c | not finite | not finite | 3 |" in text[text.index("## gas") :]


def test_means_are_geometric_and_over_the_same_datasets(roots: list[Path], tmp_path: Path):
    """Flow is of all models, gas of the runs: b has 0.2 / 0.1 and 0.1 / 0.4, with the geometric mean sqrt(1 / 2)."""
    alone = {mean.model: mean for mean in board_of(roots).means}
    assert (alone["a"].common, alone["a"].own, alone["a"].rank) == (1.0, 1.0, 2)
    assert alone["b"].common == pytest.approx(0.5**0.5) and alone["b"].rank == 1
    assert alone["c"].common is None and alone["c"].rank is None
    board = board_of(roots, foreign(tmp_path / "scores.json", "flow", 0.05))
    assert board.common == ["flow"]
    found = [(mean.model, mean.rank, mean.num_datasets) for mean in board.means]
    assert found == [("their_model", 1, 1), ("a", 2, 2), ("c", 2, 2), ("b", 4, 2)]
    assert [mean.common for mean in board.means] == pytest.approx([0.5, 1.0, 1.0, 2.0])


def test_ranks_do_not_depend_on_the_first_model(roots: list[Path]):
    """Geometric means of ratios have the same order whatever all are divided by; that is never a diverged model."""
    boards = [board_of(order) for order in (roots, roots[::-1], [roots[1], roots[2], roots[0]])]
    assert [board.reference for board in boards] == ["a", "b", "b"]
    for board in boards:
        assert [(mean.model, mean.rank) for mean in board.means] == [("b", 1), ("a", 2), ("c", None)]
        assert board.means[0].common / board.means[1].common == pytest.approx(0.5**0.5)


def test_round_off_gives_no_rank(tmp_path: Path):
    """Sums in another order are the same error; a millionth less is a lower one."""
    errors = {"a": 0.1, "b": 0.1 * (1 - 1e-13), "c": 0.1 * (1 + 1e-6)}
    board = board_of([run(tmp_path / name, {"flow": error}) for name, error in errors.items()])
    assert {row.entry.model: row.rank for row in board.rows["flow"]} == {"a": 1, "b": 1, "c": 3}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"test": [0, 2, 3]}, "other test trajectories"),
        ({"files": ["another"]}, "other raw files"),
        ({"grid": [4], "subsample": {"every_point": 2}}, "other parts of the files, grid"),
        ({"times": [0.0, 2.0]}, "other times"),
    ],
)
def test_other_trajectories_have_no_rank(roots: list[Path], tmp_path: Path, changed: dict, reason: str):
    """However small the errors are, they stand apart with the reason, and in no mean."""
    other = run(tmp_path / "other", {"flow": 0.001, "gas": 0.001}, **changed)
    board = board_of([*roots, other])
    assert "other" not in {mean.model for mean in board.means} and board.means == board_of(roots).means
    assert [row.entry.model for row in board.rows["flow"] if row.rank == 1] == ["a", "c"]
    text = unpadded(leaderboard_text(board))
    line = f"| flow | other | 0.0005 (0.00025 to 0.001) | 0.001 (0.0005 to 0.002) | 3 | {reason} |"
    assert line in text[text.index("## Not comparable") :]
    assert any(line.endswith("Compared on none, and not listed: other.") for line in text)


def test_baselines_of_a_run_are_models_of_their_own(roots: list[Path]):
    """FNO and U-Net, not persistence."""
    found = [record("flow", m, h, 0.3) for m in ("fno", "unet", "persistence") for h in ("one_step", "rollout")]
    path = roots[0] / "08_reporting/baseline_metrics.json"
    path.write_text(json.dumps([each | {"digest": trajectories_digest(TRAJECTORIES)} for each in found]))
    assert [row.entry.model for row in board_of(roots[:1]).rows["flow"]] == ["a", "fno in a", "unet in a"]


def test_the_table_for_programs_has_all_digits(roots: list[Path], tmp_path: Path):
    """The CSV has every row of the leaderboard."""
    other = run(tmp_path / "other", {"flow": 1 / 3}, test=[0, 2, 3])
    lines = list(csv.DictReader(io.StringIO(leaderboard_csv(board_of([*roots, other])))))
    assert [line["model"] for line in lines] == ["a", "c", "b", "other", "b", "a", "c"]
    assert float(lines[3]["rollout"]) == 1 / 3 and lines[3]["rank"] == "" and lines[-1]["rollout"] == ""
    assert lines[3]["scored_on"] == "other test trajectories" and lines[0]["rank"] == "1"


def test_versions_and_their_champion(roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Registered versions are ranked by the mean of their errors, where they had the same trajectories."""
    digest = trajectories_digest(TRAJECTORIES)
    versions = {
        "1": {"flow": {"family": "burgers_1d", "trajectories": digest, "nRMSE": [0.01, 0.02, 0.06]}},
        "2": {"flow": {"family": "burgers_1d", "trajectories": "other", "nRMSE": [0.01, 0.01, 0.01]}},
    }
    monkeypatch.setattr(registry, "versions", lambda name: versions)
    monkeypatch.setattr(registry, "version_of", lambda name, alias: "1")
    config = LeaderboardConfig(data_roots=[str(roots[0])], scores=[])
    text, _ = rank_models(config, REGISTRATION, tmp_path)
    lines = unpadded(text)
    assert "| 1* | ups version 1 (champion) | | 0.03 | 3 |" in lines
    assert any(line.startswith("| flow | ups version 2 | | 0.01 | 3 | other test trajectories, or") for line in lines)
    assert (
        entries_of_version("x", {"flow": versions["1"]["flow"] | {"nRMSE": [1.0, None]}})[0].errors["rollout"].value
        is None
    )


def test_this_data_root_alone_is_the_default(roots: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Without names; a pattern names several."""
    monkeypatch.setattr(registry, "versions", lambda name: {})
    text, _ = rank_models(LeaderboardConfig(data_roots=[], scores=[]), REGISTRATION, roots[1])
    assert "| 1* | b | 1 | 1 | 2 |" in unpadded(text)
    some = LeaderboardConfig(data_roots=[f"{roots[0].parent}/*"], scores=[])
    assert all(str(root) in rank_models(some, REGISTRATION, roots[1])[0] for root in roots)


@pytest.fixture
def truth(tmp_path: Path) -> tuple[Path, Path]:
    """A data root whose only dataset is described by its file, and that file."""
    path = write_file(tmp_path, "advection_1d", count=9, grid=(8,))
    dataset = inspect_file(path)
    root = run(tmp_path / "root", {dataset.name: 0.2})
    described = read_json(root / "04_feature/datasets.json")
    described["datasets"][dataset.name] = asdict(dataset)
    described["sources"] = {path.name: {"md5": digest_of(path, "md5")}}
    (root / "04_feature/datasets.json").write_text(json.dumps(described))
    return identified(root), path


def scored(predictions: Path, path: Path, root: Path | None) -> dict[str, Any]:
    """The scores of predictions of the test split in a data root, or of all trajectories."""
    asked = {"family": None, "method": None, "compute": COMPUTE, "seed": 0}
    return score_predictions(predictions, path, test_split_of=root, **asked)


def test_a_score_of_the_test_split_is_compared_with_it(truth: tuple[Path, Path], tmp_path: Path):
    """Predictions 1.1 times the truth of the test split have 0.1; those of all trajectories are not comparable."""
    root, path = truth
    dataset = inspect_file(path)
    with TrajectoryReader(tmp_path, dataset) as reader:
        for name, indices, place in (("some", TEST, root), ("all", range(9), None)):
            np.savez(tmp_path / f"{name}.npz", u=1.1 * np.stack([reader.read(index)[:, 0] for index in indices]))
            (tmp_path / f"{name}.json").write_text(json.dumps(scored(tmp_path / f"{name}.npz", path, place)))
    board = board_of([root], tmp_path / "some.json", tmp_path / "all.json")
    found = [(row.entry.model, row.differs) for row in board.rows[dataset.name]]
    assert found == [("some", None), ("root", None), ("all", "other test trajectories")]
    assert board.means[0].common == pytest.approx(0.5, rel=1e-4)


def test_the_file_must_be_that_of_the_run(truth: tuple[Path, Path], tmp_path: Path):
    """Another name, no file, another content, no data root: one line with the remedy."""
    root, path = truth
    with pytest.raises(DataFault, match=rf"is no file of \S*root; choose one of {path.name}"):
        scored(path, tmp_path / "other.hdf5", root)
    with pytest.raises(DataFault, match=r"none/04_feature/datasets\.json does not exist yet"):
        scored(path, path, tmp_path / "none")
    with pytest.raises(DataFault, match=r"no such file; name the file of the run"):
        scored(path, tmp_path / "elsewhere" / path.name, root)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataFault, match=r"has another content than in \S*root; name the file of that run"):
        scored(path, path, root)


def _no_root(roots: list[Path]) -> list[Path]:
    return [roots[0].parent / "none"]


def _no_evaluation(roots: list[Path]) -> list[Path]:
    (roots[0] / "08_reporting/metrics.json").unlink()
    return roots


def _damaged(roots: list[Path]) -> list[Path]:
    path = roots[0] / "08_reporting/metrics.json"
    path.write_text(path.read_text()[:-9])
    return roots


def _no_value(roots: list[Path]) -> list[Path]:
    path = roots[0] / "08_reporting/metrics.json"
    path.write_text(path.read_text().replace('"value"', '"valeu"'))
    return roots


def _other_split(roots: list[Path]) -> list[Path]:
    run(roots[0].parent / "new", {"flow": 0.1, "gas": 0.1}, test=[1, 2])
    (roots[0].parent / "new/04_feature/datasets.json").replace(roots[0] / "04_feature/datasets.json")
    return roots


def _old_baselines(roots: list[Path]) -> list[Path]:
    old = trajectories_digest(TRAJECTORIES | {"test": [0, 2, 3]})
    found = [record("flow", "fno", "rollout", 0.3) | {"digest": old}]
    (roots[0] / "08_reporting/baseline_metrics.json").write_text(json.dumps(found))
    return roots


@pytest.mark.parametrize(
    ("prepare", "line"),
    [
        (
            _no_root,
            r"none/08_reporting/metrics\.json does not exist: run `kedro run --pipeline full --params data_root=",
        ),
        (_no_evaluation, r"a/08_reporting/metrics\.json does not exist: run .* or correct leaderboard\.data_roots"),
        (_damaged, r"a/08_reporting/metrics\.json is not valid JSON .*; delete it and run again"),
        (_no_value, r"a/08_reporting/metrics\.json is damaged \(0\.value: Field required\)"),
        (
            _other_split,
            r"a/08_reporting/metrics\.json has scores of other test trajectories of flow than datasets\.json: "
            r"run `kedro run --pipeline evaluation --params",
        ),
        (
            _old_baselines,
            r"baseline_metrics\.json has scores of other test trajectories of flow than .* run --pipeline baselines ",
        ),
    ],
)
def test_a_run_without_its_scores_is_one_line(roots: list[Path], prepare: Any, line: str):
    """The file, what is wrong with it, and the remedy."""
    with pytest.raises(DataFault, match=line) as fault:
        board_of(prepare(roots))
    assert "\n" not in str(fault.value)


def test_wrong_scores_are_one_line(roots: list[Path], tmp_path: Path):
    """A file that is missing, damaged, without rollouts, of an unknown dataset, or of a name that is taken."""
    path = tmp_path / "scores.json"
    with pytest.raises(DataFault, match=r"scores\.json does not exist: write it by `ups score PREDICTIONS"):
        board_of(roots, path)
    with pytest.raises(DataFault, match=r"which no run of the leaderboard has: .* known: flow, gas"):
        board_of(roots, foreign(path, "water", 0.1))
    with pytest.raises(DataFault, match="two models are called a on flow: .*--method NAME"):
        board_of(roots, foreign(path, "flow", 0.1, method="a"))
    path.write_text(path.read_text().replace('"rollout"', '"one_step"'))
    with pytest.raises(DataFault, match=r"scores\.json has no nRMSE of rollouts of a"):
        board_of(roots, path)
    path.write_text("[]")
    with pytest.raises(DataFault, match=r"scores\.json is damaged"):
        board_of(roots, path)
